// The golden checkpoints: folders of tests/data/goldens with what transformers computed.
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "models.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {

inline std::vector<float> floats(const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_f32(tensor.data, tensor.dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

// What was recorded of one MoE block.
struct Recorded {
  std::string module;
  int layer = -1;
  Tensor input{}, output{};  // [T, H] f32
  Tensor ids{}, weights{};   // [T, k] i64, f32; absent where the model keeps them to itself
  Tensor token_ids{};        // [T] i64, of hash-routed layers
};

// The N of "layers.N." or "blocks.N."; -1 without one.
inline int layer_number(const std::string& module) {
  for (const std::string list : {"layers.", "blocks."}) {
    for (auto at = module.find(list); at != std::string::npos; at = module.find(list, at + 1)) {
      const auto begin = at + list.size();
      auto end = begin;
      while (end < module.size() && std::isdigit(static_cast<unsigned char>(module[end]))) ++end;
      if (end > begin && end < module.size() && module[end] == '.') {
        return std::stoi(module.substr(begin, end - begin));
      }
    }
  }
  return -1;
}

inline std::vector<Recorded> recorded(const SafetensorsFile& file) {
  static const std::string input = ".input";
  std::vector<Recorded> result;
  for (const std::string& name : file.names()) {
    if (name.size() < input.size() || !name.ends_with(input)) continue;
    Recorded r;
    r.module = name.substr(0, name.size() - input.size());
    r.layer = layer_number(r.module);
    if (r.layer < 0) continue;
    r.input = file.get(name);
    const std::string output = r.module + ".output";
    r.output = file.get(file.contains(output) ? output : output + ".0");
    const std::string token_ids = r.module + ".token_ids";
    if (file.contains(token_ids)) r.token_ids = file.get(token_ids);
    for (const char* router : {"gate", "router"}) {
      for (int i = 0; i < 4; ++i) {
        const std::string out = r.module + "." + router + ".gate_out." + std::to_string(i);
        if (file.contains(out) && file.get(out).dtype == DType::i64) r.ids = file.get(out);
      }
      for (int i = 0; i < 4 && r.ids; ++i) {
        const std::string out = r.module + "." + router + ".gate_out." + std::to_string(i);
        if (!file.contains(out)) continue;
        const Tensor tensor = file.get(out);
        if (tensor.dtype == DType::f32 && tensor.shape == r.ids.shape && !r.weights) {
          r.weights = tensor;
        }
      }
    }
    result.push_back(r);
  }
  return result;
}

// Largest error over largest magnitude.
template <class A, class B>
double relative_error(const std::vector<A>& got, const std::vector<B>& expected) {
  double error = 0, magnitude = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto wanted = static_cast<double>(expected[i]);
    const double difference = std::abs(static_cast<double>(got[i]) - wanted);
    error = std::isnan(difference) ? difference : std::max(error, difference);
    magnitude = std::max(magnitude, std::abs(wanted));
  }
  return magnitude > 0 ? error / magnitude : error;
}

}  // namespace shunt::test
