// Rows of logits in memory, as the gates read them: some tokens a warp, `lanes` lanes each.
#pragma once

#include <algorithm>

#include "route/fast_rows.cuh"
#include "shunt/tensor.hpp"

namespace shunt::routing {

struct Logits {
  const void* data = nullptr;
  Form form = Form::f32;
  std::int64_t stride = 0;
  bool runs = false;  // whole runs of a lane are aligned
};

// `run`: how many a lane reads that lie side by side.
inline Logits aligned_logits(const Tensor& logits, int experts, int run) {
  const std::int64_t size = logits.dtype == DType::f32 ? 4 : 2;
  const std::int64_t bytes = std::min<std::int64_t>(run * size, 16);
  const bool runs =
      experts % run == 0 &&
      reinterpret_cast<std::uintptr_t>(logits.data) % static_cast<std::size_t>(bytes) == 0 &&
      (logits.shape[0] == 1 || logits.strides[0] * size % bytes == 0);
  return {logits.data, static_cast<Form>(logits.dtype), logits.strides[0], runs};
}

// The logits of a warp's tokens.
struct RowsOfWarp {
  const char* data;
  std::int64_t bytes;  // from row to row
  Form form;
  __device__ RowsOfWarp(const Logits& logits, std::int64_t first)
      : bytes(logits.stride * (logits.form == Form::f32 ? 4 : 2)), form(logits.form) {
    data = static_cast<const char*>(logits.data) + first * bytes;
  }
  __device__ LogitRow row(int i) const { return {data + i * bytes, form}; }
  __device__ float operator()(int i, int e) const { return row(i)(e); }
};

template <class T, class S>
__device__ __forceinline__ void load_row(const T* row, bool runs, int experts, int q,
                                         float (&v)[S::held]) {
  struct alignas(S::run * sizeof(T) < 16 ? S::run * sizeof(T) : 16) Run {
    T of[S::run];
  };
  if (S::run == 1 || runs) {
#pragma unroll
    for (int i = 0; i < S::blocks; ++i) {
      const Run run =
          *reinterpret_cast<const Run*>(row + S::run_within(32 * i + q * S::run, experts));
#pragma unroll
      for (int j = 0; j < S::run; ++j) v[i * S::run + j] = static_cast<float>(run.of[j]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      v[n] = static_cast<float>(row[min(S::expert(n, q), experts - 1)]);
    }
  }
}

// A route of which is_deepseek_v3() is known, as one that the compiler knows it of.
template <class Route>
__device__ __forceinline__ Route as_deepseek_v3(Route r) {
  r.rule.top_k = 8;
  r.rule.keep = 4;
  r.rule.experts = 256;
  r.rule.weigh = Weigh::sigmoid;
  r.rule.scores_rank = r.rule.rank_by_two_best = r.rule.renormalize = true;
  r.rule.epsilon_is_floor = false;
  r.router_bias.data = r.per_expert_scale.data = nullptr;
  r.replay.data = nullptr;
  return r;
}

}  // namespace shunt::routing
