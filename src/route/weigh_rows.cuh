// The weights of one token's experts by one warp, from the logits of the chosen; and what is stored
// of them beside the usual: shared experts' slots, dense rows, rows past the count.
#pragma once

#include "route/row.cuh"

namespace shunt::routing {

// ---- weights -----------------------------------------------------------------------------------

// Phi-3.5: each of the k rounds has a softmax of its own over what is left.
template <class Source>
__device__ __noinline__ Slots<float> sparsemixer(const DeviceRoute& r, const Source& source,
                                                 const Slots<std::int32_t>& ids, int lane) {
  Slots<float> weights{{0, 0}};
  for (int k = 0; k < r.rule.top_k; ++k) {
    const int chosen = ids.get(k);
    const float best = finished(r, source(chosen), chosen);
    float sum = 0;
    for (int first = 0; first < r.rule.experts; first += 32) {
      const int e = first + lane;
      bool taken = e >= r.rule.experts;
      for (int j = 0; j < k; ++j) taken = ids.get(j) == e || taken;
      float term = 0;
      if (!taken) {
        const float l = finished(r, source(e), e);
        if (sparsemixer_keeps(l, best, r.rule.twice_jitter)) term = exp_of_negative(l - best);
      }
      sum += term;
    }
    weights.set(lane, k, 1.0F / warp_sum(sum));
  }
  return weights;
}

__device__ __forceinline__ float sum_of_slots(const Slots<float>& w, int count) {
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += w.get(k);
  return sum;
}

// Weights before renormalisation of the k selected.
template <class Source>
__device__ __forceinline__ Slots<float> weigh(const DeviceRoute& r, const Source& source,
                                              const Softmax& softmax,
                                              const Slots<std::int32_t>& ids, int lane) {
  const Rule& rule = r.rule;
  const Weigh kind = rule.weigh;
  if (kind == Weigh::sparsemixer) return sparsemixer(r, source, ids, lane);
  Slots<float> l{{minus_infinity, minus_infinity}};
  const int halves = rule.top_k > 32 ? 2 : 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int id = ids.of[half];
    if (half < halves && lane + 32 * half < rule.top_k && id >= 0) {
      l.of[half] = finished(r, source(id), id);
    }
  }
  Slots<float> w{{0, 0}};
  float best = 0;
  if (kind == Weigh::softmax_of_selected) best = warp_max(larger(l.of[0], l.of[1]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half >= halves || lane + 32 * half >= rule.top_k || ids.of[half] < 0) continue;
    switch (kind) {
      case Weigh::softmax_of_all:
        w.of[half] = exp_of_negative(l.of[half] - softmax.best) / softmax.sum;
        break;
      case Weigh::softmax_of_selected:
        w.of[half] = exp_of_negative(l.of[half] - best);
        break;
      case Weigh::sigmoid:
        w.of[half] = sigmoid(l.of[half]);
        break;
      case Weigh::sqrt_softplus:
        w.of[half] = sqrt_softplus(l.of[half]);
        break;
      default:
        w.of[half] = l.of[half];
        break;
    }
  }
  if (kind == Weigh::softmax_of_selected) {
    const float sum = sum_of_slots(w, rule.top_k);
    if (ids.of[0] >= 0) w.of[0] = w.of[0] / sum;
    if (ids.of[1] >= 0) w.of[1] = w.of[1] / sum;
  }
  return w;
}

template <class Route>
__device__ __forceinline__ float final_weight(const Route& r, float w, float sum, std::int32_t id) {
  if (r.rule.renormalize) w = renormalised(w, sum, r.rule.epsilon, r.rule.epsilon_is_floor);
  w = w * r.rule.factor;
  if (r.per_expert_scale.data != nullptr) w = w * element(r.per_expert_scale, id);
  return w;
}

template <class Source>
__device__ __forceinline__ float shared_score(const DeviceRoute& r, const Source& source, int i) {
  const int column = r.rule.experts + i;
  const float l = finished(r, source(column), column);
  return r.rule.weigh == Weigh::sigmoid ? sigmoid(l) : sqrt_softplus(l);
}

// The weights of shared slots, each by the lane it belongs to; `sum` over all weighed slots.
template <class Source>
__device__ __noinline__ void store_shared(const DeviceRoute& r, const Source& source,
                                          std::int64_t t, float sum, int lane) {
  const Rule& rule = r.rule;
  for (int i = lane; i < rule.shared_count; i += 32) {
    float w = rule.shared_constant;
    if (rule.shared == Shared::sum_over_scale) w = sum / rule.scale;
    if (rule.shared == Shared::gate) {
      w = sigmoid(sanitised(r.shared_logits.data[t * r.shared_logits.stride + i]));
    }
    if (rule.shared == Shared::joint) {
      w = final_weight(r, shared_score(r, source, i), sum, rule.experts + i);
    }
    w = finite_weight(w);
    const int slot = rule.top_k + i;
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + slot] = rule.experts + i;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + slot] = w;
    if (r.dense.data != nullptr) r.dense.data[t * r.dense.stride + rule.experts + i] = w;
  }
}

// The ids of a hash table; -1 where token or entry is out of range.
__device__ inline Slots<std::int32_t> look_up(const DeviceRoute& r, std::int64_t t, int lane) {
  Slots<std::int32_t> ids{{-1, -1}};
  const std::int64_t token = element(r.token_ids, t * r.token_stride);
  if (token < 0 || token >= r.vocabulary) return ids;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = lane + 32 * half;
    if (s >= r.rule.top_k) continue;
    const std::int64_t id =
        element(r.hash_table, token * r.hash_row_stride + s * r.hash_column_stride);
    if (id >= 0 && id < r.rule.experts) ids.of[half] = static_cast<std::int32_t>(id);
  }
  return ids;
}

__device__ __noinline__ inline void store_dense(const DeviceRoute& r, std::int64_t t,
                                                const Slots<std::int32_t>& ids,
                                                const Slots<float>& w, int lane) {
  float* const row = r.dense.data + t * r.dense.stride;
  for (int e = lane; e < r.rule.experts; e += 32) row[e] = 0;
  __syncwarp();
  for (int k = 0; k < r.rule.top_k; ++k) {  // in order: a hash table may repeat an id
    const std::int32_t id = ids.get(k);
    const float weight = w.get(k);
    if (lane == 0 && id >= 0) row[id] = finite_weight(row[id] + weight);
  }
}

// A row past the valid tokens.
__device__ __noinline__ inline void clear_row(const DeviceRoute& r, std::int64_t t, int lane) {
  for (int s = lane; s < r.rule.top_k + r.rule.shared_count; s += 32) {
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + s] = -1;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + s] = 0;
    if (r.replay.data != nullptr && s < r.rule.top_k) r.replay.data[t * r.replay.stride + s] = -1;
  }
  if (r.dense.data != nullptr) {
    for (int e = lane; e < r.rule.experts + r.rule.shared_count; e += 32) {
      r.dense.data[t * r.dense.stride + e] = 0;
    }
  }
  if (r.logits_out.data != nullptr) {
    for (int c = lane; c < r.rule.columns; c += 32) {
      r.logits_out.data[t * r.logits_out.stride + c] = 0;
    }
  }
}

template <class Route>
__device__ __forceinline__ std::int64_t valid_tokens(const Route& r) {
  if (r.valid_tokens == nullptr) return r.tokens;
  const std::int64_t valid = *r.valid_tokens;
  return valid < 0 ? 0 : valid < r.tokens ? valid : r.tokens;
}

}  // namespace shunt::routing
