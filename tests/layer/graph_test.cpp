// Layers in CUDA graphs, in every kind of weights and rows that has kernels of its own: one graph
// follows its inputs, so other routing and other numbers of valid tokens, bit for bit as plain
// calls have it. (Of plain weights in bf16, gpu_test.cpp.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/layer.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt {
namespace {

using testing::NamedSpec;
using testing::RandomLayer;
using testing::Result;
using testing::run;

struct NamedOptions {
  const char* name;
  LayerOptions options;
};
std::vector<NamedOptions> kinds() {
  const DType bf16 = DType::bf16;
  return {
      {"F16", {.dtype = DType::f16}},
      {"Fp8Block", {.dtype = bf16, .format = {Format::fp8_block}, .rows = RowFormat::fp8_block}},
      {"Fp8Token", {.dtype = bf16, .format = {Format::fp8_channel}, .rows = RowFormat::fp8_token}},
      {"Nvfp4", {.dtype = bf16, .format = {Format::nvfp4}}},
      {"Int4", {.dtype = bf16, .format = {Format::int4, 32}}}};
}
std::vector<NamedOptions> more_kinds() {
  std::vector<NamedOptions> list = kinds();
  list.push_back({"SparseNvfp4", {.dtype = DType::bf16, .format = {Format::sparse_nvfp4}}});
  list.push_back({"Int4InF16", {.dtype = DType::f16, .format = {Format::int4, 128}}});
  list.push_back({"Int8", {.dtype = DType::bf16, .format = {Format::int8}}});
  list.push_back({"Dense3", {.dtype = DType::bf16, .format = {Format::dense3}}});
  return list;
}

// Those whose routing can change.
std::vector<NamedSpec> small_specs() {
  std::vector<NamedSpec> list = testing::layer_specs();
  std::erase_if(
      list, [](const NamedSpec& one) { return one.spec.route.top_k == one.spec.route.experts; });
  return list;
}
std::vector<NamedSpec> large_specs() {
  LayerSpec many = testing::small_layer({.experts = 40, .top_k = 6, .renormalize = true}, 256, 128);
  many.shared = {.intermediate = 192, .sigmoid_gate = true};
  return {{"Wide", testing::small_layer({.experts = 8, .top_k = 2, .renormalize = true}, 256, 384)},
          {"Many", many}};
}

using Case = std::tuple<NamedSpec, NamedOptions>;
std::vector<Case> cases(const std::vector<NamedSpec>& specs,
                        const std::vector<NamedOptions>& options) {
  std::vector<Case> all;
  for (const NamedSpec& spec : specs) {
    for (const NamedOptions& kind : options) {
      if (test::on_gpu()) all.emplace_back(spec, kind);
    }
  }
  return all;
}

class LayerGraphs : public ::testing::TestWithParam<Case> {
 protected:
  // Where it is not, as it may be.
  bool refused() const {
    const auto& [named, kind] = GetParam();
    const Support support = supports(named.spec, kind.options, cuda().device());
    if (support) return false;
    const bool fp8 = kind.options.rows != RowFormat::as_dtype;
    const bool odd =
        named.spec.experts.intermediate % 2 != 0 || named.spec.experts.intermediate < 10;
    EXPECT_TRUE(fp8 && (!test::on_hopper() || (odd && kind.options.rows == RowFormat::fp8_token)))
        << support.reason;
    return true;
  }
};
// Of sizes that fill tiles.
class LargeLayerGraphs : public LayerGraphs {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LayerGraphs);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LargeLayerGraphs);
std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Kinds, LayerGraphs, ::testing::ValuesIn(cases(small_specs(), kinds())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Kinds, LargeLayerGraphs,
                         ::testing::ValuesIn(cases(large_specs(), more_kinds())), name_of);

// A layer and its graph over tensors of its own stream, and the same layer without one. `alone`:
// it takes nothing but hidden states and gives nothing but outputs, as most callers have it.
class Captured {
 public:
  Captured(RandomLayer& random, const LayerOptions& options, std::int64_t tokens,
           bool dependent_launch, bool alone)
      : context_(cuda({.stream = stream_.get(), .dependent_launch = dependent_launch})),
        layer_(random.spec, random.weights, context_, options),
        plain_(random.spec, random.weights, plain_context_, options),
        mirror_(context_),
        result_(random.spec, tokens),
        tokens_(tokens),
        dtype_(options.dtype),
        alone_(alone) {
    const LayerSpec& spec = random.spec;
    states_.resize(static_cast<std::size_t>(tokens * spec.hidden));
    residual_.resize(states_.size());
    ids_.resize(static_cast<std::size_t>(tokens));
    in_ = {.hidden = view(states_.data(), dtype_, {tokens, spec.hidden}),
           .valid_tokens = view(&valid_, {1})};
    if (!alone) in_.residual = view(residual_.data(), {tokens, spec.hidden});
    if (spec.route.hashed) in_.token_ids = view(ids_.data(), {tokens});
    there_ = {.hidden = mirror_.in(in_.hidden),
              .token_ids = mirror_.in(in_.token_ids),
              .residual = mirror_.in(in_.residual),
              .valid_tokens = mirror_.in(in_.valid_tokens)};
    LayerOutputs out{.output = mirror_.out(view(result_.output.data(), {tokens, spec.hidden}))};
    if (!alone) {
      out.ids = mirror_.out(view(result_.ids.data(), {tokens, spec.route.top_k}));
      out.weights = mirror_.out(view(result_.weights.data(), {tokens, spec.route.top_k}));
    }
    workspace_ = context_.allocate(layer_.workspace_bytes(tokens));
    layer_.forward(there_, out, workspace_);  // loads the kernels
    context_.synchronize();
    graph_ =
        std::make_unique<test::Graph>(stream_, [&] { layer_.forward(there_, out, workspace_); });
  }

  // Other inputs, of which the first `valid` tokens are there.
  void expect_as_a_plain_call(RandomLayer& random, std::int32_t valid) {
    const Tensor states = random.hidden_states(tokens_, dtype_);
    std::memcpy(states_.data(), states.data, states_.size() * sizeof states_[0]);
    const Tensor more = random.hidden_states(tokens_);
    std::copy_n(more.as<float>(), residual_.size(), residual_.begin());
    const Tensor ids = random.token_ids(tokens_);
    std::copy_n(ids.as<std::int32_t>(), ids_.size(), ids_.begin());
    valid_ = valid;
    context_.copy(there_.hidden.data, states_.data(), states_.size() * sizeof states_[0]);
    if (there_.residual) {
      context_.copy(there_.residual.data, residual_.data(), residual_.size() * sizeof residual_[0]);
    }
    if (there_.token_ids) {
      context_.copy(there_.token_ids.data, ids_.data(), ids_.size() * sizeof ids_[0]);
    }
    context_.copy(there_.valid_tokens.data, &valid_, sizeof valid_);
    const Result before = result_;
    mirror_.poison();
    graph_->replay();
    mirror_.fetch();
    const Result want = run(plain_context_, plain_, in_);
    EXPECT_EQ(result_.output, want.output) << valid << " valid tokens";
    if (alone_) {
      changed_ += result_.output != before.output;
    } else {
      EXPECT_EQ(result_.ids, want.ids) << valid << " valid tokens";
      EXPECT_EQ(result_.weights, want.weights) << valid << " valid tokens";
      changed_ += result_.ids != before.ids;
    }
    const std::int64_t there = std::clamp<std::int64_t>(valid, 0, tokens_);
    const auto hidden = static_cast<std::int64_t>(result_.output.size()) / tokens_;
    const auto behind = result_.output.begin() + there * hidden;
    EXPECT_TRUE(std::all_of(behind, result_.output.end(), [](float y) { return y == 0; }))
        << valid << " valid tokens: others are not zeros";
    EXPECT_TRUE(there == 0 ||
                std::any_of(result_.output.begin(), behind, [](float y) { return y != 0; }));
  }
  // How often ids were others than those before; without them, outputs.
  int times_changed() const { return changed_; }

 private:
  test::Stream stream_;
  Context context_;
  Context plain_context_ = cuda();
  Layer layer_, plain_;
  test::Mirror mirror_;
  Result result_;
  std::int64_t tokens_;
  DType dtype_;
  bool alone_;
  std::vector<std::uint16_t> states_;
  std::vector<float> residual_;
  std::vector<std::int32_t> ids_;
  std::int32_t valid_ = 0;
  LayerInputs in_, there_;
  Buffer workspace_;
  std::unique_ptr<test::Graph> graph_;
  int changed_ = 0;
};

void expect_to_follow(const NamedSpec& named, const LayerOptions& options, std::int64_t tokens,
                      const std::vector<std::int32_t>& valid, bool dependent_launch, bool alone) {
  SCOPED_TRACE(std::to_string(tokens) + " tokens" + (alone ? ", alone" : ""));
  RandomLayer random(named.spec, 23);
  Captured captured(random, options, tokens, dependent_launch, alone);
  for (const std::int32_t count : valid) {
    captured.expect_as_a_plain_call(random, count);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(captured.times_changed(), static_cast<int>(valid.size()) / 2);
}

TEST_P(LayerGraphs, FollowTheirInputs) {
  if (refused()) GTEST_SKIP() << "refused";
  const auto& [named, kind] = GetParam();
  for (const bool dependent : {false, true}) {
    expect_to_follow(named, kind.options, 41, {41, 0, 7, 40, 1000, -1, 41}, dependent, false);
  }
}

// Few tokens, whose products order them by themselves.
TEST_P(LayerGraphs, OfFewTokensFollowTheirInputs) {
  if (refused()) GTEST_SKIP() << "refused";
  const auto& [named, kind] = GetParam();
  for (const bool alone : {false, true}) {
    expect_to_follow(named, kind.options, 1, {1, 1, 0, 1, 1}, true, alone);
    expect_to_follow(named, kind.options, 3, {3, 2, 0, 3, 1}, true, alone);
    expect_to_follow(named, kind.options, 8, {8, 5, 8, 1, 7}, true, alone);
  }
}

// And of kernels for many rows, groups that are large, small and empty.
TEST_P(LargeLayerGraphs, FollowTheirInputs) {
  if (refused()) GTEST_SKIP() << "refused";
  const auto& [named, kind] = GetParam();
  for (const bool alone : {false, true}) {
    expect_to_follow(named, kind.options, 1, {1, 1, 0, 1}, true, alone);
    expect_to_follow(named, kind.options, 8, {8, 3, 0, 8}, true, alone);
    expect_to_follow(named, kind.options, 64, {64, 1, 63, 20}, true, alone);
    expect_to_follow(named, kind.options, 700, {700, 5, 699, 333}, true, alone);
  }
}

}  // namespace
}  // namespace shunt
#endif
