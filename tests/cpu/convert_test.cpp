#include "cpu/convert.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/convert.hpp"
#include "cpu/test_isa.hpp"

namespace shunt::cpu_engine {
namespace {

class ConvertIsa : public testing::TestWithParam<Isa> {};

// f32 values whose conversion is decided in every possible way: all exponents, and mantissas near
// the ties of both 16-bit types.
std::vector<float> hard_values() {
  std::vector<float> values;
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const std::uint32_t mantissa :
         {0U, 1U, 0xfffU, 0x1000U, 0x1001U, 0x2fffU, 0x3000U, 0x3001U, 0x7fffU, 0x8000U, 0x8001U,
          0x17fffU, 0x18000U, 0x18001U, 0x400000U, 0x7fdfffU, 0x7fe000U, 0x7ff000U, 0x7fffffU}) {
      for (const std::uint32_t sign : {0U, 0x80000000U}) {
        values.push_back(std::bit_cast<float>(sign | (exponent << 23) | mantissa));
      }
    }
  }
  return values;
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

float widened(std::uint16_t bits, DType dtype) {
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

TEST_P(ConvertIsa, IsTheScalarConversionBitForBit) {
  const ConvertKernels& kernels = convert_kernels(GetParam());
  const std::vector<float> from = hard_values();
  const std::size_t n = from.size();
  std::vector<std::uint16_t> half(n);
  std::vector<float> wide(n);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const auto form = static_cast<Form>(dtype);
    const auto of = dtype == DType::bf16 ? Form::f32_of_bf16 : Form::f32_of_f16;
    kernels.row(from.data(), Form::f32, 1, half.data(), form, n);
    kernels.row(from.data(), Form::f32, 1, wide.data(), of, n);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint16_t want = dtype == DType::bf16 ? f32_to_bf16(from[i]) : f32_to_f16(from[i]);
      const float value = widened(want, dtype);
      EXPECT_TRUE(same(widened(half[i], dtype), value)) << from[i];
      EXPECT_TRUE(same(wide[i], value)) << from[i] << " " << wide[i] << " " << value;
    }
  }
}

TEST_P(ConvertIsa, WidensEveryHalfExactly) {
  const ConvertKernels& kernels = convert_kernels(GetParam());
  std::vector<std::uint16_t> half(65536);
  for (std::size_t i = 0; i < half.size(); ++i) half[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(half.size());
  for (const DType dtype : {DType::bf16, DType::f16}) {
    kernels.row(half.data(), static_cast<Form>(dtype), 1, wide.data(), Form::f32, wide.size());
    for (std::size_t i = 0; i < half.size(); ++i) {
      EXPECT_TRUE(same(wide[i], widened(half[i], dtype))) << i;
    }
  }
}

TEST_P(ConvertIsa, ScalesAndStopsAtTheEnd) {
  const ConvertKernels& kernels = convert_kernels(GetParam());
  for (std::size_t n = 0; n < 40; ++n) {
    std::vector<float> from(n), to(n + 1, 5);
    for (std::size_t i = 0; i < n; ++i) from[i] = static_cast<float>(i) + 0.5F;
    kernels.row(from.data(), Form::f32, -2, to.data(), Form::f32, n);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(to[i], -2 * from[i]);
    EXPECT_EQ(to[n], 5);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConvertIsa, testing::ValuesIn(test::all_isas()),
                         [](const auto& set) { return test::isa_name(set.param); });

}  // namespace
}  // namespace shunt::cpu_engine
