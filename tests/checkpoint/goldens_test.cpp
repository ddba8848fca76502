// Every golden checkpoint against what transformers computed: first through the plain references,
// which shows that the table of families says the right thing, then through the layer.
#include <gtest/gtest.h>

#include <map>
#include <span>
#include <utility>

#include "checkpoint/golden.hpp"
#include "checkpoint/unpack_experts.hpp"
#include "layer/reference.hpp"
#include "layer/routing_reference.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

using test::Recorded;

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string folder = test::golden(GetParam());
    checkpoint_ = Checkpoint::open(folder);
    file_ = SafetensorsFile::open(folder + "/golden.safetensors");
    blocks_ = test::recorded(file_);
    ASSERT_FALSE(blocks_.empty());
  }
  Checkpoint checkpoint_;
  SafetensorsFile file_;
  std::vector<Recorded> blocks_;
};

// The same experts for every token, and weights equal but for one factor common to all: some models
// apply their scale behind the experts.
void compare_routing(const Recorded& block, const std::vector<std::int32_t>& ids,
                     const std::vector<float>& weights, int slots) {
  if (!block.ids || block.ids.shape[0] != block.input.shape[0]) return;
  const auto tokens = static_cast<std::size_t>(block.ids.shape[0]);
  const auto k = static_cast<std::size_t>(block.ids.shape[1]);
  const auto stride = static_cast<std::size_t>(slots);
  const auto* expected = block.ids.as<std::int64_t>();
  std::vector<double> ours, theirs;  // weights, slot by slot
  for (std::size_t t = 0; t < tokens; ++t) {
    std::map<std::int64_t, float> weight_of;
    for (std::size_t i = 0; i < k; ++i) weight_of[ids[t * stride + i]] = weights[t * stride + i];
    ASSERT_EQ(weight_of.size(), k) << "token " << t << ": an expert twice";
    for (std::size_t i = 0; i < k; ++i) {
      const std::int64_t id = expected[t * k + i];
      ASSERT_TRUE(weight_of.contains(id)) << "token " << t << " lacks expert " << id;
      ours.push_back(static_cast<double>(weight_of[id]));
      if (block.weights)
        theirs.push_back(static_cast<double>(block.weights.as<float>()[t * k + i]));
    }
  }
  if (!block.weights) return;
  const auto largest = std::max_element(theirs.begin(), theirs.end()) - theirs.begin();
  const double factor =
      ours[static_cast<std::size_t>(largest)] / theirs[static_cast<std::size_t>(largest)];
  for (double& weight : theirs) weight *= factor;
  EXPECT_LE(test::relative_error(ours, theirs), 1e-5);
}

TEST_P(Golden, ReadsWhatTransformersComputes) {
  for (const Recorded& block : blocks_) {
    SCOPED_TRACE(block.module);
    const LayerSpec spec = checkpoint_.spec(block.layer);
    LayerWeights weights = checkpoint_.weights(block.layer);
    std::vector<std::vector<float>> memory;
    test::unpack_experts(weights.experts, memory);
    const Support support = supports(spec, {.dtype = f32}, Device{});
    ASSERT_TRUE(support) << support.reason;

    const auto tokens = static_cast<std::size_t>(block.input.shape[0]);
    const auto hidden = static_cast<std::size_t>(spec.hidden);
    const auto slots = static_cast<std::size_t>(spec.route.slots());
    const std::vector<double> x = router_input_reference(spec, weights, block.input);
    std::vector<std::int32_t> ids;
    std::vector<float> routing;
    for (std::size_t t = 0; t < tokens; ++t) {
      std::vector<int> hashed;
      if (spec.route.hashed) {
        const Tensor table = weights.hash_table[block.token_ids.as<std::int64_t>()[t]];
        for (int i = 0; i < spec.route.top_k; ++i) {
          hashed.push_back(static_cast<int>(table.as<std::int64_t>()[i]));
        }
      }
      const RouteReference out = testing::routing_reference(
          spec, weights, std::span(x).subspan(t * hidden, hidden), std::move(hashed));
      for (std::size_t i = 0; i < slots; ++i) {
        ids.push_back(out.ids[i]);
        routing.push_back(static_cast<float>(out.weights[i]));
      }
    }
    compare_routing(block, ids, routing, spec.route.slots());
    const std::vector<double> y =
        layer_reference(spec, weights, block.input, ids.data(), routing.data());
    EXPECT_LE(test::relative_error(y, test::floats(block.output)), 1e-5);
  }
}

class GoldenLayer : public Golden {
 protected:
  void run(DType dtype, double tolerance) {
    const Context context = cpu({.threads = 2});
    for (const Recorded& block : blocks_) {
      SCOPED_TRACE(block.module);
      const Layer layer(checkpoint_, block.layer, context, {.dtype = dtype});
      const std::int64_t tokens = block.input.shape[0];
      const RouteSpec& route = layer.spec().route;
      std::vector<float> y(static_cast<std::size_t>(block.output.elements()));
      std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * route.top_k));
      std::vector<float> weights(ids.size());
      const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
      layer.forward({.hidden = block.input, .token_ids = block.token_ids},
                    {.output = view(y.data(), {tokens, layer.spec().hidden}),
                     .ids = view(ids.data(), {tokens, route.top_k}),
                     .weights = view(weights.data(), {tokens, route.top_k})},
                    workspace);
      compare_routing(block, ids, weights, route.top_k);
      EXPECT_LE(test::relative_error(y, test::floats(block.output)), tolerance);
    }
  }
};

TEST_P(GoldenLayer, F32) { run(f32, 1e-5); }
TEST_P(GoldenLayer, Bf16) { run(bf16, 1e-2); }
TEST_P(GoldenLayer, F16) { run(f16, 2e-3); }

std::string case_name(const ::testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Families, Golden, ::testing::ValuesIn(test::golden_families()), case_name);
INSTANTIATE_TEST_SUITE_P(Families, GoldenLayer, ::testing::ValuesIn(test::golden_families()),
                         case_name);

}  // namespace
}  // namespace shunt
