// The NVFP4 product of Blackwell without one: registers loaded as the kernel loads them, and an MMA
// by what PTX says of its fragments, against the numbers that the formats hold.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT

#include <cmath>
#include <cstring>
#include <vector>

#include "core/convert.hpp"
#include "format/codes.hpp"
#include "gemm/blackwell_fp4.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {
namespace {

struct Matrix {
  std::vector<double> exact;
  Buffer memory;
  PackedMatrix packed;
  Matrix(std::int64_t n, std::int64_t k, unsigned seed) {
    std::vector<float> plain(static_cast<std::size_t>(n * k));
    for (float& x : plain) {
      seed = seed * 1664525U + 1013904223U;
      x = static_cast<float>(static_cast<int>(seed >> 16) - 32768) / 8192;
    }
    const FormatSpec spec{Format::nvfp4};
    memory = cpu({.threads = 1}).allocate(packed_bytes(spec, n, k));
    packed = pack(spec, view(plain.data(), {n, k}), memory);
    std::vector<float> back(plain.size());
    unpack(packed, view(back.data(), {n, k}));
    exact.assign(back.begin(), back.end());
  }
};

// What a warp hands to mma.m16n8k64 with scale_vec::4X and selectors 0.
struct Registers {
  std::uint32_t a[32][4], b[32][2], a_scales[32], b_scales[32];
};

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
      const auto nibble = [i](std::uint32_t word) {
        return static_cast<double>(e2m1_values[word >> 4 * i & 15]);
      };
      a[group][thread * 8 + i] = nibble(in.a[lane][0]);
      a[group + 8][thread * 8 + i] = nibble(in.a[lane][1]);
      a[group][thread * 8 + i + 32] = nibble(in.a[lane][2]);
      a[group + 8][thread * 8 + i + 32] = nibble(in.a[lane][3]);
      b[thread * 8 + i][group] = nibble(in.b[lane][0]);
      b[thread * 8 + i + 32][group] = nibble(in.b[lane][1]);
    }
  }
  const auto scale = [](std::uint32_t word, int k) {
    return static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(word >> 8 * (k / 16) & 0xff)));
  };
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      d[row][column] = 0;
      for (int k = 0; k < 64; ++k) {
        d[row][column] += a[row][k] * scale(in.a_scales[row % 8 * 4 + row / 8], k) * b[k][column] *
                          scale(in.b_scales[column * 4], k);
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

void check(std::int64_t n, std::int64_t k, bool paired) {
  SCOPED_TRACE("n " + std::to_string(n) + ", k " + std::to_string(k) + (paired ? ", paired" : ""));
  const Matrix gate(n, k, 1), up(n, k, 2);
  std::vector<Matrix> rows;
  for (unsigned t = 0; t < 8; ++t) rows.emplace_back(1, k, 10 + t);
  const Fp4Layout layout{paired ? 2 * n : n, k, paired};
  std::vector<char> group(static_cast<std::size_t>(layout.group_bytes()));
  lay_out_fp4(layout, gate.packed, paired ? &up.packed : nullptr, group.data());
  float globals[2];
  std::memcpy(globals, group.data() + layout.globals_at(), sizeof globals);

  for (std::int64_t band = 0; band * 16 < layout.rows(); ++band) {
    double sums[16][8] = {};
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      const std::int64_t f = band * layout.steps() + step;
      Registers in;
      for (int lane = 0; lane < 32; ++lane) {
        std::memcpy(in.a[lane], group.data() + f * Fp4Layout::fragment_bytes + 16 * lane, 16);
        std::memcpy(&in.a_scales[lane],
                    group.data() + layout.scales_at() + f * 64 + 4 * fp4_weight_scale_row(lane), 4);
        const PackedMatrix& row =
            rows[static_cast<std::size_t>(fp4_row_place(lane, 0, 0).row)].packed;
        for (int r = 0; r < 2; ++r) {
          in.b[lane][r] = word_of(row.values.as<std::uint8_t>(),
                                  (64 * step + fp4_row_place(lane, r, 0).k) / 2, (k + 1) / 2);
        }
        const PackedMatrix& scaled = rows[static_cast<std::size_t>(fp4_row_scale_row(lane))].packed;
        in.b_scales[lane] = word_of(scaled.scales.as<std::uint8_t>(), 4 * step, (k + 15) / 16);
      }
      double d[16][8];
      multiply(in, d);
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
          const double product = w.exact[static_cast<std::size_t>(source % n * k + c)] *
                                 x.exact[static_cast<std::size_t>(c)];
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
  check(16, 64, false);
  check(48, 256, false);
  check(37, 209, false);
  check(24, 96, true);
  check(19, 33, true);
}

TEST(BlackwellFp4, EveryNibbleHasOnePlace) {
  bool weights[16][64] = {}, rows[8][64] = {}, sums[16][8] = {};
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
