// The meaning of route: one token, in double, in the words of route.hpp. Tests compare every engine
// with this.
#pragma once

#include <span>
#include <vector>

#include "shunt/route.hpp"

namespace shunt {

// Of one token; empty where the spec does not ask for it.
struct RouteReferenceInputs {
  std::vector<double> logits;  // [C]
  std::vector<double> router_bias;
  std::vector<double> selection_bias;
  std::vector<double> per_expert_scale;
  std::vector<double> shared_logits;
  std::vector<int> hashed;  // the token's k ids
};

struct RouteReference {
  std::vector<int> ids;         // [S]
  std::vector<double> weights;  // [S]
  std::vector<double> logits;   // [C], biased, cleaned and capped
  // For judging how clear the choice was: what was compared, and the groups' ranks.
  std::vector<double> compared;     // [E], -inf in dropped groups
  std::vector<double> group_ranks;  // [groups]
};

RouteReference route_reference(const RouteSpec& spec, const RouteReferenceInputs& in);

}  // namespace shunt
