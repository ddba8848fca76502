// Packed matrices whose codes are drawn, not found: those of models' sizes take no time to encode,
// and views of one's rows are matrices that differ and share their memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "format/plain.hpp"
#include "shunt/format.hpp"

namespace shunt {

class DrawnPacked {
 public:
  // k is a multiple of 8. Every code that is a number comes equally often, in blocks whose scales
  // differ by up to 2; weights have about this deviation.
  DrawnPacked(const FormatSpec& format, std::int64_t n, std::int64_t k, unsigned seed,
              double deviation)
      : random_(seed) {
    matrix_.format = resolved(format);
    matrix_.n = n;
    matrix_.k = k;
    draw_values();
    draw_scales();
    check_packed("drawn", matrix_, Device{});
    make_deviate(deviation);
  }
  DrawnPacked(DrawnPacked&&) = default;

  const PackedMatrix& matrix() const { return matrix_; }
  // What it holds, row after row.
  std::vector<float> decoded() const {
    std::vector<float> all(static_cast<std::size_t>(matrix_.n * matrix_.k));
    unpack(matrix_, view(all.data(), {matrix_.n, matrix_.k}));
    return all;
  }

 private:
  static std::int64_t cut(std::int64_t k, std::int64_t group) { return (k + group - 1) / group; }
  std::int64_t group() const {
    switch (matrix_.format.format) {
      case Format::fp8_block:
        return 128;
      case Format::nvfp4:
      case Format::sparse_nvfp4:
        return 16;
      case Format::int4:
        return matrix_.format.group;
      default:
        return 32;
    }
  }

  // Random bytes, each changed by `change`.
  template <class Change>
  void* bytes(std::int64_t count, const Change& change) {
    std::vector<std::uint64_t>& words =
        memory_.emplace_back(static_cast<std::size_t>(count / 8 + 1));
    for (std::uint64_t& word : words) word = random_();
    auto* const all = reinterpret_cast<std::uint8_t*>(words.data());
    for (std::int64_t i = 0; i < count; ++i) all[i] = change(all[i]);
    return all;
  }
  void draw_values() {
    const std::int64_t n = matrix_.n, k = matrix_.k;
    const auto as_it_is = [](std::uint8_t byte) { return byte; };
    switch (matrix_.format.format) {
      case Format::fp8_tensor:
      case Format::fp8_channel:
      case Format::fp8_block:
      case Format::mxfp8: {
        const auto no_nan = [](std::uint8_t byte) {
          return static_cast<std::uint8_t>((byte & 0x7f) == 0x7f ? byte ^ 1 : byte);
        };
        matrix_.values = view(bytes(n * k, no_nan), DType::f8_e4m3, {n, k});
        break;
      }
      case Format::int8:
        matrix_.values = view(bytes(n * k,
                                    [](std::uint8_t byte) {
                                      return static_cast<std::uint8_t>(byte == 0x80 ? 0x81 : byte);
                                    }),
                              DType::i8, {n, k});
        break;
      case Format::dense3:
        matrix_.values =
            view(bytes(n * cut(k, 32) * 12, as_it_is), DType::u8, {n, cut(k, 32) * 12});
        break;
      case Format::sparse_nvfp4: {
        // Which two of four, in either half of a byte.
        const auto places = [](std::uint8_t byte) {
          constexpr std::uint8_t two[6] = {4, 8, 12, 9, 13, 14};
          return static_cast<std::uint8_t>(two[byte % 6] | two[byte / 6 % 6] << 4);
        };
        matrix_.values = view(bytes(n * k / 4, as_it_is), DType::u8, {n, k / 4});
        matrix_.positions = view(bytes(n * k / 8, places), DType::u8, {n, k / 8});
        break;
      }
      default:
        matrix_.values = view(bytes(n * k / 2, as_it_is), DType::u8, {n, k / 2});
    }
  }
  void draw_scales() {
    const std::int64_t n = matrix_.n, groups = cut(matrix_.k, group());
    const auto e4m3 = [](std::uint8_t byte) { return static_cast<std::uint8_t>(0x38 + byte % 8); };
    const auto e8m0 = [](std::uint8_t byte) { return static_cast<std::uint8_t>(127 + byte % 2); };
    switch (matrix_.format.format) {
      case Format::fp8_tensor:
        break;
      case Format::fp8_channel:
      case Format::int8:
        matrix_.scales = view(floats(n), {n});
        break;
      case Format::fp8_block:
        matrix_.scales = view(floats(cut(n, 128) * groups), {cut(n, 128), groups});
        break;
      case Format::mxfp8:
      case Format::mxfp4:
        matrix_.scales = view(bytes(n * groups, e8m0), DType::f8_e8m0, {n, groups});
        break;
      case Format::int4: {
        auto* const halves = static_cast<std::uint16_t*>(
            bytes(2 * n * groups, [](std::uint8_t byte) { return byte; }));
        for (std::int64_t i = 0; i < n * groups; ++i) halves[i] = f32_to_bf16(about_one());
        matrix_.scales = view(halves, DType::bf16, {n, groups});
        break;
      }
      default:
        matrix_.scales = view(bytes(n * groups, e4m3), DType::f8_e4m3, {n, groups});
    }
  }
  float about_one() { return 1 + static_cast<float>(random_() % 128) / 128; }
  const float* floats(std::int64_t count) {
    auto* const all = static_cast<float*>(bytes(4 * count, [](std::uint8_t byte) { return byte; }));
    for (std::int64_t i = 0; i < count; ++i) all[i] = about_one();
    return all;
  }

  void make_deviate(double deviation) {
    double squares = 0, count = 0;
    for (std::int64_t row = 0; row < matrix_.n; row += matrix_.n / 4 + 1) {
      for (std::int64_t i = 0; i < matrix_.k; ++i, ++count) {
        const double weight = plain_weight(matrix_, row, i);
        squares += weight * weight;
      }
    }
    const double factor = deviation / std::sqrt(squares / count);
    const Tensor& scales = matrix_.scales;
    switch (matrix_.format.format) {
      case Format::mxfp8:
      case Format::mxfp4: {
        const int more = static_cast<int>(std::lround(std::log2(factor)));
        for (std::int64_t i = 0; i < scales.elements(); ++i) {
          auto& code = scales.as<std::uint8_t>()[i];
          code = static_cast<std::uint8_t>(code + more);
        }
        break;
      }
      case Format::fp8_channel:
      case Format::fp8_block:
      case Format::int8:
      case Format::int4:
        for (std::int64_t i = 0; i < scales.elements(); ++i) {
          store_f32(scales.data, scales.dtype, i,
                    load_f32(scales.data, scales.dtype, i) * static_cast<float>(factor));
        }
        break;
      default:
        matrix_.global_scale = static_cast<float>(factor);
    }
  }

  std::mt19937_64 random_;
  std::vector<std::vector<std::uint64_t>> memory_;  // moved, its numbers stay where they are
  PackedMatrix matrix_;
};

}  // namespace shunt
