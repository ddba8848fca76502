// RouteSpec: what is legal, what it resolves to, its JSON, and its words.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/runtime.hpp"
#include "route/engine.hpp"

namespace shunt {

namespace {

constexpr int max_experts = 4096;
constexpr int max_top_k = 64;
constexpr int max_groups = 64;
constexpr int max_shared = 64;

const std::vector<std::string_view> score_names = {"none", "softmax", "sigmoid", "sqrt_softplus",
                                                   "sparsemixer"};
const std::vector<std::string_view> stage_names = {"before_top_k", "after_top_k"};
const std::vector<std::string_view> rank_names = {"max", "sum_of_top_2"};
const std::vector<std::string_view> epsilon_names = {"added", "floor"};
const std::vector<std::string_view> shared_names = {"one", "inverse_scale", "sum_over_scale",
                                                    "sigmoid_gate", "joint"};

template <class Enum>
std::string name_of(Enum value, const std::vector<std::string_view>& names) {
  return std::string(names.at(static_cast<std::size_t>(value)));
}

template <class Enum>
Support legal_enum(const char* field, Enum value, const std::vector<std::string_view>& names) {
  const auto number = static_cast<std::int32_t>(value);
  if (number >= 0 && static_cast<std::size_t>(number) < names.size()) return {};
  return refuse("RouteSpec.{} is {}: must be one of {}", field, number, fmt::join(names, ", "));
}

Support legal_int(const char* field, int value, int low, int high) {
  if (value >= low && value <= high) return {};
  return refuse("RouteSpec.{} is {}: must be {} to {}", field, value, low, high);
}

Support legal_float(const char* field, float value, bool zero_too) {
  if (std::isfinite(value) && (value > 0 || (zero_too && value == 0))) return {};
  return refuse("RouteSpec.{} is {}: must be finite and {}", field, value,
                zero_too ? "0 or above" : "above 0");
}

// Fields each by itself.
Support legal_fields(const RouteSpec& spec) {
  if (Support s = legal_int("experts", spec.experts, 1, max_experts); !s) return s;
  for (const Support& support :
       {legal_int("top_k", spec.top_k, 1, std::min(max_top_k, spec.experts)),
        legal_enum("score", spec.score, score_names),
        legal_enum("score_stage", spec.score_stage, stage_names),
        legal_enum("groups.rank_by", spec.groups.rank_by, rank_names),
        legal_enum("epsilon_rule", spec.epsilon_rule, epsilon_names),
        legal_enum("shared.weight", spec.shared.weight, shared_names),
        legal_int("groups.count", spec.groups.count, 1, std::min(max_groups, spec.experts)),
        legal_int("groups.keep", spec.groups.keep, 1, spec.groups.count),
        legal_int("groups.limit", spec.groups.limit, 0,
                  spec.groups.count > 1 ? spec.experts / spec.groups.count : 0),
        legal_int("shared.count", spec.shared.count, 0, max_shared),
        legal_float("logit_scale", spec.logit_scale, false),
        legal_float("soft_cap", spec.soft_cap, true),
        legal_float("renormalize_epsilon", spec.renormalize_epsilon, true),
        legal_float("scale", spec.scale, false), legal_float("jitter", spec.jitter, true)}) {
    if (!support) return support;
  }
  return {};
}

// Fields together: what no formula covers, or what one of them would silently ignore.
Support legal_together(const RouteSpec& spec) {
  const Groups& groups = spec.groups;
  if (spec.experts % groups.count != 0) {
    return refuse("RouteSpec.groups.count is {}: must divide experts, {}", groups.count,
                  spec.experts);
  }
  const int of_group = groups.limit > 0 ? groups.limit : spec.experts / groups.count;
  const int eligible = of_group * groups.keep;
  if (eligible < spec.top_k) {
    return refuse("RouteSpec.top_k is {}: must be at most {}, the experts in {} of {} groups{}",
                  spec.top_k, eligible, groups.keep, groups.count,
                  groups.limit > 0 ? fmt::format(", {} of each", groups.limit) : std::string());
  }
  if (spec.score == Score::sparsemixer) {
    if (spec.score_stage != ScoreStage::before_top_k) {
      return refuse("RouteSpec.score_stage is after_top_k: must be before_top_k with sparsemixer");
    }
    if (spec.selection_bias || groups.count > 1 || spec.hashed) {
      return refuse("RouteSpec.{}: must be {} with the score sparsemixer, which selects by itself",
                    spec.selection_bias ? "selection_bias is true"
                    : spec.hashed       ? "hashed is true"
                                        : fmt::format("groups.count is {}", groups.count),
                    spec.selection_bias || spec.hashed ? "false" : "1");
    }
  } else if (spec.jitter != 0) {
    return refuse("RouteSpec.jitter is {}: must be 0 but with the score sparsemixer", spec.jitter);
  }
  if (spec.hashed && (spec.selection_bias || groups.count > 1)) {
    return refuse("RouteSpec.{}: must be {} with hashed ids, which nothing selects",
                  spec.selection_bias ? "selection_bias is true"
                                      : fmt::format("groups.count is {}", groups.count),
                  spec.selection_bias ? "false" : "1");
  }
  if (spec.shared.count > 0 && spec.shared.weight == SharedWeight::joint) {
    if (!spec.renormalize) {
      return refuse("RouteSpec.renormalize is false: must be true with shared.weight joint");
    }
    if (spec.score != Score::sigmoid && spec.score != Score::sqrt_softplus) {
      return refuse(
          "RouteSpec.score is {}: must be sigmoid or sqrt_softplus with shared.weight "
          "joint",
          name_of(spec.score, score_names));
    }
  }
  return {};
}

std::string words_of_score(const RouteSpec& spec) {
  switch (spec.score) {
    case Score::none:
      return "logits";
    case Score::softmax:
      return spec.score_stage == ScoreStage::before_top_k ? "softmax scores" : "softmax";
    case Score::sigmoid:
      return spec.score_stage == ScoreStage::before_top_k ? "sigmoid scores" : "sigmoid";
    case Score::sqrt_softplus:
      return spec.score_stage == ScoreStage::before_top_k ? "sqrt(softplus) scores"
                                                          : "sqrt(softplus)";
    case Score::sparsemixer:
      return fmt::format("sparsemixer with jitter {}", spec.jitter);
  }
  return {};
}

std::string words_of_selection(const RouteSpec& spec) {
  if (spec.hashed) {
    return fmt::format("{} of {} experts by the token's hash", spec.top_k, spec.experts);
  }
  std::string text = fmt::format("best {} of {} experts", spec.top_k, spec.experts);
  if (spec.groups.count > 1) {
    if (spec.groups.limit > 0) text += fmt::format(", at most {} of a group,", spec.groups.limit);
    text += fmt::format(
        " in the best {} of {} groups by {}", spec.groups.keep, spec.groups.count,
        spec.groups.rank_by == GroupRank::max ? "their maximum" : "the sum of their two best");
  }
  if (spec.selection_bias) text += " after adding the selection bias";
  return text;
}

const char* words_of(SharedWeight weight) {
  switch (weight) {
    case SharedWeight::one:
      return "weight 1";
    case SharedWeight::inverse_scale:
      return "weight 1 / scale";
    case SharedWeight::sum_over_scale:
      return "weight sum / scale";
    case SharedWeight::sigmoid_gate:
      return "the weight of a sigmoid gate";
    case SharedWeight::joint:
      return "weights renormalised together with the others";
  }
  return "";
}

std::string words_of_shared(const RouteSpec& spec) {
  return fmt::format("{} shared expert{} with {}", spec.shared.count,
                     spec.shared.count == 1 ? "" : "s", words_of(spec.shared.weight));
}

}  // namespace

Support legal(const RouteSpec& spec) {
  if (Support support = legal_fields(spec); !support) return support;
  return legal_together(spec);
}

Support supports(const RouteSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("route", device);
}

routing::Rule resolve(const RouteSpec& spec) {
  using routing::Shared;
  using routing::Weigh;
  const bool after = spec.score_stage == ScoreStage::after_top_k;
  routing::Rule rule;
  rule.experts = spec.experts;
  rule.columns = spec.columns();
  rule.top_k = spec.top_k;
  rule.shared_count = spec.shared.count;
  rule.groups = spec.groups.count;
  rule.group_size = spec.experts / spec.groups.count;
  rule.keep = spec.groups.keep;
  rule.group_limit = spec.groups.limit;
  rule.rank_by_two_best = spec.groups.rank_by == GroupRank::sum_of_top_2;
  switch (spec.score) {
    case Score::none:
      rule.weigh = Weigh::logit;
      break;
    case Score::softmax:
      rule.weigh = after ? Weigh::softmax_of_selected : Weigh::softmax_of_all;
      break;
    case Score::sigmoid:
      rule.weigh = Weigh::sigmoid;
      break;
    case Score::sqrt_softplus:
      rule.weigh = Weigh::sqrt_softplus;
      break;
    case Score::sparsemixer:
      rule.weigh = Weigh::sparsemixer;
      break;
  }
  rule.scores_rank = !after && !spec.hashed && spec.score != Score::none &&
                     spec.score != Score::sparsemixer &&
                     (spec.selection_bias || (rule.groups > 1 && rule.rank_by_two_best));
  switch (spec.shared.weight) {
    case SharedWeight::one:
      rule.shared_constant = 1;
      break;
    case SharedWeight::inverse_scale:
      rule.shared_constant = 1 / spec.scale;
      break;
    case SharedWeight::sum_over_scale:
      rule.shared = Shared::sum_over_scale;
      break;
    case SharedWeight::sigmoid_gate:
      rule.shared = Shared::gate;
      break;
    case SharedWeight::joint:
      rule.shared = Shared::joint;
      break;
  }
  rule.renormalize = spec.renormalize;
  rule.epsilon_is_floor = spec.epsilon_rule == EpsilonRule::floor;
  rule.epsilon = spec.renormalize_epsilon;
  rule.factor = spec.scale_in_weights ? spec.scale : 1;
  rule.scale = spec.scale;
  rule.logit_scale = spec.logit_scale;
  rule.soft_cap = spec.soft_cap;
  rule.twice_jitter = 2 * spec.jitter;
  // Divided by their own sum, shares of all experts are those of the selected: the sum over all of
  // them cancels. The k best have k / E of it at least (of groups: the best of all has 1 / E), to
  // which less than 2^-25 of it adds nothing.
  const float least = rule.groups > 1 ? 1 : static_cast<float>(rule.top_k);
  const bool vanishes = rule.epsilon * static_cast<float>(rule.experts) < 0x1p-26F * least;
  if (rule.weigh == Weigh::softmax_of_all && rule.renormalize && vanishes && !rule.scores_rank &&
      rule.shared_count == 0 && !spec.hashed) {
    rule.weigh = Weigh::softmax_of_selected;
    rule.renormalize = false;
  }
  return rule;
}

std::string to_json(const RouteSpec& spec) {
  if (const Support support = legal(spec); !support) {
    fail(Status::invalid_argument, "{}", support.reason);
  }
  return SpecWriter()
      .add("experts", spec.experts)
      .add("top_k", spec.top_k)
      .add("score", name_of(spec.score, score_names))
      .add("score_stage", name_of(spec.score_stage, stage_names))
      .add("logit_scale", shortest(spec.logit_scale))
      .add("router_bias", spec.router_bias)
      .add("soft_cap", shortest(spec.soft_cap))
      .add("selection_bias", spec.selection_bias)
      .add("groups", SpecWriter()
                         .add("count", spec.groups.count)
                         .add("keep", spec.groups.keep)
                         .add("rank_by", name_of(spec.groups.rank_by, rank_names))
                         .add("limit", spec.groups.limit))
      .add("renormalize", spec.renormalize)
      .add("renormalize_epsilon", shortest(spec.renormalize_epsilon))
      .add("epsilon_rule", name_of(spec.epsilon_rule, epsilon_names))
      .add("scale", shortest(spec.scale))
      .add("scale_in_weights", spec.scale_in_weights)
      .add("per_expert_scale", spec.per_expert_scale)
      .add("hashed", spec.hashed)
      .add("jitter", shortest(spec.jitter))
      .add("shared", SpecWriter()
                         .add("count", spec.shared.count)
                         .add("weight", name_of(spec.shared.weight, shared_names)))
      .add("weight_on_input", spec.weight_on_input)
      .add("batch_invariant", spec.batch_invariant)
      .text();
}

RouteSpec route_spec_from_json(const std::string& text) {
  SpecReader reader("RouteSpec", text);
  RouteSpec spec;
  reader.require("experts");
  reader.require("top_k");
  reader.read("experts", spec.experts, 1, max_experts);
  reader.read("top_k", spec.top_k, 1, max_top_k);
  reader.read("score", spec.score, score_names);
  reader.read("score_stage", spec.score_stage, stage_names);
  reader.read("logit_scale", spec.logit_scale);
  reader.read("router_bias", spec.router_bias);
  reader.read("soft_cap", spec.soft_cap);
  reader.read("selection_bias", spec.selection_bias);
  if (auto groups = reader.object("groups")) {
    groups->read("count", spec.groups.count, 1, max_groups);
    groups->read("keep", spec.groups.keep, 1, max_groups);
    groups->read("rank_by", spec.groups.rank_by, rank_names);
    groups->read("limit", spec.groups.limit, 0, max_experts);
    groups->finish();
  }
  reader.read("renormalize", spec.renormalize);
  reader.read("renormalize_epsilon", spec.renormalize_epsilon);
  reader.read("epsilon_rule", spec.epsilon_rule, epsilon_names);
  reader.read("scale", spec.scale);
  reader.read("scale_in_weights", spec.scale_in_weights);
  reader.read("per_expert_scale", spec.per_expert_scale);
  reader.read("hashed", spec.hashed);
  reader.read("jitter", spec.jitter);
  if (auto shared = reader.object("shared")) {
    shared->read("count", spec.shared.count, 0, max_shared);
    shared->read("weight", spec.shared.weight, shared_names);
    shared->finish();
  }
  reader.read("weight_on_input", spec.weight_on_input);
  reader.read("batch_invariant", spec.batch_invariant);
  reader.finish();
  if (const Support support = legal(spec); !support) {
    fail(Status::invalid_argument, "{}", support.reason);
  }
  return spec;
}

std::string describe(const RouteSpec& spec) {
  std::string text = "logits";
  if (spec.logit_scale != 1) text += fmt::format(" times {}", spec.logit_scale);
  if (spec.router_bias) text += " with bias";
  if (spec.soft_cap > 0) text += fmt::format(", capped at {}", spec.soft_cap);
  const bool before = spec.score_stage == ScoreStage::before_top_k && spec.score != Score::none;
  if (before) text += "; " + words_of_score(spec);
  text += "; " + words_of_selection(spec);
  if (!before && spec.score != Score::none) text += "; " + words_of_score(spec) + " of those";
  if (spec.renormalize) {
    text += spec.renormalize_epsilon == 0 ? std::string("; weights over their sum")
            : spec.epsilon_rule == EpsilonRule::added
                ? fmt::format("; weights over their sum + {}", spec.renormalize_epsilon)
                : fmt::format("; weights over their sum, at least {}", spec.renormalize_epsilon);
  }
  if (spec.scale != 1) {
    text += fmt::format("; times {}", spec.scale);
    if (!spec.scale_in_weights) text += " by the caller";
  }
  if (spec.per_expert_scale) text += "; times a scale per expert";
  if (spec.shared.count > 0) text += "; " + words_of_shared(spec);
  if (spec.weight_on_input) text += "; weights multiply the input";
  if (spec.batch_invariant) text += "; the same bits in any batch";
  return text;
}

}  // namespace shunt
