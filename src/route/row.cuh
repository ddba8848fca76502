// A token's logits in a warp: how one is read, and what a warp computes of all of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "route/device.hpp"
#include "route/policy.hpp"

namespace shunt::routing {

constexpr unsigned every_lane = 0xffffffffU;
constexpr float minus_infinity = -__builtin_inff();

// What is compared, where that is compiled in.
enum class Ranked {
  logit,
  score,            // with a selection bias
  score_in_groups,  // likewise; each block of 32 experts is a group
  share,            // likewise, shares of a softmax: LongCat, ERNIE 4.5
};

__device__ __forceinline__ float float_of_ordered(std::int32_t o) {
  return float_of(o ^ ((o >> 31) & 0x7fffffff));
}

__device__ __forceinline__ float load_form(const void* data, Form form, std::int64_t i) {
  switch (form) {
    case Form::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case Form::f16:
      return __half2float(static_cast<const __half*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}
__device__ __forceinline__ float element(const DeviceVector& v, std::int64_t i) {
  return load_form(v.data, v.form, i);
}
__device__ __forceinline__ std::int64_t element(const DeviceIndices& v, std::int64_t i) {
  return v.wide ? static_cast<const std::int64_t*>(v.data)[i]
                : static_cast<const std::int32_t*>(v.data)[i];
}

// Rows of logits in memory, as a source.
struct LogitRow {
  const void* data;
  Form form;
  __device__ float operator()(std::int64_t c) const { return load_form(data, form, c); }
};

template <int N, bool grouped>
__device__ __forceinline__ int expert_of(int lane, int i) {
  return grouped ? lane * N + i : lane + 32 * i;
}

// Scale, bias, clean, cap.
__device__ __forceinline__ float finished(const DeviceRoute& r, float raw, int column) {
  raw = __fmul_rn(raw, r.rule.logit_scale);
  if (r.router_bias.data != nullptr) raw = raw + element(r.router_bias, column);
  float l = sanitised(raw);
  if (r.rule.soft_cap > 0) l = sanitised(soft_capped(l, r.rule.soft_cap));
  return l;
}

// ---- over a warp -------------------------------------------------------------------------------

__device__ __forceinline__ float warp_max(float x) {
  return float_of([](std::int32_t o) {
    return o ^ ((o >> 31) & 0x7fffffff);
  }(__reduce_max_sync(every_lane, ordered(x))));
}

__device__ __forceinline__ std::int64_t warp_max(std::int64_t key) {
  const auto high = static_cast<std::int32_t>(key >> 32);
  const std::int32_t best = __reduce_max_sync(every_lane, high);
  const std::uint32_t low = high == best ? static_cast<std::uint32_t>(key) : 0;
  return static_cast<std::int64_t>(best) * (std::int64_t{1} << 32) +
         static_cast<std::int64_t>(__reduce_max_sync(every_lane, low));
}

// Lane i adds lane i ^ 16, i ^ 8, .. i ^ 1.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(every_lane, x, step);
  return x;
}

// What lane (and lane + 32) hold of slots 0 .. 63.
template <class T>
struct Slots {
  T of[2];
  __device__ __forceinline__ T get(int s) const {
    return __shfl_sync(every_lane, s < 32 ? of[0] : of[1], s & 31);
  }
  __device__ __forceinline__ void set(int lane, int s, T value) {
    if (lane == (s & 31)) (s < 32 ? of[0] : of[1]) = value;
  }
};

// The largest logit and the sum of exp(l - largest) over the E experts.
struct Softmax {
  float best = 0, sum = 1;
};

template <class Source>
__device__ Softmax softmax_of(const DeviceRoute& r, const Source& source, int lane) {
  Softmax s{minus_infinity, 0};
  for (int e = lane; e < r.rule.experts; e += 32) {
    s.best = larger(s.best, finished(r, source(e), e));
  }
  s.best = warp_max(s.best);
  for (int e = lane; e < r.rule.experts; e += 32) {
    s.sum += exp_of_negative(finished(r, source(e), e) - s.best);
  }
  s.sum = warp_sum(s.sum);
  return s;
}

}  // namespace shunt::routing
