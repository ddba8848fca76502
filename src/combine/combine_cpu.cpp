// A weighted sum of rows, token by token. A block of columns is summed in f32 in the first-level
// cache, term after term, and then rounded to the output: each element's sum has one order,
// whatever the number of threads.
//
// Bound by memory: every row is read once, every output written once.
#include <algorithm>
#include <cmath>

#include "combine/engine.hpp"
#include "core/convert.hpp"
#include "cpu/pool.hpp"

namespace shunt {

namespace {

constexpr std::int64_t block = 1024;  // columns: 4 KiB of sums

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
float load(float x) { return x; }
float load(Bf16 x) { return bf16_to_f32(x.bits); }
float load(F16 x) { return f16_to_f32(x.bits); }
void store(float& to, float x) { to = x; }
void store(Bf16& to, float x) { to.bits = f32_to_bf16(x); }
void store(F16& to, float x) { to.bits = f32_to_f16(x); }

template <class T>
void add(float* __restrict sums, const void* row, float weight, std::int64_t width) {
  const T* __restrict x = static_cast<const T*>(row);
  for (std::int64_t h = 0; h < width; ++h) sums[h] += weight * load(x[h]);
}

template <class T>
void round(void* to, const float* __restrict sums, std::int64_t width) {
  T* __restrict y = static_cast<T*>(to);
  for (std::int64_t h = 0; h < width; ++h) store(y[h], sums[h]);
}

// Rows of a [., H] tensor, as terms of the sum.
struct Rows {
  const char* data = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t element_bytes = 0;
  void (*add_row)(float*, const void*, float, std::int64_t) = nullptr;

  Rows() = default;
  explicit Rows(const Tensor& tensor)
      : data(tensor.as<char>()),
        row_bytes(tensor.strides[0] * bits(tensor.dtype) / 8),
        element_bytes(bits(tensor.dtype) / 8),
        add_row(tensor.dtype == f32    ? add<float>
                : tensor.dtype == bf16 ? add<Bf16>
                                       : add<F16>) {}
  explicit operator bool() const { return add_row != nullptr; }
  void operator()(float* sums, std::int64_t row, std::int64_t column, float weight,
                  std::int64_t width) const {
    add_row(sums, data + row * row_bytes + column * element_bytes, weight, width);
  }
};

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

void combine_cpu(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                 const Tensor& out) {
  const std::int64_t tokens = out.shape[0];
  const std::int64_t width = out.shape[1];
  const std::int64_t valid =
      in.valid_tokens ? std::clamp<std::int64_t>(*in.valid_tokens.as<std::int32_t>(), 0, tokens)
                      : tokens;
  const std::int32_t* inverse = in.inverse.as<std::int32_t>();
  const std::int32_t* ids = in.ids.as<std::int32_t>();
  const float* weights = in.weights.as<float>();
  const Rows rows(in.rows);
  const Rows hidden = in.hidden ? Rows(in.hidden) : Rows();
  const Rows shared = in.shared ? Rows(in.shared) : Rows();
  const Rows residual = in.residual ? Rows(in.residual) : Rows();
  const auto round_to = out.dtype == f32    ? round<float>
                        : out.dtype == bf16 ? round<Bf16>
                                            : round<F16>;
  const std::int64_t out_bytes = bits(out.dtype) / 8;

  const auto columns = [&](std::int64_t t, std::int64_t begin, std::int64_t count) {
    float sums[block];
    std::fill_n(sums, count, 0.0F);
    if (t < valid) {
      for (int s = 0; s < spec.slots; ++s) {
        const std::int64_t pair = t * spec.slots + s;
        if (inverse[pair] >= 0) {
          rows(sums, inverse[pair], begin, spec.weighted ? weights[pair] : 1, count);
        } else if (hidden && ids[pair] >= spec.identity_from) {
          hidden(sums, t, begin, weights[pair], count);
        }
      }
      if (shared) {
        const float gate = spec.shared_gate ? sigmoid(in.shared_gate.as<float>()[t]) : 1;
        shared(sums, t, begin, spec.shared_scale * gate, count);
      }
      if (residual) residual(sums, t, begin, 1, count);
    }
    round_to(out.as<char>() + (t * out.strides[0] + begin) * out_bytes, sums, count);
  };

  // Blocks token by token, so that few tokens are split over their columns. A thread is worth
  // waking for some 32k products.
  const std::int64_t blocks = (width + block - 1) / block;
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / (block * (spec.slots + 1)));
  context.pool().split(tokens * blocks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t column = i % blocks * block;
      columns(i / blocks, column, std::min(block, width - column));
    }
  });
}

}  // namespace shunt
