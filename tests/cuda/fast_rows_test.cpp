// The selection that gates and routers share on a GPU, run on the host lane by lane: the CPU
// engine's ids and weights, to the bit.
// clang-format off
#include "cuda/warp_on_host.hpp"
#include "route/accumulator_rows.cuh"
#include "route/deepseek_rows.cuh"
#include "route/few_experts.cuh"
#include "route/plain_rows.cuh"
#include "route/token_rows.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "route/engine.hpp"
#include "shunt/shunt.hpp"

namespace shunt::test {
namespace {

using routing::FastScratch;
using routing::FastShape;
using routing::Ranked;

struct Rows {
  const float* logits;
  int experts;
  float operator()(int i, int e) const { return logits[i * experts + e]; }
};

// A third of normal deviates, a third of few values, a third with what no model should give.
std::vector<float> logits_of(int tokens, int experts) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(experts));
  const std::size_t third = logits.size() / 3;
  constexpr float inf = std::numeric_limits<float>::infinity();
  const float odd[] = {NAN, inf, -inf, std::numeric_limits<float>::max(), -0.0F, 0.0F};
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = normal(random);
    if (i >= third) logits[i] = std::round(logits[i]);
    if (i >= 2 * third && random() % 4 == 0) logits[i] = odd[random() % std::size(odd)];
  }
  return logits;
}

// Rows of logits: what the CPU engine makes of them, and a call for what is tested to fill in.
struct Routed {
  Routed(const RouteSpec& spec, std::vector<float> logits_, std::vector<float> bias_)
      : logits(std::move(logits_)),
        bias(std::move(bias_)),
        rows(static_cast<int>(logits.size()) / spec.experts) {
    const auto slots = static_cast<std::size_t>(rows * spec.top_k);
    ids.assign(slots, -5), want_ids.assign(slots, -7);
    weights.assign(slots, -5), want_weights.assign(slots, -7);
    const Context context = cpu({.threads = 1});
    RouteInputs in{.logits = view(logits.data(), {rows, spec.experts})};
    if (spec.selection_bias) in.selection_bias = view(bias.data(), {spec.experts});
    if (spec.router_bias) in.router_bias = view(bias.data(), {spec.experts});
    const Buffer workspace = context.allocate(route_workspace_bytes(context, spec, rows, 0));
    route(context, spec, in,
          {.ids = view(want_ids.data(), {rows, spec.top_k}),
           .weights = view(want_weights.data(), {rows, spec.top_k})},
          workspace);
    call.rule = resolve(spec);
    call.tokens = rows;
    if (spec.selection_bias) call.selection_bias = {bias.data(), routing::Form::f32};
    if (spec.router_bias) call.router_bias = {bias.data(), routing::Form::f32};
    call.ids = {ids.data(), spec.top_k};
    call.weights = {weights.data(), spec.top_k};
  }
  Routed(const Routed&) = delete;
  Routed& operator=(const Routed&) = delete;

  void expect_same_bits() const {
    EXPECT_EQ(ids, want_ids);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      ASSERT_EQ(routing::bits_of(weights[i]), routing::bits_of(want_weights[i])) << i;
    }
  }

  std::vector<float> logits, bias;
  int rows;
  std::vector<std::int32_t> ids, want_ids;
  std::vector<float> weights, want_weights;
  routing::DeviceRoute call;
};

template <class S>
void expect_same_bits(const RouteSpec& spec, const std::vector<float>& bias = {}) {
  constexpr int warps = 4, tokens = warps * S::tokens;
  const int experts = spec.experts;
  Routed routed(spec, logits_of(tokens, experts), bias);
  const std::vector<float>& logits = routed.logits;
  std::vector<FastScratch<S>> scratch(S::tokens);
  HostWarp::run([&](int lane) {
    for (int first = 0; first < tokens; first += S::tokens) {
      const int t = first + lane / S::lanes;
      float v[S::held];
      for (int n = 0; n < S::held; ++n) {
        v[n] = logits[static_cast<std::size_t>(
            t * experts + std::min(S::expert(n, lane % S::lanes), experts - 1))];
      }
      routing::route_fast<S>(routed.call, routed.call,
                             Rows{logits.data() + first * experts, experts}, v, scratch.data(), t,
                             true, lane);
    }
  });
  routed.expect_same_bits();
}

struct Packed {
  bool bf16 = false, f16 = false;
  float rounded(float x) const {
    return bf16 ? __bfloat162float(__float2bfloat16(x)) : f16 ? __half2float(__float2half(x)) : x;
  }
  std::uint32_t bits(float x) const {
    return bf16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
  }
};

// Returns the share of tokens that route_plain() left to route_in_rounds().
template <class S, Packed packed = Packed{}, bool usual = false>
double expect_same_bits_of_plain(const RouteSpec& spec, bool odd) {
  constexpr int warps = 6, tokens = warps * S::tokens;
  const int experts = spec.experts;
  std::vector<float> logits = logits_of(3 * tokens, experts);
  if (!odd) logits.resize(logits.size() / 3);
  for (float& l : logits) l = packed.rounded(l);
  Routed routed(spec, std::move(logits),
                std::vector<float>(static_cast<std::size_t>(experts), 0.25F));
  const routing::DeviceRoute& r = routed.call;
  const int rows = routed.rows;
  std::int32_t won[S::tokens][S::best];
  std::vector<std::uint16_t> narrow;
  for (const float l : routed.logits) narrow.push_back(static_cast<std::uint16_t>(packed.bits(l)));
  std::vector<char> left(static_cast<std::size_t>(rows));
  HostWarp::run([&](int lane) {
    for (int first = 0; first < rows; first += S::tokens) {
      const int t = first + lane / S::lanes;
      const bool there = t < rows;
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(there ? t : first) * experts;
      const auto expert = [&](int n) {
        return at + std::min(S::expert(n, lane % S::lanes), experts - 1);
      };
      if constexpr (packed.bf16 || packed.f16) {
        std::uint32_t words[(S::held + 1) / 2] = {};
        for (int n = 0; n < S::held; ++n) {
          words[n / 2] |= std::uint32_t{narrow.data()[expert(n)]} << n % 2 * 16;
        }
        routing::route_packed<S, usual>(r, packed.bf16, narrow.data() + at, words, t, there, lane);
        continue;
      }
      float v[S::held];
      for (int n = 0; n < S::held; ++n) v[n] = routed.logits.data()[expert(n)];
      const std::uint32_t lanes = routing::route_plain<S>(r, routed.logits.data() + at, v,
                                                          won[lane / S::lanes], t, there, lane);
      if ((lanes >> lane & 1) != 0) left[static_cast<std::size_t>(t)] = 1;
      for (int i = 0; i < S::tokens && first + i < rows; ++i) {
        constexpr std::uint32_t of_token = S::lanes == 32 ? ~0U : (1U << (S::lanes & 31)) - 1;
        if ((lanes >> (i * S::lanes) & of_token) == 0) continue;
        routing::route_in_rounds(r, routed.logits.data() + std::ptrdiff_t{first + i} * experts,
                                 first + i, lane);
      }
    }
  });
  routed.expect_same_bits();
  return static_cast<double>(std::count(left.begin(), left.end(), 1)) / rows;
}

TEST(PlainRows, AllRules) {
  RouteSpec spec{.experts = 64,
                 .top_k = 4,
                 .score = Score::softmax,
                 .score_stage = ScoreStage::after_top_k,
                 .renormalize = false};
  const auto check = [&]<class S>(S) {
    EXPECT_EQ(expect_same_bits_of_plain<S>(spec, false), 0) << S::lanes << ' ' << S::blocks;
    const double left = expect_same_bits_of_plain<S>(spec, true);
    EXPECT_GT(left, 0);
    EXPECT_LT(left, 0.7);
  };
  check(FastShape<8, 4, 2, Ranked::logit>{});
  check(FastShape<32, 4, 2, Ranked::logit>{});
  check(FastShape<8, 8, 2, Ranked::logit>{});
  spec.router_bias = true;
  check(FastShape<8, 4, 2, Ranked::logit>{});
  spec.router_bias = false;
  spec.experts = 8, spec.top_k = 4;
  check(FastShape<8, 4, 1, Ranked::logit>{});
  check(FastShape<32, 4, 1, Ranked::logit>{});
  spec.top_k = 1;
  check(FastShape<8, 1, 1, Ranked::logit>{});
  check(FastShape<8, 4, 1, Ranked::logit>{});
  spec.experts = 250, spec.top_k = 3;
  check(FastShape<8, 4, 8, Ranked::logit>{});
  spec.score_stage = ScoreStage::before_top_k;
  check(FastShape<8, 4, 8, Ranked::logit>{});
  spec.experts = 128, spec.top_k = 8, spec.renormalize = true;
  check(FastShape<8, 8, 4, Ranked::logit>{});
  check(FastShape<16, 8, 4, Ranked::logit>{});
  check(FastShape<32, 8, 4, Ranked::logit>{});
  spec.experts = 512, spec.top_k = 6;
  check(FastShape<16, 8, 16, Ranked::logit>{});
  check(FastShape<8, 8, 16, Ranked::logit>{});
  spec.score = Score::sigmoid, spec.scale = 2.5F;
  check(FastShape<16, 8, 16, Ranked::logit>{});
  spec.score = Score::sqrt_softplus, spec.experts = 256;
  check(FastShape<32, 8, 8, Ranked::logit>{});
}

template <Packed packed, bool usual = false>
void expect_packed() {
  RouteSpec spec{.experts = 16,
                 .top_k = 1,
                 .score = Score::softmax,
                 .score_stage = ScoreStage::before_top_k,
                 .renormalize = false};
  const auto check = [&]<class S>(S) {
    expect_same_bits_of_plain<S, packed, usual>(spec, false);
    expect_same_bits_of_plain<S, packed, usual>(spec, true);
  };
  if constexpr (usual) {
    spec.score_stage = ScoreStage::after_top_k;
    spec.experts = 32, spec.top_k = 4;
    check(FastShape<1, 4, 1, Ranked::logit>{});
    spec.experts = 128, spec.top_k = 8;
    check(FastShape<2, 8, 4, Ranked::logit>{});
    check(FastShape<4, 8, 4, Ranked::logit>{});
    check(FastShape<8, 8, 4, Ranked::logit>{});
    return;
  }
  check(FastShape<32, 1, 1, Ranked::logit>{});
  check(FastShape<1, 1, 1, Ranked::logit, 16>{});
  spec.score_stage = ScoreStage::after_top_k;
  check(FastShape<1, 1, 1, Ranked::logit, 16>{});
  spec.top_k = 2;
  check(FastShape<1, 4, 1, Ranked::logit, 16>{});
  spec.score_stage = ScoreStage::before_top_k;
  check(FastShape<1, 4, 1, Ranked::logit, 16>{});
  spec.experts = 32, spec.top_k = 4;
  check(FastShape<1, 4, 1, Ranked::logit>{});
  check(FastShape<32, 4, 1, Ranked::logit>{});
  spec.experts = 48, spec.renormalize = true;
  check(FastShape<2, 8, 2, Ranked::logit>{});
  spec.score_stage = ScoreStage::after_top_k;
  spec.renormalize = false;
  spec.experts = 128, spec.top_k = 8;
  check(FastShape<2, 8, 4, Ranked::logit>{});
  check(FastShape<8, 8, 4, Ranked::logit>{});
  spec.experts = 240, spec.top_k = 6, spec.score_stage = ScoreStage::before_top_k;
  check(FastShape<4, 8, 8, Ranked::logit>{});
  spec.experts = 500, spec.top_k = 7;
  check(FastShape<16, 8, 16, Ranked::logit>{});
  spec.score = Score::sigmoid;
  check(FastShape<32, 8, 16, Ranked::logit>{});
}

TEST(PlainRows, Bf16) { expect_packed<Packed{.bf16 = true}>(); }
TEST(PlainRows, Usual) { expect_packed<Packed{.bf16 = true}, true>(); }
TEST(PlainRows, F16) { expect_packed<Packed{.f16 = true}>(); }

// A token by a block.
template <class S, bool usual = false>
void expect_same_bits_by_block(const RouteSpec& spec, const std::vector<float>& bias = {}) {
  constexpr int tokens = 6;
  const int experts = spec.experts;
  Routed routed(spec, logits_of(tokens, experts), bias);
  const std::vector<float>& logits = routed.logits;
  const routing::TokenRoute r(routed.call);
  routing::TokenScratch<S> scratch;
  HostWarp::run_block(S::warps, [&](int warp, int lane) {
    for (int t = 0; t < tokens; ++t) {
      const int e = std::min(32 * warp + lane, experts - 1);
      routing::route_token<S, usual>(r, logits[static_cast<std::size_t>(t * experts + e)], scratch,
                                     t, warp, lane);
      __syncthreads();
    }
  });
  routed.expect_same_bits();
}

// Few experts in bf16, by the usual rule: a warp a token, or 4 experts a lane where k is 1.
template <int k, int lanes>
void expect_same_bits_of_few(int experts) {
  constexpr int tokens = 12;
  std::vector<float> logits = logits_of(tokens, experts);
  for (float& l : logits) l = Packed{.bf16 = true}.rounded(l);
  const RouteSpec spec{.experts = experts,
                       .top_k = k,
                       .score = Score::softmax,
                       .score_stage = ScoreStage::after_top_k,
                       .renormalize = false};
  const auto slots = static_cast<std::size_t>(tokens * k);
  std::vector<std::int32_t> ids(slots, -5), want_ids(slots, -7);
  std::vector<float> weights(slots, -5), want_weights(slots, -7);
  const Context context = cpu({.threads = 1});
  const Buffer workspace = context.allocate(route_workspace_bytes(context, spec, tokens, 0));
  route(context, spec, {.logits = view(logits.data(), {tokens, experts})},
        {.ids = view(want_ids.data(), {tokens, k}),
         .weights = view(want_weights.data(), {tokens, k})},
        workspace);
  const auto bits = [&](int t, int e) {
    return Packed{.bf16 = true}.bits(logits[static_cast<std::size_t>(t * experts + e)]);
  };
  HostWarp::run([&](int lane) {
    for (int t = 0; t < tokens; ++t) {
      if constexpr (lanes > 0) {
        alignas(8) std::uint16_t row[4 * lanes];
        for (int e = 0; e < experts; ++e) row[e] = static_cast<std::uint16_t>(bits(t, e));
        const int q = lane % lanes;
        const uint2 words{bits(t, 4 * q) | bits(t, 4 * q + 1) << 16,
                          bits(t, 4 * q + 2) | bits(t, 4 * q + 3) << 16};
        const int id = routing::first_of_lanes<lanes>(words, row, q);
        if (lane != 0) continue;
        ids[static_cast<std::size_t>(t)] = id;
        weights[static_cast<std::size_t>(t)] = 1;
      } else {
        const auto own =
            routing::best_of_warp<k>(bits(t, std::min(lane, experts - 1)), experts, lane);
        if (own.slot < 0) continue;
        ids[static_cast<std::size_t>(t * k + own.slot)] = lane;
        weights[static_cast<std::size_t>(t * k + own.slot)] = own.weight;
      }
    }
  });
  EXPECT_EQ(ids, want_ids);
  for (std::size_t i = 0; i < slots; ++i) {
    ASSERT_EQ(routing::bits_of(weights[i]), routing::bits_of(want_weights[i])) << i;
  }
}

TEST(FewExperts, TheUsualRule) {
  expect_same_bits_of_few<1, 2>(8);
  expect_same_bits_of_few<1, 4>(16);
  expect_same_bits_of_few<1, 8>(32);
  expect_same_bits_of_few<2, 0>(8);
  expect_same_bits_of_few<4, 0>(32);
  expect_same_bits_of_few<4, 0>(7);
  expect_same_bits_of_few<8, 0>(32);
  expect_same_bits_of_few<8, 0>(8);
}

// Eight tokens of up to 16 experts in a warp's accumulators.
template <int P>
void expect_same_bits_of_accumulators(const RouteSpec& spec) {
  const int tokens = 21, experts = spec.experts;
  Routed routed(spec, logits_of(tokens, experts), {});
  const routing::TokenRoute call(routed.call);
  HostWarp::run([&](int lane) {
    const int g = lane / 4, q = lane % 4;
    for (int first = 0; first < tokens; first += 8) {
      float sums[4];
      for (int i = 0; i < 4; ++i) {
        const int t = std::min(first + 2 * q + i % 2, tokens - 1);
        const int e = std::min(g + 8 * (i / 2), experts - 1);
        sums[i] = routed.logits[static_cast<std::size_t>(t * experts + e)];
      }
      routing::route_accumulators<P>(call, sums, first, tokens, lane);
    }
  });
  routed.expect_same_bits();
}

TEST(AccumulatorRows, TheUsualRule) {
  for (const int experts : {2, 5, 8, 9, 16}) {
    for (const int k : {1, 2, 3, 4, 5, 8}) {
      if (k > experts) continue;
      RouteSpec spec{.experts = experts, .top_k = k};
      spec.score_stage = ScoreStage::after_top_k;
      expect_same_bits_of_accumulators<8>(spec);
      if (k <= 4) expect_same_bits_of_accumulators<4>(spec);
    }
  }
}

std::vector<float> bias_of(int experts) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 0.1F);
  std::vector<float> bias(static_cast<std::size_t>(experts));
  for (float& b : bias) b = normal(random);
  return bias;
}

TEST(FastRows, Softmax) {
  RouteSpec spec{.experts = 8, .top_k = 2};
  expect_same_bits<FastShape<32, 8, 1, Ranked::logit>>(spec);
  expect_same_bits<FastShape<8, 8, 1, Ranked::logit>>(spec);
  spec.experts = 60, spec.top_k = 4;
  expect_same_bits<FastShape<32, 8, 2, Ranked::logit>>(spec);
  spec.experts = 128, spec.top_k = 8;
  expect_same_bits<FastShape<8, 8, 4, Ranked::logit>>(spec);
  spec.experts = 160, spec.top_k = 6;
  expect_same_bits<FastShape<8, 8, 8, Ranked::logit>>(spec);
  spec.experts = 512, spec.top_k = 10;
  expect_same_bits<FastShape<16, 16, 16, Ranked::logit>>(spec);
  spec.experts = 896, spec.top_k = 16;
  expect_same_bits<FastShape<32, 16, 32, Ranked::logit>>(spec);
  spec.experts = 16;
  spec.top_k = 16;
  expect_same_bits<FastShape<16, 16, 1, Ranked::logit>>(spec);
}

TEST(FastRows, SoftmaxOfTheSelected) {
  RouteSpec spec{.experts = 256,
                 .top_k = 8,
                 .score = Score::softmax,
                 .score_stage = ScoreStage::after_top_k,
                 .renormalize = true};
  expect_same_bits<FastShape<8, 8, 8, Ranked::logit>>(spec);
  spec.selection_bias = true;
  expect_same_bits<FastShape<8, 8, 8, Ranked::score>>(spec, bias_of(256));
}

TEST(FastRows, BiasedScores) {
  RouteSpec spec{.experts = 384,
                 .top_k = 8,
                 .score = Score::sigmoid,
                 .selection_bias = true,
                 .renormalize = true,
                 .scale = 2.5F};
  expect_same_bits<FastShape<16, 16, 16, Ranked::score>>(spec, bias_of(384));
  expect_same_bits<FastShape<32, 8, 16, Ranked::score>>(spec, bias_of(384));
  spec.score = Score::sqrt_softplus;
  expect_same_bits<FastShape<16, 16, 16, Ranked::score>>(spec, bias_of(384));
}

const RouteSpec deepseek_v3{.experts = 256,
                            .top_k = 8,
                            .score = Score::sigmoid,
                            .selection_bias = true,
                            .groups = {8, 4, GroupRank::sum_of_top_2},
                            .renormalize = true,
                            .scale = 2.5F};

TEST(FastRows, Groups) {
  RouteSpec spec = deepseek_v3;
  expect_same_bits<FastShape<8, 8, 8, Ranked::score_in_groups>>(spec, bias_of(256));
  expect_same_bits<FastShape<32, 8, 8, Ranked::score_in_groups>>(spec, bias_of(256));
  spec.groups.rank_by = GroupRank::max;
  expect_same_bits<FastShape<8, 8, 8, Ranked::score_in_groups>>(spec, bias_of(256));
  spec.top_k = 12;
  expect_same_bits<FastShape<16, 16, 8, Ranked::score_in_groups>>(spec, bias_of(256));
}

TEST(TokenRows, PlainRules) {
  using routing::TokenShape;
  RouteSpec spec{.experts = 8, .top_k = 2};
  expect_same_bits_by_block<TokenShape<1, 4, Ranked::logit>>(spec);
  spec.experts = 60, spec.top_k = 4, spec.renormalize = true;
  expect_same_bits_by_block<TokenShape<2, 4, Ranked::logit>>(spec);
  spec.score_stage = ScoreStage::after_top_k, spec.router_bias = true;
  expect_same_bits_by_block<TokenShape<2, 4, Ranked::logit>>(spec, bias_of(60));
  spec.router_bias = false;
  spec.experts = 128, spec.top_k = 8;
  expect_same_bits_by_block<TokenShape<4, 8, Ranked::logit>>(spec);
  spec.renormalize = false;
  expect_same_bits_by_block<TokenShape<4, 8, Ranked::logit>, true>(spec);
  spec.experts = 250, spec.top_k = 3;
  expect_same_bits_by_block<TokenShape<8, 4, Ranked::logit>, true>(spec);
  spec.score = Score::sqrt_softplus, spec.top_k = 7;
  expect_same_bits_by_block<TokenShape<8, 8, Ranked::logit>>(spec);
  spec.score = Score::softmax, spec.score_stage = ScoreStage::before_top_k, spec.experts = 416;
  expect_same_bits_by_block<TokenShape<16, 8, Ranked::logit>>(spec);
  spec.experts = 8, spec.top_k = 8;
  expect_same_bits_by_block<TokenShape<1, 8, Ranked::logit>>(spec);
}

TEST(TokenRows, BiasedScores) {
  using routing::TokenShape;
  RouteSpec spec{.experts = 100,
                 .top_k = 6,
                 .score = Score::sigmoid,
                 .selection_bias = true,
                 .renormalize = true,
                 .scale = 2.5F};
  expect_same_bits_by_block<TokenShape<4, 8, Ranked::score>>(spec, bias_of(100));
  spec.score = Score::softmax, spec.score_stage = ScoreStage::after_top_k;
  expect_same_bits_by_block<TokenShape<4, 8, Ranked::score>>(spec, bias_of(100));
  spec.score = Score::sigmoid, spec.score_stage = ScoreStage::before_top_k;
  spec.experts = 256, spec.top_k = 8;
  spec.groups = {8, 4, GroupRank::sum_of_top_2};
  using InGroups = TokenShape<8, 8, Ranked::score_in_groups>;
  expect_same_bits_by_block<InGroups>(spec, bias_of(256));
  spec.groups.keep = 6;
  expect_same_bits_by_block<InGroups>(spec, bias_of(256));
  spec.groups.rank_by = GroupRank::max, spec.groups.keep = 1;
  expect_same_bits_by_block<InGroups>(spec, bias_of(256));
  expect_same_bits_by_block<InGroups>(spec, std::vector<float>(256, 0.5F));
}

void expect_same_bits_of_deepseek(const std::vector<float>& bias, float deviation = 1) {
  std::vector<float> logits = logits_of(24, 256);
  for (float& l : logits) l *= deviation;
  Routed routed(deepseek_v3, std::move(logits), bias);
  std::vector<float> aligned(256 + 4);  // vectors of 4
  const auto offset = reinterpret_cast<std::uintptr_t>(aligned.data()) % 16 / 4;
  float* const own_bias = aligned.data() + (4 - offset) % 4;
  std::copy(bias.begin(), bias.end(), own_bias);
  alignas(16) float row[256];
  const routing::DeviceRoute& r = routed.call;
  const routing::DeepseekRoute of{.logits = row,
                                  .stride = 256,
                                  .bias = own_bias,
                                  .ids = r.ids,
                                  .weights = r.weights,
                                  .tokens = r.tokens,
                                  .valid_tokens = nullptr,
                                  .epsilon = r.rule.epsilon,
                                  .factor = r.rule.factor};
  routing::DeepseekScratch scratch;
  HostWarp::run([&](int lane) {
    for (int t = 0; t < routed.rows; ++t) {
      if (lane == 0) std::copy_n(routed.logits.data() + std::ptrdiff_t{256} * t, 256, row);
      __syncwarp();
      routing::route_deepseek(of, row, scratch, t, lane);
      __syncwarp();
    }
  });
  routed.expect_same_bits();
}

TEST(DeepseekRows, AnyLogitsAndBias) {
  expect_same_bits_of_deepseek(bias_of(256));
  expect_same_bits_of_deepseek(bias_of(256), 30);
  expect_same_bits_of_deepseek(std::vector<float>(256, 0.5F));
  expect_same_bits_of_deepseek(std::vector<float>(256, 0.0F), 0.0F);
  std::vector<float> bias(256, -0.5F);
  bias[3] = NAN;
  bias[7] = std::numeric_limits<float>::infinity();
  bias[100] = -bias[7];
  bias[101] = bias[133] = std::numeric_limits<float>::lowest();
  bias[130] = bias[131] = std::numeric_limits<float>::max();
  for (std::size_t i = 160; i < 256; ++i) bias[i] = 14;
  expect_same_bits_of_deepseek(bias);
}

// Groups and experts that tie, and a bias that no model should have.
TEST(FastRows, OddBias) {
  const RouteSpec spec{.experts = 256,
                       .top_k = 8,
                       .score = Score::sigmoid,
                       .selection_bias = true,
                       .groups = {8, 4, GroupRank::sum_of_top_2}};
  std::vector<float> bias(256, 0.5F);
  expect_same_bits<FastShape<8, 8, 8, Ranked::score_in_groups>>(spec, bias);
  bias[3] = NAN;
  bias[7] = std::numeric_limits<float>::infinity();
  bias[100] = -bias[7];
  for (std::size_t i = 128; i < 256; ++i) bias[i] = 14;
  expect_same_bits<FastShape<8, 8, 8, Ranked::score_in_groups>>(spec, bias);
  expect_same_bits<FastShape<32, 8, 8, Ranked::score_in_groups>>(spec, bias);
}

}  // namespace
}  // namespace shunt::test
