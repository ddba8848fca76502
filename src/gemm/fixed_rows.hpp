// Rows in blocks of 16-bit integers, for products with codes that are small integers themselves:
// int4 less its zero point, e2m1 doubled (also two of four, times 256), int8, and dense3's numbers.
// Sums of a block are then integers, and exact.
//
// A row that was rounded to bf16 or f16 is cut at the weights' groups of k, or, where a column has
// one scale for all of k (int8), into blocks of 64. Of a block whose largest number lies in
// [2^e, 2^(e+1)), where e is taken for -111 at least, each becomes the nearest integer of
// x / 2^(e-14). A number of bf16 from 2^(e-7) on, and of f16 from 2^(e-4) on, does not move; a
// smaller one moves by 2^(e-15) at most. (The rounding before moved the largest by up to 2^(e-8),
// or 2^(e-11).) So a column's sum, beside the f32 sum of its groups, is off by at most
//
//   sum over blocks of max(2^-15 largest |x|, 2^-126) * sum of |w| over the block
//
// and depends on nothing but its own row and weights. Rows that meet dense3 are integers of 15
// bits, x / 2^(e-13), so that all of these limits are twice as large. A row that holds an infinity
// or a NaN has no such form, and is multiplied in f32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/dense3_numbers.hpp"
#include "gemm/packed_kernels.hpp"

namespace shunt::cpu_engine {

// In memory: the blocks, then the numbers, filled up with zeros to a multiple of 32. A number is 16
// bits; rows in bytes have of a block of 32 first the upper bytes and then the lower ones, both
// signed; rows in planes have of each eight the upper bytes in fixed_plane_order, then the lower
// ones, which have no sign.
struct FixedBlock {
  float unit;  // 2^(e-14), times the unit of the codes
  // What the products of codes that are more than they mean add, negated.
  std::int32_t start;
};
constexpr std::size_t fixed_step = 32;
// The integers of a larger block, times 16, might not be summed in 32 bits.
constexpr std::size_t most_fixed_group = 2048;
constexpr std::size_t fixed_byte_group = 64;  // of int8
// dense3: with so many more its numbers are positive bytes; its rows have so many bits less.
constexpr int fixed_dense3_more = 128;
constexpr std::uint32_t fixed_dense3_less = 1;
// As a word of eight codes has them: those in the lower nibbles of its bytes, then the others.
constexpr int fixed_plane_order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
// Of eight numbers, which byte of the 16 goes to each place: from words to planes, and back.
struct FixedPlanes {
  alignas(16) std::uint8_t of_words[16];
  alignas(16) std::uint8_t to_words[16];
  constexpr FixedPlanes() : of_words{}, to_words{} {
    for (int place = 0; place < 8; ++place) {
      const int lower = 2 * fixed_plane_order[place], upper = lower + 1;
      of_words[place] = static_cast<std::uint8_t>(upper);
      of_words[place + 8] = static_cast<std::uint8_t>(lower);
      to_words[upper] = static_cast<std::uint8_t>(place);
      to_words[lower] = static_cast<std::uint8_t>(place + 8);
    }
  }
};
inline constexpr FixedPlanes fixed_planes;
constexpr std::size_t fixed_numbers_at(std::size_t k, std::size_t group) {
  return (k + group - 1) / group * sizeof(FixedBlock);
}
constexpr std::size_t fixed_row_bytes(std::size_t k, std::size_t group) {
  return fixed_numbers_at(k, group) + (k + fixed_step - 1) / fixed_step * fixed_step * 2;
}

struct FixedFormat {
  // A row in f32, zeros behind k up to a multiple of 32, into blocks of `group`, a multiple of 16.
  // False: it holds an infinity or a NaN, and `to` nothing of use.
  bool (*row)(const float* from, std::size_t k, std::size_t group, void* to) = nullptr;
  // Of such rows; `group` is theirs. sums[r][c] = fma(f32(sum of a block) * unit, scale,
  // sums[r][c]), one block after the other; the sum is rounded once when it becomes f32. Columns
  // are cut as PackedKernels' are.
  PackedKernel multiply = nullptr;
};
struct FixedKernels {
  FixedFormat nvfp4, mxfp4;
  FixedFormat int4;
  FixedFormat int8;        // of each four numbers of a row the second and the third change places
  FixedFormat int8_to_l1;  // the same, its codes fetched to the L1, not to the L2
};
namespace avx2 {
extern const FixedKernels fixed_kernels;
extern const FixedFormat fixed_dense3;  // of each four numbers as for int8
}  // namespace avx2
namespace avx512_vnni {
extern const FixedKernels fixed_kernels;
extern const FixedFormat fixed_sparse;
}  // namespace avx512_vnni
namespace avx512_vbmi {
extern const FixedFormat nvfp4_planes, mxfp4_planes, int4_planes;  // groups of 16 n
extern const FixedFormat fixed_dense3;                             // rows in bytes
extern const FixedFormat fixed_dense3_shared;  // the same, with fewer loads (Features::fewer_loads)
}  // namespace avx512_vbmi

}  // namespace shunt::cpu_engine
