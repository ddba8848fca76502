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

// Of relative_power(), f32 rows, on the CPU.
struct Limits {
  // In the mean of a model's layers at least, of each layer at most: half the least and a little
  // above the most of all golden families. The worst are some 5 times as far off as their weights
  // (docs/formats.md): three matrices err, and what they return cancels in the sum. fp8 has room
  // for rows in fp8 (gpu_test.cpp); its worst is 0.0035.
  double low, high;
  // What docs/formats.md states, with a digit more: the mean of two layers.
  double tiny_moe, deepseek_v3;
};
inline const std::map<std::string, Limits>& format_limits() {
  static const std::map<std::string, Limits> limits = {
      {"fp8_tensor", {3e-5, 5e-3, 4.3e-4, 1.16e-3}}, {"fp8_channel", {2e-5, 5e-3, 4.2e-4, 1.06e-3}},
      {"fp8_block", {2e-5, 5e-3, 4.4e-4, 1.16e-3}},  {"mxfp8", {4e-5, 6e-3, 6.6e-4, 1.60e-3}},
      {"nvfp4", {2e-4, 5e-2, 5.8e-3, 1.53e-2}},      {"mxfp4", {6e-4, 7e-2, 1.20e-2, 2.30e-2}},
      {"int8", {1e-6, 2e-4, 2.8e-5, 6.0e-5}},        {"int4:32", {2e-4, 4.5e-2, 5.7e-3, 1.45e-2}},
      {"dense3", {1e-3, 0.12, 1.63e-2, 3.81e-2}},    {"sparse_nvfp4", {5e-3, 0.75, 0.185, 0.203}}};
  return limits;
}

}  // namespace shunt::test
