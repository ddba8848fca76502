// NVFP4: e2m1 with an e4m3 scale for 16 of k and one f32 scale a matrix.
#include <algorithm>

#include "format/rules.hpp"

namespace shunt {

namespace {

constexpr std::int64_t group = 16;
constexpr std::uint8_t e4m3_one = 0x38, e4m3_least = 0x01;

PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::u8, {n, groups_of(k, 2)}),
          .scales = without_data(DType::f8_e4m3, {n, groups_of(k, group)})};
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float* const from = rows.row(i);
    const std::int64_t row = rows.first + i;
    std::uint8_t* const scales = to.scales.as<std::uint8_t>() + row * groups_of(rows.k, group);
    std::uint8_t* const codes = to.values.as<std::uint8_t>() + row * groups_of(rows.k, 2);
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      scales[g] = nvfp4_block_scale(largest(from + begin, count), to.global_scale);
      const double scale =
          static_cast<double>(e4m3_to_f32(scales[g])) * static_cast<double>(to.global_scale);
      for (std::int64_t k = begin; k < begin + count; ++k) {
        put_nibble(codes, k, to_e2m1(static_cast<double>(from[k]), scale));
      }
    });
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const std::uint8_t* const scales =
      from.scales.as<std::uint8_t>() + row * groups_of(from.k, group);
  const std::uint8_t* const codes = from.values.as<std::uint8_t>() + row * groups_of(from.k, 2);
  for_each_group(from.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
    const double scale =
        static_cast<double>(e4m3_to_f32(scales[g])) * static_cast<double>(from.global_scale);
    for (std::int64_t k = begin; k < begin + count; ++k) {
      to[k] = static_cast<double>(e2m1_values[nibble(codes, k)]) * scale;
    }
  });
}

}  // namespace

std::uint8_t nvfp4_block_scale(float amax, float global) {
  if (amax == 0) return e4m3_one;
  const std::uint8_t code = to_e4m3(static_cast<double>(amax), 6 * static_cast<double>(global));
  return std::max(code, e4m3_least);
}

float nvfp4_global_scale(float amax) { return scale_for(amax, 6 * 448); }

const FormatRules nvfp4_rules = {{Format::nvfp4}, tensors, nvfp4_global_scale, encode, decode};

}  // namespace shunt
