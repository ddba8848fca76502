#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace shunt {
namespace {

// f16 by arithmetic on its fields, as IEEE 754 defines it.
double f16_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(Convert, EveryF16RoundTrips) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = f16_to_f32(half);
    if ((bits & 0x7fff) > 0x7c00) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    if ((bits & 0x7fff) < 0x7c00) {
      EXPECT_EQ(value, f16_value(half)) << bits;
    }
    EXPECT_EQ(f32_to_f16(value), half) << bits;
  }
}

TEST(Convert, F16RoundsToNearestEven) {
  for (unsigned bits = 0; bits + 1 < 0x7c00; ++bits) {
    const double low = f16_value(static_cast<std::uint16_t>(bits));
    const double high = f16_value(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const auto even = static_cast<std::uint16_t>(bits % 2 == 0 ? bits : bits + 1);
    EXPECT_EQ(f32_to_f16(middle), even);
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), bits);
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, 1e9f)), bits + 1);
    EXPECT_EQ(f32_to_f16(-middle), even | 0x8000);
  }
}

TEST(Convert, F16SaturatesFiniteValuesOnly) {
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(1e30f), 0x7bff);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfbff);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(std::nanf("")))));
}

TEST(Convert, EveryBf16RoundTripsAndTiesGoToEven) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = bf16_to_f32(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(value))));
    } else {
      EXPECT_EQ(f32_to_bf16(value), half);
    }
  }
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

// e4m3 by arithmetic on its fields: bias 7, no infinities, the last code is NaN.
double e4m3_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 3) & 15;
  const int mantissa = static_cast<int>(bits) & 7;
  const double sign = (bits & 0x80) != 0 ? -1 : 1;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

TEST(Convert, EveryE4m3RoundTrips) {
  for (unsigned bits = 0; bits < 0x100; ++bits) {
    const auto byte = static_cast<std::uint8_t>(bits);
    const float value = e4m3_to_f32(byte);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(to_e4m3(value), 0x7f);  // NaN has no sign
    } else {
      EXPECT_EQ(value, e4m3_value(bits)) << bits;
      EXPECT_EQ(std::signbit(value), (bits & 0x80) != 0);
      EXPECT_EQ(to_e4m3(value), byte) << bits;
    }
  }
}

// Between each pair of neighbours: up to the middle the lower, from there the upper, the middle to
// the even one. That is all of the positive numbers up to 448.
TEST(Convert, E4m3RoundsToNearestEven) {
  for (unsigned bits = 0; bits + 1 < 0x7f; ++bits) {
    const double low = e4m3_value(bits), high = e4m3_value(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(to_e4m3(middle), even);
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 0.0f)), bits);
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 1e9f)), bits + 1);
    EXPECT_EQ(to_e4m3(-middle), even | 0x80);
    for (int step = 1; step < 8; ++step) {
      const auto value = static_cast<float>(low + (high - low) * step / 8);
      EXPECT_EQ(to_e4m3(value), step < 4 ? bits : step > 4 ? bits + 1 : even) << value;
    }
  }
}

TEST(Convert, E4m3Saturates) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {448.0f, 448.1f, 464.0f, 480.0f, 1e9f, 3e38f, infinity}) {
    EXPECT_EQ(to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(to_e4m3(-value), 0xfe) << value;
  }
  for (const float value : {1e-40f, 1e-9f, 0x1p-10f}) EXPECT_EQ(to_e4m3(value), 0);
  EXPECT_EQ(to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(to_e4m3(-std::nanf("")), 0x7f);
}

}  // namespace
}  // namespace shunt
