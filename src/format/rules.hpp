// What a format is to pack(), unpack() and check_packed(): one of these a file.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/shape.hpp"
#include "format/codes.hpp"
#include "shunt/format.hpp"

namespace shunt {

// `count` consecutive rows of the matrix, from row `first`, in f32.
struct RowBlock {
  std::int64_t first = 0, count = 0, k = 0;
  const float* data = nullptr;  // [count, k]
  const float* row(std::int64_t i) const { return data + i * k; }
};

struct FormatRules {
  FormatSpec format{};  // as known_formats() has it
  // The tensors of a packed [n, k], without data: their dtypes and shapes.
  PackedMatrix (*tensors)(const FormatSpec& spec, std::int64_t n, std::int64_t k);
  // The global scale for the largest magnitude; null: the format has none.
  float (*global_scale)(float amax);
  // Writes the rows of a block, a multiple of `block_rows` of them but for the matrix's end.
  void (*encode)(const RowBlock& rows, const PackedMatrix& to);
  // The exact values of one row: to[k].
  void (*decode)(const PackedMatrix& from, std::int64_t row, double* to);
  std::int64_t block_rows = 16;
};

// Whether the format is one of the enumeration, plain among them.
bool is_known(Format format);

extern const FormatRules fp8_tensor_rules, fp8_channel_rules, fp8_block_rules, mxfp8_rules,
    nvfp4_rules, mxfp4_rules, int8_rules, int4_rules, dense3_rules, sparse_nvfp4_rules;

inline constexpr auto f32_max = static_cast<double>(std::numeric_limits<float>::max());

// The largest magnitude of values[0 .. count).
inline float largest(const float* values, std::int64_t count) {
  float most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(values[i]));
  return most;
}

// amax / most as a scale: never 0, so that a value can be divided by it, nor rounded up so far that
// `most` of it were no f32.
inline float scale_for(float amax, float most) {
  if (amax == 0) return 1;
  const float scale = std::max(amax / most, 0x1p-126F);
  return std::isfinite(scale * most) ? scale : std::nextafterf(scale, 0);
}

// Calls fn(group, first k, count) for the groups of a row.
template <class Fn>
void for_each_group(std::int64_t k, std::int64_t group, Fn&& fn) {
  for (std::int64_t g = 0; g * group < k; ++g) {
    fn(g, g * group, std::min(group, k - g * group));
  }
}

inline std::uint8_t nibble(const std::uint8_t* row, std::int64_t k) {
  return static_cast<std::uint8_t>(k % 2 == 0 ? row[k / 2] & 15 : row[k / 2] >> 4);
}
// In order of k: the even one clears its partner.
inline void put_nibble(std::uint8_t* row, std::int64_t k, std::uint8_t code) {
  row[k / 2] = static_cast<std::uint8_t>(k % 2 == 0 ? code : row[k / 2] | code << 4);
}

// A dense tensor without data.
inline Tensor without_data(DType dtype, std::initializer_list<std::int64_t> shape) {
  return view(nullptr, dtype, shape);
}

// The e4m3 block scale of nvfp4 for a block of 16: amax / 6 / global to nearest; 1 for zeros, and
// never less than the least e4m3 for anything else.
std::uint8_t nvfp4_block_scale(float amax, float global);
float nvfp4_global_scale(float amax);
// The same fitted to what a block has left once it is pruned (values[0 .. count), zeros among
// them, count up to 32): of the e4m3 near that one, the one of the least squared error, of equal
// ones that one.
inline constexpr std::int64_t most_fitted = 32;
std::uint8_t nvfp4_fitted_scale(const float* values, std::int64_t count, float global);

}  // namespace shunt
