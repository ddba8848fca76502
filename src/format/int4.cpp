// 4-bit integers around a zero point, with a scale for a group of k.
#include <algorithm>

#include "format/rules.hpp"

namespace shunt {
namespace {

PackedMatrix tensors(const FormatSpec& spec, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::u8, {n, groups_of(k, 2)}),
          .scales = without_data(DType::bf16, {n, groups_of(k, spec.group)})};
}

// The scale is rounded to bf16 first, up where it would be 0; codes are nearest under it, of those
// that stand for an f32.
void encode(const RowBlock& rows, const PackedMatrix& to) {
  const std::int64_t group = to.format.group;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float* const from = rows.row(i);
    const std::int64_t row = rows.first + i;
    std::uint16_t* const scales = to.scales.as<std::uint16_t>() + row * groups_of(rows.k, group);
    std::uint8_t* const codes = to.values.as<std::uint8_t>() + row * groups_of(rows.k, 2);
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      scales[g] = f32_to_bf16(scale_for(largest(from + begin, count), 7.5F));
      const auto scale = static_cast<double>(bf16_to_f32(scales[g]));
      const double least = 8 * scale <= f32_max ? -8 : -7;
      for (std::int64_t k = begin; k < begin + count; ++k) {
        const double code = std::nearbyint(static_cast<double>(from[k]) / scale);
        put_nibble(codes, k, static_cast<std::uint8_t>(std::clamp(code, least, 7.0) + 8));
      }
    });
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const std::int64_t groups = groups_of(from.k, from.format.group);
  const std::uint8_t* const codes = from.values.as<std::uint8_t>() + row * groups_of(from.k, 2);
  const auto* const order = from.group_of.as<const std::int32_t>();
  const auto* const zeros = from.zeros.as<const std::uint8_t>();
  for (std::int64_t k = 0; k < from.k; ++k) {
    const std::int64_t g = row * groups + (order != nullptr ? order[k] : k / from.format.group);
    const int zero = zeros != nullptr ? zeros[g] : 8;
    to[k] = static_cast<double>(load_f32(from.scales.data, from.scales.dtype, g)) *
            (nibble(codes, k) - zero);
  }
}

}  // namespace

const FormatRules int4_rules = {{Format::int4, 32}, tensors, nullptr, encode, decode};

}  // namespace shunt
