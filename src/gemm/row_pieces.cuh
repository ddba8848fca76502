// Rows of a group on their way to shared memory as they are: in pieces of 16 bytes, asynchronously.
#pragma once

#include "cuda/mma.cuh"

namespace shunt::cuda_engine {

// Where a row of the order comes from: a row of the source, or -1 for zeros.
template <class Args>
__device__ __forceinline__ int source_of(const Args& args, std::int64_t at) {
  if (args.permutation != nullptr) {
    const std::int32_t pair = args.permutation[at];
    at = pair < 0 ? -1 : pair / args.slots;
  }
  return at < args.source_rows ? static_cast<int>(at) : -1;
}

}  // namespace shunt::cuda_engine

#if defined(__CUDA_ARCH__)

namespace shunt::cuda_engine {

__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// `bytes` 0: a zero.
__device__ __forceinline__ void cp_async_4(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Rows that one thread copies, the same piece of each: `each` of them, every `lines`-th.
template <int each, int lines>
class RowPieces {
 public:
  // The first `left` rows of which this thread has every `lines`-th from its own on; source(c):
  // where its c-th comes from. A row has fewer than 2^32 pieces before it.
  template <class Source>
  __device__ __forceinline__ void begin(std::int64_t row_bytes, int left, const Source& source) {
    left_ = left;
    whole_ = true;
    const auto row = static_cast<std::uint32_t>(row_bytes / 16);
#pragma unroll
    for (int c = 0; c < each; ++c) {
      offset_[c] = 0;
      if (lines * c >= left_) continue;
      const int from = source(c);
      offset_[c] = from < 0 ? none : static_cast<std::uint32_t>(from) * row;
      whole_ = whole_ && from >= 0;
    }
  }

  // The piece at `from` in row 0, `bytes` of it, zeros behind; at(c): where in shared memory.
  template <class At>
  __device__ __forceinline__ void copy(const char* from, int bytes, const At& at) const {
    if (whole_ && bytes == 16) {
#pragma unroll
      for (int c = 0; c < each; ++c) {
        if (lines * c < left_) cp_async_16(at(c), from + std::uint64_t{offset_[c]} * 16);
      }
      return;
    }
#pragma unroll 1
    for (int c = 0; c < each; ++c) {
      if (lines * c >= left_) continue;
      std::uint32_t offset = 0;  // an index that is not known would take it out of registers
#pragma unroll
      for (int i = 0; i < each; ++i) offset = i == c ? offset_[i] : offset;
      const bool some = offset != none && bytes > 0;
      cp_async_16(at(c), from + (some ? std::uint64_t{offset} * 16 : 0), some ? bytes : 0);
    }
  }

 private:
  static constexpr std::uint32_t none = 0xffffffff;
  std::uint32_t offset_[each];  // of rows, in pieces
  int left_ = 0;
  bool whole_ = true;
};

}  // namespace shunt::cuda_engine

#endif
