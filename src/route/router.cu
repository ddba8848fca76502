// Router: hidden states [T, H] times router weights [C, H], then the whole of routing, one launch
// without logits in memory.
//
// A cluster of S blocks takes `rows` tokens (16 or 64) and all columns (up to 512, or 256 on GPUs
// with less than 140 KB of shared memory a block); its blocks
// share out H. A block sums its part of H on the tensor cores with all rows x columns sums in
// registers, puts them into its shared memory, and after one barrier of the cluster each block adds
// up the S parts of rows / S rows, in the order of the ranks, and routes them, a warp a row
// (shared_rows.cuh). More columns: blocks of as many write logits to the workspace, and the gate
// follows.
//
// 8 warps, over rows x columns: 2 x 4 of 32 x 8 NT (64 rows) or 1 x 8 of 16 x 8 NT (16 rows).
// Whole: operands of one 16-bit type, 16-byte aligned: cp.async in 2 to 8 stages of 64 along H,
//   rows of 128 bytes whose 16-byte pieces are swizzled by the row, ldmatrix, mma.sync.
// Split: any types and alignment: values staged as f32, 32 along H at a time, each split into up to
//   three bf16 that add up to it; products of pieces down to 2^-24 of the result: f32-grade logits.
//
// Bytes: W once a cluster (from L2), x once. A sum's order follows from H and S alone; S follows
// from T, C and H (router_plan.hpp).
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "order/sort_tail.cuh"
#include "route/shared_rows.cuh"
#include "route_and_order/cuda.hpp"

namespace shunt::routing {

namespace {

using cuda_engine::cluster_barrier;
using cuda_engine::cluster_rank;
using cuda_engine::cp_async_16;
using cuda_engine::mma_16816;
using cuda_engine::shared_address;

constexpr int warps = 8;
constexpr int threads = 32 * warps;

struct Operands {
  DeviceVector x, w;
  std::int64_t x_stride = 0, w_stride = 0;  // elements
  int hidden = 0;
  float* logits = nullptr;  // [T, C]: write raw sums there and route nothing; or null
  int parts = 1;            // blocks of a cluster
  int stages = 2;           // 2 to 8
  bool ordered = false;     // ids are sorted at the end
};

template <int rows, int NT>
struct Tile {
  static constexpr int warps_m = rows == 64 ? 2 : 1;
  static constexpr int warps_n = warps / warps_m;
  static constexpr int MT = rows / warps_m / 16;  // m16 tiles of a warp
  static constexpr int columns = warps_n * NT * 8;
  static constexpr int sum_stride = any_sum_stride(columns);
  static constexpr int whole_stage = any_stage_bytes(rows, columns);
  static constexpr int split_stride = any_split_stride;
};

// Until all but the `pending` last groups of copies are there.
__device__ __forceinline__ void wait_for_all_but(int pending) {
  switch (pending) {
    case 0:
      return cuda_engine::cp_async_wait<0>();
    case 1:
      return cuda_engine::cp_async_wait<1>();
    case 2:
      return cuda_engine::cp_async_wait<2>();
    case 3:
      return cuda_engine::cp_async_wait<3>();
    case 4:
      return cuda_engine::cp_async_wait<4>();
    case 5:
      return cuda_engine::cp_async_wait<5>();
    default:
      return cuda_engine::cp_async_wait<6>();
  }
}

template <int rows, int NT>
using Sums = float[Tile<rows, NT>::MT][NT][4];

// Where 16-byte piece `piece` of row `row` lies in a stage.
__device__ __forceinline__ std::uint32_t swizzled(int row, int piece) {
  return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
}

template <int rows, int NT, class T>
__device__ __forceinline__ void multiply_whole(const Operands& o, std::int64_t first_token,
                                               std::int64_t tokens, int first_column, int columns,
                                               int begin, int end, unsigned char* shared,
                                               Sums<rows, NT>& sums) {
  using Shape = Tile<rows, NT>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const auto* x = static_cast<const T*>(o.x.data) + first_token * o.x_stride;
  const auto* w = static_cast<const T*>(o.w.data) + first_column * o.w_stride;
  const std::uint32_t base = shared_address(shared);
  const int steps = (end - begin + 63) / 64;

  const int stages = o.stages;
  // A thread fetches the same piece of every 32nd row.
  const int piece = thread & 7, own = thread >> 3;
  const T* const from_x = x + own * o.x_stride + piece * 8;
  const T* const from_w = w + own * o.w_stride + piece * 8;
  const auto stage_at = [&](int slot) {
    return base + static_cast<std::uint32_t>(slot) * static_cast<std::uint32_t>(Shape::whole_stage);
  };
  const auto fetch = [&](int step, int slot) {
    const std::uint32_t stage = stage_at(slot);
    const int h = begin + step * 64;
    const int bytes = min(max(end - h - piece * 8, 0), 8) * 2;
#pragma unroll
    for (int j = 0; j < (rows + 31) / 32; ++j) {
      const int row = own + 32 * j;
      if (rows % 32 == 0 || row < rows) {
        const bool there = row < tokens && bytes > 0;
        cp_async_16(stage + swizzled(row, piece), there ? from_x + 32 * j * o.x_stride + h : x,
                    there ? bytes : 0);
      }
    }
#pragma unroll
    for (int j = 0; j < Shape::columns / 32; ++j) {
      const int row = own + 32 * j;
      const bool there = row < columns && bytes > 0;
      cp_async_16(stage + swizzled(rows + row, piece), there ? from_w + 32 * j * o.w_stride + h : w,
                  there ? bytes : 0);
    }
  };
#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) {
    if (s < steps) fetch(s, s);
    cuda_engine::cp_async_commit();
  }
  const int row_m = warp % Shape::warps_m * Shape::MT * 16;
  const int row_n = rows + warp / Shape::warps_m * NT * 8;
  int slot = 0, free = stages - 1;
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but(stages - 2);
    __syncthreads();  // this stage is there for all, and all have left the one before
    if (step + stages - 1 < steps) fetch(step + stages - 1, free);
    cuda_engine::cp_async_commit();
    const std::uint32_t stage = stage_at(slot);
    free = slot;
    slot = slot + 1 == stages ? 0 : slot + 1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t a[Shape::MT][4];
#pragma unroll
      for (int m = 0; m < Shape::MT; ++m) {
        cuda_engine::ldmatrix_x4(
            a[m], stage + swizzled(row_m + m * 16 + (lane & 15), 2 * k + (lane >> 4)));
      }
      if constexpr (NT == 1) {
        std::uint32_t b0, b1;
        cuda_engine::ldmatrix_x2(b0, b1,
                                 stage + swizzled(row_n + (lane & 7), 2 * k + (lane >> 3 & 1)));
#pragma unroll
        for (int m = 0; m < Shape::MT; ++m) mma_16816(T{}, sums[m][0], a[m], b0, b1);
      } else {
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
          std::uint32_t b[4];
          cuda_engine::ldmatrix_x4(b, stage + swizzled(row_n + n * 8 + (lane & 7) + (lane >> 4) * 8,
                                                       2 * k + (lane >> 3 & 1)));
#pragma unroll
          for (int m = 0; m < Shape::MT; ++m) {
            mma_16816(T{}, sums[m][n], a[m], b[0], b[1]);
            mma_16816(T{}, sums[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }
  cuda_engine::cp_async_wait<0>();
}

// Two values as three pairs of bf16: they add up to the value.
struct Pieces {
  std::uint32_t of[3];
};
__device__ __forceinline__ Pieces split(float2 v) {
  Pieces pieces;
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    const __nv_bfloat16 x = __float2bfloat16_rn(v.x), y = __float2bfloat16_rn(v.y);
    pieces.of[p] = static_cast<std::uint32_t>(__bfloat16_as_ushort(x)) |
                   static_cast<std::uint32_t>(__bfloat16_as_ushort(y)) << 16;
    // Infinities and NaN are in the first piece alone.
    v.x = isfinite(v.x) ? v.x - __bfloat162float(x) : 0.0F;
    v.y = isfinite(v.y) ? v.y - __bfloat162float(y) : 0.0F;
  }
  return pieces;
}
__device__ __forceinline__ int pieces_of(Form form) {
  return form == Form::bf16 ? 1 : form == Form::f16 ? 2 : 3;
}

template <int rows, int NT>
__device__ __forceinline__ void multiply_split(const Operands& o, std::int64_t first_token,
                                               std::int64_t tokens, int first_column, int columns,
                                               int begin, int end, unsigned char* shared,
                                               Sums<rows, NT>& sums) {
  using Shape = Tile<rows, NT>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  auto* const staged = reinterpret_cast<float*>(shared);
  const int row_m = warp % Shape::warps_m * Shape::MT * 16 + (lane >> 2);
  const int row_n = rows + warp / Shape::warps_m * NT * 8 + (lane >> 2);
  const int x_pieces = pieces_of(o.x.form), w_pieces = pieces_of(o.w.form);
  for (int h = begin; h < end; h += 32) {
    __syncthreads();
    for (int i = thread; i < (rows + Shape::columns) * 32; i += threads) {
      const int row = i >> 5, at = h + (i & 31);
      const bool of_x = row < rows;
      const int index = of_x ? row : row - rows;
      float value = 0;
      if (at < end && (of_x ? index < tokens : index < columns)) {
        value = of_x ? load_form(o.x.data, o.x.form, (first_token + index) * o.x_stride + at)
                     : load_form(o.w.data, o.w.form, (first_column + index) * o.w_stride + at);
      }
      staged[row * Shape::split_stride + (i & 31)] = value;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; k += 16) {
      const auto pair = [&](int row, int column) {
        return split(*reinterpret_cast<const float2*>(staged + row * Shape::split_stride + k +
                                                      column + 2 * (lane & 3)));
      };
      Pieces a[Shape::MT][4];
#pragma unroll
      for (int m = 0; m < Shape::MT; ++m) {
        a[m][0] = pair(row_m + m * 16, 0);
        a[m][1] = pair(row_m + m * 16 + 8, 0);
        a[m][2] = pair(row_m + m * 16, 8);
        a[m][3] = pair(row_m + m * 16 + 8, 8);
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const Pieces b0 = pair(row_n + n * 8, 0), b1 = pair(row_n + n * 8, 8);
#pragma unroll
        for (int m = 0; m < Shape::MT; ++m) {
#pragma unroll
          for (int i = 2; i >= 0; --i) {  // the small products first
#pragma unroll
            for (int j = 2 - i; j >= 0; --j) {
              if (i >= x_pieces || j >= w_pieces) continue;
              const std::uint32_t piece[4] = {a[m][0].of[i], a[m][1].of[i], a[m][2].of[i],
                                              a[m][3].of[i]};
              mma_16816(__nv_bfloat16{}, sums[m][n], piece, b0.of[j], b1.of[j]);
            }
          }
        }
      }
    }
  }
}

template <int rows, int NT, bool is_split, class T>
__global__ void __launch_bounds__(threads, 1)
    router(const __grid_constant__ DeviceRoute r, const __grid_constant__ Operands o,
           const __grid_constant__ ordering::SortTail tail) {
  using Shape = Tile<rows, NT>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SharedRoute route;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  route.fill(r, thread, threads);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int part = static_cast<int>(cluster_rank());
  if (o.ordered) ordering::zero_ahead(tail, blockIdx.x, gridDim.x);
  const std::int64_t first = std::int64_t{blockIdx.x} / o.parts * rows;
  const std::int64_t valid = valid_tokens(r);
  const std::int64_t tokens = min(max(valid - first, std::int64_t{0}), std::int64_t{rows});
  const int first_column = static_cast<int>(blockIdx.y) * Shape::columns;
  const int columns = min(r.rule.columns - first_column, Shape::columns);
  // Whole steps of 64 to a part.
  const int steps = (o.hidden + 63) / 64;
  const int begin = steps * part / o.parts * 64;
  const int end = min(steps * (part + 1) / o.parts * 64, o.hidden);

  float sums[Shape::MT][NT][4] = {};
  if (tokens > 0) {
    if constexpr (is_split) {
      multiply_split<rows, NT>(o, first, tokens, first_column, columns, begin, end, shared, sums);
    } else {
      multiply_whole<rows, NT, T>(o, first, tokens, first_column, columns, begin, end, shared,
                                  sums);
    }
  }
  __syncthreads();  // the stages are free
  auto* const mine = reinterpret_cast<float*>(shared);
  const int row_m = warp % Shape::warps_m * Shape::MT * 16 + (lane >> 2);
  const int column = warp / Shape::warps_m * NT * 8 + 2 * (lane & 3);
#pragma unroll
  for (int m = 0; m < Shape::MT; ++m) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(mine + (row_m + m * 16 + half * 8) * Shape::sum_stride + column +
                                   n * 8) =
            make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
      }
    }
  }
  if (o.parts > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  const int share = rows / o.parts;  // rows of this block
  float* added = mine;               // their whole sums
  if (o.parts > 1) {
    added += rows * Shape::sum_stride;
    for (int i = warp; i < share && part * share + i < tokens; i += warps) {
      const float* const from = mine + (part * share + i) * Shape::sum_stride;
      float* const to = added + i * Shape::sum_stride;
      for (int c = 4 * lane; c < columns; c += 128) {
        // All on their way before the first is waited for.
        float4 of[16];
#pragma unroll
        for (int p = 0; p < 16; ++p) {
          if (p < o.parts) of[p] = cuda_engine::load_of_rank(from + c, static_cast<unsigned>(p));
        }
        float4 sum = of[0];
#pragma unroll
        for (int p = 1; p < 16; ++p) {
          if (p >= o.parts) continue;
          sum.x += of[p].x;
          sum.y += of[p].y;
          sum.z += of[p].z;
          sum.w += of[p].w;
        }
        *reinterpret_cast<float4*>(to + c) = sum;
      }
    }
    __syncthreads();
  }
  if (o.logits == nullptr) {
    route_shared_rows<Shape::columns>(route.get(), added, Shape::sum_stride, first + part * share,
                                      share, warp, warps, lane);
  } else {
    for (int i = warp; i < share && part * share + i < tokens; i += warps) {
      float* const to = o.logits + (first + part * share + i) * r.rule.columns + first_column;
      for (int c = lane; c < columns; c += 32) to[c] = added[i * Shape::sum_stride + c];
    }
  }
  if (o.parts > 1) {
    cluster_barrier();  // no block ends while another reads its sums
  } else if (o.ordered) {
    __syncthreads();
  }
  if (o.ordered) ordering::run_sort_tail(tail, static_cast<unsigned>(part));
}

template <int rows, int NT>
void launch_router(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Operands& o,
                   const ordering::SortTail& tail, bool whole) {
  using Shape = Tile<rows, NT>;
  const std::int64_t tiles = (r.tokens + rows - 1) / rows;
  const auto column_tiles =
      static_cast<unsigned>((r.rule.columns + Shape::columns - 1) / Shape::columns);
  const cuda_engine::Shape shape{
      .grid = {static_cast<unsigned>(tiles) * static_cast<unsigned>(o.parts), column_tiles, 1},
      .block = {threads, 1, 1},
      .shared = std::max(
          static_cast<std::size_t>(any_bytes(!whole, rows, Shape::columns, o.parts, o.stages)),
          o.ordered ? tail.job.plan.shared_bytes() : 0),
      .cluster = static_cast<unsigned>(o.parts)};
  const char* what = "route: router";
  if (!whole) {
    cuda_engine::launch(what, gpu, shape, router<rows, NT, true, __nv_bfloat16>, r, o, tail);
  } else if (o.x.form == Form::bf16) {
    cuda_engine::launch(what, gpu, shape, router<rows, NT, false, __nv_bfloat16>, r, o, tail);
  } else {
    cuda_engine::launch(what, gpu, shape, router<rows, NT, false, __half>, r, o, tail);
  }
}

void launch_tiles(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Operands& o,
                  const ordering::SortTail& tail, int rows, int columns, bool whole) {
  if (rows == 64) {
    if (columns <= 64) return launch_router<64, 2>(gpu, r, o, tail, whole);
    if (columns <= 128) return launch_router<64, 4>(gpu, r, o, tail, whole);
    if (columns <= 256) return launch_router<64, 8>(gpu, r, o, tail, whole);
    return launch_router<64, 16>(gpu, r, o, tail, whole);
  }
  if (columns <= 64) return launch_router<16, 1>(gpu, r, o, tail, whole);
  if (columns <= 128) return launch_router<16, 2>(gpu, r, o, tail, whole);
  if (columns <= 256) return launch_router<16, 4>(gpu, r, o, tail, whole);
  return launch_router<16, 8>(gpu, r, o, tail, whole);
}

// Rows in order, and coordinates that an int holds.
// `one`: the stride of a single row does not count.
bool fits_tensor_map(const Tensor& tensor, bool one) {
  const std::int64_t rows = tensor.shape[0], stride = tensor.strides[0];
  return rows < (std::int64_t{1} << 31) - 256 &&
         ((one && rows == 1) || (stride >= tensor.shape[1] && stride < std::int64_t{1} << 38));
}
bool aligned(const Tensor& tensor, bool one) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         ((one && tensor.shape[0] <= 1) || tensor.strides[0] % 8 == 0);
}

}  // namespace

void router_cuda(const cuda_engine::Gpu& gpu, const RouteCall& call, DeviceRoute r,
                 Workspace workspace) {
  router_order_cuda(gpu, call, r, workspace, nullptr);
}

bool router_order_cuda(const cuda_engine::Gpu& gpu, const RouteCall& call, DeviceRoute r,
                       Workspace workspace, const OrderCall* ordered) {
  const Tensor& x = call.in.hidden;
  const Tensor& w = call.in.router_weight;
  Operands o{.x = {x.data, static_cast<Form>(x.dtype)},
             .w = {w.data, static_cast<Form>(w.dtype)},
             .x_stride = x.strides[0],
             .w_stride = w.strides[0],
             .hidden = static_cast<int>(call.hidden)};
  const bool one = !call.spec.batch_invariant;  // else one token were read where many are not
  const bool whole =
      x.dtype == w.dtype && x.dtype != DType::f32 && aligned(x, one) && aligned(w, true);
  const bool boxes = whole && fits_tensor_map(x, one) && fits_tensor_map(w, true);
  const auto plan = [&](RouterOperands operands) {
    return plan_router(gpu, call.tokens, r.rule.columns, o.hidden, operands,
                       call.spec.batch_invariant);
  };
  RouterPlan p = plan(!whole  ? RouterOperands::any
                      : boxes ? RouterOperands::boxes
                              : RouterOperands::whole);
  auto* const memory = static_cast<float*>(workspace.data);
  float* logits = r.rule.columns > 512 ? memory : nullptr;  // too many for one launch
  const DeviceRoute all_rows = r;                           // for a gate of rows in memory
  if (logits == nullptr) fit_shared_rows(r);
  const WholeOperands operands{.x = x.data,
                               .w = w.data,
                               .x_stride = o.x_stride,
                               .w_stride = o.w_stride,
                               .hidden = o.hidden,
                               .bf16 = x.dtype == DType::bf16};
  if (p.kernel == RouterKernel::few) {
    router_few(gpu, r, operands, p, memory, ordered);
    return ordered != nullptr;
  }
  bool ordered_too = false;
  const bool done = (p.kernel == RouterKernel::many && router_many(gpu, r, operands, p, memory)) ||
                    (p.kernel == RouterKernel::blackwell && router_blackwell(gpu, r, operands, p));
  if (!done) {
    p = plan(RouterOperands::any);
    o.parts = p.parts;
    o.stages = p.stages;
    if (r.rule.columns > p.columns) logits = memory;
    if (logits != nullptr) r = all_rows;
    o.logits = logits;
    ordering::SortTail tail;
    ordered_too = ordered != nullptr && logits == nullptr;
    if (ordered_too) {
      const auto parts = static_cast<unsigned>(p.parts);
      const auto tiles = static_cast<unsigned>((call.tokens + p.rows - 1) / p.rows);
      o.ordered = true;
      tail = ordering::sort_tail(gpu, *ordered, tiles == 1 ? parts : 1, threads,
                                 tiles == 1 ? 1 : tiles * parts);
    }
    launch_tiles(gpu, r, o, tail, p.rows, p.columns, whole);
  }
  if (logits != nullptr) {
    gate_cuda(gpu, r, view(logits, DType::f32, {call.tokens, r.rule.columns}));
  }
  return ordered_too;
}

}  // namespace shunt::routing
