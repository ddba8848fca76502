// The NVFP4 product of a B200 without one: shared memory as the kernel fills it, and a stage of its
// products by what PTX says of descriptors, of copies to tensor memory and of where the scales of a
// product lie, against the numbers that the format holds.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/convert.hpp"
#include "cuda/tcgen05_words.hpp"
#include "format/codes.hpp"
#include "format/pairs.hpp"
#include "gemm/blackwell_fp4_tiles.hpp"
#include "gemm/fp4_data.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {
namespace {

using Matrix = test::Fp4Matrix;

std::uint64_t bits(std::uint64_t word, int low, int high) {
  return word >> low & ((std::uint64_t{1} << (high - low + 1)) - 1);
}

using Shared = std::vector<std::uint8_t>;
constexpr std::size_t column_bytes = std::size_t{128} * 4;

// Lane l of column c: four bytes.
struct TensorMemory {
  std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(512 * column_bytes);
  std::uint8_t* at(int lane, int column) {
    return bytes.data() + static_cast<std::size_t>(column) * column_bytes +
           static_cast<std::size_t>(lane) * 4;
  }
};

// tcgen05.cp.32x128b.warpx4: 32 rows of 16 bytes, in groups of eight that lie bits 32..45 apart, to
// four columns of lanes 32 w + row, for each of four warps.
void copy_scales(const Shared& shared, std::uint64_t descriptor, TensorMemory& memory, int column) {
  EXPECT_EQ(bits(descriptor, 46, 48), 1U);
  EXPECT_EQ(bits(descriptor, 61, 63), 0U);
  const std::size_t start = bits(descriptor, 0, 13) * 16, apart = bits(descriptor, 32, 45) * 16;
  for (int row = 0; row < 32; ++row) {
    const std::size_t from =
        start + static_cast<std::size_t>(row / 8) * apart + static_cast<std::size_t>(row % 8) * 16;
    for (int w = 0; w < 4; ++w) {
      for (int c = 0; c < 4; ++c) {
        std::memcpy(memory.at(32 * w + row, column + c),
                    shared.data() + from + static_cast<std::size_t>(c) * 4, 4);
      }
    }
  }
}

// tcgen05.cp.128x128b: 128 rows of 16 bytes, in groups of eight that lie bits 32..45 apart, to four
// columns of as many lanes.
void copy_positions(const Shared& shared, std::uint64_t descriptor, TensorMemory& memory,
                    int column) {
  EXPECT_EQ(bits(descriptor, 46, 48), 1U);
  EXPECT_EQ(bits(descriptor, 61, 63), 0U);
  const std::size_t start = bits(descriptor, 0, 13) * 16, apart = bits(descriptor, 32, 45) * 16;
  for (int row = 0; row < 128; ++row) {
    const std::size_t from =
        start + static_cast<std::size_t>(row / 8) * apart + static_cast<std::size_t>(row % 8) * 16;
    for (int c = 0; c < 4; ++c) {
      std::memcpy(memory.at(row, column + c),
                  shared.data() + from + static_cast<std::size_t>(c) * 4, 4);
    }
  }
}

// Kept element (row, i < 64) of a sparse operand, K-major, 64-byte swizzle: rows of 64 bytes, the
// bits of an address from 4 to 5 exchanged by those from 7 to 8.
double kept_element(const Shared& shared, std::uint64_t descriptor, int row, int i) {
  EXPECT_EQ(bits(descriptor, 46, 48), 1U);
  EXPECT_EQ(bits(descriptor, 61, 63), 4U);
  const std::size_t start = bits(descriptor, 0, 13) * 16, apart = bits(descriptor, 32, 45) * 16;
  std::size_t address = start + static_cast<std::size_t>(row / 8) * apart +
                        static_cast<std::size_t>(row % 8) * 64 + static_cast<std::size_t>(i / 2);
  address ^= (address >> 7 & 3) << 4;
  return static_cast<double>(e2m1_values[shared[address] >> i % 2 * 4 & 15]);
}

// Element (row, k < 64) of an operand, K-major, 128-byte swizzle: rows of 128 bytes, the bits of an
// address from 4 to 6 exchanged by those from 7 to 9. Two elements a byte, the lower first.
double element(const Shared& shared, std::uint64_t descriptor, int row, int k) {
  EXPECT_EQ(bits(descriptor, 46, 48), 1U);
  EXPECT_EQ(bits(descriptor, 61, 63), 2U);
  const std::size_t start = bits(descriptor, 0, 13) * 16, apart = bits(descriptor, 32, 45) * 16;
  std::size_t address = start + static_cast<std::size_t>(row / 8) * apart +
                        static_cast<std::size_t>(row % 8) * 128 + static_cast<std::size_t>(k / 2);
  address ^= (address >> 7 & 7) << 4;
  return static_cast<double>(e2m1_values[shared[address] >> k % 2 * 4 & 15]);
}

// tcgen05.mma kind::mxf4nvf4, scale_vec::4X, 64 along K: sums[row][column] grow.
void multiply(const Shared& shared, std::uint64_t a, std::uint64_t b, std::uint32_t instruction,
              TensorMemory& memory, int a_scales, int b_scales,
              std::vector<std::vector<double>>& sums) {
  EXPECT_EQ(bits(instruction, 7, 9), 1U);    // e2m1
  EXPECT_EQ(bits(instruction, 10, 12), 1U);  // e2m1
  EXPECT_EQ(bits(instruction, 0, 6), 0U);    // dense, scales of B from byte 0
  EXPECT_EQ(bits(instruction, 13, 16), 0U);
  EXPECT_EQ(bits(instruction, 23, 23), 0U);  // e4m3
  EXPECT_EQ(bits(instruction, 29, 31), 0U);  // scales of A from byte 0, 64 along K
  const auto rows = static_cast<int>(bits(instruction, 24, 28) * 16);
  const auto columns = static_cast<int>(bits(instruction, 17, 22) * 8);
  ASSERT_EQ(rows, 128);
  ASSERT_EQ(static_cast<std::size_t>(columns), sums[0].size());
  const auto scaled = [&](std::uint64_t operand, int scales, int row, int k) {
    const std::uint8_t scale = memory.at(row % 32, scales + row / 32)[k / 16];
    return element(shared, operand, row, k) * static_cast<double>(e4m3_to_f32(scale));
  };
  std::vector<double> right(static_cast<std::size_t>(columns) * 64);
  for (int j = 0; j < columns; ++j) {
    for (int k = 0; k < 64; ++k) {
      right[static_cast<std::size_t>(j) * 64 + static_cast<std::size_t>(k)] =
          scaled(b, b_scales, j, k);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int k = 0; k < 64; ++k) {
      const double left = scaled(a, a_scales, i, k);
      for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j) {
        sums[static_cast<std::size_t>(i)][j] += left * right[j * 64 + static_cast<std::size_t>(k)];
      }
    }
  }
}

// tcgen05.mma.sp kind::mxf4nvf4, scale_vec::4X, 128 along K: row i of A has its positions in lane i
// of two columns, four bits for eight of k, ascending: the numbers of the two pairs, ascending,
// whose values are kept, pair after pair. A scale is for 32.
void multiply_sparse(const Shared& shared, std::uint64_t a, std::uint64_t b,
                     std::uint32_t instruction, TensorMemory& memory, int a_scales, int b_scales,
                     int positions, std::vector<std::vector<double>>& sums) {
  EXPECT_EQ(bits(instruction, 0, 6), 4U);  // sparse, from position 0; scales of B from byte 0
  EXPECT_EQ(bits(instruction, 7, 9), 1U);
  EXPECT_EQ(bits(instruction, 10, 12), 1U);
  EXPECT_EQ(bits(instruction, 13, 16), 0U);
  EXPECT_EQ(bits(instruction, 23, 23), 0U);
  EXPECT_EQ(bits(instruction, 29, 31), 0U);  // 128 along K
  const auto columns = static_cast<int>(bits(instruction, 17, 22) * 8);
  ASSERT_EQ(bits(instruction, 24, 28) * 16, 128U);
  ASSERT_EQ(static_cast<std::size_t>(columns), sums[0].size());
  const auto scale = [&](int scales, int row, int k) {
    return static_cast<double>(e4m3_to_f32(memory.at(row % 32, scales + row / 32)[k / 32]));
  };
  std::vector<double> right(static_cast<std::size_t>(columns) * 128);
  for (int j = 0; j < columns; ++j) {
    for (int k = 0; k < 128; ++k) {
      right[static_cast<std::size_t>(j) * 128 + static_cast<std::size_t>(k)] =
          element(shared, b, j, k) * scale(b_scales, j, k);
    }
  }
  for (int i = 0; i < 128; ++i) {
    for (int eight = 0; eight < 16; ++eight) {
      const int pairs = memory.at(i, positions + eight / 8)[eight % 8 / 2] >> eight % 2 * 4 & 15;
      ASSERT_LT(pairs & 3, pairs >> 2);
      for (int kept = 0; kept < 4; ++kept) {
        const int k = eight * 8 + (pairs >> kept / 2 * 2 & 3) * 2 + kept % 2;
        const double left = kept_element(shared, a, i, eight * 4 + kept) * scale(a_scales, i, k);
        for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j) {
          sums[static_cast<std::size_t>(i)][j] +=
              left * right[j * 128 + static_cast<std::size_t>(k)];
        }
      }
    }
  }
}

template <bool sparse>
void check(std::int64_t n, std::int64_t k, bool paired, int count) {
  using Stage = Fp4Stage<sparse>;
  SCOPED_TRACE("n " + std::to_string(n) + ", k " + std::to_string(k) + (paired ? ", paired" : "") +
               ", rows " + std::to_string(count) + (sparse ? ", sparse" : ""));
  const Format format = sparse ? Format::sparse_nvfp4 : Format::nvfp4;
  const Matrix gate(n, k, 1, format, sparse), up(n, k, 2, format, sparse);
  const Matrix rows(count, k, 3, Format::nvfp4, sparse);
  const Fp4Tiles layout{paired ? 2 * n : n, k, paired, sparse};
  const int scaled = layout.scaled_k();
  std::vector<char> group(static_cast<std::size_t>(layout.group_bytes()));
  lay_out_fp4_tiles(layout, gate.packed, paired ? &up.packed : nullptr, group.data());
  float globals[2];
  std::memcpy(globals, group.data() + layout.globals_at(), sizeof globals);

  const int columns = (count + 63) / 64 * 64;
  for (std::int64_t tile = 0; tile < layout.columns(); ++tile) {
    std::vector<std::vector<double>> sums(128,
                                          std::vector<double>(static_cast<std::size_t>(columns)));
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      const std::uint32_t base = 1024 * 3;
      Shared shared(base + Stage::bytes, 0x7f);  // what is not written is NaN
      std::memcpy(shared.data() + base,
                  group.data() + (tile * layout.steps() + step) * layout.tile_bytes(),
                  static_cast<std::size_t>(layout.tile_bytes()));
      // The tensor map's boxes: swizzled by the address, zeros beyond.
      for (int row = 0; row < columns; ++row) {
        for (std::int64_t byte = 0; byte < 128; ++byte) {
          const std::int64_t from = step * 128 + byte;
          std::size_t to = base + Stage::rows_at + static_cast<std::size_t>(row) * 128 +
                           static_cast<std::size_t>(byte);
          to ^= (to >> 7 & 7) << 4;
          shared[to] = row < count && from < (k + 1) / 2
                           ? rows.packed.values.as<std::uint8_t>()[row * ((k + 1) / 2) + from]
                           : std::uint8_t{0};
        }
        for (int in = 0; in < 256; in += scaled) {
          // One for 32 stands twice in the matrix, and once in what the product is given.
          const std::int64_t from = step * 16 + in / 16, all = (k + 15) / 16;
          shared[base + Stage::scales_at +
                 static_cast<std::size_t>(fp4_scale_at(row, in, Stage::scale_blocks, scaled))] =
              row < count && from < all ? rows.packed.scales.as<std::uint8_t>()[row * all + from]
                                        : std::uint8_t{0};
        }
      }
      TensorMemory memory;
      const std::uint32_t instruction =
          tcgen05_fp4_instruction(static_cast<unsigned>(columns), sparse);
      Stage::multiply(
          base, static_cast<unsigned>(columns),
          [&](std::uint32_t to, std::uint64_t from) {
            copy_scales(shared, from, memory, static_cast<int>(to));
          },
          [&](std::uint32_t to, std::uint64_t from) {
            copy_positions(shared, from, memory, static_cast<int>(to));
          },
          [&](std::uint64_t a, std::uint64_t b, std::uint32_t a_scales, std::uint32_t b_scales,
              std::uint32_t positions, unsigned) {
            const auto of_a = static_cast<int>(a_scales), of_b = static_cast<int>(b_scales);
            if (sparse) {
              multiply_sparse(shared, a, b, instruction, memory, of_a, of_b,
                              static_cast<int>(positions), sums);
            } else {
              multiply(shared, a, b, instruction, memory, of_a, of_b, sums);
            }
          });
    }
    for (std::int64_t i = 0; i < 128; ++i) {
      const std::int64_t row = tile * 128 + i;
      const std::int64_t source = row < layout.rows() ? layout.order().source(row) : -1;
      for (int j = 0; j < count; ++j) {
        const double sum = sums[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
        if (source < 0) {
          EXPECT_EQ(sum, 0);
          continue;
        }
        const bool second = source >= n;
        double expected = 0, size = 0;
        for (std::int64_t c = 0; c < k; ++c) {
          const double product = (second ? up : gate).at(source % n, c) * rows.at(j, c);
          expected += product;
          size += std::fabs(product);
        }
        const double got = sum * static_cast<double>(globals[second ? 1 : 0]) *
                           static_cast<double>(rows.packed.global_scale);
        // unpack() has rounded both to f32.
        ASSERT_NEAR(got, expected, size * 0x1p-22) << "row " << source << " of weights, row " << j;
      }
    }
  }
}

TEST(BlackwellFp4Tiles, AStageMultipliesAsTheFormatSays) {
  check<false>(128, 256, false, 64);
  check<false>(128, 512, false, 192);
  check<false>(77, 209, false, 130);
  check<false>(150, 64, false, 1);
  check<false>(72, 300, true, 70);
}

TEST(BlackwellFp4Tiles, AStageOfSparseWeightsMultipliesAsTheFormatSays) {
  check<true>(128, 256, false, 64);
  check<true>(128, 512, false, 192);
  check<true>(77, 209, false, 130);
  check<true>(150, 64, false, 1);
  check<true>(72, 300, true, 70);
}

TEST(BlackwellFp4Tiles, EveryScaleAndCodeHasOnePlace) {
  for (const int blocks : {1, 2}) {
    std::set<int> scales;
    for (int row = 0; row < 128 * blocks; ++row) {
      for (int k = 0; k < 256; k += 16) scales.insert(fp4_scale_at(row, k, blocks, 16));
    }
    EXPECT_EQ(scales.size(), static_cast<std::size_t>(2048 * blocks));
    EXPECT_EQ(*scales.begin(), 0);
    EXPECT_EQ(*scales.rbegin(), 2048 * blocks - 1);
  }
  std::set<int> codes, kept;
  for (int row = 0; row < 128; ++row) {
    for (int k = 0; k < 256; k += 2) codes.insert(fp4_code_at(row, k));
  }
  EXPECT_EQ(codes.size(), static_cast<std::size_t>(Fp4Tiles{}.code_bytes()));
  EXPECT_EQ(*codes.rbegin(), Fp4Tiles{}.code_bytes() - 1);
  for (int row = 0; row < 128; ++row) {
    for (int i = 0; i < 128; i += 2) kept.insert(fp4_kept_at(row, i));
  }
  EXPECT_EQ(kept.size(), static_cast<std::size_t>(Fp4Tiles{.sparse = true}.code_bytes()));
  EXPECT_EQ(*kept.rbegin(), Fp4Tiles{.sparse = true}.code_bytes() - 1);
}

}  // namespace
}  // namespace shunt::cuda_engine

#endif
