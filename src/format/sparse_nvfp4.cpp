// NVFP4 of which two of every four along k are kept: their values, where they lie, and the scales
// of dense blocks of 16.
#include <algorithm>
#include <array>

#include "format/rules.hpp"

namespace shunt {
namespace {

constexpr std::int64_t group = 16;

PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::u8, {n, groups_of(k, 4)}),
          .scales = without_data(DType::f8_e4m3, {n, groups_of(k, group)}),
          .positions = without_data(DType::u8, {n, groups_of(k, 8)})};
}

// Zeroes all but the two largest magnitudes of four, of equal ones the lower; where they lie,
// ascending.
std::array<int, 2> keep_two(float* four) {
  int first = 0;
  for (int i = 1; i < 4; ++i) {
    if (std::fabs(four[i]) > std::fabs(four[first])) first = i;
  }
  int second = first == 0 ? 1 : 0;
  for (int i = second + 1; i < 4; ++i) {
    if (i != first && std::fabs(four[i]) > std::fabs(four[second])) second = i;
  }
  for (int i = 0; i < 4; ++i) {
    if (i != first && i != second) four[i] = 0;
  }
  return {std::min(first, second), std::max(first, second)};
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float* const from = rows.row(i);
    const std::int64_t row = rows.first + i;
    std::uint8_t* const scales = to.scales.as<std::uint8_t>() + row * groups_of(rows.k, group);
    std::uint8_t* const codes = to.values.as<std::uint8_t>() + row * groups_of(rows.k, 4);
    std::uint8_t* const places = to.positions.as<std::uint8_t>() + row * groups_of(rows.k, 8);
    std::fill_n(places, groups_of(rows.k, 8), std::uint8_t{0});
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      std::array<float, group> kept{};
      std::copy_n(from + begin, count, kept.begin());
      std::array<std::array<int, 2>, group / 4> where{};
      for (std::size_t four = 0; four < where.size(); ++four) {
        where[four] = keep_two(kept.data() + 4 * four);
      }
      scales[g] = nvfp4_fitted_scale(kept.data(), group, to.global_scale);
      const double scale =
          static_cast<double>(e4m3_to_f32(scales[g])) * static_cast<double>(to.global_scale);
      const auto code = [&](std::int64_t at) {
        return to_e2m1(static_cast<double>(kept[static_cast<std::size_t>(at)]), scale);
      };
      for (std::int64_t at = 0; at < count; at += 4) {
        const std::int64_t k = begin + at;
        const auto [low, high] = where[static_cast<std::size_t>(at / 4)];
        codes[k / 4] = static_cast<std::uint8_t>(code(at + low) | code(at + high) << 4);
        places[k / 8] =
            static_cast<std::uint8_t>(places[k / 8] | (low | high << 2) << (k % 8 == 0 ? 0 : 4));
      }
    });
    // The group of four past an odd number of them: positions 0 and 1, no values.
    if (groups_of(rows.k, 4) % 2 != 0) places[rows.k / 8] |= 4 << 4;
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const std::uint8_t* const scales =
      from.scales.as<std::uint8_t>() + row * groups_of(from.k, group);
  const std::uint8_t* const codes = from.values.as<std::uint8_t>() + row * groups_of(from.k, 4);
  const std::uint8_t* const places = from.positions.as<std::uint8_t>() + row * groups_of(from.k, 8);
  std::fill_n(to, from.k, 0.0);
  for (std::int64_t k = 0; k < from.k; k += 4) {
    const double scale = static_cast<double>(e4m3_to_f32(scales[k / group])) *
                         static_cast<double>(from.global_scale);
    const int place = places[k / 8] >> (k % 8 == 0 ? 0 : 4);
    const std::int64_t low = k + (place & 3), high = k + (place >> 2 & 3);
    if (low < from.k) to[low] = static_cast<double>(e2m1_values[codes[k / 4] & 15]) * scale;
    if (high < from.k) to[high] = static_cast<double>(e2m1_values[codes[k / 4] >> 4]) * scale;
  }
}

}  // namespace

const FormatRules sparse_nvfp4_rules = {
    {Format::sparse_nvfp4}, tensors, nvfp4_global_scale, encode, decode};

}  // namespace shunt
