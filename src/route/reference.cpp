#include "route/reference.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

namespace shunt {

namespace {

using Values = std::vector<double>;

constexpr auto largest = static_cast<double>(FLT_MAX);

double clean(double x) {
  if (std::isnan(x)) return -largest;
  return std::clamp(x, -largest, largest);
}

Values softmax(Values x) {
  const double best = *std::max_element(x.begin(), x.end());
  for (double& v : x) v = std::exp(v - best);
  const double sum = std::accumulate(x.begin(), x.end(), 0.0);
  for (double& v : x) v /= sum;
  return x;
}

Values scored(Score score, Values x) {
  if (score == Score::softmax) return softmax(x);
  for (double& v : x) {
    if (score == Score::sigmoid)
      v = v < 0 ? std::exp(v) / (1 + std::exp(v)) : 1 / (1 + std::exp(-v));
    if (score == Score::sqrt_softplus) {
      v = std::sqrt(std::max(v, 0.0) + std::log1p(std::exp(-std::abs(v))));
    }
  }
  return x;
}

// The `count` best, best first, ties to the lower id.
std::vector<int> top(const Values& x, int count) {
  std::vector<int> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const double q_a = x[static_cast<std::size_t>(a)];
    const double q_b = x[static_cast<std::size_t>(b)];
    return q_a != q_b ? q_a > q_b : a < b;
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

Values gathered(const Values& x, const std::vector<int>& ids) {
  Values y;
  for (const int id : ids) y.push_back(x[static_cast<std::size_t>(id)]);
  return y;
}

double group_rank(GroupRank rank_by, Values group) {
  std::sort(group.rbegin(), group.rend());
  return rank_by == GroupRank::max || group.size() == 1 ? group[0] : group[0] + group[1];
}

// The k rounds of Phi-3.5 for ids already in order.
Values sparsemixer(Values l, const std::vector<int>& ids, double jitter) {
  constexpr double gone = -std::numeric_limits<double>::infinity();
  Values weights;
  for (const int id : ids) {
    const double best = l[static_cast<std::size_t>(id)];
    Values kept = l;
    for (double& v : kept) {
      // In f32, as published: at the boundary itself 2 * 0.01f in double would be another number.
      const auto gap = static_cast<float>((best - v) / std::max(std::abs(v), best));
      if (static_cast<double>(gap) > 2 * jitter) v = gone;
    }
    weights.push_back(softmax(kept)[static_cast<std::size_t>(id)]);
    l[static_cast<std::size_t>(id)] = gone;
  }
  return weights;
}

}  // namespace

RouteReference route_reference(const RouteSpec& spec, const RouteReferenceInputs& in) {
  RouteReference out;
  const auto cap = static_cast<double>(spec.soft_cap);
  const auto scale = static_cast<double>(spec.scale);
  const auto epsilon = static_cast<double>(spec.renormalize_epsilon);
  const auto experts = static_cast<std::size_t>(spec.experts);
  const bool before = spec.score_stage == ScoreStage::before_top_k;

  Values l = in.logits;
  for (std::size_t c = 0; c < l.size(); ++c) {
    const double scaled = static_cast<double>(spec.logit_scale) * l[c];
    l[c] = clean(spec.router_bias ? scaled + in.router_bias[c] : scaled);
    if (cap > 0) l[c] = cap * std::tanh(l[c] / cap);
  }
  out.logits = l;
  const Values shared_l(l.begin() + spec.experts, l.end());
  l.resize(experts);
  const Values p = before ? scored(spec.score, l) : l;

  // q, and what ranks the groups. Where the order of p is that of l, l is compared.
  Values q = l;
  Values ranking = spec.groups.rank_by == GroupRank::max ? l : p;
  if (spec.selection_bias) {
    for (std::size_t e = 0; e < experts; ++e) q[e] = clean(p[e] + in.selection_bias[e]);
    ranking = q;
  }
  if (spec.groups.count > 1) {
    const auto size = static_cast<std::ptrdiff_t>(experts) / spec.groups.count;
    for (int g = 0; g < spec.groups.count; ++g) {
      const auto first = ranking.begin() + g * size;
      out.group_ranks.push_back(group_rank(spec.groups.rank_by, Values(first, first + size)));
    }
    std::vector<bool> kept(out.group_ranks.size());
    for (const int g : top(out.group_ranks, spec.groups.keep))
      kept[static_cast<std::size_t>(g)] = true;
    for (std::size_t e = 0; e < experts; ++e) {
      if (!kept[e / static_cast<std::size_t>(size)])
        q[e] = -std::numeric_limits<double>::infinity();
    }
  }
  out.compared = q;
  out.ids = spec.hashed ? in.hashed : top(q, spec.top_k);
  if (spec.groups.limit > 0) {
    out.ids.clear();
    std::vector<int> taken(static_cast<std::size_t>(spec.groups.count));
    for (const int id : top(q, spec.experts)) {
      const int group = id / (spec.experts / spec.groups.count);
      const bool open = taken[static_cast<std::size_t>(group)]++ < spec.groups.limit;
      if (open && out.ids.size() < static_cast<std::size_t>(spec.top_k)) out.ids.push_back(id);
    }
  }

  Values w = gathered(p, out.ids);
  if (!before) w = scored(spec.score, w);
  if (spec.score == Score::sparsemixer)
    w = sparsemixer(l, out.ids, static_cast<double>(spec.jitter));
  const double selected_sum = std::accumulate(w.begin(), w.end(), 0.0);
  Values shared;
  for (int i = 0; i < spec.shared.count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    out.ids.push_back(spec.experts + i);
    switch (spec.shared.weight) {
      case SharedWeight::one:
        shared.push_back(1);
        break;
      case SharedWeight::inverse_scale:
        shared.push_back(1 / scale);
        break;
      case SharedWeight::sum_over_scale:
        shared.push_back(selected_sum / scale);
        break;
      case SharedWeight::sigmoid_gate:
        shared.push_back(scored(Score::sigmoid, {clean(in.shared_logits[at])})[0]);
        break;
      case SharedWeight::joint:
        w.push_back(scored(spec.score, {shared_l[at]})[0]);
        break;
    }
  }
  const double sum = std::accumulate(w.begin(), w.end(), 0.0);
  const double denominator =
      spec.epsilon_rule == EpsilonRule::added ? sum + epsilon : std::max(sum, epsilon);
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (spec.renormalize) w[i] = denominator == 0 ? 0 : w[i] / denominator;
    if (spec.scale_in_weights) w[i] *= scale;
    if (spec.per_expert_scale) w[i] *= in.per_expert_scale[static_cast<std::size_t>(out.ids[i])];
  }
  w.insert(w.end(), shared.begin(), shared.end());
  for (double& v : w) v = std::isnan(v) ? 0 : std::clamp(v, -largest, largest);
  out.weights = w;
  return out;
}

}  // namespace shunt
