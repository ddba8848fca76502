#include "core/quantise.hpp"

#include "core/apart.hpp"
#include "core/check.hpp"

namespace shunt {

Support legal(const QuantiseSpec& spec) {
  if (spec.quantise < Quantise::none || spec.quantise > Quantise::block_128) {
    return refuse("quantise is {}: must be 0 (none), 1 (row) or 2 (block_128)",
                  static_cast<int>(spec.quantise));
  }
  if (!(spec.scale_upper_bound >= 0) || !std::isfinite(spec.scale_upper_bound)) {
    return refuse("scale_upper_bound is {}: must be 0 for none, or positive and finite",
                  spec.scale_upper_bound);
  }
  if (spec.quantise == Quantise::none && (spec.scale_upper_bound > 0 || spec.power_of_two_scales)) {
    return refuse("{} is given, but quantise is none: there are no scales",
                  spec.power_of_two_scales ? "power_of_two_scales" : "scale_upper_bound");
  }
  return {};
}

void check_scales(const std::string& name, const Tensor& scales, Quantise quantise,
                  std::int64_t rows, std::int64_t width, Device device) {
  if (quantise == Quantise::row) {
    check_tensor(name, scales, {.dtypes = {DType::f32}, .shape = {rows}}, device);
  } else {
    check_tensor(name, scales, {.dtypes = {DType::f32}, .shape = {rows, (width + 127) / 128}},
                 device);
  }
  check_elements_apart(name, scales);
}

}  // namespace shunt
