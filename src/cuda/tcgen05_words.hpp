// The words that tell tcgen05 what its operands are: descriptors of shared memory and of
// instructions. Names and numbers of bits are PTX's.
#pragma once

#include <cstdint>

#ifndef SHUNT_BOTH
#ifdef __CUDACC__
#define SHUNT_BOTH __host__ __device__
#else
#define SHUNT_BOTH
#endif
#endif

namespace shunt::cuda_engine {

// Of an operand in shared memory: rows of 128 bytes along K (64 elements of 16 bits, 256 of 4),
// 16-byte pieces swizzled by the row, as a tensor map with the 128-byte swizzle leaves them;
// `address` a multiple of 1024 bytes. 32 bytes further along K: add 2.
SHUNT_BOTH constexpr std::uint64_t tcgen05_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3ffff) >> 4} |  // 0..13: address / 16
         std::uint64_t{1} << 16 |          // 16..29: offset along K; not read with this swizzle
         std::uint64_t{1024 >> 4} << 32 |  // 32..45: from 8 rows to the next 8, / 16
         std::uint64_t{1} << 46 |          // 46..48: the form of descriptor that tcgen05 takes
         std::uint64_t{2} << 61;           // 61..63: swizzled within 128 bytes
}
// The same of rows of 64 bytes, swizzled within these; `address` a multiple of 512.
SHUNT_BOTH constexpr std::uint64_t tcgen05_narrow_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3ffff) >> 4} | std::uint64_t{1} << 16 |
         std::uint64_t{512 >> 4} << 32 |  // from 8 rows to the next 8
         std::uint64_t{1} << 46 | std::uint64_t{4} << 61;
}
// Of rows of 16 bytes, one after the other: 32 of scales, 128 of positions, as they are copied.
SHUNT_BOTH constexpr std::uint64_t tcgen05_scale_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3ffff) >> 4} |
         std::uint64_t{128 >> 4} << 32 |  // from 8 rows to the next 8
         std::uint64_t{1} << 46;          // and 0 in 61..63: not swizzled
}

// Of a product of 128 rows (M) by `columns` (N), a multiple of 16 up to 256. Both operands K-major,
// dense, as they are: zeros in the bits for majorness (15, 16), sparsity (0..2), negation (13, 14).
SHUNT_BOTH constexpr std::uint32_t tcgen05_instruction(bool bf16, unsigned columns) {
  const std::uint32_t type = bf16 ? 1 : 0;
  return 1U << 4 |            // 4..5: f32 sums
         type << 7 |          // 7..9: type of A
         type << 10 |         // 10..12: type of B
         columns / 8 << 17 |  // 17..22: N / 8
         128 / 16 << 24;      // 24..28: M / 16
}
// The same of kind::mxf4nvf4. Zeros also in the bits for which of a word's scales come first (4..5,
// 29..30: all four are taken), e4m3 scales (23) and 64 along K, 128 of sparse ones (31).
SHUNT_BOTH constexpr std::uint32_t tcgen05_fp4_instruction(unsigned columns, bool sparse) {
  return (sparse ? 1U : 0U)
             << 2 |           // 2: positions of A's say where they lie, the first of them (0..1)
         1U << 7 |            // 7..9: A is e2m1
         1U << 10 |           // 10..11: B is e2m1
         columns / 8 << 17 |  // 17..22: N / 8
         128 / 16 << 24;      // 24..28: M / 16
}

}  // namespace shunt::cuda_engine
