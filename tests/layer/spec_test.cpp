// What LayerSpec allows, how it reads, and what a Layer refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "layer/random_layer.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/layer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {
namespace {

using testing::layer_specs;
using testing::RandomLayer;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "";
}

TEST(LayerSpec, JsonRoundTrips) {
  for (const auto& named : layer_specs()) {
    EXPECT_EQ(layer_spec_from_json(to_json(named.spec)), named.spec) << named.name;
    EXPECT_FALSE(describe(named.spec).empty());
  }
}

TEST(LayerSpec, JsonIsReadStrictly) {
  const std::string good = to_json(layer_specs()[0].spec);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return error_of([&] { layer_spec_from_json(text); });
  };
  EXPECT_EQ(with("\"zero_experts\"", "\"zero_expert\""),
            "LayerSpec.zero_expert is unknown; known are expert_norm, experts, hidden, "
            "input_norm, latent, latent_input_norm, latent_norm, output_bias, output_norm, route, "
            "routed_outside, router_norm, shared, zero_experts");
  EXPECT_NE(with("\"hidden\":48", "\"hidden\":-48").find("LayerSpec.hidden is -48"),
            std::string::npos);
  EXPECT_NE(with("\"hidden\":48", "\"hidden\":\"48\"").find("\"48\""), std::string::npos);
  EXPECT_NE(error_of([] { layer_spec_from_json("{}"); }).find("LayerSpec.hidden is missing"),
            std::string::npos);
}

TEST(LayerSpec, RefusesWhatDoesNotFitTogether) {
  const auto reason = [](const std::function<void(LayerSpec&)>& change, LayerOptions options = {},
                         Device device = {}) {
    LayerSpec spec = layer_specs()[0].spec;
    change(spec);
    const Support support = supports(spec, options, device);
    EXPECT_FALSE(support.supported);
    return support.reason;
  };
  EXPECT_EQ(reason([](LayerSpec& s) { s.hidden = 0; }),
            "LayerSpec.hidden is 0: must be 1 to 16777216");
  EXPECT_NE(reason([](LayerSpec& s) { s.experts.experts = 9; }).find("experts.experts is 9"),
            std::string::npos);
  EXPECT_NE(reason([](LayerSpec& s) { s.latent = 3; }).find("must be 3"), std::string::npos);
  EXPECT_NE(reason([](LayerSpec& s) { s.zero_experts = 8; }).find("zero_experts is 8"),
            std::string::npos);
  EXPECT_NE(reason([](LayerSpec& s) { s.route.top_k = 9; }).find("top_k"), std::string::npos);
  EXPECT_NE(reason([](LayerSpec& s) { s.experts.activation.limit = -1; }).find("limit"),
            std::string::npos);
  EXPECT_NE(reason([](LayerSpec& s) {
              s.output_norm = {.enabled = true, .epsilon = -1};
            }).find("output_norm.epsilon"),
            std::string::npos);
  EXPECT_EQ(reason([](LayerSpec& s) { s.latent_norm.enabled = true; }),
            "LayerSpec.latent_norm.enabled is true: must be false without a latent width");
  EXPECT_EQ(reason([](LayerSpec& s) { s.latent_input_norm.enabled = true; }),
            "LayerSpec.latent_input_norm.enabled is true: must be false without a latent width");
  EXPECT_EQ(reason([](LayerSpec& s) { s.expert_norm = {.enabled = true, .weight_first = true}; }),
            "LayerSpec.expert_norm.weight_first is true: must be false without a weight");
  EXPECT_NE(reason([](LayerSpec& s) { s.route.scale_in_weights = false; }).find("scale"),
            std::string::npos);
  EXPECT_NE(reason([](LayerSpec&) {}, {.dtype = DType::i32}).find("dtype is i32"),
            std::string::npos);
  EXPECT_NE(reason([](LayerSpec&) {}, {}, {static_cast<DeviceType>(7), 0}).find("type 7"),
            std::string::npos);
}

TEST(Layer, RefusesWeightsThatDoNotFit) {
  const Context context = cpu({.threads = 1});
  RandomLayer random(layer_specs()[1].spec, 3);
  const auto message = [&](const std::function<void(LayerWeights&)>& change) {
    LayerWeights weights = random.weights;
    change(weights);
    return error_of([&] { Layer(random.spec, weights, context); });
  };
  EXPECT_EQ(message([](LayerWeights&) {}), "");
  EXPECT_EQ(message([](LayerWeights& w) { w.router = w.router.transposed(); }),
            "layer: weights.router is bf16 [64, 13]: wrong shape; legal is f32 | bf16 | f16 "
            "[13, 64]");
  EXPECT_NE(message([](LayerWeights& w) { w.experts.up.pop_back(); }).find("experts.up has 12"),
            std::string::npos);
  EXPECT_NE(message([](LayerWeights& w) {
              w.experts.down[3].dtype = DType::i32;
            }).find("experts.down[3]"),
            std::string::npos);
  EXPECT_NE(message([](LayerWeights& w) { w.shared_gate = {}; }).find("shared_gate is missing"),
            std::string::npos);
  EXPECT_NE(
      message([](LayerWeights& w) { w.output_bias = w.router[0]; }).find("output_bias is given"),
      std::string::npos);
  EXPECT_NE(message([](LayerWeights& w) { w.experts.gate[0].data = nullptr; }).find("null"),
            std::string::npos);
}

// As a view may say, of one row again and again.
TEST(Layer, RefusesAHashTableOfMoreBytesThanThereAre) {
  const Context context = cpu({.threads = 1});
  int hashed = 0;
  for (const auto& one : layer_specs()) {
    if (!one.spec.route.hashed) continue;
    ++hashed;
    RandomLayer random(one.spec, 3);
    random.weights.hash_table.strides[0] = 0;
    for (const int bits : {61, 62}) {
      random.weights.hash_table.shape[0] = std::int64_t{1} << bits;
      EXPECT_NE(error_of([&] { Layer(one.spec, random.weights, context); }).find("overflows"),
                std::string::npos);
    }
  }
  EXPECT_GT(hashed, 0);
}

TEST(Layer, HandlesOfNothingSaySo) {
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  const RandomLayer random(layer_specs()[0].spec, 1);
  const Context context = cpu({.threads = 1});
  Layer layer(random.spec, random.weights, context);
  const Layer other(std::move(layer));
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { (void)layer.spec(); }, [&] { (void)layer.options(); },
           [&] { (void)layer.prepared_bytes(); }, [&] { (void)layer.workspace_bytes(1); },
           [&] { (void)layer.explain(1); },
           [&] { layer.forward(LayerInputs{}, LayerOutputs{}, {}); },
           [&] { layer.save_prepared("nowhere"); }, [&] { layer.unprepare(); }}) {
    EXPECT_EQ(message(call), "layer: is empty: must come from its constructor or load_prepared()");
  }
  const Checkpoint none;
  EXPECT_EQ(message([&] { Layer(none, 0, context); }),
            "checkpoint: is empty: must come from Checkpoint::open()");
  EXPECT_THROW(none.layers(), Error);
  EXPECT_THROW(none.tensor("x"), Error);
  EXPECT_THROW(SafetensorsFile().names(), Error);
  // And what is no format is named by its number.
  for (const bool rows : {false, true}) {
    LayerOptions options{.format = {Format{99}}};
    if (rows) options.rows = RowFormat::fp8_block;
    EXPECT_EQ(supports(random.spec, options, Device{}).reason,
              "LayerOptions.format is 99: must be one of shunt::Format");
  }
}

// What no engine has is invalid, not unsupported.
TEST(Layer, RefusesOptionsThatAreNeverLegalAsInvalid) {
  const RandomLayer random(layer_specs()[0].spec, 1);
  const Context context = cpu({.threads = 1});
  const auto refused = [&](const LayerOptions& options, const std::string& words) {
    try {
      const Layer layer(random.spec, random.weights, context, options);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument) << error.what();
      EXPECT_EQ(std::string(error.what()), "layer: " + words);
    }
  };
  refused({.format = {Format{99}}}, "LayerOptions.format is 99: must be one of shunt::Format");
  refused({.format = {Format::nvfp4, 16}},
          "LayerOptions.format has the group 16: must be 0, only int4 has one");
  refused({.format = {Format::int4, 24}},
          "LayerOptions.format has the group 24: must be a multiple of 16");
  refused({.format = format_from_string("int4:64:zeros")},
          "LayerOptions.format is int4:64:zeros: order and zeros are the packed weights' own");
  refused({.rows = RowFormat{9}}, "LayerOptions.rows is 9: must be 0 (as_dtype) to 3 (nvfp4)");
  refused({.dtype = DType::i32}, "LayerOptions.dtype is i32: must be f32, bf16 or f16");
}

// A weight that is no number is named, not only its place in a matrix.
TEST(Layer, NamesTheMatrixThatCannotBePacked) {
  RandomLayer random(layer_specs()[0].spec, 1);
  Tensor& up = random.weights.experts.up[1];
  store_f32(up.data, up.dtype, 3, std::nanf(""));
  try {
    const Layer layer(random.spec, random.weights, cpu({.threads = 1}),
                      {.format = {Format::nvfp4}});
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layer: experts.up[1]: pack: matrix[0, 3] is nan"),
              std::string::npos)
        << error.what();
  }
}

TEST(Layer, RefusesCallsThatDoNotFit) {
  const Context context = cpu({.threads = 1});
  RandomLayer random(layer_specs()[0].spec, 4);
  const Layer layer(random.spec, random.weights, context);
  const Buffer workspace = context.allocate(layer.workspace_bytes(4));
  const Tensor x = random.hidden_states(4);
  std::vector<float> output(4 * 48);
  const Tensor y = view(output.data(), {4, 48});
  const auto message = [&](LayerInputs in, LayerOutputs out, Workspace space) {
    return error_of([&] { layer.forward(in, out, space); });
  };
  EXPECT_EQ(message({.hidden = x}, {.output = y}, workspace), "");
  EXPECT_NE(message({}, {.output = y}, workspace).find("hidden"), std::string::npos);
  EXPECT_NE(message({.hidden = x}, {}, workspace).find("output"), std::string::npos);
  EXPECT_NE(message({.hidden = x}, {.output = y.rows(0, 3)}, workspace).find("[4, 48]"),
            std::string::npos);
  EXPECT_NE(message({.hidden = x}, {.output = y}, {}).find("workspace is null"), std::string::npos);
  EXPECT_NE(message({.hidden = x, .token_ids = random.token_ids(4)}, {.output = y}, workspace)
                .find("token_ids is given"),
            std::string::npos);
  EXPECT_NE(message({.hidden = x.transposed()}, {.output = y}, workspace).find("wrong shape"),
            std::string::npos);
  EXPECT_NE(error_of([&] { layer.workspace_bytes(-1); }).find("max_tokens is -1"),
            std::string::npos);

  // Other tensors than the output over hidden states or residual: what is written is read still.
  const std::int64_t experts = random.spec.route.experts, k = random.spec.route.top_k;
  std::vector<float> logits(static_cast<std::size_t>(4 * experts));
  const Tensor of_all = view(logits.data(), {4, experts}), of_some = view(logits.data(), {4, k});
  EXPECT_EQ(message({.hidden = x, .logits = of_all}, {.output = y, .weights = of_some}, workspace),
            "forward: outputs.weights overlaps logits: must lie apart");
  const Tensor ids = view(output.data(), i32, {4, k});
  EXPECT_EQ(message({.hidden = x}, {.output = y, .ids = ids}, workspace),
            "forward: outputs.ids overlaps output: must lie apart");
  EXPECT_EQ(message({.hidden = x,
                     .ids = view(logits.data(), i32, {4, k}),
                     .weights = view(output.data() + 4 * 48 - 1, {4, k})},
                    {.output = y}, workspace),
            "forward: output overlaps weights: must lie apart");
}

}  // namespace
}  // namespace shunt
