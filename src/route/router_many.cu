// Router for many tokens on Hopper: hidden states [T, H] times router weights [C, H], then the
// whole of routing, one launch. x and W of one 16-bit type, rows at multiples of 16 bytes; any H.
//
// A block computes 128 tokens (or 64) x up to 256 columns over one of `parts` cuts of H, in steps
// of 64. 9 warps:
//   warp 8     one thread of it orders bulk tensor copies of x and W into a ring of stages, rows of
//              128 bytes swizzled; what lies beyond T, C and H comes as zeros
//   warps 0-7  two warpgroups with wgmma; with 128 tokens each has 64 of them and all columns, with
//              64 each has all of them and half of the columns
//   full[s]    the bytes of stage s are there: 1 arrival, that of the copying thread
//   empty[s]   stage s may be overwritten: 8 arrivals, of each warp that multiplies, one step later
//              than its products were started
// A cluster is the blocks of a tile of tokens: `parts`, times two halves of 256 columns where C is
// more than 256. Sums go into the block's shared memory; after a cluster barrier rank p of R
// gathers the whole rows [p rows / R, (p + 1) rows / R) from all ranks, adds parts up in their
// order and routes them, all 9 warps a row each. A second cluster barrier is arrived at after the
// gathering and waited for at the end: no block leaves while others read its sums. A tile past the
// valid count is only cleared; the count is the same for its whole cluster.
// More than 512 columns: rows of raw logits go to memory, 256 columns a block, and the gate
// follows.
//
// Bytes: x once a column half, W once a tile of tokens, both mostly from L2. Time predicted on an
// H200: 2 us until the first product, the larger of 2 T C H / 790 TFLOP/s and bytes, 0.3 for each
// cluster barrier, 1 to 2 for gathering, 1 for routing: 4096 x 256 x 7168 26 us (19 of them
// products); 8192 x 512 x 2048 28; 4096 x 128 x 2048 7.5; 2048 x 128 x 1024 4.5. Measured: 64, 45,
// 31 and 20: routing takes most of it (docs/notes/cuda-route.md).
#include "cuda/hopper.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "route/cuda.hpp"
#include "route/fast_shared_rows.cuh"

#ifndef SHUNT_BUILT_FOR_SM_90A
#define SHUNT_BUILT_FOR_SM_90A 0
#endif

namespace shunt::routing {

namespace {

using cuda_engine::cluster_barrier;

constexpr int multiplying = 8;  // warps
constexpr int warps = multiplying + 1;
constexpr int threads = 32 * warps;
constexpr int step = 64;  // elements along H

struct Layout {
  int hidden = 0;
  int parts = 1;
  bool bf16 = false;        // or f16
  float* logits = nullptr;  // [T, C]: raw sums go there and nothing is routed; or null
};

// `tile`: 64, 128, 256 or 512 columns of a whole row.
template <int rows_, int tile_>
struct Shape {
  static constexpr int rows = rows_, tile = tile_;
  static constexpr int columns = tile < 256 ? tile : 256;  // of a block
  static constexpr int halves = tile / columns;
  static constexpr int each = rows == 128 ? columns : columns / 2;  // columns of a warpgroup
  static constexpr int x_bytes = rows * step * 2, w_bytes = columns * step * 2;
  static constexpr int stage_bytes = x_bytes + w_bytes;
  static constexpr int fit = 200 * 1024 / stage_bytes;
  static constexpr int stages = fit < 8 ? fit : 8;
  // Floats of a row of sums; 8 more: stores of two floats by 8 rows x 4 lanes hit no bank twice.
  static constexpr int stride = columns + 8;
  static constexpr int whole_stride = tile + 8;
  static constexpr int sum_floats = rows * stride;
  __host__ __device__ static constexpr int batch(int ranks) {  // rows gathered at a time
    return rows / ranks < 64 / halves ? rows / ranks : 64 / halves;
  }
  static constexpr int bytes(int ranks) {
    const int after = 4 * (sum_floats + (ranks > 1 ? batch(ranks) * whole_stride : 0));
    return 1024 + (stages * stage_bytes > after ? stages * stage_bytes : after);
  }
};

#if defined(SHUNT_SM_90A)

// Rows [row, row + count) of all ranks' sums, added up over P parts.
template <class S, int P>
__device__ __forceinline__ void gather(const float* mine, float* whole, int row, int count,
                                       int vectors, int thread) {
  constexpr int together = 8 / P;  // vectors of a thread, so that 8 loads are on their way
  const int size = count * vectors;
  for (int first = thread; first < size; first += together * threads) {
    float4 of[together][P];
#pragma unroll
    for (int u = 0; u < together; ++u) {
      const int i = min(first + u * threads, size - 1);
      const int column = 4 * (i % vectors), half = column / S::columns;
      const float* const from =
          mine + (row + i / vectors) * S::stride + (column - half * S::columns);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        of[u][p] = cuda_engine::load_of_rank(from, static_cast<unsigned>(half * P + p));
      }
    }
#pragma unroll
    for (int u = 0; u < together; ++u) {
      const int i = first + u * threads;
      if (i >= size) break;
      float4 sum = of[u][0];
#pragma unroll
      for (int p = 1; p < P; ++p) {
        sum.x += of[u][p].x;
        sum.y += of[u][p].y;
        sum.z += of[u][p].z;
        sum.w += of[u][p].w;
      }
      *reinterpret_cast<float4*>(whole + i / vectors * S::whole_stride + 4 * (i % vectors)) = sum;
    }
  }
}

// What the 9 warps do until the sums are in `mine`. `stages`: where stages and sums begin.
template <class S, class T>
__device__ __forceinline__ void multiply(const CUtensorMap& x, const CUtensorMap& w,
                                         unsigned char* stages, std::uint64_t* full,
                                         std::uint64_t* empty, int first_step, int steps,
                                         int first_token, int first_column, int warp, int lane) {
  if (warp == multiplying) {
    if (lane == 0) {
      int s = 0;
      unsigned round = 0;
      for (int i = 0; i < steps; ++i) {
        if (round > 0) cuda_engine::mbarrier_wait(&empty[s], (round - 1) & 1);
        unsigned char* const stage = stages + s * S::stage_bytes;
        const int h = (first_step + i) * step;
        cuda_engine::mbarrier_arrive_expect(&full[s], S::stage_bytes);
        cuda_engine::copy_box(stage, &x, &full[s], h, first_token);
        cuda_engine::copy_box(stage + S::x_bytes, &w, &full[s], h, first_column);
        if (++s == S::stages) s = 0, ++round;
      }
    }
    __syncwarp();
    return;
  }
  const int group = warp / 4;
  const std::uint32_t base = cuda_engine::shared_address(stages);
  const std::uint32_t a_base = base + (S::rows == 128 ? group * 64 * 128 : 0);
  const std::uint32_t b_base = base + S::x_bytes + (S::rows == 128 ? 0 : group * S::each * 128);
  float sums[S::each / 2];
#pragma unroll
  for (int j = 0; j < S::each / 2; ++j) sums[j] = 0;
  int s = 0, before = 0;
  unsigned parity = 0;
  for (int i = 0; i < steps; ++i) {
    cuda_engine::mbarrier_wait(&full[s], parity);
    const auto stage = static_cast<std::uint32_t>(s * S::stage_bytes);
    const std::uint64_t a = cuda_engine::wgmma_descriptor(a_base + stage);
    const std::uint64_t b = cuda_engine::wgmma_descriptor(b_base + stage);
    cuda_engine::wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < step / 16; ++k) {
      cuda_engine::wgmma(T{}, sums, a + 2 * k, b + 2 * k);
    }
    cuda_engine::wgmma_commit();
    cuda_engine::wgmma_wait<1>();  // the step before has been read
    if (i > 0 && lane == 0) cuda_engine::mbarrier_arrive(&empty[before]);
    before = s;
    if (++s == S::stages) s = 0, parity ^= 1;
  }
  cuda_engine::wgmma_wait<0>();
  // Both warpgroups have read their last stage, and every copy has landed: sums may lie there.
  asm volatile("bar.sync 1, %0;" ::"n"(32 * multiplying) : "memory");
  auto* const mine = reinterpret_cast<float*>(stages);
  const int row = (S::rows == 128 ? group * 64 : 0) + warp % 4 * 16 + (lane >> 2);
  const int column = (S::rows == 128 ? 0 : group * S::each) + 2 * (lane & 3);
  float* const to = mine + row * S::stride + column;
#pragma unroll
  for (int j = 0; j < S::each / 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sums[4 * j], sums[4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * S::stride + 8 * j) =
        make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
}

#endif

template <class S>
__global__ void __launch_bounds__(threads, 1)
    many(const __grid_constant__ DeviceRoute r, const __grid_constant__ CUtensorMap x,
         const __grid_constant__ CUtensorMap w, const __grid_constant__ Layout o) {
#if defined(SHUNT_SM_90A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages];
  __shared__ FastSharedScratch scratch[warps];
  __shared__ SharedRoute route;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  route.fill(r, thread, threads);
  // The same offset in each block.
  unsigned char* const stages = shared + (1024 - cuda_engine::shared_address(shared) % 1024) % 1024;
  if (thread == 0) {
    cuda_engine::prefetch_tensor_map(&x);
    cuda_engine::prefetch_tensor_map(&w);
    for (int s = 0; s < S::stages; ++s) {
      cuda_engine::mbarrier_init(&full[s], 1);
      cuda_engine::mbarrier_init(&empty[s], multiplying);
    }
    cuda_engine::mbarrier_init_fence();
  }
  __syncthreads();
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();

  const int ranks = o.parts * S::halves;
  const int rank = static_cast<int>(blockIdx.x) % ranks;
  const std::int64_t first = std::int64_t{blockIdx.x} / ranks * S::rows;
  const int share = S::rows / ranks, first_row = rank * share;
  const auto tokens =
      static_cast<int>(min(max(valid_tokens(r) - first, std::int64_t{0}), std::int64_t{S::rows}));
  auto* const mine = reinterpret_cast<float*>(stages);
  if (tokens == 0) {  // so it is for the whole cluster
    if (o.logits == nullptr) {
      clear_rows(r, first + first_row, share, warp, warps, lane);
    }
    return;
  }
  const int steps = (o.hidden + step - 1) / step, part = rank % o.parts;
  const int begin = steps * part / o.parts, end = steps * (part + 1) / o.parts;
  const int first_column = (static_cast<int>(blockIdx.y) * S::halves + rank / o.parts) * S::columns;
  const auto multiply_as = [&]<class T>(T) {
    multiply<S, T>(x, w, stages, full, empty, begin, end - begin, static_cast<int>(first),
                   first_column, warp, lane);
  };
  o.bf16 ? multiply_as(__nv_bfloat16{}) : multiply_as(__half{});

  const auto finish = [&](const float* rows, int stride, int row, int count) {
    if (o.logits == nullptr) {
      if (!route_shared_rows_fast<S::tile, false>(route.get(), rows, stride, first + row, count,
                                                  warp, warps, scratch, lane)) {
        route_shared_rows<S::tile>(route.get(), rows, stride, first + row, count, warp, warps,
                                   lane);
      }
      return;
    }
    const int columns = min(r.rule.columns - first_column, S::columns);
    for (int i = warp; i < count && row + i < tokens; i += warps) {
      float* const to = o.logits + (first + row + i) * r.rule.columns + first_column;
      for (int c = lane; c < columns; c += 32) to[c] = rows[i * stride + c];
    }
  };
  if (ranks == 1) {
    __syncthreads();
    finish(mine, S::stride, 0, S::rows);
    return;
  }
  __syncwarp();
  cluster_barrier();
  float* const whole = mine + S::sum_floats;
  // In memory as in a row that is routed, whole vectors.
  const int columns =
      S::halves > 1 ? r.rule.columns : min(r.rule.columns - first_column, S::columns);
  const int vectors = (columns + 3) / 4, batch = S::batch(ranks);
  for (int done = 0; done < share; done += batch) {
    if (done > 0) __syncthreads();  // the rows before have been routed
    const int row = first_row + done;
    const int count = min(batch, tokens - row);
    if (count > 0) {
      switch (o.parts) {
        case 2:
          gather<S, 2>(mine, whole, row, count, vectors, thread);
          break;
        case 4:
          gather<S, 4>(mine, whole, row, count, vectors, thread);
          break;
        case 8:
          gather<S, 8>(mine, whole, row, count, vectors, thread);
          break;
        default:
          gather<S, 1>(mine, whole, row, count, vectors, thread);
          break;
      }
    }
    if (done + batch >= share) {
      __syncwarp();
      cuda_engine::cluster_arrive();
    }
    __syncthreads();
    finish(whole, S::whole_stride, row, batch);
  }
  __syncwarp();
  cuda_engine::cluster_wait();
#endif
}

template <int rows, int tile>
bool launch_many(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const Layout& o) {
  using S = Shape<rows, tile>;
  static_assert(S::each % 8 == 0);
  CUtensorMap x, w;
  const bool mapped = cuda_engine::map_rows(x, operands.x, operands.bf16, r.tokens, o.hidden,
                                            operands.x_stride, rows) &&
                      cuda_engine::map_rows(w, operands.w, operands.bf16, r.rule.columns, o.hidden,
                                            operands.w_stride, S::columns);
  if (!mapped) return false;
  const auto tiles = static_cast<unsigned>((r.tokens + rows - 1) / rows);
  const auto ranks = static_cast<unsigned>(o.parts * S::halves);
  const int width = S::columns * S::halves;
  const auto columns =
      static_cast<unsigned>(o.logits == nullptr ? 1 : (r.rule.columns + width - 1) / width);
  const cuda_engine::Shape shape{
      .grid = {tiles * ranks, columns, 1},
      .block = {threads, 1, 1},
      .shared = static_cast<std::size_t>(S::bytes(static_cast<int>(ranks))),
      .cluster = ranks};
  cuda_engine::launch("route: router", gpu, shape, many<S>, r, x, w, o);
  return true;
}

template <int rows>
bool launch_rows(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, const Layout& o) {
  if (plan.columns == 64) return launch_many<rows, 64>(gpu, r, operands, o);
  if (plan.columns == 128) return launch_many<rows, 128>(gpu, r, operands, o);
  if (plan.columns == 256) return launch_many<rows, 256>(gpu, r, operands, o);
  return launch_many<rows, 512>(gpu, r, operands, o);
}

}  // namespace

bool router_many(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, float* logits) {
  if (!SHUNT_BUILT_FOR_SM_90A) return false;
  const Layout o{
      .hidden = operands.hidden, .parts = plan.parts, .bf16 = operands.bf16, .logits = logits};
  return plan.rows == 64 ? launch_rows<64>(gpu, r, operands, plan, o)
                         : launch_rows<128>(gpu, r, operands, plan, o);
}

}  // namespace shunt::routing
