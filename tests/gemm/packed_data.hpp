// Random packed weights of fp8, and rows rounded as gather() rounds them, for tests of products.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "core/quantise.hpp"
#include "gemm/gemm_data.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

// A packed matrix that owns its bytes; weights of about 1 / sqrt(k).
struct Fp8Matrix {
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;
  PackedMatrix matrix;

  Fp8Matrix(Format format, std::int64_t n, std::int64_t k, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 60);
    std::uniform_real_distribution<float> around(0.5f, 2.0f);
    bytes.resize(static_cast<std::size_t>(n * k));
    for (auto& byte : bytes) byte = to_e4m3(normal(random));
    const std::int64_t blocks_n = (n + 127) / 128, blocks_k = (k + 127) / 128;
    const std::int64_t count = format == Format::fp8_block     ? blocks_n * blocks_k
                               : format == Format::fp8_channel ? n
                                                               : 0;
    const float usual = 1 / (60 * std::sqrt(static_cast<float>(k)));
    for (std::int64_t i = 0; i < count; ++i) scales.push_back(usual * around(random));
    matrix = {.format = {.format = format},
              .n = n,
              .k = k,
              .values = view(static_cast<const void*>(bytes.data()), DType::f8_e4m3, {n, k})};
    if (format == Format::fp8_block) {
      matrix.scales = view(scales.data(), {blocks_n, blocks_k});
    } else if (format == Format::fp8_channel) {
      matrix.scales = view(scales.data(), {n});
    } else {
      matrix.global_scale = usual;
    }
  }
  Fp8Matrix(Fp8Matrix&&) = default;
  float scale(std::int64_t row, std::int64_t at) const {
    const std::int64_t blocks_k = (matrix.k + 127) / 128;
    if (matrix.format.format == Format::fp8_tensor) return matrix.global_scale;
    const std::int64_t i =
        matrix.format.format == Format::fp8_block ? row / 128 * blocks_k + at / 128 : row;
    return scales[static_cast<std::size_t>(i)] * matrix.global_scale;
  }
  float code(std::int64_t row, std::int64_t at) const {
    return e4m3_to_f32(bytes[static_cast<std::size_t>(row * matrix.k + at)]);
  }
};

// A row as e4m3, and its scales: one for `block` numbers.
struct Fp8Row {
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;
  Fp8Row(const std::vector<float>& x, std::int64_t block) : bytes(x.size()) {
    for (std::size_t begin = 0; begin < x.size(); begin += static_cast<std::size_t>(block)) {
      const std::size_t end = std::min(x.size(), begin + static_cast<std::size_t>(block));
      float most = 0;
      for (std::size_t i = begin; i < end; ++i) {
        if (std::isfinite(x[i])) most = std::max(most, std::abs(x[i]));
      }
      const Fp8Scale scale = fp8_scale(most, 0, false);
      for (std::size_t i = begin; i < end; ++i) bytes[i] = to_e4m3(x[i] * scale.factor);
      scales.push_back(scale.scale);
    }
  }
};

// What a tensor core may lose where it adds 128 products of e4m3: four instructions, each of which
// aligns 32 products and the sum so far to the largest of them and keeps 13 bits behind its first.
inline double fp8_step_bound(double largest) { return 4 * 33 * 0x1p-13 * largest; }

}  // namespace shunt::test
