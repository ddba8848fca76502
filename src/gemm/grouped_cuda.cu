// Grouped GEMM over ragged groups, any GPU since compute capability 8.0: f32, and in 16 bits what
// neither Hopper's own kernels (many_rows.cuh, few_rows.cuh) nor mma_rows.cu take: weights that are
// not prepared, rows that must be converted or do not lie at multiples of 16 bytes.
//
// A block of 4 warps computes tiles of 64 rows by 64 rows of the weights' layout, one after the
// other, tile numbers blockIdx.x, blockIdx.x + gridDim.x, ..; tile_search.cuh says where a tile
// lies. k goes by in steps of 64 bytes: 32 numbers of 16 bits or 16 of f32. A ring of four stages
// in shared memory holds the steps at hand, rows of 64 bytes 80 bytes apart, so that ldmatrix and
// 16-byte reads meet no bank twice. What lies in memory as the kernel wants it is copied there
// asynchronously; what must be converted, scaled or gathered number by number passes through
// registers, read before a step's arithmetic and written behind it.
//
// The one barrier of a step means: every thread's part of the step at hand has landed, and the
// step before is used up, so that its stage may be written. The barrier behind a tile lets the next
// tile write every stage.
//
// 16 bits: warp w has rows 32 (w / 2) and columns 32 (w % 2) of the tile, as 2 x 4 tiles of
// mma.m16n8k16. f32: thread t has rows t / 16 + 8 i, and columns t % 8 + 8 j + 32 (t / 8 % 2), by
// FMA. Either way a sum runs over k from first to last in an order that knows nothing of the tile:
// its bits depend on its own row and weights alone. Where gate and up take turns in the layout, a
// thread holds both sides of an element, and the epilogue joins them.
//
// Bytes: weights of the groups hit once from memory and, within L2, once a 64 rows; rows once a 64
// columns. Few rows: (weights + rows) / read bandwidth; in flight 4 blocks x 3 stages x 4 KB a
// multiprocessor. Many rows: half of what wgmma would reach, at best.
#include "activate/activation.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "gemm/cuda_engine.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/tile_search.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 128;
constexpr int tile = 64;  // rows and columns
constexpr int step_bytes = 64;
constexpr int pitch = 80;
constexpr int stages = 4;
constexpr int blocks_a_multiprocessor = 4;
constexpr int chunks_each = 2;  // of 16 bytes that a thread moves, of a step of either operand
// The offset of what is not there: zeros. (A stride may be negative, and so an offset too.)
constexpr std::int64_t nowhere = INT64_MIN;

// Rows of numbers along k.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t group_stride = 0, row_stride = 0, k_stride = 1;
};

struct Args {
  int groups;
  GroupWalk walk;
  std::int64_t k;
  std::int64_t layout_rows, tile_columns;
  Operand weights;
  RowLayout layout;  // of weights that are prepared

  Operand source;
  std::int64_t source_rows;
  const std::int32_t* permutation;
  int slots;
  const float* row_scale;
  bool wide_rows;  // f32 rows whose 16-byte pieces are aligned

  Operand bias;  // row_stride is unused, k_stride counts columns; null data: none
  bool paired, activates;
  std::int64_t out_columns;
  cpu_engine::ActivationRule rule;
  void* out;
  DType out_dtype;
  std::int64_t out_stride;
};

struct Bf16 {
  using Word = std::uint16_t;
  static __device__ Word word(float x) { return f32_to_bf16(x); }
  static __device__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                             std::uint32_t b1) {
    mma_16816(__nv_bfloat16(), c, a, b0, b1);
  }
};
struct F16 {
  using Word = std::uint16_t;
  static __device__ Word word(float x) { return f32_to_f16(x); }
  static __device__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                             std::uint32_t b1) {
    mma_16816(__half(), c, a, b0, b1);
  }
};
struct Full {
  using Word = float;
  static __device__ Word word(float x) { return x; }
};

template <class Element>
constexpr int chunk_numbers = 16 / sizeof(typename Element::Word);

// 16 bytes of a step on their way through registers.
template <class Element>
struct Chunk {
  float x[chunk_numbers<Element>];

  // Numbers k .. of the row that begins `offset` elements into the operand; 0 behind the end.
  __device__ void load(const Operand& operand, std::int64_t offset, std::int64_t k,
                       std::int64_t end, bool wide) {
    constexpr int count = chunk_numbers<Element>;
    if (offset != nowhere && wide && k + count <= end) {
      const auto* from =
          reinterpret_cast<const float4*>(static_cast<const float*>(operand.data) + offset + k);
#pragma unroll
      for (int q = 0; q < count / 4; ++q) {
        const float4 four = from[q];
        x[4 * q] = four.x, x[4 * q + 1] = four.y, x[4 * q + 2] = four.z, x[4 * q + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      x[i] = offset != nowhere && k + i < end
                 ? load_element(operand.data, operand.dtype, offset + (k + i) * operand.k_stride)
                 : 0.0f;
    }
  }
  __device__ void store(char* to) const {
    union {
      typename Element::Word words[chunk_numbers<Element>];
      uint4 all;
    };
#pragma unroll
    for (int i = 0; i < chunk_numbers<Element>; ++i) words[i] = Element::word(x[i]);
    *reinterpret_cast<uint4*>(to) = all;
  }
};

// The sums of one thread, and what a step adds to them.
template <class Element>
struct Sums {
  float c[2][4][4] = {};

  __device__ void add(const char* rows, const char* weights) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const std::uint32_t a_at =
        shared_address(rows) +
        static_cast<std::uint32_t>((32 * (warp / 2) + lane % 16) * pitch + lane / 16 * 16);
    const std::uint32_t b_at =
        shared_address(weights) +
        static_cast<std::uint32_t>((32 * (warp % 2) + lane / 16 * 8 + lane % 8) * pitch +
                                   lane / 8 % 2 * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ldmatrix_x4(a[i], a_at + static_cast<std::uint32_t>(16 * i * pitch + 32 * half));
        ldmatrix_x4(b[i], b_at + static_cast<std::uint32_t>(16 * i * pitch + 32 * half));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Element::mma(c[i][j], a[i], b[j / 2][2 * (j % 2)], b[j / 2][2 * (j % 2) + 1]);
      }
    }
  }

  // Calls put(row of the tile, column of the tile's layout, sum, sum 8 columns further) for every
  // element; pairs: only where gate's columns are.
  template <class Put>
  __device__ void each(bool pairs, const Put& put) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (pairs && j % 2 == 1) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          put(32 * (warp / 2) + 16 * i + 8 * (e / 2) + lane / 4,
              32 * (warp % 2) + 8 * j + 2 * (lane % 4) + e % 2, c[i][j][e], c[i][(j + 1) % 4][e]);
        }
      }
    }
  }
};

template <>
struct Sums<Full> {
  float c[8][4] = {};

  __device__ void add(const char* rows, const char* weights) {
    const int t = static_cast<int>(threadIdx.x);
    const char* const a_at = rows + t / 16 * pitch;
    const char* const b_at = weights + (t % 8 + 32 * (t / 8 % 2)) * pitch;
#pragma unroll
    for (int q = 0; q < step_bytes / 16; ++q) {
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[j] = *reinterpret_cast<const float4*>(b_at + 8 * j * pitch + 16 * q);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 a = *reinterpret_cast<const float4*>(a_at + 8 * i * pitch + 16 * q);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[i][j] = __fmaf_rn(a.x, b[j].x, c[i][j]);
          c[i][j] = __fmaf_rn(a.y, b[j].y, c[i][j]);
          c[i][j] = __fmaf_rn(a.z, b[j].z, c[i][j]);
          c[i][j] = __fmaf_rn(a.w, b[j].w, c[i][j]);
        }
      }
    }
  }

  template <class Put>
  __device__ void each(bool pairs, const Put& put) const {
    const int t = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (pairs && j % 2 == 1) continue;
        put(t / 16 + 8 * i, t % 8 + 8 * j + 32 * (t / 8 % 2), c[i][j], c[i][(j + 1) % 4]);
      }
    }
  }
};

// Out of line: a copy for each of a thread's 32 elements would compile for a minute.
__device__ __noinline__ float joined(const cpu_engine::ActivationRule& rule, float gate, float up) {
  return activated(rule, gate, up);
}

// A row's weight multiplies its sums, the bias joins, then the activation, then one rounding.
template <class Element>
__device__ void write_tile(const Args& args, const TileSearch::Tile& at,
                           const Sums<Element>& sums) {
  const std::int64_t first = at.column * (args.paired ? tile / 2 : tile);
  const std::int64_t bias = at.group * args.bias.group_stride;
  const auto biased = [&](float sum, std::int64_t column) {
    if (args.bias.data == nullptr) return sum;
    return __fadd_rn(
        sum, load_element(args.bias.data, args.bias.dtype, bias + column * args.bias.k_stride));
  };
  sums.each(args.paired, [&](int r, int c, float sum, float further) {
    const std::int64_t row = at.row + r;
    const std::int64_t column = first + (args.paired ? c / 16 * 8 + c % 8 : c);
    if (row >= at.end || column >= args.out_columns) return;
    if (args.row_scale != nullptr) {
      sum = __fmul_rn(sum, args.row_scale[row]);
      further = __fmul_rn(further, args.row_scale[row]);
    }
    float value = biased(sum, column);
    if (args.paired) {
      value = joined(args.rule, value, biased(further, args.out_columns + column));
    } else if (args.activates) {
      value = joined(args.rule, 0.0f, value);
    }
    store_element(args.out, args.out_dtype, row * args.out_stride + column, value);
  });
}

// direct_*: the operand's chunks are aligned, of Element and taken as they are.
template <class Element, bool direct_rows, bool direct_weights>
__global__ void __launch_bounds__(threads, blocks_a_multiprocessor)
    multiply(const __grid_constant__ Args args) {
  using Word = typename Element::Word;
  constexpr int numbers = chunk_numbers<Element>;
  constexpr int step = step_bytes / static_cast<int>(sizeof(Word));
  __shared__ alignas(128) char row_ring[stages][tile * pitch];
  __shared__ alignas(128) char weight_ring[stages][tile * pitch];
  wait_for_predecessor();
  let_successor_start();

  // This thread moves chunk `part` of rows line and line + 32 of either operand.
  const int line = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  const int at_ring = line * pitch + part * 16;
  constexpr int apart = 32;
  const std::int64_t steps = (args.k + step - 1) / step;

  TileSearch search(args.walk, args.groups, tile, args.tile_columns);
  for (std::int64_t number = blockIdx.x;; number += gridDim.x) {
    const TileSearch::Tile at = search.find(number);
    if (at.group < 0) return;

    std::int64_t row_offset[chunks_each], weight_offset[chunks_each];  // in elements
    std::int64_t weight_row[chunks_each];
#pragma unroll
    for (int i = 0; i < chunks_each; ++i) {
      const std::int64_t row = at.row + line + i * apart;
      row_offset[i] = nowhere;
      if (row < at.end) {
        std::int64_t from = row;
        if (args.permutation != nullptr) {
          const std::int32_t pair = args.permutation[row];
          from = pair < 0 ? -1 : pair / args.slots;
        }
        if (from >= 0 && from < args.source_rows) row_offset[i] = from * args.source.row_stride;
      }
      const std::int64_t column = at.column * tile + line + i * apart;
      weight_row[i] = column;
      weight_offset[i] = column < args.layout_rows ? at.group * args.weights.group_stride +
                                                         column * args.weights.row_stride
                                                   : nowhere;
    }
    const auto copy = [&](const Operand& operand, std::int64_t offset, std::int64_t k, char* to) {
      const std::int64_t left = (args.k - k) * static_cast<std::int64_t>(sizeof(Word));
      const bool some = offset != nowhere && left > 0;
      cp_async_16(shared_address(to),
                  static_cast<const Word*>(operand.data) + (some ? offset + k : 0),
                  !some        ? 0
                  : left >= 16 ? 16
                               : static_cast<int>(left));
    };
    const auto copy_step = [&](std::int64_t s) {
      const std::int64_t k = s * step + part * numbers;
      const int stage = static_cast<int>(s % stages);
#pragma unroll
      for (int i = 0; i < chunks_each; ++i) {
        const int to = at_ring + i * apart * pitch;
        if constexpr (direct_rows) copy(args.source, row_offset[i], k, row_ring[stage] + to);
        if constexpr (direct_weights) {
          const bool some = weight_offset[i] != nowhere && k < args.layout.padded_k();
          const std::int64_t at =
              some ? weight_offset[i] + args.layout.element(weight_row[i], k) : 0;
          cp_async_16(shared_address(weight_ring[stage] + to),
                      static_cast<const Word*>(args.weights.data) + at, some ? 16 : 0);
        }
      }
    };
    Chunk<Element> row_chunks[chunks_each], weight_chunks[chunks_each];
    const auto load_step = [&](std::int64_t s) {
      const std::int64_t k = s * step + part * numbers;
#pragma unroll
      for (int i = 0; i < chunks_each; ++i) {
        if constexpr (!direct_rows) {
          row_chunks[i].load(args.source, row_offset[i], k, args.k, args.wide_rows);
        }
        if constexpr (!direct_weights) {
          weight_chunks[i].load(args.weights, weight_offset[i], k, args.k, false);
        }
      }
    };
    const auto store_step = [&](std::int64_t s) {
      const int stage = static_cast<int>(s % stages);
#pragma unroll
      for (int i = 0; i < chunks_each; ++i) {
        const int to = at_ring + i * apart * pitch;
        if constexpr (!direct_rows) row_chunks[i].store(row_ring[stage] + to);
        if constexpr (!direct_weights) weight_chunks[i].store(weight_ring[stage] + to);
      }
    };

    for (int s = 0; s < stages - 1; ++s) {
      if (s < steps) {
        copy_step(s);
        load_step(s);
        store_step(s);
      }
      cp_async_commit();  // an empty group too: the count of groups is that of steps
    }
    Sums<Element> sums;
    for (std::int64_t s = 0; s < steps; ++s) {
      cp_async_wait<stages - 2>();
      __syncthreads();
      const std::int64_t ahead = s + stages - 1;
      if (ahead < steps) {
        copy_step(ahead);
        load_step(ahead);
      }
      cp_async_commit();
      sums.add(row_ring[s % stages], weight_ring[s % stages]);
      if (ahead < steps) store_step(ahead);
    }
    write_tile<Element>(args, at, sums);
    cp_async_wait<0>();
    __syncthreads();
  }
}

bool aligned(const void* data, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

template <class Element>
void enqueue(const Gpu& gpu, const Args& args, unsigned blocks, bool direct_rows,
             bool direct_weights) {
  auto* const kernel =
      direct_weights
          ? (direct_rows ? multiply<Element, true, true> : multiply<Element, false, true>)
          : multiply<Element, false, false>;
  launch("grouped_gemm", gpu, {.grid = dim3(blocks), .block = dim3(threads)}, kernel, args);
}

}  // namespace

void multiply_groups(const Gpu& gpu, const GroupedProduct& p) {
  if (multiply_as_planned(gpu, plan_product(sizes_of(p), figures(gpu)), p)) return;
  const RowLayout& layout = p.layout;
  const bool prepared = p.prepared != nullptr || !p.matrices;
  Args args{.groups = p.groups,
            .walk = walk_of(p),
            .k = layout.k,
            .layout_rows = prepared ? layout.rows() : layout.n,
            .tile_columns = 0,
            .weights = {},
            .layout = layout,
            .source = {p.rows.data, p.rows.dtype, 0, p.rows.strides[0], 1},
            .source_rows = p.rows.shape[0],
            .permutation = p.permutation,
            .slots = p.slots,
            .row_scale = p.row_scale,
            .wide_rows = p.rows.dtype == DType::f32 && aligned(p.rows.data, 4 * p.rows.strides[0]),
            .bias = {},
            .paired = layout.paired,
            .activates = p.activation.kind != cpu_engine::ActivationRule::identity ||
                         p.activation.limit < __builtin_inff(),
            .out_columns = layout.out_columns(),
            .rule = p.activation,
            .out = p.out.data,
            .out_dtype = p.out.dtype,
            .out_stride = p.out.strides[0]};
  args.tile_columns = (args.layout_rows + tile - 1) / tile;
  if (prepared) {
    args.weights = {p.prepared, layout.dtype, layout.group_bytes() / layout.element_bytes(), 0, 1};
  } else {
    args.weights = {p.matrices.data, p.matrices.dtype, p.matrices.strides[0], p.matrices.strides[1],
                    p.matrices.strides[2]};
  }
  if (p.bias) args.bias = {p.bias.data, p.bias.dtype, p.bias.strides[0], 0, p.bias.strides[1]};

  // The worst case: every group ends within a tile.
  const std::int64_t rows = args.walk.rows;
  const std::int64_t down = rows / tile + (args.groups < rows ? args.groups : rows);
  const std::int64_t most = std::int64_t{blocks_a_multiprocessor} * gpu.multiprocessors;
  const std::int64_t all = args.tile_columns > most ? most * (down > 0) : down * args.tile_columns;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>(all < most ? all : most);
  const bool direct_rows = p.rows.dtype == layout.dtype &&
                           aligned(p.rows.data, layout.element_bytes() * p.rows.strides[0]);
  switch (layout.dtype) {
    case DType::bf16:
      return enqueue<Bf16>(gpu, args, blocks, direct_rows, prepared);
    case DType::f16:
      return enqueue<F16>(gpu, args, blocks, direct_rows, prepared);
    default:
      return enqueue<Full>(gpu, args, blocks, direct_rows, prepared);
  }
}

}  // namespace shunt::cuda_engine
