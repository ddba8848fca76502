// NVFP4: e2m1 with an e4m3 scale for 16 of k and one f32 scale a matrix.
#include <algorithm>

#include "format/grouped.hpp"

namespace shunt {

namespace {

constexpr std::uint8_t e4m3_one = 0x38, e4m3_least = 0x01;

struct Nvfp4 : E2m1Codes {
  static constexpr DType stored_scale = DType::f8_e4m3;
  static constexpr std::int64_t group = 16;
  static std::uint8_t scale_byte(const PackedMatrix& m, const float* values, std::int64_t count) {
    return nvfp4_block_scale(largest(values, count), m.global_scale);
  }
  static double scale(const PackedMatrix& m, std::uint8_t byte) {
    return static_cast<double>(e4m3_to_f32(byte)) * static_cast<double>(m.global_scale);
  }
};

}  // namespace

std::uint8_t nvfp4_block_scale(float amax, float global) {
  if (amax == 0) return e4m3_one;
  const std::uint8_t code = to_e4m3(static_cast<double>(amax), 6 * static_cast<double>(global));
  return std::max(code, e4m3_least);
}

float nvfp4_global_scale(float amax) { return scale_for(amax, 6 * 448); }

const FormatRules nvfp4_rules = {{Format::nvfp4},
                                 Grouped<Nvfp4>::tensors,
                                 nvfp4_global_scale,
                                 Grouped<Nvfp4>::encode,
                                 Grouped<Nvfp4>::decode};

}  // namespace shunt
