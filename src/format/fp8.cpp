// e4m3 with f32 scales: one a matrix, one a row, or one for 128 x 128.
#include <algorithm>
#include <cmath>

#include "core/quantise.hpp"
#include "format/rules.hpp"

namespace shunt {
namespace {

constexpr std::int64_t side = 128;

PackedMatrix of_tensor(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::f8_e4m3, {n, k})};
}
PackedMatrix of_channel(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::f8_e4m3, {n, k}), .scales = without_data(DType::f32, {n})};
}
PackedMatrix of_block(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::f8_e4m3, {n, k}),
          .scales = without_data(DType::f32, {groups_of(n, side), groups_of(k, side)})};
}

float global_scale(float amax) { return scale_for(amax, e4m3_max); }

void put(const float* from, std::int64_t count, float scale, std::uint8_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = to_e4m3(static_cast<double>(from[i]), static_cast<double>(scale));
  }
}
std::uint8_t* values(const PackedMatrix& m, std::int64_t row) {
  return m.values.as<std::uint8_t>() + row * m.k;
}

void encode_tensor(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    put(rows.row(i), rows.k, to.global_scale, values(to, rows.first + i));
  }
}
void encode_channel(const RowBlock& rows, const PackedMatrix& to) {
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const float scale = scale_for(largest(rows.row(i), rows.k), e4m3_max);
    to.scales.as<float>()[rows.first + i] = scale;
    put(rows.row(i), rows.k, scale, values(to, rows.first + i));
  }
}
void encode_block(const RowBlock& rows, const PackedMatrix& to) {
  const std::int64_t groups = groups_of(rows.k, side);
  for (std::int64_t top = 0; top < rows.count; top += side) {
    const std::int64_t end = std::min(top + side, rows.count);
    float* const scales = to.scales.as<float>() + (rows.first + top) / side * groups;
    for_each_group(rows.k, side, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      float amax = 0;
      for (std::int64_t i = top; i < end; ++i) {
        amax = std::max(amax, largest(rows.row(i) + begin, count));
      }
      scales[g] = scale_for(amax, e4m3_max);
      for (std::int64_t i = top; i < end; ++i) {
        put(rows.row(i) + begin, count, scales[g], values(to, rows.first + i) + begin);
      }
    });
  }
}

void get(const PackedMatrix& from, std::int64_t row, std::int64_t begin, std::int64_t count,
         float scale, double* to) {
  const std::uint8_t* const codes = values(from, row);
  for (std::int64_t i = begin; i < begin + count; ++i) {
    to[i] = static_cast<double>(e4m3_to_f32(codes[i])) * static_cast<double>(scale);
  }
}
void decode_tensor(const PackedMatrix& from, std::int64_t row, double* to) {
  get(from, row, 0, from.k, from.global_scale, to);
}
void decode_channel(const PackedMatrix& from, std::int64_t row, double* to) {
  get(from, row, 0, from.k, from.scales.as<float>()[row], to);
}
void decode_block(const PackedMatrix& from, std::int64_t row, double* to) {
  const float* const scales = from.scales.as<float>() + row / side * groups_of(from.k, side);
  for_each_group(from.k, side, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
    get(from, row, begin, count, scales[g], to);
  });
}

}  // namespace

const FormatRules fp8_tensor_rules = {
    {Format::fp8_tensor}, of_tensor, global_scale, encode_tensor, decode_tensor};
const FormatRules fp8_channel_rules = {
    {Format::fp8_channel}, of_channel, nullptr, encode_channel, decode_channel};
const FormatRules fp8_block_rules = {{Format::fp8_block}, of_block,     nullptr,
                                     encode_block,        decode_block, side};

}  // namespace shunt
