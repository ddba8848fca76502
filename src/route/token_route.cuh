// What kernels are given that serve the usual rules alone.
#pragma once

#include "route/device.hpp"

namespace shunt::routing {

// DeviceRoute without what the fast kernels do not serve, in as few lines of constant memory.
struct TokenRoute {
  struct {
    int experts, top_k, keep;
    Weigh weigh;
    float epsilon, factor;
    bool rank_by_two_best, scores_rank, renormalize, epsilon_is_floor;
  } rule;
  std::int64_t tokens;
  const std::int32_t* valid_tokens;
  DeviceRows<std::int32_t> ids;
  DeviceRows<float> weights;
  DeviceRows<std::int16_t> replay;
  DeviceVector router_bias, selection_bias, per_expert_scale;

  __host__ __device__ explicit TokenRoute(const DeviceRoute& r)
      : rule{.experts = r.rule.experts,
             .top_k = r.rule.top_k,
             .keep = r.rule.keep,
             .weigh = r.rule.weigh,
             .epsilon = r.rule.epsilon,
             .factor = r.rule.factor,
             .rank_by_two_best = r.rule.rank_by_two_best,
             .scores_rank = r.rule.scores_rank,
             .renormalize = r.rule.renormalize,
             .epsilon_is_floor = r.rule.epsilon_is_floor},
        tokens(r.tokens),
        valid_tokens(r.valid_tokens),
        ids(r.ids),
        weights(r.weights),
        replay(r.replay),
        router_bias(r.router_bias),
        selection_bias(r.selection_bias),
        per_expert_scale(r.per_expert_scale) {}
};

// Of a token past the valid ones. Not inlined, so as not to lie in the way of the others.
__device__ __noinline__ inline void clear_slot(const TokenRoute& r, std::int64_t t, int slot) {
  if (slot >= r.rule.top_k) return;
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + slot] = -1;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + slot] = 0;
  if (r.replay.data != nullptr) r.replay.data[t * r.replay.stride + slot] = -1;
}

}  // namespace shunt::routing
