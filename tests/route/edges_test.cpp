// What breaks routers elsewhere: ties, poisoned rows, biases that dwarf scores, ragged calls.
#include <cfloat>

#include "route/route_util.hpp"

namespace shunt::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
const float nan_value = std::nanf("");

class RouteEdges : public ::testing::Test {
 protected:
  Context context = engine(2);

  // ids and weights of one row of logits.
  std::pair<std::vector<int>, std::vector<float>> one(const RouteSpec& spec,
                                                      const std::vector<float>& logits,
                                                      const std::vector<float>& bias = {}) {
    RouteCase c(spec, 1);
    c.logits = logits;
    c.selection_bias = bias;
    const RouteResult out = run(context, c);
    check_row(c, out, 0);
    return {{out.ids.begin(), out.ids.end()}, out.weights};
  }
};

using Ids = std::vector<int>;

TEST_F(RouteEdges, TiesGoToTheLowerId) {
  const std::vector<float> equal(9, 0.5F);
  for (const Score score :
       {Score::none, Score::softmax, Score::sigmoid, Score::sqrt_softplus, Score::sparsemixer}) {
    const auto [ids, weights] = one({.experts = 9, .top_k = 4, .score = score}, equal);
    EXPECT_EQ(ids, (Ids{0, 1, 2, 3}));
  }
  EXPECT_EQ(one({.experts = 5, .top_k = 3}, {1, 3, 2, 3, 1}).first, (Ids{1, 3, 2}));
  EXPECT_EQ(one({.experts = 5, .top_k = 5}, {1, 3, 2, 3, 1}).first, (Ids{1, 3, 2, 0, 4}));
  // -0 ties with 0.
  EXPECT_EQ(one({.experts = 3, .top_k = 2}, {-0.0F, 0.0F, -1}).first, (Ids{0, 1}));
  EXPECT_EQ(one({.experts = 3, .top_k = 2}, {0.0F, -0.0F, -1}).first, (Ids{0, 1}));
}

TEST_F(RouteEdges, GroupTiesGoToTheLowerGroup) {
  RouteSpec spec{.experts = 8, .top_k = 2, .groups = {.count = 4, .keep = 2}};
  EXPECT_EQ(one(spec, std::vector<float>(8, 1)).first, (Ids{0, 1}));
  // Groups 1, 2 and 3 tie for the second place.
  EXPECT_EQ(one(spec, {5, 0, 0, 3, 3, 0, 2, 3}).first, (Ids{0, 3}));
  spec.groups.rank_by = GroupRank::sum_of_top_2;
  EXPECT_EQ(one(spec, std::vector<float>(8, 1)).first, (Ids{0, 1}));
}

TEST_F(RouteEdges, SaturatedScoresAreNoTies) {
  // sigmoid(20) and sigmoid(30) are both 1 in f32, exp(-200) and exp(-300) both 0.
  const RouteSpec top1{.experts = 4, .top_k = 1, .score = Score::sigmoid};
  EXPECT_EQ(one(top1, {20, 30, 25, 0}).first, (Ids{1}));
  EXPECT_EQ(one({.experts = 4, .top_k = 4}, {-300, 0, -200, -400}).first, (Ids{1, 2, 0, 3}));
}

TEST_F(RouteEdges, PoisonedRowsGiveDistinctIdsAndFiniteWeights) {
  const std::vector<std::vector<float>> rows = {
      {nan_value, nan_value, nan_value, nan_value, nan_value, nan_value, nan_value, nan_value},
      {infinity, infinity, infinity, infinity, infinity, infinity, infinity, infinity},
      {-infinity, -infinity, -infinity, -infinity, -infinity, -infinity, -infinity, -infinity},
      {nan_value, 1, infinity, -infinity, 2, nan_value, -1, 0},
      {1, 2, 3, 4, nan_value, -nan_value, infinity, -infinity},
      {FLT_MAX, -FLT_MAX, FLT_MAX, 0, FLT_MIN, -FLT_MIN, 1e-45F, -1e-45F}};
  for (const auto& [groups, keep] : {std::pair{1, 1}, std::pair{4, 2}, std::pair{8, 6}}) {
    for (NamedRule& rule : rules(8, 4, groups, keep)) {
      RouteCase c = random_case(rule.spec, static_cast<std::int64_t>(rows.size()), 5);
      for (std::size_t t = 0; t < rows.size(); ++t) {
        std::copy(rows[t].begin(), rows[t].end(), c.row(static_cast<std::int64_t>(t)));
      }
      const RouteResult out = run(context, c);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        std::set<int> seen;
        for (int s = 0; s < rule.spec.slots(); ++s) {
          const int id = out.ids[at(t * rule.spec.slots() + s)];
          EXPECT_GE(id, 0);
          EXPECT_LT(id, 8 + rule.spec.shared.count);
          EXPECT_TRUE(seen.insert(id).second) << rule.name << " row " << t << " id " << id;
          EXPECT_TRUE(std::isfinite(out.weights[at(t * rule.spec.slots() + s)])) << rule.name;
        }
        for (int e = 0; e < 8; ++e) {
          EXPECT_TRUE(std::isfinite(out.dense[at(t * (8 + rule.spec.shared.count) + e)]));
          EXPECT_TRUE(std::isfinite(out.logits[at(t * rule.spec.columns() + e)]));
        }
      }
    }
  }
}

TEST_F(RouteEdges, PoisonedRowsSelectWhatIsThere) {
  // NaN is the worst, +inf the best, and what is left keeps its order.
  EXPECT_EQ(one({.experts = 5, .top_k = 4}, {nan_value, 1, infinity, 2, -1}).first,
            (Ids{2, 3, 1, 4}));
  EXPECT_EQ(one({.experts = 4, .top_k = 4}, {nan_value, -infinity, nan_value, -5}).first,
            (Ids{3, 0, 1, 2}));
  // All equal after cleaning: a uniform softmax.
  const auto [ids, weights] = one({.experts = 4, .top_k = 2}, std::vector<float>(4, nan_value));
  EXPECT_EQ(ids, (Ids{0, 1}));
  EXPECT_EQ(weights, (std::vector<float>{0.25F, 0.25F}));
}

// Ids and weights alone, by which a GPU takes its own kernels: nothing is read behind the last
// row's logits or the router's bias (compute-sanitizer sees it), and the others are as they are
// alone.
TEST_F(RouteEdges, APoisonedLastRowIsTheLastThatIsRead) {
  for (const int experts : {40, 60, 640}) {
    for (const bool bias : {false, true}) {
      for (const std::int64_t tokens : {9, 700}) {
        const RouteSpec spec{.experts = experts,
                             .top_k = 4,
                             .score_stage = ScoreStage::after_top_k,
                             .router_bias = bias};
        RouteCase c = random_case(spec, tokens, 5);
        for (const float poison : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
          float* const last = c.row(tokens - 1);
          std::fill_n(last, experts, poison);
          last[1] = 1;  // fewer numbers than choices
          const RouteResult want = run(cpu({.threads = 1}), c);
          RouteResult got = want;
          std::fill(got.ids.begin(), got.ids.end(), -7);
          std::fill(got.weights.begin(), got.weights.end(), -7.0F);
          RouteOutputs asked = got.outputs(spec, tokens);
          asked.dense = asked.logits = asked.replay = {};
          route_on(context, spec, c.inputs(), asked);
          EXPECT_EQ(got.ids, want.ids) << experts << " experts, " << tokens << " tokens";
          EXPECT_EQ(got.weights, want.weights) << experts << " experts, " << tokens << " tokens";
        }
      }
    }
  }
}

TEST_F(RouteEdges, PoisonedBiasesAndScalesStayFinite) {
  const RouteSpec spec{.experts = 4,
                       .top_k = 3,
                       .score = Score::sigmoid,
                       .selection_bias = true,
                       .per_expert_scale = true};
  RouteCase c(spec, 1);
  c.logits = {1, 2, 3, 4};
  c.selection_bias = {nan_value, infinity, -infinity, 0};
  c.per_expert_scale = {nan_value, infinity, 1, 1};
  const RouteResult out = run(context, c);
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{1, 3, 0}));
  EXPECT_EQ(out.weights[0], FLT_MAX);
  EXPECT_TRUE(std::isfinite(out.weights[1]));
  EXPECT_EQ(out.weights[2], 0);
}

TEST_F(RouteEdges, NegativeBiasesDoNotOpenDroppedGroups) {
  // All q are negative; a dropped group masked with 0 would win.
  const RouteSpec spec{.experts = 8,
                       .top_k = 4,
                       .score = Score::sigmoid,
                       .selection_bias = true,
                       .groups = {.count = 4, .keep = 2, .rank_by = GroupRank::sum_of_top_2},
                       .renormalize = true};
  const auto [ids, weights] =
      one(spec, {0, 0, 1, 1, 2, 2, -1, -1}, {-9, -9, -8, -8, -7, -7, -6, -6});
  EXPECT_EQ(ids, (Ids{6, 7, 4, 5}));
}

TEST_F(RouteEdges, WeightsAreNotBiasedScoresMinusBias) {
  // p of 1e-8 beside a bias of 12: the difference of p + b and b would be 0.
  const RouteSpec spec{.experts = 4,
                       .top_k = 2,
                       .score = Score::sigmoid,
                       .selection_bias = true,
                       .renormalize = true};
  const auto [ids, weights] = one(spec, {-18, -19, -20, -21}, {12, 12.5F, 12, 12});
  EXPECT_EQ(ids, (Ids{1, 0}));
  const double a = 1 / (1 + std::exp(19.0));
  const double b = 1 / (1 + std::exp(18.0));
  EXPECT_NEAR(static_cast<double>(weights[0]), a / (a + b), 1e-6);
  EXPECT_NEAR(static_cast<double>(weights[1]), b / (a + b), 1e-6);
}

TEST_F(RouteEdges, NothingToRenormaliseGivesZero) {
  const RouteSpec spec{.experts = 3,
                       .top_k = 2,
                       .score = Score::sigmoid,
                       .renormalize = true,
                       .renormalize_epsilon = 0};
  EXPECT_EQ(one(spec, {-1000, -2000, -3000}).second, (std::vector<float>{0, 0}));
}

TEST_F(RouteEdges, ScaleIsAppliedOnceWhateverElseIsAsked) {
  for (const bool renormalize : {false, true}) {
    RouteSpec spec{.experts = 6, .top_k = 3, .renormalize = renormalize};
    const std::vector<float> logits = {0.1F, 0.9F, -0.5F, 2, 1, 0};
    const auto plain = one(spec, logits).second;
    spec.scale = 4;
    const auto scaled = one(spec, logits).second;
    spec.scale_in_weights = false;
    const auto left = one(spec, logits).second;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(scaled[i], 4 * plain[i]);
      EXPECT_EQ(left[i], plain[i]);
    }
  }
}

TEST_F(RouteEdges, RowsPastTheValidOnesAreCleared) {
  for (NamedRule& rule : rules(16, 4, 4, 2)) {
    const RouteCase c = random_case(rule.spec, 9, 3);
    const RouteResult all = run(context, c);
    for (const std::int32_t valid : {-3, 0, 1, 5, 9, 100}) {
      RouteInputs in = c.inputs();
      in.valid_tokens = view(&valid, {1});
      const RouteResult out = run(context, c.spec, in);
      const std::int64_t rows = std::clamp<std::int64_t>(valid, 0, 9);
      const auto expect = [&](const auto& got, const auto& full, auto cleared) {
        const std::size_t split = got.size() / 9 * at(rows);
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i], i < split ? full[i] : cleared) << rule.name << " valid " << valid;
        }
      };
      expect(out.ids, all.ids, -1);
      expect(out.weights, all.weights, 0.0F);
      expect(out.dense, all.dense, 0.0F);
      expect(out.logits, all.logits, 0.0F);
      expect(out.replay, all.replay, -1);
    }
  }
}

TEST_F(RouteEdges, TokenIdsOfRowsPastTheValidOnesAreNotRead) {
  const RouteSpec spec{.experts = 8, .top_k = 2, .hashed = true};
  RouteCase c = random_case(spec, 4, 3);
  c.token_ids[3] = -1;
  const std::int32_t valid = 3;
  RouteInputs in = c.inputs();
  in.valid_tokens = view(&valid, {1});
  EXPECT_EQ(run(context, spec, in).ids[6], -1);
}

TEST_F(RouteEdges, NoTokens) {
  for (NamedRule& rule : rules(8, 2, 2, 1)) {
    const RouteCase c = random_case(rule.spec, 0, 1);
    run(context, c);
  }
  const RouteSpec spec{.experts = 4, .top_k = 2};
  const std::vector<float> w(12);
  run(context, spec,
      {.hidden = view(static_cast<float*>(nullptr), {0, 3}),
       .router_weight = view(w.data(), {4, 3})});
}

TEST_F(RouteEdges, AHashTablesRepeatedIdStays) {
  const RouteSpec spec{.experts = 4, .top_k = 3, .score = Score::sigmoid, .hashed = true};
  RouteCase c = random_case(spec, 1, 1);
  c.vocabulary = 1;
  c.token_ids = {0};
  c.hash_table = {2, 0, 2};
  const RouteResult out = run(context, c);
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{2, 0, 2}));
  EXPECT_EQ(out.dense[2], out.weights[0] + out.weights[2]);
  check_row(c, out, 0);
}

TEST_F(RouteEdges, AnySubsetOfOutputsAndStridedOnes) {
  const RouteCase c = random_case(rules(24, 5, 4, 2)[5].spec, 6, 9);
  const RouteResult all = run(context, c);
  RouteResult some(c.spec, 6);
  const RouteOutputs outs = some.outputs(c.spec, 6);
  route_on(context, c.spec, c.inputs(), {.ids = outs.ids});
  route_on(context, c.spec, c.inputs(), {.weights = outs.weights});
  route_on(context, c.spec, c.inputs(), {.dense = outs.dense});
  route_on(context, c.spec, c.inputs(), {.logits = outs.logits});
  route_on(context, c.spec, c.inputs(), {.replay = outs.replay});
  EXPECT_TRUE(some == all);

  std::vector<float> strided(6 * 8, 42);
  Tensor weights = view(strided.data(), {6, 5});
  weights.strides[0] = 8;
  route_on(context, c.spec, c.inputs(), {.weights = weights});
  for (std::size_t i = 0; i < strided.size(); ++i) {
    EXPECT_EQ(strided[i], i % 8 < 5 ? all.weights[i / 8 * 5 + i % 8] : 42);
  }
}

TEST_F(RouteEdges, PermutingTokensPermutesRows) {
  for (NamedRule& rule : rules(40, 6, 5, 3)) {
    const RouteCase c = random_case(rule.spec, 20, 4);
    const RouteResult out = run(context, c);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      // A row by itself is what it was among others.
      RouteCase single = c;
      single.tokens = 1;
      single.logits.assign(c.logits.begin() + t * c.columns(),
                           c.logits.begin() + (t + 1) * c.columns());
      if (!c.token_ids.empty()) single.token_ids = {c.token_ids[at(t)]};
      if (!c.shared_logits.empty()) {
        single.shared_logits = {c.shared_logits[at(t * c.spec.shared.count)]};
      }
      const RouteResult row = run(context, single);
      for (int s = 0; s < c.spec.slots(); ++s) {
        EXPECT_EQ(row.ids[at(s)], out.ids[at(t * c.spec.slots() + s)]) << rule.name;
        EXPECT_EQ(row.weights[at(s)], out.weights[at(t * c.spec.slots() + s)]) << rule.name;
      }
    }
  }
}

TEST_F(RouteEdges, RelabellingExpertsRelabelsIds) {
  // Whole groups change places, and the experts within each; logits without ties.
  const int groups = 4;
  const int size = 8;
  std::mt19937 random(2);
  for (NamedRule& rule : rules(groups * size, 6, groups, 2)) {
    if (rule.spec.hashed) continue;
    const RouteCase c = random_case(rule.spec, 12, 6, Values::permuted);
    std::vector<int> to(at(c.columns()));  // new id of each expert; shared ones stay
    for (std::size_t e = 0; e < to.size(); ++e) to[e] = static_cast<int>(e);
    std::vector<int> group_to = {2, 0, 3, 1};
    for (int g = 0; g < groups; ++g) {
      std::vector<int> within(size);
      for (int i = 0; i < size; ++i) within[at(i)] = i;
      std::shuffle(within.begin(), within.end(), random);
      for (int i = 0; i < size; ++i) to[at(g * size + i)] = group_to[at(g)] * size + within[at(i)];
    }
    RouteCase moved = c;
    for (std::size_t e = 0; e < to.size(); ++e) {
      const std::size_t n = at(to[e]);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        moved.logits[at(t * c.columns()) + n] = c.logits[at(t * c.columns()) + e];
      }
      if (!c.router_bias.empty()) moved.router_bias[n] = c.router_bias[e];
      if (n < c.selection_bias.size()) moved.selection_bias[n] = c.selection_bias[e];
      if (!c.per_expert_scale.empty()) moved.per_expert_scale[n] = c.per_expert_scale[e];
    }
    const RouteResult before = run(context, c);
    const RouteResult after = run(context, moved);
    for (std::size_t i = 0; i < before.ids.size(); ++i) {
      const int id = before.ids[i];
      EXPECT_EQ(after.ids[i], id < groups * size ? to[at(id)] : id) << rule.name;
      // The softmax sums over experts in another order.
      EXPECT_NEAR(after.weights[i], before.weights[i], 4e-6F * std::abs(before.weights[i]))
          << rule.name;
    }
  }
}

TEST_F(RouteEdges, RunsTwiceAlike) {
  for (NamedRule& rule : rules(128, 8, 8, 4)) {
    const RouteCase c = random_case(rule.spec, 200, 8);
    EXPECT_TRUE(run(context, c) == run(context, c)) << rule.name;
  }
}

}  // namespace
}  // namespace shunt::test
