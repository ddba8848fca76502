#include "layer/norm.hpp"

#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "cpu/pool.hpp"

namespace shunt {

namespace {

constexpr int lanes = 16;

// A row as f32 values, whatever its dtype.
struct Row {
  const void* data;
  DType dtype;
  float operator[](std::int64_t i) const { return load_f32(data, dtype, i); }
};

Row row_of(const Tensor& tensor, std::int64_t t) {
  return {static_cast<const char*>(tensor.data) + t * tensor.strides[0] * (bits(tensor.dtype) / 8),
          tensor.dtype};
}

// Sum of a(i) over [0, width) in strided lanes, folded in a fixed order.
template <class Term>
float lane_sum(std::int64_t width, Term term) {
  float sums[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) sums[lane] += term(i + lane);
  }
  for (; i < width; ++i) sums[i % lanes] += term(i);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace

void rms_norm(const Context& context, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              float* out) {
  const std::int64_t width = x.shape[1];
  context.pool().split(x.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const Row row = row_of(x, t);
      const float mean = lane_sum(width, [&](std::int64_t i) { return row[i] * row[i]; }) /
                         static_cast<float>(width);
      const float factor = spec.multiplier / std::sqrt(mean + spec.epsilon);
      float* to = out + t * width;
      for (std::int64_t i = 0; i < width; ++i) {
        to[i] = row[i] * factor * (weight ? load_f32(weight.data, weight.dtype, i) : 1.0f);
      }
    }
  });
}

void gate_logits(const Context& context, const Tensor& x, const Tensor& gate, float* logits) {
  context.pool().split(x.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const Row row = row_of(x, t);
      logits[t] = lane_sum(
          x.shape[1], [&](std::int64_t i) { return row[i] * load_f32(gate.data, gate.dtype, i); });
    }
  });
}

void scale_and_bias(const Context& context, float* data, std::int64_t rows, std::int64_t width,
                    float scale, const Tensor& bias) {
  context.pool().split(rows, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = data + t * width;
      for (std::int64_t i = 0; i < width; ++i) {
        row[i] = row[i] * scale + (bias ? load_f32(bias.data, bias.dtype, i) : 0.0f);
      }
    }
  });
}

void store_rows(const Context& context, const float* from, const Tensor& residual,
                const Tensor& to) {
  const std::int64_t width = to.shape[1];
  context.pool().split(to.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      void* out = static_cast<char*>(to.data) + t * to.strides[0] * (bits(to.dtype) / 8);
      const Row extra = residual ? row_of(residual, t) : Row{nullptr, DType::f32};
      for (std::int64_t i = 0; i < width; ++i) {
        store_f32(out, to.dtype, i, from[t * width + i] + (residual ? extra[i] : 0.0f));
      }
    }
  });
}

void zero_rows(const Tensor& to, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = bits(to.dtype) / 8;
  for (std::int64_t t = begin; t < end; ++t) {
    std::memset(static_cast<char*>(to.data) + t * to.strides[0] * width, 0,
                static_cast<std::size_t>(to.shape[1] * width));
  }
}

}  // namespace shunt
