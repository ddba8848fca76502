// The NVFP4 products of Blackwell without one: registers loaded as the kernel loads them, and an
// MMA by what PTX says of its fragments, against the numbers that the formats hold.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "core/convert.hpp"
#include "format/codes.hpp"
#include "format/pairs.hpp"
#include "gemm/blackwell_fp4.hpp"
#include "gemm/fp4_data.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {
namespace {

using Matrix = test::Fp4Matrix;

// What a warp hands to mma.m16n8k64, or to mma.sp.m16n8k128, with scale_vec::4X and selectors 0.
struct Registers {
  std::uint32_t a[32][4], b[32][4], a_scales[32], b_scales[32], positions[32];
};

double nibble(std::uint32_t word, int i) {
  return static_cast<double>(e2m1_values[word >> 4 * i & 15]);
}
double scale(std::uint32_t word, int i) {
  return static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(word >> 8 * i & 0xff)));
}

// PTX ISA, fragments of mma.m16n8k64 with 4-bit types: groupID = lane / 4, threadID = lane % 4. A:
// row groupID (registers 0 and 2) or groupID + 8 (1 and 3), column threadID * 8 + nibble, + 32 in
// registers 2 and 3. B: row (k) threadID * 8 + nibble, + 32 in register 1, column groupID. Scales
// of A's rows groupID and groupID + 8 come from lanes threadID 0 and 1, of B's column from
// threadID 0; byte i belongs to columns (of B: rows) 16 i to 16 i + 15.
void multiply(const Registers& in, double (&d)[16][8]) {
  double a[16][64], b[64][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, thread = lane % 4;
    for (int i = 0; i < 8; ++i) {
      a[group][thread * 8 + i] = nibble(in.a[lane][0], i);
      a[group + 8][thread * 8 + i] = nibble(in.a[lane][1], i);
      a[group][thread * 8 + i + 32] = nibble(in.a[lane][2], i);
      a[group + 8][thread * 8 + i + 32] = nibble(in.a[lane][3], i);
      b[thread * 8 + i][group] = nibble(in.b[lane][0], i);
      b[thread * 8 + i + 32][group] = nibble(in.b[lane][1], i);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      d[row][column] = 0;
      for (int k = 0; k < 64; ++k) {
        d[row][column] += a[row][k] * scale(in.a_scales[row % 8 * 4 + row / 8], k / 16) *
                          b[k][column] * scale(in.b_scales[column * 4], k / 16);
      }
    }
  }
}

// PTX ISA, sparse m16n8k128 with e2m1: A's registers 0 and 1 hold what is kept of columns threadID
// * 16 to threadID * 16 + 15, registers 2 and 3 of those 64 further, rows as above: of each eight
// columns two pairs of neighbours, whose numbers, ascending, are two bits each. Positions: of row
// groupID, columns 0 to 63 in threadID 0 and 64 to 127 in 2, of row groupID + 8 in 1 and 3; four
// bits for eight columns, ascending. B: as above, + 32 a register. Byte i of the scales belongs to
// columns 32 i to 32 i + 31.
void multiply_sparse(const Registers& in, double (&d)[16][8]) {
  double a[16][128] = {}, b[128][8];
  for (int row = 0; row < 16; ++row) {
    for (int eight = 0; eight < 16; ++eight) {
      const int holder = row % 8 * 4 + row / 8 + eight / 8 * 2;
      const std::uint32_t places = in.positions[holder] >> eight % 8 * 4 & 15;
      EXPECT_LT(places & 3, places >> 2);
      const std::uint32_t codes = in.a[row % 8 * 4 + eight / 2 % 4][row / 8 + eight / 8 * 2];
      for (int i = 0; i < 4; ++i) {
        const auto pair = static_cast<int>(places >> i / 2 * 2 & 3);
        a[row][eight * 8 + pair * 2 + i % 2] = nibble(codes, eight % 2 * 4 + i);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < 8; ++i) {
        b[lane % 4 * 8 + i + 32 * r][lane / 4] = nibble(in.b[lane][r], i);
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      d[row][column] = 0;
      for (int k = 0; k < 128; ++k) {
        d[row][column] += a[row][k] * scale(in.a_scales[row % 8 * 4 + row / 8], k / 32) *
                          b[k][column] * scale(in.b_scales[column * 4], k / 32);
      }
    }
  }
}

// The 8 rows' word at `byte`, and their scales of a step, as the kernel finds them.
std::uint32_t word_of(const std::uint8_t* from, std::int64_t byte, std::int64_t end) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    if (byte + i < end) word |= std::uint32_t{from[byte + i]} << 8 * i;
  }
  return word;
}

void check(const Matrix& gate, const Matrix* up_or_null, bool sparse) {
  const bool paired = up_or_null != nullptr;
  const Matrix& up = paired ? *up_or_null : gate;
  const std::int64_t n = gate.packed.n, k = gate.packed.k;
  SCOPED_TRACE("n " + std::to_string(n) + ", k " + std::to_string(k) + (paired ? ", paired" : "") +
               (sparse ? ", sparse" : ""));
  std::vector<Matrix> rows;
  for (unsigned t = 0; t < 8; ++t) rows.emplace_back(1, k, 10 + t, Format::nvfp4, sparse);
  const Fp4Layout layout{paired ? 2 * n : n, k, paired, sparse};
  std::vector<char> group(static_cast<std::size_t>(layout.group_bytes()));
  lay_out_fp4(layout, gate.packed, paired ? &up.packed : nullptr, group.data());
  float globals[2];
  std::memcpy(globals, group.data() + layout.globals_at(), sizeof globals);

  for (std::int64_t band = 0; band * 16 < layout.rows(); ++band) {
    double sums[16][8] = {};
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      const std::int64_t f = band * layout.steps() + step;
      Registers in{};
      for (int lane = 0; lane < 32; ++lane) {
        std::memcpy(in.a[lane], group.data() + f * Fp4Layout::fragment_bytes + 16 * lane, 16);
        std::memcpy(&in.a_scales[lane],
                    group.data() + layout.scales_at() + f * 64 + 4 * fp4_weight_scale_row(lane), 4);
        const PackedMatrix& row =
            rows[static_cast<std::size_t>(fp4_row_place(lane, 0, 0).row)].packed;
        for (int r = 0; r < (sparse ? 4 : 2); ++r) {
          const std::int64_t at = step * layout.fragment_k() + fp4_row_place(lane, r, 0).k;
          in.b[lane][r] = word_of(row.values.as<std::uint8_t>(), at / 2, (k + 1) / 2);
        }
        const PackedMatrix& scaled = rows[static_cast<std::size_t>(fp4_row_scale_row(lane))].packed;
        // One for 32 stands twice in the matrix, and once in what the product is given.
        std::vector<std::uint8_t> row_scales;
        for (std::int64_t at = 0; at < k; at += layout.scaled_k()) {
          row_scales.push_back(scaled.scales.as<std::uint8_t>()[at / 16]);
        }
        in.b_scales[lane] =
            word_of(row_scales.data(), 4 * step, static_cast<std::int64_t>(row_scales.size()));
        if (!sparse) continue;
        std::memcpy(&in.positions[lane],
                    group.data() + layout.positions_at() + f * 128 + std::size_t{4} * lane, 4);
      }
      double d[16][8];
      sparse ? multiply_sparse(in, d) : multiply(in, d);
      for (int i = 0; i < 16; ++i) {
        for (int t = 0; t < 8; ++t) sums[i][t] += d[i][t];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const Fp4Sum place = fp4_sum_place(lane, i);
        const std::int64_t source = layout.order().source(band * 16 + place.weight_row);
        const double sum = sums[place.weight_row][place.row];
        if (band * 16 + place.weight_row >= layout.rows() || source < 0) {
          EXPECT_EQ(sum, 0);
          continue;
        }
        const bool second = source >= n;
        const Matrix& w = second ? up : gate;
        const Matrix& x = rows[static_cast<std::size_t>(place.row)];
        double expected = 0, size = 0;
        for (std::int64_t c = 0; c < k; ++c) {
          const double product = w.at(source % n, c) * x.at(0, c);
          expected += product;
          size += std::fabs(product);
        }
        const double got = sum * static_cast<double>(globals[second ? 1 : 0]) *
                           static_cast<double>(x.packed.global_scale);
        // unpack() has rounded both to f32.
        EXPECT_NEAR(got, expected, size * 0x1p-22)
            << "row " << source << " of weights, row " << place.row;
      }
    }
  }
}

TEST(BlackwellFp4, FragmentsMultiplyAsTheFormatSays) {
  for (const auto& [n, k, paired] : {std::tuple{16, 64, false},
                                     {48, 256, false},
                                     {37, 209, false},
                                     {24, 96, true},
                                     {19, 33, true}}) {
    const Matrix gate(n, k, 1), up(n, k, 2);
    check(gate, paired ? &up : nullptr, false);
  }
}

TEST(BlackwellFp4, SparseFragmentsMultiplyAsTheFormatSays) {
  for (const auto& [n, k, paired] : {std::tuple{16, 128, false},
                                     {48, 512, false},
                                     {37, 209, false},
                                     {24, 160, true},
                                     {19, 33, true}}) {
    const Matrix gate(n, k, 1, Format::sparse_nvfp4, true), up(n, k, 2, Format::sparse_nvfp4, true);
    EXPECT_EQ(fp4_pairs_support(gate.packed).reason, "");
    check(gate, paired ? &up : nullptr, true);
  }
}

TEST(BlackwellFp4, PackingInPairsKeepsTheLargerPair) {
  const std::vector<float> values = {6, 0,  4, 4, 3, 1,  2, 2, -1, 1,
                                     1, -1, 0, 0, 0, -2, 0, 0, 0,  0.5F};
  const std::vector<float> expected = {6, 0, 0, 0, 3, 1,  0, 0, -1, 1,
                                       0, 0, 0, 0, 0, -2, 0, 0, 0,  0.5F};
  const auto k = static_cast<std::int64_t>(values.size());
  const Buffer memory = cpu({.threads = 1}).allocate(packed_bytes({Format::sparse_nvfp4}, 1, k));
  const PackedMatrix packed =
      pack_in_pairs(Format::sparse_nvfp4, values.data(), 1, k, memory, 6 * 448);
  check_packed("packed", packed, Device{});
  EXPECT_EQ(packed.global_scale, 1);
  std::vector<float> back(values.size());
  unpack(packed, view(back.data(), {1, k}));
  EXPECT_EQ(back, expected);
}

// The four that a sparse_nvfp4 matrix keeps of eight need not be pairs.
TEST(BlackwellFp4, SparseWeightsThatAreNoPairsAreRefusedByName) {
  const Matrix any(4, 64, 1, Format::sparse_nvfp4);
  EXPECT_EQ(fp4_pairs_support(any.packed)
                .reason.rfind("sparse_nvfp4 as mma.sp of Blackwell: row 0, k ", 0),
            0U);
  EXPECT_FALSE(fp4_pairs_support(Matrix(4, 64, 1).packed));

  const auto of = [](std::vector<float> row, const char* reason) {
    Matrix m(1, 64, 1, Format::sparse_nvfp4);
    row.resize(64);
    m.packed = pack({Format::sparse_nvfp4}, view(row.data(), {1, 64}), m.memory, 6 * 448);
    unpack(m.packed, view(row.data(), {1, 64}));
    m.exact.assign(row.begin(), row.end());
    EXPECT_EQ(fp4_pairs_support(m.packed).reason, reason);
    if (*reason == 0) check(m, nullptr, true);
  };
  // Two pairs of the first four and none of the second; a block of zeros has any scale.
  of({0, 6, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2}, "");
  std::vector<float> late(64);
  late[33] = 24, late[37] = 3, late[60] = 6;
  of(late, "sparse_nvfp4 as mma.sp of Blackwell: row 0, k 32 to 63: two scales where one is taken");
  late[33] = 6;
  of(late, "");
  late[33] = late[37] = 0, late[60] = 3;
  of(late, "");
  late[53] = 3, late[54] = 2, late[50] = 1;
  of(late,
     "sparse_nvfp4 as mma.sp of Blackwell: row 0, k 48 to 55: values in more than two of its four "
     "aligned pairs");
}

TEST(BlackwellFp4, EveryNibbleHasOnePlace) {
  bool weights[16][64] = {}, rows[8][64] = {}, sums[16][8] = {}, positions[16][16] = {};
  int kept[16][16] = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      for (int r = 0; r < 4; ++r) {
        const Fp4Place at = fp4_weight_place(lane, r, i);
        EXPECT_FALSE(weights[at.row][at.k]);
        weights[at.row][at.k] = true;
      }
      for (int r = 0; r < 2; ++r) {
        const Fp4Place at = fp4_row_place(lane, r, i);
        EXPECT_FALSE(rows[at.row][at.k]);
        rows[at.row][at.k] = true;
      }
    }
    for (int i = 0; i < 8; ++i) {
      const Fp4Place at = fp4_positions_place(lane, i);
      EXPECT_FALSE(positions[at.row][at.k / 8]);
      positions[at.row][at.k / 8] = true;
      for (int r = 0; r < 4; ++r) {
        const Fp4Place eight = fp4_kept_place(lane, r, i);
        EXPECT_EQ(kept[eight.row][eight.k / 8]++, i % 4);
      }
    }
    for (int i = 0; i < 4; ++i) {
      const Fp4Sum at = fp4_sum_place(lane, i);
      EXPECT_FALSE(sums[at.weight_row][at.row]);
      sums[at.weight_row][at.row] = true;
    }
  }
}

}  // namespace
}  // namespace shunt::cuda_engine

#endif
