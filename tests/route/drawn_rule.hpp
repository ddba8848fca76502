// A rule of routing whose every property is drawn at random.
#pragma once

#include <algorithm>
#include <cstdint>

#include "drawn.hpp"
#include "shunt/route.hpp"

namespace shunt::test {

// Of about so many experts, from 1 on.
inline RouteSpec drawn_rule(Draw& draw, int experts) {
  RouteSpec r{.experts = experts};
  if (draw.one_in(3)) {
    r.groups.count = static_cast<int>(draw.between(1, std::min(8, experts)));
    r.experts = (experts + r.groups.count - 1) / r.groups.count * r.groups.count;
    r.groups.keep = static_cast<int>(draw.between(1, r.groups.count));
    r.groups.rank_by = draw.any({GroupRank::max, GroupRank::sum_of_top_2});
  }
  r.score = draw.any({Score::none, Score::softmax, Score::softmax, Score::sigmoid,
                      Score::sqrt_softplus, Score::sparsemixer});
  r.score_stage = draw.any({ScoreStage::before_top_k, ScoreStage::after_top_k});
  r.router_bias = draw.one_in(4);
  r.selection_bias = draw.one_in(3);
  if (draw.one_in(6)) r.soft_cap = 5;
  // Of logits themselves a sum may be next to nothing.
  r.renormalize = r.score != Score::none && draw.one_in(2);
  r.renormalize_epsilon = draw.any({1e-20f, 0.0f, 1e-3f});
  r.epsilon_rule = draw.any({EpsilonRule::added, EpsilonRule::floor});
  r.scale = draw.any({1.0f, 1.0f, 2.5f, 0.5f});
  r.per_expert_scale = draw.one_in(6);
  r.hashed = draw.one_in(10);
  r.weight_on_input = draw.one_in(5);
  r.batch_invariant = draw.one_in(6);
  if (draw.one_in(6)) {
    r.shared.count = static_cast<int>(draw.between(1, 3));
    r.shared.weight = draw.any({SharedWeight::one, SharedWeight::inverse_scale,
                                SharedWeight::sum_over_scale, SharedWeight::joint});
    if (r.score == Score::none && r.shared.weight == SharedWeight::sum_over_scale) {
      r.shared.weight = SharedWeight::one;
    }
  }
  if (r.shared.weight == SharedWeight::joint) {
    r.score = draw.any({Score::sigmoid, Score::sqrt_softplus});
    r.renormalize = true;
  }
  if (r.score == Score::sparsemixer) {
    r.score_stage = ScoreStage::before_top_k;
    r.selection_bias = r.hashed = false;
    r.groups = {};
    r.jitter = draw.any({0.0f, 0.01f});
  }
  if (r.hashed) {
    r.selection_bias = false;
    r.groups = {};
  }
  if (draw.one_in(6)) r.logit_scale = draw.any({0.3f, 1.7f});
  const int of_group = r.experts / r.groups.count;
  if (r.groups.count > 1 && draw.one_in(3)) {
    r.groups.limit = static_cast<int>(draw.between(1, of_group));
  }
  const int eligible = (r.groups.limit > 0 ? r.groups.limit : of_group) * r.groups.keep;
  r.top_k = static_cast<int>(draw.between(1, std::min(eligible, draw.one_in(6) ? 20 : 8)));
  return r;
}

}  // namespace shunt::test
