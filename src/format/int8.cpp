// Symmetric 8-bit integers with a scale a row.
#include <algorithm>

#include "format/rules.hpp"

namespace shunt {
namespace {

PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::i8, {n, k}), .scales = without_data(DType::f32, {n})};
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float* const from = rows.row(i);
    const float scale = scale_for(largest(from, rows.k), 127);
    to.scales.as<float>()[rows.first + i] = scale;
    std::int8_t* const codes = to.values.as<std::int8_t>() + (rows.first + i) * rows.k;
    for (std::int64_t k = 0; k < rows.k; ++k) {
      const double code = std::nearbyint(static_cast<double>(from[k]) / static_cast<double>(scale));
      codes[k] = static_cast<std::int8_t>(std::clamp(code, -127.0, 127.0));
    }
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const auto scale = static_cast<double>(from.scales.as<float>()[row]);
  const std::int8_t* const codes = from.values.as<std::int8_t>() + row * from.k;
  for (std::int64_t k = 0; k < from.k; ++k) to[k] = codes[k] * scale;
}

}  // namespace

const FormatRules int8_rules = {{Format::int8}, tensors, nullptr, encode, decode};

}  // namespace shunt
