// A shared expert as one more of the experts (layer/folded.hpp): when it is, and that a call gives
// what it gives with the shared expert apart.
#include "layer/folded.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::Result;
using testing::run;
using testing::run_in_stages;
using testing::small_layer;

// Llama 4's rule, or DeepSeek-V3's.
LayerSpec spec_of(bool on_input, std::int64_t hidden = 512, std::int64_t intermediate = 256) {
  RouteSpec route{.experts = 16,
                  .top_k = 1,
                  .score = Score::sigmoid,
                  .score_stage = ScoreStage::after_top_k,
                  .weight_on_input = true};
  if (!on_input) {
    route = {.experts = 32,
             .top_k = 4,
             .score = Score::sigmoid,
             .selection_bias = true,
             .groups = {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2},
             .renormalize = true,
             .scale = 2.5f};
  }
  LayerSpec spec = small_layer(route, hidden, intermediate);
  spec.shared = {.intermediate = intermediate};
  return spec;
}

bool says_folded(const Layer& layer, std::int64_t tokens) {
  return layer.explain(tokens).find("one more of the experts") != std::string::npos;
}

TEST(FoldedShared, IsASlotOfTheFoldedSpec) {
  for (const bool on_input : {true, false}) {
    const LayerSpec spec = spec_of(on_input), folded = shunt::folded(spec);
    EXPECT_TRUE(supports(folded, {}, Device{})) << supports(folded, {}, Device{}).reason;
    EXPECT_EQ(folded.shared.intermediate, 0);
    EXPECT_EQ(folded.experts.experts, spec.experts.experts + 1);
    EXPECT_EQ(folded.route.slots(), spec.route.slots() + 1);
    EXPECT_EQ(folded.route.columns(), spec.route.columns());
  }
}

TEST(FoldedShared, IsNotOnACpuNorUnlikeTheOthers) {
  EXPECT_FALSE(may_fold(spec_of(true), {}, Device{}));
#if SHUNT_CUDA_BUILT
  const auto may = [](const auto& change) {
    LayerSpec spec = spec_of(false);
    LayerOptions options;
    change(spec, options);
    return may_fold(spec, options, {DeviceType::cuda, 0});
  };
  EXPECT_TRUE(may([](auto&, auto&) {}));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.shared.intermediate = 0; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.shared.intermediate *= 2; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.shared.activation.kind = Activation::gelu; }));
  EXPECT_TRUE(may([](auto& spec, auto&) { spec.shared.sigmoid_gate = true; }));
  EXPECT_TRUE(may([](auto& spec, auto&) { spec.shared.scale = 0.5f; }));
  EXPECT_FALSE(may([](auto& spec, auto&) {
    spec = spec_of(true);
    spec.shared.scale = 0.5f;
  }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.shared.down_bias = true; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.experts.gate_up_bias = true; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.input_norm.enabled = true; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.expert_norm.enabled = true; }));
  EXPECT_FALSE(may([](auto& spec, auto&) { spec.routed_outside = true; }));
  EXPECT_FALSE(may([](auto&, auto& options) { options.dtype = DType::f32; }));
  EXPECT_FALSE(may([](auto&, auto& options) { options.format = {Format::nvfp4}; }));
  EXPECT_FALSE(may([](auto&, auto& options) { options.in_place = true; }));
  EXPECT_FALSE(may([](auto&, auto& options) { options.batch_invariant = true; }));
#endif
}

// Timed on an H200: docs/notes/cuda-layer.md, "One more of the experts".
TEST(FoldedShared, PaysWhereOneTokenIsReadInOnePass) {
  constexpr int h200 = 132;
  const auto pays = [](int top_k, std::int64_t hidden, std::int64_t intermediate) {
    LayerSpec spec = small_layer({.experts = 512, .top_k = top_k}, hidden, intermediate);
    spec.shared = {.intermediate = intermediate};
    return folding_pays(spec, h200);
  };
  EXPECT_TRUE(pays(1, 5120, 1024));   // a shard of Llama 4
  EXPECT_FALSE(pays(10, 2048, 512));  // Qwen3-Next: more rows than a block adds up
  EXPECT_FALSE(pays(8, 4096, 1408));  // GLM-4.5-Air
  EXPECT_FALSE(pays(8, 7168, 2048));  // DeepSeek-V3
  EXPECT_FALSE(pays(32, 64, 32));     // too many pairs
}

// Matrices of one list are prepared together: they must be stored alike.
TEST(FoldedShared, IsNotWhereItsMatricesAreStoredOtherwise) {
  RandomLayer random(spec_of(false, 64, 32), 3);
  LayerWeights weights = random.weights;
  EXPECT_TRUE(may_fold(weights));
  EXPECT_EQ(joined(weights).down.back().data, weights.shared.down[0].data);
  weights.shared.down[0].dtype = DType::f16;
  EXPECT_FALSE(may_fold(weights));
}

// Rows are rounded alike, sums added in the same order but within products: what is left is the
// rounding of a row that lies between two numbers.
TEST(FoldedShared, GivesWhatItGivesApart) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const Context context = cuda({.dependent_launch = true}), plain = cuda();
  for (const auto& [on_input, gated] : {std::pair{true, false}, {false, false}, {false, true}}) {
    LayerSpec spec = spec_of(on_input);
    spec.shared.sigmoid_gate = gated;
    if (gated) spec.shared.scale = 0.7f;
    RandomLayer random(spec, 41);
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const double bound = dtype == DType::bf16 ? 1.2e-2 : 2e-3;
      const Layer layer(spec, random.weights, context, {.dtype = dtype});
      for (const std::int64_t tokens : {1, 2, 3, 5, 8, 9, 17, 64, 130, 700, 2600}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens of " + to_string(dtype) +
                     (on_input ? ", weights on the input" : "") + (gated ? ", gated" : ""));
        EXPECT_EQ(says_folded(layer, tokens), tokens == 1 && test::on_hopper());
        const LayerInputs in{.hidden = random.hidden_states(tokens, dtype)};
        const Result once = run(context, layer, in);
        const Result apart = run_in_stages(context, layer, in);
        EXPECT_LE(test::relative_error(once.output, apart.output), bound);
        EXPECT_EQ(once.ids, apart.ids);
        EXPECT_EQ(once.weights, apart.weights);
        EXPECT_EQ(run(context, layer, in).output, once.output);
        EXPECT_EQ(run(plain, Layer(spec, random.weights, plain, {.dtype = dtype}), in).output,
                  once.output);
      }
    }
  }
}

// Rows at or past the count are zero, with a residual and without; others as without padding.
TEST(FoldedShared, TokensThatAreNotValidHaveNoSharedExpert) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const Context context = test::engine();
  const LayerSpec spec = spec_of(true);
  RandomLayer random(spec, 42);
  const Layer layer(spec, random.weights, context, {});
  for (const std::int64_t tokens : {1, 4, 300}) {
    const Tensor hidden = random.hidden_states(tokens, DType::bf16);
    const Tensor residual = random.hidden_states(tokens, DType::bf16);
    const Result whole = run(context, layer, {.hidden = hidden, .residual = residual});
    for (std::int32_t count : {0, 1, static_cast<std::int32_t>(tokens / 2)}) {
      const Result some = run(
          context, layer,
          {.hidden = hidden, .residual = residual, .valid_tokens = view(&count, DType::i32, {1})});
      for (std::int64_t i = 0; i < tokens * spec.hidden; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double wanted = i / spec.hidden < count ? static_cast<double>(whole.output[at]) : 0.0;
        ASSERT_NEAR(static_cast<double>(some.output[at]), wanted, 0.02 * std::abs(wanted) + 0.02)
            << count << " of " << tokens << " tokens, number " << i;
        if (i / spec.hidden >= count) {
          ASSERT_EQ(some.output[at], 0.0f);
        }
      }
    }
  }
}

TEST(FoldedShared, SavedAndLoadedItGivesTheSameBits) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const Context context = test::engine();
  const LayerSpec spec = spec_of(false);
  RandomLayer random(spec, 43);
  const Layer layer(spec, random.weights, context, {});
  const test::TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors";
  layer.save_prepared(path);
  const Layer loaded = Layer::load_prepared(path, context);
  EXPECT_EQ(loaded.prepared_bytes(), layer.prepared_bytes());
  for (const std::int64_t tokens : {1, 33}) {
    EXPECT_EQ(says_folded(loaded, tokens), says_folded(layer, tokens));
    const LayerInputs in{.hidden = random.hidden_states(tokens, DType::bf16)};
    EXPECT_EQ(run(context, loaded, in).output, run(context, layer, in).output);
    EXPECT_EQ(run_in_stages(context, loaded, in).output, run_in_stages(context, layer, in).output);
  }
}

}  // namespace
}  // namespace shunt
