#include "format/codes.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "format/plain.hpp"

namespace shunt {
namespace {

TEST(Codes, EveryE2m1) {
  for (int code = 0; code < 16; ++code) {
    const double value = plain_e2m1(code);
    EXPECT_EQ(static_cast<double>(e2m1_values[static_cast<std::size_t>(code)]), value);
    EXPECT_EQ(to_e2m1(value, 1), code);
    EXPECT_EQ(to_e2m1(value * 0x1p-140, 0x1p-140), code);
  }
}

TEST(Codes, E2m1TiesGoToEvenAndSaturate) {
  for (const double scale : {1.0, 0.013, 0x1p-149, 3e38}) {
    for (int code = 0; code < 7; ++code) {
      const double tie = (plain_e2m1(code) + plain_e2m1(code + 1)) / 2 * scale;
      const int even = code % 2 == 0 ? code : code + 1;
      EXPECT_EQ(to_e2m1(tie, scale), even);
      EXPECT_EQ(to_e2m1(-tie, scale), even + 8);
      EXPECT_EQ(to_e2m1(std::nextafter(tie, 0.0), scale), code);
      EXPECT_EQ(to_e2m1(std::nextafter(tie, 1e300), scale), code + 1);
    }
    EXPECT_EQ(to_e2m1(1000 * scale, scale), 7);
    EXPECT_EQ(to_e2m1(-1000 * scale, scale), 15);
  }
}

TEST(Codes, EveryE8m0) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_to_f64(static_cast<std::uint8_t>(code)), std::ldexp(1.0, code - 127));
    EXPECT_EQ(static_cast<double>(e8m0_to_f32(static_cast<std::uint8_t>(code))),
              std::ldexp(1.0, code - 127));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f64(255)));
}

TEST(Codes, EveryE4m3FromItsQuotient) {
  for (int code = 0; code < 256; ++code) {
    const double value = plain_e4m3(code);
    if (std::isnan(value)) {
      EXPECT_EQ(code & 0x7f, 0x7f);
      EXPECT_TRUE(std::isnan(e4m3_to_f32(static_cast<std::uint8_t>(code))));
      continue;
    }
    for (const float scale : {1.0F, 0.1F, 3.7e-30F}) {
      EXPECT_EQ(to_e4m3(value * static_cast<double>(scale), static_cast<double>(scale)), code);
    }
  }
}

// All bounds between neighbours, and the doubles just beside them, where a step by way of f32 would
// round twice.
TEST(Codes, E4m3RoundsOnce) {
  for (int code = 0; code < 0x7e; ++code) {
    const double tie = (plain_e4m3(code) + plain_e4m3(code + 1)) / 2;
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(to_e4m3(tie, 1), even);
    EXPECT_EQ(to_e4m3(std::nextafter(tie, 0.0), 1), code);
    EXPECT_EQ(to_e4m3(std::nextafter(tie, 1e9), 1), code + 1);
    EXPECT_EQ(to_e4m3(-std::nextafter(tie, 1e9), 1), code + 129);
  }
  EXPECT_EQ(to_e4m3(1e30, 1), 0x7e);
  EXPECT_EQ(to_e4m3(-1e300, 1e-300), 0xfe);
  EXPECT_EQ(to_e4m3(-0.0, 1), 0x80);
  EXPECT_EQ(to_e4m3(std::nan(""), 1), 0x7f);
}

// At each bound between neighbours and just beside it.
TEST(Codes, AMagnitudeIsWhatItsE2m1StandsFor) {
  for (const double scale : {1.0, 0.3, 448.0 * 3e-5, 1e30}) {
    for (const double bound : {0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 100.0}) {
      const double at = bound * scale;
      for (const double m : {std::nextafter(at, 0.0), at, std::nextafter(at, 1e300)}) {
        EXPECT_EQ(e2m1_magnitude(m, scale), static_cast<double>(e2m1_values[to_e2m1(m, scale)]))
            << bound << " " << scale;
      }
    }
  }
}

TEST(Codes, ADoubleRoundsOnceToBf16AndF16) {
  std::uint16_t out = 0;
  // Beside the tie between 1 and the next bf16, by less than an f32 can say.
  const double tie = 1 + 0x1p-8;
  store_f64(&out, DType::bf16, 0, tie);
  EXPECT_EQ(out, 0x3f80);
  store_f64(&out, DType::bf16, 0, tie + 0x1p-40);
  EXPECT_EQ(out, 0x3f81);
  store_f64(&out, DType::f16, 0, 1 + 0x1p-11 + 0x1p-45);
  EXPECT_EQ(out, 0x3c01);
  store_f64(&out, DType::f16, 0, -1e300);
  EXPECT_EQ(out, 0xfbff);  // no f32 either
  store_f64(&out, DType::f16, 0, -1e30);
  EXPECT_EQ(out, 0xfbff);
}

TEST(Codes, MxScaleIsTheLargestPowerOfTwo) {
  EXPECT_EQ(mx_scale(0, 2), 0);
  EXPECT_EQ(mx_scale(1, 2), 125);
  EXPECT_EQ(mx_scale(std::nextafterf(1, 0), 2), 124);
  EXPECT_EQ(mx_scale(7.9F, 2), 127);
  EXPECT_EQ(mx_scale(448, 8), 127);
  EXPECT_EQ(mx_scale(std::numeric_limits<float>::denorm_min(), 2), 0);
  EXPECT_EQ(mx_scale(std::numeric_limits<float>::max(), 2), 252);
}

}  // namespace
}  // namespace shunt
