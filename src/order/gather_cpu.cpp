// Rows of hidden states in the order of experts, converted on the way. Bound by memory: a token's
// row is read once for each of its experts, every row is written once.
#include <algorithm>
#include <cstring>

#include "core/quantise.hpp"
#include "cpu/convert.hpp"
#include "cpu/pool.hpp"
#include "order/engine.hpp"

namespace shunt {

using cpu_engine::Form;

void gather_cpu(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                const Tensor& rows, const Tensor& scales, std::int64_t count) {
  const std::int64_t width = in.hidden.shape[1];
  const std::int64_t from_bytes = in.hidden.strides[0] * bits(in.hidden.dtype) / 8;
  const std::int64_t to_bytes = rows.strides[0] * bits(rows.dtype) / 8;
  const std::int32_t* permutation = in.permutation.as<std::int32_t>();
  const float* weights = spec.scale_by_weight ? in.weights.as<float>() : nullptr;
  const auto from_form = static_cast<Form>(in.hidden.dtype);
  const auto to_form = static_cast<Form>(rows.dtype);
  const bool copies = weights == nullptr && from_form == to_form;
  const auto kernels = cpu_engine::convert_kernels(context.pool().isa());
  const auto n = static_cast<std::size_t>(width);

  // A thread is worth waking for some 32k elements.
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
  context.pool().split(count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const char* from = in.hidden.as<char>() + permutation[r] / spec.slots * from_bytes;
      char* to = rows.as<char>() + r * to_bytes;
      if (spec.quantise != Quantise::none) {
        quantise_row(spec.rounding(), n, reinterpret_cast<std::uint8_t*>(to),
                     scales.as<float>() + r * scales.strides[0], scales.strides[1],
                     [&](std::size_t h, std::size_t width_of_strip, float* values) {
                       kernels.row(from + h * cpu_engine::form_bytes(from_form), from_form,
                                   weights != nullptr ? weights[r] : 1, values, Form::f32,
                                   width_of_strip);
                     });
      } else if (copies) {
        std::memcpy(to, from, n * cpu_engine::form_bytes(to_form));
      } else {
        kernels.row(from, from_form, weights != nullptr ? weights[r] : 1, to, to_form, n);
      }
    }
  });
}

}  // namespace shunt
