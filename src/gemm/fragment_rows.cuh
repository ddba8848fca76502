// The rows of a group into shared memory, for the kernels of packed weights: in boxes of 64 of k,
// rows of 128 bytes, their pieces of 16 exchanged by the row as the tensor cores want them.
#pragma once

#include "cuda/element.cuh"
#include "cuda/hopper.cuh"
#include "gemm/fragment_product.hpp"
#include "gemm/row_pieces.cuh"
#include "gemm/wgmma.cuh"

#if defined(__CUDA_ARCH__)

namespace shunt::cuda_engine {

// Eight numbers of a row from its k-th on, `left` of them there, rounded and put to `to`.
template <bool bf16>
__device__ __forceinline__ void store_numbers(const FragmentArgs& args, std::uint32_t to,
                                              const char* from, std::int64_t k, std::int64_t left,
                                              float scale) {
  std::uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= left) continue;
    const float x = __fmul_rn(load_element(from, args.source_dtype, k + i), scale);
    word[i / 2] |= std::uint32_t{bf16 ? f32_to_bf16(x) : f32_to_f16(x)} << (16 * (i % 2));
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

// What a lane of a warp copies of every step of 128 of k: piece lane % 16 of rows lane / 16 + 2 c.
// `direct`: args.direct is known to hold.
template <bool bf16, int tokens, bool direct = false>
class StepRows {
 public:
  __device__ __forceinline__ explicit StepRows(int lane) : line_(lane / 16), part_(lane % 16) {}

  // Rows [row, row + count) of the order.
  __device__ __forceinline__ void begin(const FragmentArgs& args, int row, int count) {
    row_ = row, left_ = count - line_;
    if (!direct && !args.direct) return;
    pieces_.begin(args.source_row_bytes, left_,
                  [&](int c) { return source_of(args, std::int64_t{row} + line_ + 2 * c); });
  }

  // Step `step` to the stage at `to`. Rows behind the count are left as they are.
  __device__ __forceinline__ void copy(const FragmentArgs& args, std::uint32_t to, int step) const {
    const std::int64_t k = std::int64_t{step} * 128 + 8 * part_;
    const std::uint32_t box =
        to + static_cast<std::uint32_t>(part_ / 8 * tokens * 128 + line_ * 128);
    const auto at = [&](int c) {
      return box + static_cast<std::uint32_t>(c * 256 + ((part_ % 8) ^ (line_ + 2 * c) % 8) * 16);
    };
    const std::int64_t left = args.k - k;  // numbers
    if (direct || args.direct) {
      const int bytes = left <= 0 ? 0 : 16;
      pieces_.copy(left <= 0 ? args.source : args.source + 2 * k, bytes, at);
      return;
    }
    if constexpr (!direct) {
#pragma unroll 1
      for (int c = 0; 2 * c < left_; ++c) {
        const std::int64_t row = std::int64_t{row_} + line_ + 2 * c;
        const int source = source_of(args, row);
        const float scale = args.row_scale != nullptr ? __ldg(args.row_scale + row) : 1.0f;
        store_numbers<bf16>(args, at(c), args.source + max(source, 0) * args.source_row_bytes, k,
                            source < 0 ? 0 : left, scale);
      }
    }
  }

 private:
  RowPieces<tokens / 2, 2> pieces_;
  int line_, part_, row_ = 0, left_ = 0;
};

// The rows that a tile of many tokens has, in shared memory: sources[t], -1 for zeros, and what
// they are times. By `threads` threads, a barrier before and behind. `direct`, here and below:
// args.direct is known to hold.
template <int tokens, int threads, bool direct = false>
__device__ __forceinline__ void list_rows(const FragmentArgs& args, int row, int count, int thread,
                                          int* sources, float* scales) {
#pragma unroll
  for (int t = thread; t < tokens; t += threads) {
    int source = -1;
    if (t < count) {
      const std::int64_t at = std::int64_t{row} + t;
      if (!direct) scales[t] = args.row_scale != nullptr ? args.row_scale[at] : 1.0f;
      source = source_of(args, at);
    }
    sources[t] = source;
  }
}

// What one of `threads` threads copies of the rows listed, 64 of k at once: piece thread % 8 of
// rows thread / 8 + threads / 8 c.
template <bool bf16, int tokens, int threads, bool direct = false>
class ListedRows {
 public:
  static constexpr int lines = threads / 8;
  static_assert(lines % 8 == 0 && tokens % lines == 0);

  __device__ __forceinline__ ListedRows(int thread, const int* sources, const float* scales)
      : sources_(sources), scales_(scales), line_(thread / 8), part_(thread % 8) {}

  // The first `count` of those listed.
  __device__ __forceinline__ void begin(const FragmentArgs& args, int count) {
    count_ = count;
    if (!direct && !args.direct) return;
    pieces_.begin(args.source_row_bytes, count - line_,
                  [&](int c) { return sources_[line_ + lines * c]; });
  }

  // From `k` on to the box at `to`.
  __device__ __forceinline__ void copy(const FragmentArgs& args, std::uint32_t to,
                                       std::int64_t k) const {
    const std::int64_t left = args.k - k - 8 * part_;  // numbers
    const std::uint32_t first =
        to + static_cast<std::uint32_t>(line_ * 128 + (part_ ^ (line_ % 8)) * 16);
    if (direct || args.direct) {
      const int bytes = left <= 0 ? 0 : 16;
      pieces_.copy(left <= 0 ? args.source : args.source + 2 * (k + 8 * part_), bytes,
                   [&](int c) { return first + static_cast<std::uint32_t>(lines * c * 128); });
      return;
    }
    if constexpr (!direct) {
#pragma unroll 1
      for (int t = line_; t < count_; t += lines) {
        const int source = sources_[t];
        store_numbers<bf16>(args, first + static_cast<std::uint32_t>((t - line_) * 128),
                            args.source + max(source, 0) * args.source_row_bytes, k + 8 * part_,
                            source < 0 ? 0 : left, scales_[t]);
      }
    }
  }

 private:
  RowPieces<tokens / lines, lines> pieces_;
  const int* sources_;
  const float* scales_;
  int line_, part_, count_ = 0;
};

}  // namespace shunt::cuda_engine

#endif
