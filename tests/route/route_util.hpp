// Cases of route, run by an engine and judged by the reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "route/reference.hpp"
#include "shunt/route.hpp"

namespace shunt::test {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// What a GPU's sum over `width` products may lose beside roundings: tensor cores align what an
// instruction adds, 16 products and the sum so far, which is at most `largest`. A router for which
// H is one part (8.0, 8.9) has it all.
inline double tensor_core_loss(std::int64_t width, double largest) {
  return on_gpu() ? 0x1p-23 * static_cast<double>((width + 15) / 16) * largest : 0;
}

// Logits and all that a spec may ask for.
struct RouteCase {
  RouteSpec spec;
  std::int64_t tokens = 0;
  std::vector<float> logits;  // [T, C]
  std::vector<float> router_bias, selection_bias, per_expert_scale, shared_logits;
  std::vector<std::int32_t> token_ids;
  std::vector<std::int64_t> hash_table;  // [V, k]
  int vocabulary = 11;

  RouteCase(const RouteSpec& s, std::int64_t t) : spec(s), tokens(t) {
    logits.resize(at(t * spec.columns()));
  }
  std::int64_t columns() const { return spec.columns(); }
  float* row(std::int64_t t) { return logits.data() + t * columns(); }

  RouteInputs extras() const {
    RouteInputs in;
    const std::int64_t c = spec.columns();
    if (spec.router_bias) in.router_bias = view(router_bias.data(), {c});
    if (spec.selection_bias) in.selection_bias = view(selection_bias.data(), {spec.experts});
    if (spec.per_expert_scale) in.per_expert_scale = view(per_expert_scale.data(), {c});
    if (spec.hashed) {
      in.token_ids = view(token_ids.data(), {tokens});
      in.hash_table = view(hash_table.data(), {vocabulary, spec.top_k});
    }
    if (spec.shared.count > 0 && spec.shared.weight == SharedWeight::sigmoid_gate) {
      in.shared_logits = view(shared_logits.data(), {tokens, spec.shared.count});
    }
    return in;
  }
  RouteInputs inputs() const {
    RouteInputs in = extras();
    in.logits = view(logits.data(), {tokens, spec.columns()});
    return in;
  }

  RouteReference reference(std::int64_t t) const {
    const auto doubles = [](auto first, auto last) { return std::vector<double>(first, last); };
    const auto all = [&](const auto& v) { return doubles(v.begin(), v.end()); };
    RouteReferenceInputs in;
    const auto row_begin = logits.begin() + t * spec.columns();
    in.logits = doubles(row_begin, row_begin + spec.columns());
    in.router_bias = all(router_bias);
    in.selection_bias = all(selection_bias);
    in.per_expert_scale = all(per_expert_scale);
    if (!shared_logits.empty()) {
      const auto shared = shared_logits.begin() + t * spec.shared.count;
      in.shared_logits = doubles(shared, shared + spec.shared.count);
    }
    if (spec.hashed) {
      const auto ids = hash_table.begin() + token_ids[at(t)] * spec.top_k;
      in.hashed.assign(ids, ids + spec.top_k);
    }
    return route_reference(spec, in);
  }
};

struct RouteResult {
  std::vector<std::int32_t> ids;     // [T, S]
  std::vector<float> weights;        // [T, S]
  std::vector<float> dense;          // [T, E + shared]
  std::vector<float> logits;         // [T, C]
  std::vector<std::int16_t> replay;  // [T, k]

  RouteResult(const RouteSpec& spec, std::int64_t tokens)
      : ids(at(tokens * spec.slots()), -7),
        weights(at(tokens * spec.slots()), -7),
        dense(at(tokens * (spec.experts + spec.shared.count)), -7),
        logits(at(tokens * spec.columns()), -7),
        replay(at(tokens * spec.top_k), -7) {}
  RouteOutputs outputs(const RouteSpec& spec, std::int64_t tokens) const {
    return {.ids = view(ids.data(), {tokens, spec.slots()}),
            .weights = view(weights.data(), {tokens, spec.slots()}),
            .dense = view(dense.data(), {tokens, spec.experts + spec.shared.count}),
            .logits = view(logits.data(), {tokens, spec.columns()}),
            .replay = view(replay.data(), DType::i16, {tokens, spec.top_k})};
  }
  // To the bit: no NaN compares equal to itself otherwise.
  bool operator==(const RouteResult& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
    };
    return same(ids, other.ids) && same(weights, other.weights) && same(dense, other.dense) &&
           same(logits, other.logits) && same(replay, other.replay);
  }
};

inline RouteInputs mirrored(Mirror& mirror, const RouteInputs& in) {
  return {.logits = mirror.in(in.logits),
          .hidden = mirror.in(in.hidden),
          .router_weight = mirror.in(in.router_weight),
          .router_bias = mirror.in(in.router_bias),
          .selection_bias = mirror.in(in.selection_bias),
          .per_expert_scale = mirror.in(in.per_expert_scale),
          .token_ids = mirror.in(in.token_ids),
          .hash_table = mirror.in(in.hash_table),
          .shared_logits = mirror.in(in.shared_logits),
          .valid_tokens = mirror.in(in.valid_tokens)};
}
inline RouteOutputs mirrored(Mirror& mirror, const RouteOutputs& out) {
  return {.ids = mirror.out(out.ids),
          .weights = mirror.out(out.weights),
          .dense = mirror.out(out.dense),
          .logits = mirror.out(out.logits),
          .replay = mirror.out(out.replay)};
}

// route() on tensors of the host, whatever the engine.
inline void route_on(const Context& context, const RouteSpec& spec, const RouteInputs& in,
                     const RouteOutputs& out) {
  Mirror mirror(context);
  const Tensor& rows = in.logits ? in.logits : in.hidden;
  const Buffer workspace = context.allocate(
      route_workspace_bytes(context, spec, rows.shape[0], in.hidden ? in.hidden.shape[1] : 0));
  route(context, spec, mirrored(mirror, in), mirrored(mirror, out), workspace);
  mirror.fetch();
}

inline RouteResult run(const Context& context, const RouteSpec& spec, const RouteInputs& in) {
  const Tensor& rows = in.logits ? in.logits : in.hidden;
  const std::int64_t tokens = rows.shape[0];
  RouteResult out(spec, tokens);
  route_on(context, spec, in, out.outputs(spec, tokens));
  return out;
}

inline RouteResult run(const Context& context, const RouteCase& c) {
  return run(context, c.spec, c.inputs());
}

// What an engine in f32 may be off by.
struct Room {
  double logit = 0;                     // absolute
  double weight = 0;                    // relative, of p and of weights
  double bias = 0;                      // the largest selection bias
  bool biased = false, scores = false;  // q = .. + bias; q of scores
  static constexpr double unit = 6e-8;  // half a unit in the last place of f32, relative

  double of_value(double v, bool of_scores, double parts) const {
    const double magnitude = std::isfinite(v) ? std::abs(v) + 2 * bias : 0;
    double room = of_scores ? parts * magnitude * weight : parts * logit;
    if (biased || parts > 1) room += 2 * parts * unit * magnitude;
    return room;
  }
  // Of q, and of the rank of a group.
  double compared(double q) const { return of_value(q, biased && scores, 1); }
  double rank(double r, GroupRank by) const {
    return by == GroupRank::max ? compared(r) : of_value(r, scores, 2);
  }
};
// Whether logits that a router reports would be another's, were they given to the same rule again.
inline bool finishes_logits(const RouteSpec& spec) {
  return spec.router_bias || spec.soft_cap > 0 || spec.logit_scale != 1;
}

inline Room room_of(const RouteCase& c, const RouteReference& r) {
  const auto [low, high] = std::minmax_element(r.logits.begin(), r.logits.end());
  const double magnitude = std::max(std::abs(*low), std::abs(*high));
  Room room;
  if (c.spec.logit_scale != 1) {  // before a bias that may all but cancel it
    double before = magnitude;
    for (const float b : c.router_bias) before += static_cast<double>(std::abs(b));
    room.logit += 2 * Room::unit * before;
  }
  if (c.spec.router_bias) room.logit += 2 * Room::unit * magnitude;
  if (c.spec.soft_cap > 0) room.logit += 6 * Room::unit * magnitude;
  // exp and the divisions are off by some units; a rounded exponent multiplies by its error.
  room.weight = 30 * Room::unit + 2 * Room::unit * (*high - *low) + 2 * room.logit;
  for (const float b : c.selection_bias) {
    room.bias = std::max(room.bias, static_cast<double>(std::abs(b)));
  }
  room.biased = c.spec.selection_bias;
  room.scores = c.spec.score_stage == ScoreStage::before_top_k && c.spec.score != Score::none &&
                c.spec.score != Score::sparsemixer;
  return room;
}

// Whether rounding may put an expert on either side of sparsemixer's threshold.
inline bool near_threshold(const RouteSpec& spec, const RouteReference& r) {
  for (int s = 0; s < spec.top_k; ++s) {
    const double best = r.logits[at(r.ids[at(s)])];
    for (const double l : r.logits) {
      const double ratio = (best - l) / std::max(std::abs(l), best);
      if (std::abs(ratio - 2 * static_cast<double>(spec.jitter)) < 1e-6) return true;
    }
  }
  return false;
}

// Compares row t of an engine's result with the reference. Returns false where the choice is too
// close to call, and only what must hold anyway was checked.
inline bool check_row(const RouteCase& c, const RouteResult& out, std::int64_t t) {
  const RouteSpec& spec = c.spec;
  const RouteReference ref = c.reference(t);
  const std::int32_t* ids = out.ids.data() + t * spec.slots();
  const float* weights = out.weights.data() + t * spec.slots();
  const float* dense = out.dense.data() + t * (spec.experts + spec.shared.count);
  const Room room = room_of(c, ref);

  for (std::int64_t e = 0; e < spec.columns(); ++e) {
    const double l = ref.logits[at(e)];
    EXPECT_NEAR(static_cast<double>(out.logits[at(t * spec.columns() + e)]), l,
                room.logit + 1e-6 * std::abs(l))
        << "token " << t << " logit " << e;
  }
  std::set<std::int32_t> seen;
  std::vector<double> expected_dense(at(spec.experts + spec.shared.count));
  for (int s = 0; s < spec.slots(); ++s) {
    EXPECT_GE(ids[s], s < spec.top_k ? 0 : spec.experts);
    EXPECT_LT(ids[s], s < spec.top_k ? spec.experts : spec.experts + spec.shared.count);
    if (!spec.hashed) {
      EXPECT_TRUE(seen.insert(ids[s]).second) << "token " << t << ": id twice: " << ids[s];
    }
    EXPECT_TRUE(std::isfinite(weights[s])) << "token " << t << " slot " << s;
    expected_dense[at(ids[s])] += static_cast<double>(weights[s]);
  }
  for (std::size_t e = 0; e < expected_dense.size(); ++e) {
    EXPECT_NEAR(static_cast<double>(dense[e]), expected_dense[e],
                1e-6 * std::abs(expected_dense[e]));
  }

  for (int k = 0; k < spec.top_k; ++k) {
    EXPECT_EQ(out.replay[at(t * spec.top_k + k)], ids[k]) << "token " << t;
  }

  bool clear = true;
  if (!spec.hashed) {
    std::vector<double> ranks = ref.group_ranks;
    if (!ranks.empty() && spec.groups.keep < spec.groups.count) {
      std::sort(ranks.rbegin(), ranks.rend());
      const double last = ranks[at(spec.groups.keep - 1)];
      const double gap = last - ranks[at(spec.groups.keep)];
      clear = gap == 0 || gap > room.rank(last, spec.groups.rank_by);
    }
    // Each id is the best that was left, but for rounding.
    std::vector<double> left = ref.compared;
    std::vector<int> taken(at(spec.groups.count));
    for (int s = 0; clear && s < spec.top_k; ++s) {
      const auto best = std::max_element(left.begin(), left.end());
      if (ids[s] != best - left.begin()) {
        const double tolerance = room.compared(*best);
        EXPECT_GT(tolerance, 0) << "token " << t << " slot " << s << ": " << ids[s]
                                << " instead of " << best - left.begin();
        EXPECT_GE(left[at(ids[s])], *best - tolerance)
            << "token " << t << " slot " << s << ": " << ids[s] << " instead of "
            << best - left.begin();
        clear = false;
      }
      left[at(ids[s])] = -std::numeric_limits<double>::infinity();
      const int size = spec.experts / spec.groups.count, group = ids[s] / size;
      if (++taken[at(group)] == spec.groups.limit) {
        std::fill_n(left.begin() + group * size, size, -std::numeric_limits<double>::infinity());
      }
    }
  }
  if (spec.score == Score::sparsemixer && near_threshold(spec, ref)) clear = false;
  if (!clear) return false;
  for (int s = 0; s < spec.slots(); ++s) {
    EXPECT_EQ(ids[s], ref.ids[at(s)]) << "token " << t << " slot " << s;
    const double w = ref.weights[at(s)];
    EXPECT_NEAR(static_cast<double>(weights[s]), w, room.weight * std::abs(w) + 1e-37)
        << "token " << t << " slot " << s << " id " << ids[s];
  }
  return true;
}

inline void check(const RouteCase& c, const RouteResult& out) {
  std::int64_t unclear = 0;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    unclear += check_row(c, out, t) ? 0 : 1;
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "with " << to_json(c.spec);
      return;
    }
  }
  // Over many selected of many experts, something is near the threshold in most rows.
  if (c.spec.score == Score::sparsemixer) return;
  EXPECT_LE(unclear, 1 + c.tokens / 10) << to_json(c.spec);
}

enum class Values { normal, permuted, coarse };

// A case with everything that its spec asks for. `permuted` logits have no ties and are exact in
// bf16 up to 256 experts; `coarse` ones have many.
inline RouteCase random_case(const RouteSpec& spec, std::int64_t tokens, unsigned seed,
                             Values values = Values::normal) {
  RouteCase c(spec, tokens);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& v, std::int64_t size, float mean, float deviation) {
    v.resize(at(size));
    for (float& x : v) x = mean + deviation * normal(random);
  };
  const std::int64_t columns = spec.columns();
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* row = c.row(t);
    for (std::int64_t e = 0; e < columns; ++e) {
      row[e] = values == Values::permuted ? static_cast<float>(e - columns / 2) / 32
                                          : 2 * normal(random);
      if (values == Values::coarse) row[e] = std::round(row[e]) / 2;
    }
    if (values == Values::permuted) std::shuffle(row, row + columns, random);
  }
  if (spec.router_bias) fill(c.router_bias, columns, 0, 0.5F);
  if (spec.selection_bias) fill(c.selection_bias, spec.experts, 0, 0.2F);
  if (spec.per_expert_scale) fill(c.per_expert_scale, columns, 1, 0.3F);
  if (spec.shared.count > 0 && spec.shared.weight == SharedWeight::sigmoid_gate) {
    fill(c.shared_logits, tokens * spec.shared.count, 0, 2);
  }
  if (spec.hashed) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      c.token_ids.push_back(static_cast<std::int32_t>(random() % unsigned(c.vocabulary)));
    }
    std::vector<std::int64_t> experts(at(spec.experts));
    for (std::size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<std::int64_t>(e);
    for (int v = 0; v < c.vocabulary; ++v) {
      std::shuffle(experts.begin(), experts.end(), random);
      c.hash_table.insert(c.hash_table.end(), experts.begin(), experts.begin() + spec.top_k);
    }
  }
  return c;
}

inline std::vector<std::uint16_t> narrowed(const std::vector<float>& values, DType dtype) {
  std::vector<std::uint16_t> out;
  for (const float v : values) out.push_back(dtype == bf16 ? f32_to_bf16(v) : f32_to_f16(v));
  return out;
}

// The points R1 .. R16 for E experts of which k are chosen, in `groups` groups of which `keep`
// stay.
struct NamedRule {
  std::string name;
  RouteSpec spec;
};
std::vector<NamedRule> rules(int experts, int top_k, int groups, int keep);

}  // namespace shunt::test
