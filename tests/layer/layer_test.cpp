// The whole layer against the double reference, and what it promises whatever the engine.
#include "shunt/layer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "layer/run_layer.hpp"

namespace shunt {
namespace {

using testing::layer_specs;
using testing::NamedSpec;
using testing::RandomLayer;
using testing::Result;
using testing::run;
using testing::small_layer;

// The routing that the layer used, shared slots included, as the reference takes it.
std::vector<std::int32_t> all_ids(const LayerSpec& spec, const Result& result) {
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < result.ids.size(); ++i) {
    ids.push_back(result.ids[i]);
    if ((i + 1) % static_cast<std::size_t>(spec.route.top_k) == 0) {
      for (int s = 0; s < spec.route.shared.count; ++s) ids.push_back(spec.route.experts + s);
    }
  }
  return ids;
}

// Where the engine rounds experts' rows, that accounts for `rounded` times `spread`.
double max_error(const std::vector<float>& got, const std::vector<double>& expected,
                 double rounded = 0, const std::vector<double>& spread = {}) {
  double error = 0;
  double magnitude = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(got[i]) - expected[i]) -
                              (spread.empty() ? 0 : rounded * spread[i]);
    // A NaN fails, whatever comes after it.
    error = std::max(error, std::isnan(difference) ? HUGE_VAL : difference);
    magnitude = std::max(magnitude, std::fabs(expected[i]));
  }
  return magnitude > 0 ? error / magnitude : error;
}

class LayerTest : public ::testing::TestWithParam<NamedSpec> {
 protected:
  LayerInputs inputs(RandomLayer& random, std::int64_t tokens, DType dtype = DType::f32) {
    LayerInputs in{.hidden = random.hidden_states(tokens, dtype)};
    if (random.spec.route.hashed) in.token_ids = random.token_ids(tokens);
    return in;
  }
  Context context_ = test::engine();
};

TEST_P(LayerTest, MatchesTheReference) {
  RandomLayer random(GetParam().spec, 7);
  const LayerSpec& spec = random.spec;
  for (const std::int64_t tokens : {1, 2, 3, 17, 70}) {
    const LayerInputs in = inputs(random, tokens);
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Layer layer(spec, random.weights, context_, {.dtype = dtype});
      const Result result = run(context_, layer, in);
      if (spec.route.shared.count > 0) continue;  // joint weights: see JointSharedExperts
      std::vector<double> spread;
      const std::vector<double> expected =
          layer_reference(spec, random.weights, in.hidden, all_ids(spec, result).data(),
                          result.weights.data(), &spread);
      // f32: sums of some 100 terms. bf16: x and h are rounded to 2^-9 each, errors average out.
      const double bound = dtype == DType::f32 ? 4e-6 : dtype == DType::bf16 ? 1.2e-2 : 2e-3;
      const double rounded = test::on_gpu() ? testing::row_rounding(dtype) : 0;
      EXPECT_LE(max_error(result.output, expected, rounded, spread), bound)
          << to_string(dtype) << ", " << tokens << " tokens";
    }
  }
}

// Routing that the caller did, from hidden states or from logits, gives what the layer's own does.
TEST_P(LayerTest, TakesTheCallersRouting) {
  RandomLayer random(GetParam().spec, 9);
  const LayerSpec& spec = random.spec;
  if (spec.route.shared.count > 0) GTEST_SKIP() << "ids of shared slots are not put out";
  const Layer layer(spec, random.weights, context_, {.dtype = DType::bf16});
  for (const std::int64_t tokens : {1, 5, 40}) {
    const LayerInputs in = inputs(random, tokens);
    const Result own = run(context_, layer, in);
    const std::int64_t slots = spec.route.slots(), columns = spec.route.columns();
    std::vector<float> output(own.output.size(), std::nanf(""));
    const Buffer workspace = context_.allocate(layer.workspace_bytes(tokens));
    const auto forward = [&](const Tensor& logits, const Tensor& ids, const Tensor& weights) {
      std::fill(output.begin(), output.end(), std::nanf(""));
      test::Mirror mirror(context_);
      layer.forward({.hidden = mirror.in(in.hidden),
                     .token_ids = ids ? Tensor{} : mirror.in(in.token_ids),
                     .logits = mirror.in(logits),
                     .ids = mirror.in(ids),
                     .weights = mirror.in(weights)},
                    {.output = mirror.out(view(output.data(), {tokens, spec.hidden}))}, workspace);
      mirror.fetch();
    };
    forward({}, view(own.ids.data(), {tokens, slots}), view(own.weights.data(), {tokens, slots}));
    EXPECT_EQ(output, own.output) << tokens << " tokens";

    if (spec.router_norm.enabled || spec.route.router_bias || spec.route.soft_cap > 0 ||
        spec.route.logit_scale != 1) {
      continue;
    }
    const Tensor& w = random.weights.router;
    std::vector<float> logits(static_cast<std::size_t>(tokens * columns));
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t c = 0; c < columns; ++c) {
        double sum = 0;
        for (std::int64_t i = 0; i < spec.hidden; ++i) {
          sum += static_cast<double>(load_f32(in.hidden[t].data, in.hidden.dtype, i)) *
                 static_cast<double>(load_f32(w[c].data, w.dtype, i));
        }
        logits[static_cast<std::size_t>(t * columns + c)] = static_cast<float>(sum);
      }
    }
    forward(view(logits.data(), {tokens, columns}), {}, {});
    float most = 0;
    for (const float y : own.output) most = std::max(most, std::abs(y));
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_NEAR(output[i], own.output[i], 1e-3F * most) << tokens << " tokens, " << i;
    }
  }
}

TEST(LayerRouting, WhatIsRefused) {
  const Context context = test::engine();
  const LayerSpec spec = layer_specs().front().spec;
  RandomLayer random(spec, 3);
  const Layer layer(spec, random.weights, context, {.dtype = DType::f32});
  const std::int64_t tokens = 2, k = spec.route.slots();
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  test::Mirror mirror(context);
  std::vector<std::int32_t> id_values(static_cast<std::size_t>(tokens * k));
  std::vector<float> weight_values(id_values.size()),
      out(static_cast<std::size_t>(tokens * spec.hidden));
  std::vector<float> logit_values(static_cast<std::size_t>(tokens * spec.route.columns()));
  const LayerInputs base{
      .hidden = mirror.in(random.hidden_states(tokens, DType::f32)),
      .logits = mirror.in(view(logit_values.data(), {tokens, spec.route.columns()})),
      .ids = mirror.in(view(id_values.data(), {tokens, k})),
      .weights = mirror.in(view(weight_values.data(), {tokens, k}))};
  const Tensor y = mirror.out(view(out.data(), {tokens, spec.hidden}));
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const auto refusal = [&](const LayerInputs& in, const LayerOutputs& to) -> std::string {
    try {
      layer.forward(in, to, workspace);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Tensor shifted = base.hidden;
  shifted.data = static_cast<char*>(shifted.data) + 4;
  EXPECT_TRUE(has(refusal(base, {.output = shifted}),
                  "forward: output overlaps hidden: must be the same view, or lie apart"));
  LayerInputs both = base;
  EXPECT_TRUE(has(refusal(both, {.output = y}), "logits are given beside ids"));
  LayerInputs bare = base;
  bare.logits = bare.weights = {};
  EXPECT_TRUE(has(refusal(bare, {.output = y}), "weights"));
  LayerInputs alone = base;
  alone.logits = alone.ids = {};
  EXPECT_TRUE(has(refusal(alone, {.output = y}), "weights"));
  LayerInputs given = base;
  given.logits = {};
  EXPECT_TRUE(has(refusal(given, {.output = y, .ids = base.ids}), "outputs.ids"));
  given.ids.shape[1] = k + 1;
  EXPECT_TRUE(has(refusal(given, {.output = y}), "ids"));
  LayerInputs from_logits = base;
  from_logits.ids = from_logits.weights = {};
  Tensor overlapping = y;
  overlapping.strides[0] = 1;
  EXPECT_TRUE(has(refusal(from_logits, {.output = overlapping}),
                  "forward: output has a row stride of 1: must be its width"));
}

TEST(LayerRouting, WorkspaceOverATensorIsRefused) {
  const Context context = test::engine();
  const LayerSpec spec = layer_specs().front().spec;
  RandomLayer random(spec, 3);
  const Layer layer(spec, random.weights, context, {.dtype = DType::f32});
  const std::int64_t tokens = 2, k = spec.route.slots();
  const std::size_t needed = layer.workspace_bytes(tokens);
  const Buffer memory = context.allocate(needed + (1 << 16));
  test::Mirror mirror(context);
  std::vector<std::int32_t> id_values(static_cast<std::size_t>(tokens * k));
  std::vector<float> weight_values(id_values.size()),
      out(static_cast<std::size_t>(tokens * spec.hidden));
  const LayerInputs in{.hidden = mirror.in(random.hidden_states(tokens, DType::f32)),
                       .ids = mirror.in(view(id_values.data(), {tokens, k})),
                       .weights = mirror.in(view(weight_values.data(), {tokens, k}))};
  const Tensor y = mirror.out(view(out.data(), {tokens, spec.hidden}));
  const auto refusal = [&](const LayerInputs& given, const Tensor& to) -> std::string {
    try {
      layer.forward(given, {.output = to}, memory);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto moved = [&](Tensor of, std::size_t at) {
    of.data = static_cast<char*>(memory.data()) + at;
    return of;
  };
  EXPECT_EQ(refusal(in, y), "");
  EXPECT_EQ(refusal(in, moved(y, needed)), "");  // behind what the call needs
  context.synchronize();
  EXPECT_EQ(refusal(in, moved(y, 64)), "forward: workspace overlaps output: must lie apart");
  LayerInputs over = in;
  over.weights = moved(in.weights, 0);
  EXPECT_EQ(refusal(over, y), "forward: workspace overlaps weights: must lie apart");
  over = in;
  over.hidden = moved(in.hidden, 64);
  EXPECT_EQ(refusal(over, y), "forward: workspace overlaps hidden: must lie apart");
}

TEST_P(LayerTest, RoutesEveryTokenToDifferentExperts) {
  RandomLayer random(GetParam().spec, 8);
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::f32});
  const Result result = run(context_, layer, inputs(random, 40));
  const int k = random.spec.route.top_k;
  for (std::size_t t = 0; t < 40; ++t) {
    std::vector<std::int32_t> row(result.ids.begin() + static_cast<std::ptrdiff_t>(t) * k,
                                  result.ids.begin() + static_cast<std::ptrdiff_t>(t + 1) * k);
    std::sort(row.begin(), row.end());
    EXPECT_GE(row.front(), 0);
    EXPECT_LT(row.back(), random.spec.route.experts);
    EXPECT_EQ(std::adjacent_find(row.begin(), row.end()), row.end());
  }
}

TEST_P(LayerTest, BitsDoNotDependOnThreadsRunsOrNeighbours) {
  RandomLayer random(GetParam().spec, 9);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const LayerInputs in = inputs(random, 37);
    const Layer layer(random.spec, random.weights, context_, {.dtype = dtype});
    const Result first = run(context_, layer, in);
    EXPECT_EQ(run(context_, layer, in).output, first.output);
    for (const int threads : {1, 3, 4}) {
      const Context other = test::engine(threads);
      const Layer same(random.spec, random.weights, other, {.dtype = dtype});
      const Result result = run(other, same, in);
      EXPECT_EQ(result.output, first.output) << threads << " threads";
      EXPECT_EQ(result.weights, first.weights);
      EXPECT_EQ(result.ids, first.ids);
    }
    // A token by itself gives the bits it gave among others.
    for (const std::int64_t t : {0, 20, 36}) {
      LayerInputs alone{.hidden = in.hidden.rows(t, t + 1)};
      if (in.token_ids) alone.token_ids = in.token_ids.rows(t, t + 1);
      const Result one = run(context_, layer, alone);
      EXPECT_TRUE(std::equal(one.output.begin(), one.output.end(),
                             first.output.begin() + t * random.spec.hidden));
    }
  }
}

TEST_P(LayerTest, PermutedTokensGivePermutedRows) {
  RandomLayer random(GetParam().spec, 10);
  const std::int64_t tokens = 23;
  const std::int64_t hidden = random.spec.hidden;
  const LayerInputs in = inputs(random, tokens);
  std::vector<float> turned(static_cast<std::size_t>(tokens * hidden));
  std::vector<std::int32_t> turned_ids(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::copy_n(in.hidden.as<float>() + (tokens - 1 - t) * hidden, hidden,
                turned.begin() + t * hidden);
    if (in.token_ids) {
      turned_ids[static_cast<std::size_t>(t)] = in.token_ids.as<std::int32_t>()[tokens - 1 - t];
    }
  }
  LayerInputs other{.hidden = view(turned.data(), {tokens, hidden})};
  if (in.token_ids) other.token_ids = view(turned_ids.data(), {tokens});
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::f32});
  const Result straight = run(context_, layer, in);
  const Result reversed = run(context_, layer, other);
  for (std::int64_t t = 0; t < tokens; ++t) {
    EXPECT_TRUE(std::equal(straight.output.begin() + t * hidden,
                           straight.output.begin() + (t + 1) * hidden,
                           reversed.output.begin() + (tokens - 1 - t) * hidden));
  }
}

TEST_P(LayerTest, ValidTokensResidualStridesAndDtypes) {
  RandomLayer random(GetParam().spec, 11);
  const std::int64_t tokens = 12;
  const std::int64_t hidden = random.spec.hidden;
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::bf16});
  const LayerInputs in = inputs(random, tokens, DType::bf16);
  const Result plain = run(context_, layer, in);

  for (const std::int32_t valid : {-3, 0, 5, 12, 99}) {
    LayerInputs some = in;
    some.valid_tokens = view(&valid, {1});
    const Result part = run(context_, layer, some);
    const std::int64_t kept = std::clamp<std::int64_t>(valid, 0, tokens);
    for (std::int64_t i = 0; i < tokens * hidden; ++i) {
      EXPECT_EQ(part.output[static_cast<std::size_t>(i)],
                i < kept * hidden ? plain.output[static_cast<std::size_t>(i)] : 0.0f);
    }
    for (std::int64_t i = kept * random.spec.route.top_k; i < tokens * random.spec.route.top_k;
         ++i) {
      EXPECT_EQ(part.ids[static_cast<std::size_t>(i)], -1);
      EXPECT_EQ(part.weights[static_cast<std::size_t>(i)], 0.0f);
    }
  }

  // Strided hidden states and output, in place; a residual of the same rows.
  std::vector<std::uint16_t> wide(static_cast<std::size_t>(tokens * (hidden + 5)));
  Tensor strided = view(wide.data(), DType::bf16, {tokens, hidden + 5});
  strided.shape[1] = hidden;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::memcpy(strided[t].data, in.hidden[t].data, static_cast<std::size_t>(hidden) * 2);
  }
  test::Mirror mirror(context_);
  const Tensor there = mirror.out(strided);
  const LayerInputs in_place{
      .hidden = there, .token_ids = mirror.in(in.token_ids), .residual = there};
  const Buffer workspace = context_.allocate(layer.workspace_bytes(tokens));
  layer.forward(in_place, {.output = there}, workspace);
  mirror.fetch();
  double largest = 0;
  for (const float value : plain.output) largest = std::max(largest, std::fabs(double{value}));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < hidden; ++i) {
      const double x{load_f32(in.hidden.data, DType::bf16, t * hidden + i)};
      const double expected = double{plain.output[static_cast<std::size_t>(t * hidden + i)]} + x;
      const double got{bf16_to_f32(wide[static_cast<std::size_t>(t * (hidden + 5) + i)])};
      EXPECT_NEAR(got, expected, 0.005 * (std::fabs(expected) + largest / 100));
    }
    for (std::int64_t i = hidden; i < hidden + 5; ++i) {
      EXPECT_EQ(wide[static_cast<std::size_t>(t * (hidden + 5) + i)], 0);
    }
  }
}

#if defined(__x86_64__)
// torch.set_flush_denormal and -ffast-math set the caller's thread alone.
TEST_P(LayerTest, BitsDoNotDependOnHowTheCallerFlushesSmallNumbers) {
  RandomLayer random(GetParam().spec, 10);
  for (Tensor& down : random.weights.experts.down) {  // so small that results are denormal
    for (std::int64_t n = 0; n < down.shape[0]; ++n) {
      for (std::int64_t k = 0; k < down.shape[1]; ++k) {
        const std::int64_t at = n * down.strides[0] + k * down.strides[1];
        store_f32(down.data, down.dtype, at, load_f32(down.data, down.dtype, at) * 1e-37F);
      }
    }
  }
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::f32});
  const LayerInputs in = inputs(random, 40);
  const Result want = run(context_, layer, in);
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  const Result got = run(context_, layer, in);
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(std::memcmp(got.output.data(), want.output.data(), 4 * want.output.size()), 0);
  EXPECT_EQ(got.ids, want.ids);
}

// Subnormal biases in f16 are normal numbers in f32.
TEST(Layer, BitsDoNotDependOnHowItsMakerFlushesSmallNumbers) {
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2, .selection_bias = true}, 64, 32);
  spec.experts.gate_up_bias = spec.experts.down_bias = true;
  RandomLayer random(spec, 12);
  ExpertWeights& experts = random.weights.experts;
  std::vector<Tensor*> biases = {&random.weights.selection_bias};
  for (auto* list : {&experts.gate_bias, &experts.up_bias, &experts.down_bias}) {
    for (Tensor& bias : *list) biases.push_back(&bias);
  }
  std::vector<std::vector<std::uint16_t>> memory;
  for (Tensor* bias : biases) {
    const std::int64_t size = bias->elements();
    auto& values = memory.emplace_back(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::uint16_t>(1000 - i);
    }
    *bias = view(values.data(), f16, {size});
  }
  const Context context = test::engine();
  const Layer layer(spec, random.weights, context);
  const LayerInputs in = {.hidden = random.hidden_states(6)};
  const Result want = run(context, layer, in);
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  const Layer made(spec, random.weights, context);
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(run(context, made, in).output, want.output);
}
#endif

TEST_P(LayerTest, WorkspaceForManyIsEnoughForFewer) {
  RandomLayer random(GetParam().spec, 18);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Layer layer(random.spec, random.weights, context_, {.dtype = dtype});
    std::size_t before = 0;
    for (std::int64_t tokens = 0; tokens < 500; ++tokens) {
      const std::size_t bytes = layer.workspace_bytes(tokens);
      EXPECT_GE(bytes, before) << tokens << " tokens";
      before = bytes;
    }
  }
}

TEST_P(LayerTest, NoTokensIsLegal) {
  RandomLayer random(GetParam().spec, 12);
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::f32});
  const Result result = run(context_, layer, inputs(random, 0));
  EXPECT_TRUE(result.output.empty());
}

TEST_P(LayerTest, PoisonedTokensHarmOnlyThemselves) {
  RandomLayer random(GetParam().spec, 13);
  const std::int64_t tokens = 8;
  const std::int64_t hidden = random.spec.hidden;
  const LayerInputs in = inputs(random, tokens);
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::bf16});
  const Result clean = run(context_, layer, in);
  auto* x = in.hidden.as<float>();
  std::fill_n(x + 2 * hidden, hidden, std::nanf(""));
  x[5 * hidden] = std::numeric_limits<float>::infinity();
  const Result dirty = run(context_, layer, in);
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (t == 2 || t == 5) continue;
    EXPECT_TRUE(std::equal(clean.output.begin() + t * hidden,
                           clean.output.begin() + (t + 1) * hidden,
                           dirty.output.begin() + t * hidden))
        << "token " << t;
  }
  for (const std::int32_t id : dirty.ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, random.spec.route.experts);
  }
}

TEST_P(LayerTest, TimesEveryStage) {
  RandomLayer random(GetParam().spec, 14);
  const Layer layer(random.spec, random.weights, context_, {.dtype = DType::f32});
  const LayerInputs in = inputs(random, 5);
  const Result plain = run(context_, layer, in);
  std::vector<float> output(plain.output.size());
  const Buffer workspace = context_.allocate(layer.workspace_bytes(5));
  std::vector<StageTime> times;
  test::Mirror mirror(context_);
  layer.forward_timed({.hidden = mirror.in(in.hidden), .token_ids = mirror.in(in.token_ids)},
                      {.output = mirror.out(view(output.data(), {5, random.spec.hidden}))},
                      workspace, times);
  mirror.fetch();
  EXPECT_EQ(output, plain.output);
  EXPECT_GE(times.size(), test::on_gpu() ? 4u : 5u);
  for (const StageTime& time : times) {
    EXPECT_GE(time.seconds, 0);
    EXPECT_GT(time.bytes, 0) << time.stage;
  }
  EXPECT_EQ(times.front().stage, test::on_gpu() ? "route+order" : "route");
  EXPECT_NE(layer.explain(5).find("gate_up"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Specs, LayerTest, ::testing::ValuesIn(layer_specs()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// The joint rule's weights come with the shared slots: recomputed here by its formula.
TEST(Layer, JointSharedExperts) {
  const Context context = test::engine();
  for (const NamedSpec& named : layer_specs()) {
    if (named.spec.route.shared.count == 0) continue;
    RandomLayer random(named.spec, 15);
    const LayerSpec& spec = random.spec;
    const LayerInputs in{.hidden = random.hidden_states(9)};
    const Layer layer(spec, random.weights, context, {.dtype = DType::f32});
    const Result result = run(context, layer, in);
    const std::vector<std::int32_t> ids = all_ids(spec, result);
    const int slots = spec.route.slots();
    std::vector<float> weights(ids.size());
    const std::vector<double> router = router_input_reference(spec, random.weights, in.hidden);
    for (std::size_t t = 0; t < 9; ++t) {
      double sum = 0;
      std::vector<double> p;
      for (int j = 0; j < slots; ++j) {
        const std::int32_t id =
            ids[t * static_cast<std::size_t>(slots) + static_cast<std::size_t>(j)];
        double logit = 0;
        for (std::int64_t i = 0; i < spec.hidden; ++i) {
          logit += router[t * static_cast<std::size_t>(spec.hidden) + static_cast<std::size_t>(i)] *
                   double{load_f32(random.weights.router.data, random.weights.router.dtype,
                                   id * spec.hidden + i)};
        }
        p.push_back(1 / (1 + std::exp(-logit)));
        sum += p.back();
      }
      for (int j = 0; j < slots; ++j) {
        const std::size_t at = t * static_cast<std::size_t>(slots) + static_cast<std::size_t>(j);
        weights[at] =
            static_cast<float>(p[static_cast<std::size_t>(j)] / sum * double{spec.route.scale});
        if (j < spec.route.top_k) {
          EXPECT_NEAR(weights[at],
                      result.weights[t * static_cast<std::size_t>(spec.route.top_k) +
                                     static_cast<std::size_t>(j)],
                      1e-6);
        }
      }
    }
    EXPECT_LE(max_error(result.output, layer_reference(spec, random.weights, in.hidden, ids.data(),
                                                       weights.data())),
              4e-6);
  }
}

// Checkpoints store gate and up as halves, interleaved, or transposed: strides say so, bits do not
// change.
TEST(Layer, StridedWeightsGiveTheSameBits) {
  const Context context = test::engine();
  RandomLayer random(layer_specs()[3].spec, 16);
  const std::int64_t hidden = random.spec.hidden;
  const std::int64_t intermediate = random.spec.experts.intermediate;
  LayerWeights strided = random.weights;
  std::vector<std::vector<std::uint16_t>> memory;
  const auto copy = [](const Tensor& from, const Tensor& to) {
    for (std::int64_t i = 0; i < from.shape[0]; ++i) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        to.as<std::uint16_t>()[i * to.strides[0] + j * to.strides[1]] =
            from.as<std::uint16_t>()[i * from.strides[0] + j * from.strides[1]];
      }
    }
  };
  for (std::size_t e = 0; e < strided.experts.gate.size(); ++e) {
    // [H, 2I], gate and up columns interleaved
    auto& both = memory.emplace_back(static_cast<std::size_t>(2 * hidden * intermediate));
    Tensor gate = view(both.data(), DType::bf16, {hidden, 2 * intermediate}).transposed();
    gate.shape[0] = intermediate;
    gate.strides[0] = 2;
    Tensor up = gate;
    up.data = both.data() + 1;
    copy(random.weights.experts.gate[e], gate);
    copy(random.weights.experts.up[e], up);
    auto& down = memory.emplace_back(static_cast<std::size_t>(hidden * intermediate));
    const Tensor turned = view(down.data(), DType::bf16, {intermediate, hidden}).transposed();
    copy(random.weights.experts.down[e], turned);
    strided.experts.gate[e] = gate;
    strided.experts.up[e] = up;
    strided.experts.down[e] = turned;
  }
  const LayerInputs in{.hidden = random.hidden_states(21)};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Layer dense(random.spec, random.weights, context, {.dtype = dtype});
    const Layer other(random.spec, strided, context, {.dtype = dtype});
    EXPECT_EQ(run(context, dense, in).output, run(context, other, in).output);
  }
}

// Relabelling the experts changes ids and nothing else (f32 weights are equal, sums follow slots).
TEST(Layer, ExpertLabelsDoNotMatter) {
  const Context context = test::engine();
  RandomLayer random(layer_specs()[0].spec, 17);
  const LayerInputs in{.hidden = random.hidden_states(30)};
  const Layer layer(random.spec, random.weights, context, {.dtype = DType::f32});
  const Result straight = run(context, layer, in);
  LayerWeights turned = random.weights;
  const int experts = random.spec.route.experts;
  for (auto* list : {&turned.experts.gate, &turned.experts.up, &turned.experts.down}) {
    std::reverse(list->begin(), list->end());
  }
  std::vector<std::uint16_t> router(static_cast<std::size_t>(experts * random.spec.hidden));
  for (int e = 0; e < experts; ++e) {
    std::memcpy(router.data() + e * random.spec.hidden, random.weights.router[experts - 1 - e].data,
                static_cast<std::size_t>(random.spec.hidden) * 2);
  }
  turned.router = view(router.data(), DType::bf16, {experts, random.spec.hidden});
  const Layer other(random.spec, turned, context, {.dtype = DType::f32});
  const Result reversed = run(context, other, in);
  for (std::size_t i = 0; i < straight.ids.size(); ++i) {
    EXPECT_EQ(straight.ids[i], experts - 1 - reversed.ids[i]);
    EXPECT_NEAR(straight.weights[i], reversed.weights[i], 1e-6);
  }
  for (std::size_t i = 0; i < straight.output.size(); ++i) {
    EXPECT_NEAR(straight.output[i], reversed.output[i], 1e-5);
  }
}

}  // namespace
}  // namespace shunt
