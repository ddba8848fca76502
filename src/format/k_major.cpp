// The k-major layout of sparse FP4: the same bytes, transposed.
#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "core/memory.hpp"
#include "core/workspace.hpp"
#include "shunt/sparse.hpp"

namespace shunt {
namespace {

// to[c, r] = from[r, c], in tiles of whole lines.
void transpose(const Tensor& from, const Tensor& to) {
  constexpr std::int64_t tile = 64;
  const std::int64_t rows = from.shape[0], columns = from.shape[1];
  const auto* const in = from.as<const std::uint8_t>();
  auto* const out = to.as<std::uint8_t>();
  for (std::int64_t r0 = 0; r0 < rows; r0 += tile) {
    for (std::int64_t c0 = 0; c0 < columns; c0 += tile) {
      for (std::int64_t r = r0; r < std::min(r0 + tile, rows); ++r) {
        for (std::int64_t c = c0; c < std::min(c0 + tile, columns); ++c) {
          out[c * rows + r] = in[r * columns + c];
        }
      }
    }
  }
}

void check(const char* what, const KMajorSparse& m, std::int64_t n, std::int64_t k) {
  check_tensor(fmt::format("{}: comp", what), m.comp,
               {.dtypes = {DType::u8}, .shape = {k / 4, n}, .dense = true}, Device{});
  check_tensor(fmt::format("{}: meta", what), m.meta,
               {.dtypes = {DType::u8}, .shape = {k / 8, n}, .dense = true}, Device{});
  check_tensor(fmt::format("{}: scale", what), m.scale,
               {.dtypes = {DType::u8, DType::f8_e4m3}, .shape = {k / 16, n}, .dense = true},
               Device{});
}

}  // namespace

PackedMatrix from_k_major(const KMajorSparse& matrix, Workspace memory) {
  check_tensor("from_k_major: comp", matrix.comp,
               {.dtypes = {DType::u8}, .shape = {any_size, any_size}, .dense = true}, Device{});
  const std::int64_t k = matrix.comp.shape[0] * 4, n = matrix.comp.shape[1];
  if (k % 16 != 0) {
    fail(Status::invalid_argument, "from_k_major: comp is {}: K / 4 must be a multiple of 4",
         matrix.comp.describe());
  }
  check("from_k_major", matrix, n, k);
  if (!std::isfinite(matrix.global_scale)) {
    fail(Status::invalid_argument, "from_k_major: global_scale is {}: must be finite",
         matrix.global_scale);
  }
  const auto* const meta = matrix.meta.as<const std::uint8_t>();
  for (std::int64_t i = 0; i < matrix.meta.elements(); ++i) {
    const int byte = meta[i];
    if ((byte & 3) == (byte >> 2 & 3) || (byte >> 4 & 3) == byte >> 6) {
      fail(Status::invalid_argument, "from_k_major: meta[{}, {}] is {:#04x}: positions must differ",
           i / n, i % n, byte);
    }
  }
  const FormatSpec spec{Format::sparse_nvfp4};
  check_memory("from_k_major", "memory", memory, packed_bytes(spec, n, k));
  Carver carver(memory);
  PackedMatrix packed{.format = spec, .n = n, .k = k, .global_scale = matrix.global_scale};
  packed.values =
      view(carver.take_bytes(static_cast<std::size_t>(n * k / 4)), DType::u8, {n, k / 4});
  packed.scales =
      view(carver.take_bytes(static_cast<std::size_t>(n * k / 16)), DType::f8_e4m3, {n, k / 16});
  packed.positions =
      view(carver.take_bytes(static_cast<std::size_t>(n * k / 8)), DType::u8, {n, k / 8});
  transpose(matrix.comp, packed.values);
  transpose(matrix.scale, packed.scales);
  transpose(matrix.meta, packed.positions);
  auto* const values = packed.values.as<std::uint8_t>();
  auto* const positions = packed.positions.as<std::uint8_t>();
  for (std::int64_t i = 0; i < packed.positions.elements(); ++i) {
    for (int four = 0; four < 2; ++four) {
      const int two = positions[i] >> (4 * four) & 15, low = two & 3, high = two >> 2;
      if (low < high) continue;
      // The same weights, ascending: the two change places, and so do their values.
      const int turned = high | low << 2;
      positions[i] =
          static_cast<std::uint8_t>((positions[i] & (0xf0 >> (4 * four))) | turned << (4 * four));
      std::uint8_t& value = values[2 * i + four];
      value = static_cast<std::uint8_t>(value >> 4 | value << 4);
    }
  }
  return packed;
}

void to_k_major(const PackedMatrix& matrix, KMajorSparse& out) {
  check_packed("to_k_major: matrix", matrix, Device{});
  if (matrix.format.format != Format::sparse_nvfp4) {
    fail(Status::invalid_argument, "to_k_major: matrix is {}: must be sparse_nvfp4",
         to_string(matrix.format));
  }
  if (matrix.k % 16 != 0) {
    fail(Status::invalid_argument, "to_k_major: matrix.k is {}: must be a multiple of 16",
         matrix.k);
  }
  check("to_k_major", out, matrix.n, matrix.k);
  transpose(matrix.values, out.comp);
  transpose(matrix.positions, out.meta);
  transpose(matrix.scales, out.scale);
  out.global_scale = matrix.global_scale;
}

}  // namespace shunt
