#include "combine/reference.hpp"

#include <cmath>

#include "core/convert.hpp"

namespace shunt {

void combine_reference(const CombineSpec& spec, const CombineInputs& in, Tensor out) {
  const auto at = [](const Tensor& tensor, std::int64_t row, std::int64_t h) {
    return static_cast<double>(load_f32(tensor.data, tensor.dtype, row * tensor.strides[0] + h));
  };
  const auto wide = [](float x) { return static_cast<double>(x); };
  for (std::int64_t t = 0; t < out.shape[0]; ++t) {
    const bool valid = !in.valid_tokens || t < *in.valid_tokens.as<std::int32_t>();
    for (std::int64_t h = 0; h < out.shape[1]; ++h) {
      double sum = 0;
      for (int s = 0; s < spec.slots; ++s) {
        const std::int64_t pair = t * spec.slots + s;
        const std::int32_t row = in.inverse.as<std::int32_t>()[pair];
        if (row >= 0) {
          sum += (spec.weighted ? wide(in.weights.as<float>()[pair]) : 1) * at(in.rows, row, h);
          continue;
        }
        if (spec.identity_from < 0) continue;
        const std::int32_t id = in.ids.as<std::int32_t>()[pair];
        if (id >= spec.identity_from && (spec.identity_until == 0 || id < spec.identity_until)) {
          sum += wide(in.weights.as<float>()[pair]) * at(in.hidden, t, h);
        }
      }
      if (in.shared) {
        const double gate =
            spec.shared_gate ? 1 / (1 + std::exp(-wide(in.shared_gate.as<float>()[t]))) : 1;
        sum += wide(spec.shared_scale) * gate * at(in.shared, t, h);
      }
      if (in.residual) sum += at(in.residual, t, h);
      store_f32(out.data, out.dtype, t * out.strides[0] + h, valid ? static_cast<float>(sum) : 0);
    }
  }
}

}  // namespace shunt
