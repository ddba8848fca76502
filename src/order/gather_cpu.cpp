// Rows of hidden states in the order of experts, converted on the way. Bound by memory: a token's
// row is read once for each of its experts, every row is written once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "core/quantise.hpp"
#include "cpu/convert.hpp"
#include "cpu/pool.hpp"
#include "order/engine.hpp"

namespace shunt {

using cpu_engine::Form;

namespace {

// A row of 128 or fewer values at a time.
constexpr std::size_t strip = 128;

// One row as fp8. Its values are computed twice: once for their amax, once for themselves.
struct QuantisedRow {
  const GatherSpec& spec;
  cpu_engine::ConvertKernels convert;
  Form form;

  Fp8Scale scale_of(float amax) const {
    return fp8_scale(amax, spec.scale_upper_bound, spec.power_of_two_scales);
  }
  // scales: of the row, `step` elements apart.
  void operator()(const char* from, float weight, std::uint8_t* to, float* scales,
                  std::int64_t step, std::size_t n) const {
    float values[strip];
    const auto read = [&](std::size_t h) {
      const std::size_t count = std::min(strip, n - h);
      convert.row(from + h * cpu_engine::form_bytes(form), form, weight, values, Form::f32, count);
      return count;
    };
    const auto amax_of = [&](std::size_t count) {
      float amax = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const float size = std::abs(values[i]);
        if (std::isfinite(size)) amax = std::max(amax, size);
      }
      return amax;
    };
    Fp8Scale scale;
    if (spec.quantise == Quantise::row) {
      float amax = 0;
      for (std::size_t h = 0; h < n; h += strip) amax = std::max(amax, amax_of(read(h)));
      scale = scale_of(amax);
      *scales = scale.scale;
    }
    for (std::size_t h = 0; h < n; h += strip) {
      const std::size_t count = read(h);
      if (spec.quantise == Quantise::block_128) {
        scale = scale_of(amax_of(count));
        scales[static_cast<std::int64_t>(h / strip) * step] = scale.scale;
      }
      for (std::size_t i = 0; i < count; ++i) to[h + i] = f32_to_e4m3(values[i] * scale.factor);
    }
  }
};

}  // namespace

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
  const QuantisedRow quantise{spec, kernels, from_form};
  const auto n = static_cast<std::size_t>(width);

  // A thread is worth waking for some 32k elements.
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
  context.pool().split(count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const char* from = in.hidden.as<char>() + permutation[r] / spec.slots * from_bytes;
      char* to = rows.as<char>() + r * to_bytes;
      if (spec.quantise != Quantise::none) {
        quantise(from, weights != nullptr ? weights[r] : 1, reinterpret_cast<std::uint8_t*>(to),
                 scales.as<float>() + r * scales.strides[0], scales.strides[1], n);
      } else if (copies) {
        std::memcpy(to, from, n * cpu_engine::form_bytes(to_form));
      } else {
        kernels.row(from, from_form, weights != nullptr ? weights[r] : 1, to, to_form, n);
      }
    }
  });
}

}  // namespace shunt
