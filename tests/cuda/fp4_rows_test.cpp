// The pass that rounds rows to NVFP4, run lane by lane on the host, against pack(): bit by bit.
// clang-format off
#include "cuda/warp_on_host.hpp"
#include "gemm/fp4_rows.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <random>

#include "core/convert.hpp"
#include "format/codes.hpp"
#include "format/pairs.hpp"
#include "format/rules.hpp"
#include "shunt/context.hpp"

namespace shunt {
namespace {

template <int scaled>
float round_row(const std::vector<float>& row, std::vector<std::uint8_t>& codes,
                std::vector<std::uint8_t>& scales) {
  const auto k = static_cast<std::int64_t>(row.size());
  codes.assign(static_cast<std::size_t>((k + 1) / 2), 0xaa);
  scales.assign(static_cast<std::size_t>((k + scaled - 1) / scaled), 0xaa);
  std::vector<float> lanes(32);
  test::HostWarp::run([&](int lane) {
    lanes[static_cast<std::size_t>(lane)] = cuda_engine::round_row_to_fp4<scaled>(
        [&](std::int64_t i) { return row[static_cast<std::size_t>(i)]; }, k, codes.data(),
        scales.data(), lane);
  });
  for (const float lane : lanes) EXPECT_EQ(__float_as_uint(lane), __float_as_uint(lanes[0]));
  return lanes[0];
}

template <int scaled>
void expect_packed(const std::vector<float>& row, const std::string& what) {
  SCOPED_TRACE(what + ", a scale for " + std::to_string(scaled));
  const auto k = static_cast<std::int64_t>(row.size());
  const Buffer memory = cpu({.threads = 1}).allocate(packed_bytes({Format::nvfp4}, 1, k));
  const PackedMatrix packed = scaled == 32
                                  ? pack_in_pairs(Format::nvfp4, row.data(), 1, k, memory)
                                  : pack({Format::nvfp4}, view(row.data(), {1, k}), memory);
  std::vector<std::uint8_t> codes, scales;
  const float scale = round_row<scaled>(row, codes, scales);
  EXPECT_EQ(scale, packed.global_scale);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    ASSERT_EQ(scales[i], packed.scales.as<const std::uint8_t>()[i * (scaled / 16)]) << i;
  }
  for (std::size_t i = 0; i < codes.size(); ++i) {
    ASSERT_EQ(codes[i], packed.values.as<const std::uint8_t>()[i]) << i;
  }
}

void expect_both(const std::vector<float>& row, const std::string& what) {
  expect_packed<16>(row, what);
  expect_packed<32>(row, what);
}

TEST(Fp4Rows, AreRoundedAsPackRoundsThem) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const int k : {1, 2, 15, 16, 17, 31, 33, 48, 200, 1029}) {
    for (const int exponent : {-149, -130, -110, -62, -30, 0, 40, 120}) {
      std::vector<float> row(static_cast<std::size_t>(k));
      for (std::size_t i = 0; i < row.size(); ++i) {
        // Blocks of very different sizes, as outliers make them.
        row[i] = std::ldexp(normal(random), exponent - static_cast<int>(i / 16 % 5) * 3);
      }
      expect_both(row, "k " + std::to_string(k) + ", exponent " + std::to_string(exponent));
    }
  }
  std::vector<float> largest(64, 3.4028235e38f);
  expect_both(largest, "the largest");
  expect_both(std::vector<float>(40, 0.0f), "zeros");
  expect_both(std::vector<float>(40, -0.0f), "negative zeros");
  std::vector<float> sparse(64, 0.0f);
  sparse[3] = 6 * 448, sparse[40] = 1e-30f;
  expect_both(sparse, "a block that its scale cannot reach");
}

// Numbers on the very bounds between codes, and beside them.
TEST(Fp4Rows, TiesGoToTheEvenCode) {
  std::vector<float> row(16, 0.0f);
  row[0] = 6 * 448;  // the row's scale is 1
  for (const float scale : {448.0f, 1.0f, 0.001953125f, 0.8125f, 13.0f, 416.0f}) {
    for (const float bound : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
      for (const float x : {bound * scale, std::nextafterf(bound * scale, 0.0f),
                            std::nextafterf(bound * scale, 1e9f)}) {
        row.resize(64);
        row[32] = 6 * scale;
        row[33] = x;
        row[34] = -x;
        expect_both(row, "bound " + std::to_string(bound) + " of " + std::to_string(scale));
      }
    }
  }
  // Largest magnitudes between two scales.
  for (int code = 0; code < 126; ++code) {
    const auto value = [](int c) { return e4m3_to_f32(static_cast<std::uint8_t>(c)); };
    const float middle = (value(code) + value(code + 1)) * 3;
    for (const float x :
         {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, 1e9f), 6 * value(code)}) {
      row[32] = x, row[33] = row[34] = 0;
      expect_both(row, "code " + std::to_string(code));
    }
  }
}

TEST(Fp4Rows, WhatIsNotFiniteMakesTheRowNan) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> row(40, 1.0f);
    row[37] = bad;
    std::vector<std::uint8_t> codes, scales;
    EXPECT_TRUE(std::isnan(round_row<16>(row, codes, scales)));
    for (const std::uint8_t scale : scales) EXPECT_EQ(scale, 0x38);
  }
}

}  // namespace
}  // namespace shunt
