#include "format/pairs.hpp"
#include "cpu/float_mode.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "format/rules.hpp"

namespace shunt {

PackedMatrix pack_in_pairs(Format format, const float* values, std::int64_t n, std::int64_t k,
                           Workspace memory, float global_amax) {
  const cpu_engine::FloatMode mode;
  const bool sparse = format == Format::sparse_nvfp4;
  if (!sparse && format != Format::nvfp4) {
    throw Error(Status::invalid_argument,
                "pack_in_pairs: " + to_string(FormatSpec{format}) + ": nvfp4 or sparse_nvfp4");
  }
  // For its tensors and the global scale; codes, positions and scales are written again.
  const PackedMatrix to = pack({format}, view(values, {n, k}), memory, global_amax);
  for (std::int64_t row = 0; row < n; ++row) {
    auto* const codes = to.values.as<std::uint8_t>() + row * to.values.strides[0];
    auto* const scales = to.scales.as<std::uint8_t>() + row * to.scales.strides[0];
    std::uint8_t* const positions =
        sparse ? to.positions.as<std::uint8_t>() + row * to.positions.strides[0] : nullptr;
    for_each_group(k, 32, [&](std::int64_t, std::int64_t begin, std::int64_t count) {
      std::array<float, 32> block{};
      std::copy_n(values + row * k + begin, count, block.begin());
      std::array<bool, 8> second{};
      for (std::size_t four = 0; sparse && four < 8; ++four) {
        const float* const x = &block[4 * four];
        const auto square = [](double a, double b) { return a * a + b * b; };
        second[four] = square(static_cast<double>(x[2]), static_cast<double>(x[3])) >
                       square(static_cast<double>(x[0]), static_cast<double>(x[1]));
        const std::size_t zeroed = 4 * four + (second[four] ? 0 : 2);
        block[zeroed] = block[zeroed + 1] = 0;
      }
      const std::uint8_t byte = sparse
                                    ? nvfp4_fitted_scale(block.data(), 32, to.global_scale)
                                    : nvfp4_block_scale(largest(block.data(), 32), to.global_scale);
      for (std::int64_t at = begin; at < begin + count; at += 16) scales[at / 16] = byte;
      const double scale =
          static_cast<double>(e4m3_to_f32(byte)) * static_cast<double>(to.global_scale);
      const auto pair = [&](std::size_t at) {
        return static_cast<std::uint8_t>(to_e2m1(static_cast<double>(block[at]), scale) |
                                         to_e2m1(static_cast<double>(block[at + 1]), scale) << 4);
      };
      if (!sparse) {
        for (std::int64_t at = 0; at < count; at += 2) {
          codes[(begin + at) / 2] = pair(static_cast<std::size_t>(at));
        }
        return;
      }
      for (std::int64_t at = 0; at < count; at += 4) {
        const std::int64_t k4 = begin + at;
        const bool late = second[static_cast<std::size_t>(at / 4)];
        codes[k4 / 4] = pair(static_cast<std::size_t>(at + (late ? 2 : 0)));
        const int places = late ? 2 | 3 << 2 : 0 | 1 << 2, shift = k4 % 8 == 0 ? 0 : 4;
        positions[k4 / 8] =
            static_cast<std::uint8_t>((positions[k4 / 8] & ~(15 << shift)) | places << shift);
      }
    });
  }
  return to;
}

}  // namespace shunt
