// Layers of one expert a token, whose rows the second product writes to their tokens where the
// output has the layer's dtype: the bits of those that are combined in f32 and then rounded.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "layer/format_cases.hpp"
#include "layer/random_layer.hpp"
#include "shunt/format.hpp"

namespace shunt {
namespace {

using testing::FormatCase;
using testing::RandomLayer;
using testing::small_layer;

constexpr int experts = 16;

std::vector<FormatCase> cases() {
  std::vector<FormatCase> list = testing::format_cases();
  list.push_back({"fp8_block f16",
                  testing::options_of(DType::f16, {Format::fp8_block}, RowFormat::fp8_block)});
  return list;
}

// Half of the weights are far from 1.
LayerSpec spec_of(bool weight_on_input, bool bias) {
  LayerSpec spec = small_layer({.experts = experts,
                                .top_k = 1,
                                .score = Score::sigmoid,
                                .score_stage = ScoreStage::after_top_k,
                                .weight_on_input = weight_on_input},
                               264, 192);
  spec.experts.down_bias = bias;
  return spec;
}

struct Call {
  Tensor hidden;
  Tensor ids{}, weights{}, valid{};
};

// The layer's output, of `dtype`, in f32. Every number was garbage before.
std::vector<float> forward(const Context& context, const Layer& layer, const Call& call,
                           DType dtype) {
  const std::int64_t tokens = call.hidden.shape[0], width = layer.spec().hidden;
  std::vector<char> memory(static_cast<std::size_t>(tokens * width * bits(dtype) / 8), -1);
  const Tensor y = view(memory.data(), dtype, {tokens, width});
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  const std::vector<unsigned char> garbage(workspace.bytes(), 0xff);
  context.copy(workspace.data(), garbage.data(), garbage.size());
  test::Mirror mirror(context);
  layer.forward({.hidden = mirror.in(call.hidden),
                 .valid_tokens = mirror.in(call.valid),
                 .ids = mirror.in(call.ids),
                 .weights = mirror.in(call.weights)},
                {.output = mirror.out(y)}, workspace);
  mirror.fetch();
  std::vector<float> values;
  for (std::int64_t i = 0; i < tokens * width; ++i)
    values.push_back(load_f32(memory.data(), dtype, i));
  return values;
}

// Bits of rounded numbers, -0 and NaN told apart from others.
std::vector<std::uint32_t> bits_of(const std::vector<float>& values, DType rounded_to) {
  std::vector<std::uint32_t> result;
  for (const float value : values) {
    std::uint32_t one = 0;
    store_f32(&one, rounded_to, 0, value);
    result.push_back(one);
  }
  return result;
}

TEST(OneRowAToken, GoesToItsTokenWithTheBitsOfCombine) {
  const Context context = test::engine();
  for (const FormatCase& c : cases()) {
    for (const auto& [weight_on_input, bias] :
         {std::pair{false, false}, std::pair{false, true}, std::pair{true, false}}) {
      const LayerSpec spec = spec_of(weight_on_input, bias);
      if (!supports(spec, c.options, context.device())) continue;
      RandomLayer made(spec, 31);
      const Layer layer(spec, made.weights, context, c.options);
      // 700 and 2600 are for a GPU's kernels for many rows.
      for (const std::int64_t tokens : {1, 2, 7, 40, 130, 700, 2600}) {
        if (tokens > 130 && !test::on_gpu()) break;
        SCOPED_TRACE(std::string(c.name) + ", " + std::to_string(tokens) + " tokens" +
                     (weight_on_input ? ", weight on the input" : "") + (bias ? ", bias" : ""));
        const DType dtype = c.options.dtype;
        const Call call{made.hidden_states(tokens, dtype)};
        const std::vector<float> wide = forward(context, layer, call, DType::f32);
        const std::vector<float> own = forward(context, layer, call, dtype);
        EXPECT_EQ(bits_of(own, dtype), bits_of(wide, dtype));
      }
    }
  }
}

// Tokens without an expert here, and those that are not valid, are 0.
TEST(OneRowAToken, TokensWithoutOneAreZero) {
  const Context context = test::engine();
  std::mt19937 random(5);
  for (const FormatCase& c : cases()) {
    const LayerSpec spec = spec_of(false, false);
    if (!supports(spec, c.options, context.device())) continue;
    RandomLayer made(spec, 33);
    const Layer layer(spec, made.weights, context, c.options);
    const DType dtype = c.options.dtype;
    for (const std::int64_t tokens : {1, 9, 300}) {
      SCOPED_TRACE(std::string(c.name) + ", " + std::to_string(tokens) + " tokens");
      std::vector<std::int32_t> ids;
      std::vector<float> weights;
      for (std::int64_t t = 0; t < tokens; ++t) {
        ids.push_back(static_cast<std::int32_t>(random() % (experts + 4)));
        if (ids.back() >= experts) ids.back() = -1;
        weights.push_back(0.25f + static_cast<float>(random() % 100) / 64);
      }
      std::int32_t valid = static_cast<std::int32_t>(tokens - tokens / 4);
      Call call{made.hidden_states(tokens, dtype), view(ids.data(), {tokens, 1}),
                view(weights.data(), {tokens, 1}), view(&valid, {1})};
      const std::vector<float> wide = forward(context, layer, call, DType::f32);
      const std::vector<float> own = forward(context, layer, call, dtype);
      EXPECT_EQ(bits_of(own, dtype), bits_of(wide, dtype));
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (t < valid && ids[static_cast<std::size_t>(t)] >= 0) continue;
        const auto row = own.begin() + t * spec.hidden;
        EXPECT_EQ(std::vector<float>(row, row + spec.hidden),
                  std::vector<float>(static_cast<std::size_t>(spec.hidden), 0.0f))
            << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace shunt
