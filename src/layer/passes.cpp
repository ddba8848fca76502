#include "layer/passes.hpp"

#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "core/convert.hpp"
#include "cpu/pool.hpp"
#include "cuda/runtime.hpp"
#include "layer/plan.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

constexpr int lanes = 16;

// A row as f32 values, whatever its dtype.
struct Row {
  const void* data;
  DType dtype;
  float operator[](std::int64_t i) const { return load_f32(data, dtype, i); }
};

Row row_view(const Tensor& tensor, std::int64_t t) {
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

[[maybe_unused]] bool on_gpu(const Context& context) {
  return context.device().type == DeviceType::cuda;
}

// `to` may be where x lies.
void norm_row(const NormSpec& spec, const Tensor& weight, std::int64_t width, const Row& x,
              float* to) {
  const auto weight_of = [&](std::int64_t i) {
    return weight ? load_f32(weight.data, weight.dtype, i) : 1.0f;
  };
  const auto term = [&](std::int64_t i) { return spec.weight_first ? x[i] * weight_of(i) : x[i]; };
  const float squares = lane_sum(width, [&](std::int64_t i) { return term(i) * term(i); });
  const float factor =
      spec.multiplier / std::sqrt(squares / static_cast<float>(width) + spec.epsilon);
  for (std::int64_t i = 0; i < width; ++i) {
    to[i] = term(i) * factor * (spec.weight_first ? 1.0f : weight_of(i));
  }
}

}  // namespace

void rms_norm(const Context& context, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              const Tensor& out, const Tensor& valid) {
  if constexpr (cuda_engine::built) {
    if (on_gpu(context)) return cuda_engine::rms_norm(context.gpu(), spec, x, weight, out, valid);
  }
  context.pool().split(x.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      norm_row(spec, weight, x.shape[1], row_view(x, t), out[t].as<float>());
    }
  });
}

void gate_logits(const Context& context, const Tensor& x, const Tensor& gate, float* logits,
                 const Tensor& valid) {
  if constexpr (cuda_engine::built) {
    if (on_gpu(context)) return cuda_engine::gate_logits(context.gpu(), x, gate, logits, valid);
  }
  context.pool().split(x.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const Row row = row_view(x, t);
      logits[t] = lane_sum(
          x.shape[1], [&](std::int64_t i) { return row[i] * load_f32(gate.data, gate.dtype, i); });
    }
  });
}

void finish_rows(const Context& context, const Finish& f) {
  if constexpr (cuda_engine::built) {
    if (on_gpu(context)) return cuda_engine::finish_rows(context.gpu(), f);
  }
  const std::int64_t width = f.out.shape[1];
  context.pool().split(f.out.shape[0], 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* const row = f.wide.as<float>() + t * width;
      if (f.shared) {
        const float gate =
            f.shared_logits != nullptr ? 1 / (1 + std::exp(-f.shared_logits[t])) : 1.0f;
        const float* const shared = f.shared.as<float>() + t * width;
        for (std::int64_t i = 0; i < width; ++i) row[i] += f.shared_scale * gate * shared[i];
      }
      if (f.bias) {
        for (std::int64_t i = 0; i < width; ++i) {
          row[i] += load_f32(f.bias.data, f.bias.dtype, i);
        }
      }
      if (f.norm.enabled) norm_row(f.norm, f.norm_weight, width, Row{row, DType::f32}, row);
      void* const out =
          static_cast<char*>(f.out.data) + t * f.out.strides[0] * (bits(f.out.dtype) / 8);
      const Row extra = f.residual ? row_view(f.residual, t) : Row{nullptr, DType::f32};
      for (std::int64_t i = 0; i < width; ++i) {
        store_f32(out, f.out.dtype, i, row[i] + (f.residual ? extra[i] : 0.0f));
      }
    }
  });
}

void round_rows(const Context& context, RowFormat kind, const Tensor& x, const Tensor& valid,
                const Tensor& rows, const Tensor& scales) {
  if constexpr (cuda_engine::built) {
    return quantise_rows_cuda(context, quantise_of(kind), x, valid, rows, scales);
  }
  fail(Status::unsupported, "round_rows: rows are rounded to fp8 on a GPU only");
}

void round_in_place(const Context& context, RowFormat kind, const Tensor& rows,
                    const Tensor& count) {
  if constexpr (cuda_engine::built) {
    return cuda_engine::round_in_place(context.gpu(), kind, rows, count);
  }
  fail(Status::unsupported, "round_in_place: rows are rounded to fp8 on a GPU only");
}

void clear_unrouted(const Context& context, const Tensor& inverse, const Tensor& valid,
                    const Tensor& out) {
  if constexpr (cuda_engine::built) {
    return cuda_engine::clear_unrouted(context.gpu(), inverse, valid, out);
  }
  fail(Status::unsupported, "clear_unrouted: rows are written to their tokens on a GPU only");
}

void copy_columns(const Context& context, const std::int32_t* ids, const float* weights,
                  std::int64_t from_columns, const Tensor& to_ids, const Tensor& to_weights) {
  if constexpr (cuda_engine::built) {
    if (on_gpu(context)) {
      return cuda_engine::copy_columns(context.gpu(), ids, weights, from_columns, to_ids,
                                       to_weights);
    }
  }
  const auto copy = [&](const void* from, const Tensor& to) {
    for (std::int64_t t = 0; to && t < to.shape[0]; ++t) {
      std::memcpy(to.as<char>() + t * to.shape[1] * 4,
                  static_cast<const char*>(from) + t * from_columns * 4,
                  static_cast<std::size_t>(to.shape[1]) * 4);
    }
  };
  copy(ids, to_ids);
  copy(weights, to_weights);
}

void fill_slot(const Context& context, const SharedSlot& slot) {
  if constexpr (cuda_engine::built) return cuda_engine::fill_slot(context.gpu(), slot);
  fail(Status::unsupported, "fill_slot: shared experts have slots on a GPU only");
}

}  // namespace shunt
