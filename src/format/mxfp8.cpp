// OCP MXFP8: e4m3 with a power of two for 32 of k.
#include <algorithm>

#include "format/rules.hpp"

namespace shunt {
namespace {

constexpr std::int64_t group = 32;
constexpr int e4m3_exponent = 8;  // of 448

PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::f8_e4m3, {n, k}),
          .scales = without_data(DType::f8_e8m0, {n, groups_of(k, group)})};
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float* const from = rows.row(i);
    const std::int64_t row = rows.first + i;
    std::uint8_t* const scales = to.scales.as<std::uint8_t>() + row * groups_of(rows.k, group);
    std::uint8_t* const codes = to.values.as<std::uint8_t>() + row * rows.k;
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      scales[g] = mx_scale(largest(from + begin, count), e4m3_exponent);
      const double scale = e8m0_to_f64(scales[g]);
      for (std::int64_t k = begin; k < begin + count; ++k) {
        codes[k] = to_e4m3(static_cast<double>(from[k]), scale);
      }
    });
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const std::uint8_t* const scales =
      from.scales.as<std::uint8_t>() + row * groups_of(from.k, group);
  const std::uint8_t* const codes = from.values.as<std::uint8_t>() + row * from.k;
  for_each_group(from.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
    const double scale = e8m0_to_f64(scales[g]);
    for (std::int64_t k = begin; k < begin + count; ++k) {
      to[k] = static_cast<double>(e4m3_to_f32(codes[k])) * scale;
    }
  });
}

}  // namespace

const FormatRules mxfp8_rules = {{Format::mxfp8}, tensors, nullptr, encode, decode};

}  // namespace shunt
