// Rows for weights in GPTQ's order of activations: each row's k as its group's matrix has them.
//
// A block has up to four rows that follow one another. They are rounded into shared memory, the
// four numbers of a k beside each other, and picked from there: a look-up gives all rows of a
// group, eight places of an order a thread. What was tried: docs/notes/cuda-w4.md.
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/row_pieces.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256, most_rows = 4, places = 8;
constexpr std::size_t own_bytes = 1024;  // of shared memory beside the rows, at most

std::int64_t pitch(std::int64_t k) { return (k + places - 1) / places * places; }

struct Args {
  GroupWalk walk;
  int groups;
  const char* orders;  // of group 0
  std::int64_t group_bytes, k;
  const void* source;
  DType source_dtype;
  std::int64_t source_rows, stride;
  const std::int32_t* permutation;
  int slots;
  const float* row_scale;
  std::int64_t rows;
  int each;  // rows of a block
  void* to;  // [rows, pitch(k)]
  std::int64_t pitch;
  DType dtype;
};

// Row `from` of the source at k: rounded, or 0.
__device__ std::uint16_t rounded(const Args& args, int from, std::int64_t k, float scale) {
  if (from < 0 || k >= args.k) return 0;
  float x = load_element(args.source, args.source_dtype, from * args.stride + k);
  if (args.row_scale != nullptr) x = __fmul_rn(x, scale);
  return args.dtype == DType::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
}

enum class Staging {
  none,    // k is too long for shared memory
  any,     // a number at a time
  copied,  // rows are of the dtype already and not scaled: by twos, many loads under way
};

template <Staging staging>
__global__ void __launch_bounds__(threads) order_rows_kernel(const Args args) {
  extern __shared__ __align__(16) uint2 numbers[];  // [k], of four rows
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t first = std::int64_t{blockIdx.x} * args.each;
  // Every thread asks groups of its own which of the rows they have; then one a row where that
  // comes from.
  struct Row {
    int group;  // -1: none
    int from;   // of the source; -1: zeros
    float scale;
  };
  __shared__ Row rows[most_rows];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < most_rows) rows[thread] = {-1, -1, 1.0f};
  __syncthreads();
  for (int g = thread; g < args.groups; g += threads) {
    const GroupRows of = args.walk.of(g);
#pragma unroll
    for (int r = 0; r < most_rows; ++r) {
      const std::int64_t row = first + r;
      if (r < args.each && row >= of.begin && row < of.end) rows[r].group = g;
    }
  }
  __syncthreads();
  if (thread < most_rows && rows[thread].group >= 0) {
    rows[thread].from = source_of(args, first + thread);
    if (args.row_scale != nullptr) rows[thread].scale = args.row_scale[first + thread];
  }
  __syncthreads();
  int group[most_rows], from[most_rows];
  float scale[most_rows];
#pragma unroll
  for (int r = 0; r < most_rows; ++r) {
    group[r] = rows[r].group;
    from[r] = rows[r].from;
    scale[r] = rows[r].scale;
  }
  const auto four = [&](std::int64_t k) {
    std::uint32_t of[most_rows];
#pragma unroll
    for (int r = 0; r < most_rows; ++r) of[r] = rounded(args, from[r], k, scale[r]);
    return make_uint2(of[0] | of[1] << 16, of[2] | of[3] << 16);
  };
  if (staging == Staging::copied) {
    constexpr int at_once = 4;
    const std::uint32_t* source[most_rows];
#pragma unroll
    for (int r = 0; r < most_rows; ++r) {
      source[r] =
          static_cast<const std::uint32_t*>(args.source) + max(from[r], 0) * (args.stride / 2);
    }
    auto* const pairs = reinterpret_cast<uint4*>(numbers);
    const int count = static_cast<int>(args.k / 2);
#pragma unroll 1
    for (int begin = thread; begin < count; begin += at_once * threads) {
      std::uint32_t two[at_once][most_rows];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int k = begin + i * threads;
#pragma unroll
        for (int r = 0; r < most_rows; ++r) {
          two[i][r] = from[r] >= 0 && k < count ? source[r][k] : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int k = begin + i * threads;
        if (k >= count) break;
        const std::uint32_t* const of = two[i];
        pairs[k] = make_uint4(__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[2], of[3], 0x5410),
                              __byte_perm(of[0], of[1], 0x7632), __byte_perm(of[2], of[3], 0x7632));
      }
    }
    __syncthreads();
  } else if (staging == Staging::any) {
    for (std::int64_t k = thread; k < args.k; k += threads) numbers[k] = four(k);
    __syncthreads();
  }
  for (std::int64_t at = std::int64_t{thread} * places; at < args.k; at += threads * places) {
    uint2 picked[places];
    int have = -1;
#pragma unroll
    for (int r = 0; r < most_rows; ++r) {
      if (group[r] < 0) continue;
      if (group[r] != have) {
        have = group[r];
        const auto* const of =
            reinterpret_cast<const std::int32_t*>(args.orders + have * args.group_bytes);
        // Past k a group has room for a whole piece.
        const int4 low = *reinterpret_cast<const int4*>(of + at);
        const int4 high = *reinterpret_cast<const int4*>(of + at + 4);
        const std::int32_t k[places] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < places; ++i) {
          picked[i] = at + i >= args.k           ? make_uint2(0, 0)
                      : staging != Staging::none ? numbers[k[i]]
                                                 : four(k[i]);
        }
      }
      std::uint32_t words[places / 2];
#pragma unroll
      for (int i = 0; i < places; i += 2) {
        const auto half = [&](const uint2& of) { return r < 2 ? of.x : of.y; };
        words[i / 2] =
            __byte_perm(half(picked[i]), half(picked[i + 1]), r % 2 == 0 ? 0x5410 : 0x7632);
      }
      auto* const to = static_cast<std::uint16_t*>(args.to) + (first + r) * args.pitch + at;
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace

std::size_t ordered_rows_bytes(std::int64_t rows, std::int64_t k) {
  return static_cast<std::size_t>(rows * pitch(k) * 2);
}

FragmentProduct order_rows(const Gpu& gpu, const FragmentProduct& p, void* memory) {
  const FragmentLayout& layout = p.layout;
  const std::int64_t rows = p.out.shape[0];
  const int each = rows < std::int64_t{most_rows} * gpu.multiprocessors ? 1 : most_rows;
  const auto staged_bytes = static_cast<std::size_t>(layout.k) * sizeof(uint2);
  const bool staged = staged_bytes + own_bytes <= static_cast<std::size_t>(gpu.shared_bytes);
  const bool copied = p.rows.dtype == layout.dtype && p.row_scale == nullptr && layout.k % 2 == 0 &&
                      p.rows.strides[0] % 2 == 0 &&
                      reinterpret_cast<std::uintptr_t>(p.rows.data) % 4 == 0;
  launch("grouped_gemm: rows in order", gpu,
         {.grid = dim3(static_cast<unsigned>((rows + each - 1) / each)),
          .block = dim3(threads),
          .shared = staged ? staged_bytes : 0},
         !staged  ? order_rows_kernel<Staging::none>
         : copied ? order_rows_kernel<Staging::copied>
                  : order_rows_kernel<Staging::any>,
         Args{.walk = walk_of(p),
              .groups = p.groups,
              .orders = static_cast<const char*>(p.prepared) + layout.order_at(),
              .group_bytes = layout.group_bytes(),
              .k = layout.k,
              .source = p.rows.data,
              .source_dtype = p.rows.dtype,
              .source_rows = p.rows.shape[0],
              .stride = p.rows.strides[0],
              .permutation = p.permutation,
              .slots = p.slots,
              .row_scale = p.row_scale,
              .rows = rows,
              .each = each,
              .to = memory,
              .pitch = pitch(layout.k),
              .dtype = layout.dtype});
  FragmentProduct ordered = p;
  ordered.rows = view(memory, layout.dtype, {rows, layout.k}, p.out.device);
  ordered.rows.strides[0] = pitch(layout.k);
  ordered.permutation = nullptr;
  ordered.slots = 1;
  ordered.row_scale = nullptr;
  return ordered;
}

}  // namespace shunt::cuda_engine
