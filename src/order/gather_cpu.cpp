// Rows of hidden states in the order of experts. Bound by memory: every row is read and written
// once, converted on the way.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/convert.hpp"
#include "cpu/pool.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

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

// `weight` null: not scaled.
using RowFn = void (*)(const void* from, void* to, std::int64_t width, const float* weight);

template <class From, class To>
void row(const void* from, void* to, std::int64_t width, const float* weight) {
  const From* __restrict x = static_cast<const From*>(from);
  To* __restrict y = static_cast<To*>(to);
  if (weight != nullptr) {
    const float w = *weight;
    for (std::int64_t h = 0; h < width; ++h) store(y[h], w * load(x[h]));
  } else if constexpr (std::is_same_v<From, To>) {
    std::memcpy(y, x, static_cast<std::size_t>(width) * sizeof(To));
  } else {
    for (std::int64_t h = 0; h < width; ++h) store(y[h], load(x[h]));
  }
}

template <class From>
RowFn row_to(DType to) {
  return to == f32 ? row<From, float> : to == bf16 ? row<From, Bf16> : row<From, F16>;
}

RowFn row_fn(DType from, DType to) {
  return from == f32 ? row_to<float>(to) : from == bf16 ? row_to<Bf16>(to) : row_to<F16>(to);
}

}  // namespace

void gather_cpu(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                const Tensor& rows, std::int64_t count) {
  const std::int64_t width = in.hidden.shape[1];
  const std::int64_t from_bytes = in.hidden.strides[0] * bits(in.hidden.dtype) / 8;
  const std::int64_t to_bytes = rows.strides[0] * bits(rows.dtype) / 8;
  const std::int32_t* permutation = in.permutation.as<std::int32_t>();
  const float* weights = spec.scale_by_weight ? in.weights.as<float>() : nullptr;
  const RowFn convert = row_fn(in.hidden.dtype, rows.dtype);

  // A thread is worth waking for some 32k elements.
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
  context.pool().split(count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t token = permutation[r] / spec.slots;
      convert(in.hidden.as<char>() + token * from_bytes, rows.as<char>() + r * to_bytes, width,
              weights != nullptr ? weights + r : nullptr);
    }
  });
}

}  // namespace shunt
