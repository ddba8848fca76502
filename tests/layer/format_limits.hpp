// How far recorded layers are off with packed experts.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace shunt::test {

// Squared error over power.
inline double relative_power(const std::vector<float>& got, const std::vector<float>& wanted) {
  double error = 0, power = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto w = static_cast<double>(wanted[i]);
    error += (static_cast<double>(got[i]) - w) * (static_cast<double>(got[i]) - w);
    power += w * w;
  }
  return error / power;
}

// Of relative_power(), in the mean of a model's layers at least, of each layer at most.
struct Limits {
  double low, high;
};
inline const std::map<std::string, Limits>& format_limits() {
  static const std::map<std::string, Limits> limits = {
      {"fp8_tensor", {1e-4, 5e-3}}, {"fp8_channel", {1e-4, 5e-3}}, {"fp8_block", {1e-4, 5e-3}},
      {"mxfp8", {1e-4, 5e-3}},      {"nvfp4", {4e-3, 5e-2}},       {"mxfp4", {4e-3, 8e-2}},
      {"int8", {1e-6, 1e-3}},       {"int4:32", {4e-3, 5e-2}},     {"dense3", {1e-2, 0.15}},
      {"sparse_nvfp4", {5e-2, 0.8}}};
  return limits;
}

}  // namespace shunt::test
