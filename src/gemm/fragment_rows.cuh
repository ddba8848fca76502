// The rows of a group into shared memory, for the kernels of packed weights: in boxes of 64 of k,
// rows of 128 bytes, their pieces of 16 exchanged by the row as the tensor cores want them.
#pragma once

#include "cuda/element.cuh"
#include "cuda/hopper.cuh"
#include "gemm/fragment_product.hpp"
#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

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

// One of `threads` threads' part: piece `part` of a step of 128 of k, of rows line + lines * c.
template <bool bf16, int tokens, int threads>
class RowCopies {
 public:
  static constexpr int lines = threads / 16, each = tokens / lines;
  static_assert(lines % 4 == 0 && tokens % lines == 0);

  __device__ __forceinline__ RowCopies(const FragmentArgs& args, int thread)
      : line_(thread / 16), part_(thread % 16), left_(0) {
    (void)args;
  }

  // Rows [row, row + count) of the order.
  __device__ __forceinline__ void begin(const FragmentArgs& args, int row, int count) {
    left_ = count - line_;
#pragma unroll
    for (int c = 0; c < each; ++c) {
      source_[c] = -1;
      if (lines * c >= left_) continue;
      std::int64_t at = std::int64_t{row} + line_ + lines * c;
      if (!args.direct && args.row_scale != nullptr) scale_[c] = args.row_scale[at];
      if (args.permutation != nullptr) {
        const std::int32_t pair = args.permutation[at];
        at = pair < 0 ? -1 : pair / args.slots;
      }
      if (at < args.source_rows) source_[c] = static_cast<int>(at);
    }
  }

  // Step `step` to the stage at `to`. Rows behind the count are left as they are.
  __device__ __forceinline__ void copy(const FragmentArgs& args, std::uint32_t to, int step) const {
    const std::int64_t k = std::int64_t{step} * 128 + 8 * part_;
    const std::uint32_t box =
        to + static_cast<std::uint32_t>(part_ / 8 * tokens * 128 + line_ * 128);
#pragma unroll
    for (int c = 0; c < each; ++c) {
      if (lines * c >= left_) continue;
      const int row = line_ + lines * c;
      const std::uint32_t at =
          box + static_cast<std::uint32_t>(lines * c * 128 + ((part_ % 8) ^ (row % 8)) * 16);
      const std::int64_t left = source_[c] < 0 ? 0 : args.k - k;  // numbers
      const char* const from = args.source + max(source_[c], 0) * args.source_row_bytes;
      if (args.direct) {
        cp_async_16(at, left > 0 ? from + 2 * k : args.source,
                    left <= 0 ? 0 : static_cast<int>(min(left * 2, std::int64_t{16})));
      } else {
        store_numbers<bf16>(args, at, from, k, left, args.row_scale != nullptr ? scale_[c] : 1.0f);
      }
    }
  }

 private:
  int line_, part_, left_;
  int source_[each];
  float scale_[each];
};

// The rows that a tile of many tokens has, in shared memory: sources[t], -1 for zeros, and what
// they are times. By `threads` threads, a barrier before and behind.
template <int tokens, int threads>
__device__ __forceinline__ void list_rows(const FragmentArgs& args, int row, int count, int thread,
                                          int* sources, float* scales) {
#pragma unroll
  for (int t = thread; t < tokens; t += threads) {
    int source = -1;
    if (t < count) {
      std::int64_t at = std::int64_t{row} + t;
      scales[t] = args.row_scale != nullptr ? args.row_scale[at] : 1.0f;
      if (args.permutation != nullptr) {
        const std::int32_t pair = args.permutation[at];
        at = pair < 0 ? -1 : pair / args.slots;
      }
      if (at < args.source_rows) source = static_cast<int>(at);
    }
    sources[t] = source;
  }
}

// 64 of k, from `k` on, of the `count` rows listed, to the box at `to`.
template <bool bf16, int threads>
__device__ __forceinline__ void copy_rows(const FragmentArgs& args, std::uint32_t to,
                                          std::int64_t k, int count, int thread, const int* sources,
                                          const float* scales) {
  constexpr int lines = threads / 8;
  static_assert(lines % 8 == 0);
  const int line = thread / 8, part = thread % 8;
  const std::int64_t left = args.k - k - 8 * part;  // numbers
  const char* const column = args.source + 2 * (k + 8 * part);
  const int bytes = left <= 0 ? 0 : static_cast<int>(min(left * 2, std::int64_t{16}));
  const std::uint32_t at = to + static_cast<std::uint32_t>(line * 128 + (part ^ (line % 8)) * 16);
#pragma unroll 4
  for (int t = line; t < count; t += lines) {
    const int source = sources[t];
    const std::uint32_t here = at + static_cast<std::uint32_t>((t - line) * 128);
    if (args.direct) {
      const bool some = source >= 0 && bytes > 0;
      cp_async_16(here, some ? column + source * args.source_row_bytes : args.source,
                  some ? bytes : 0);
    } else {
      store_numbers<bf16>(args, here, args.source + max(source, 0) * args.source_row_bytes,
                          k + 8 * part, source < 0 ? 0 : left, scales[t]);
    }
  }
}

}  // namespace shunt::cuda_engine

#endif
