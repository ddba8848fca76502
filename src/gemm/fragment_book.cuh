// dense3's pairs of numbers in shared memory (fragment_lane.hpp): 64 KB of a block's, which its
// kernels have less of for what is under way.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/hopper.cuh"
#include "gemm/fragment_lane.hpp"

#if defined(__CUDA_ARCH__)

namespace shunt::cuda_engine {

namespace {

// Four of the numbers, a byte each.
template <int i>
SHUNT_BOTH constexpr std::uint32_t dense3_four() {
  std::uint32_t four = 0;
  for (int byte = 0; byte < 4; ++byte) {
    four |= std::uint32_t{static_cast<std::uint8_t>(dense3_numbers[4 * i + byte])} << (8 * byte);
  }
  return four;
}

// Where a lane finds it. Before threads part: what is the same in all lanes else costs an addition
// a look-up.
template <class L>
__device__ __forceinline__ typename L::Book book_at(unsigned char* memory, int lane) {
  typename L::Book book;
  if constexpr (L::Book::bytes > 0) {
    book.at = shared_address(memory);
    book.own = static_cast<std::uint32_t>(4 * lane);
  }
  return book;
}

// Written by all `threads`, which a barrier must follow, to Book::bytes at `memory`.
template <class L>
__device__ __forceinline__ void write_book(unsigned char* memory, int thread, int threads) {
  if constexpr (L::Book::bytes > 0) {
    constexpr int copies = L::Book::copies;
    const int lane = thread % 32;
    // A lane has four of them: no memory is read.
    std::uint32_t four = 0;
    [&]<int... i>(std::integer_sequence<int, i...>) {
      ((four =
            lane % 16 == i ? std::integral_constant<std::uint32_t, dense3_four<i>()>::value : four),
       ...);
    }
    (std::make_integer_sequence<int, 16>());
    auto* const words = reinterpret_cast<std::uint32_t*>(memory);
#pragma unroll 1
    for (int index = thread; index < 512; index += threads) {  // by whole warps
      const std::uint32_t word = book_word<L::bf16>(
          [&](std::uint32_t window) {
            const std::uint32_t from = __shfl_sync(0xffffffffu, four, static_cast<int>(window / 4));
            return static_cast<signed char>(from >> (8 * (window % 4)));
          },
          static_cast<std::uint32_t>(index));
#pragma unroll
      for (int i = 0; i < copies; ++i) {
        words[index * copies + (i + lane) % copies] = word;
      }
    }
    __syncwarp();  // else loops behind lose their uniform registers
  }
}

}  // namespace

}  // namespace shunt::cuda_engine

#endif
