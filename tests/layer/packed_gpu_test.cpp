// Layers whose experts stay packed on the GPU, against the CPU engine's of the same packed weights.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "engine.hpp"
#include "gemm/fragment_layout.hpp"
#include "gemm/ordered_data.hpp"
#include "layer/random_layer.hpp"
#include "shunt/format.hpp"

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::small_layer;
using testing::weights_on_the_input;

std::vector<FormatSpec> formats() {
  std::vector<FormatSpec> list = known_formats();
  list.push_back({Format::int4, 128});
  return list;
}

TEST(LayerPackedOnAGpu, IsRefusedWhereItIsNotComputed) {
  const LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true});
  const Device gpu{DeviceType::cuda, 0};
  for (const FormatSpec& format : formats()) {
    const Support wide = supports(spec, {.dtype = DType::f32, .format = format}, gpu);
    const Support in_place =
        supports(spec, {.dtype = DType::bf16, .format = format, .in_place = true}, gpu);
    EXPECT_FALSE(wide);
    EXPECT_FALSE(in_place);
    EXPECT_TRUE(supports(spec, {.dtype = DType::bf16, .format = format}, Device{}));
    // A build without CUDA has another reason.
    if (!supports(spec, {.dtype = DType::bf16, .format = format}, gpu)) continue;
    EXPECT_NE(wide.reason.find("LayerOptions.dtype is f32 and format " + to_string(format)),
              std::string::npos)
        << wide.reason;
    EXPECT_NE(in_place.reason.find("LayerOptions.in_place: must be false with format " +
                                   to_string(format)),
              std::string::npos)
        << in_place.reason;
  }
}

std::vector<float> forward(const Context& context, RandomLayer& made, const LayerSpec& spec,
                           const LayerOptions& options, const Tensor& x, std::int64_t tokens) {
  const Layer layer(spec, made.weights, context, options);
  std::vector<float> y(static_cast<std::size_t>(tokens * spec.hidden));
  test::Mirror mirror(context);
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  const Tensor out = mirror.out(view(y.data(), {tokens, spec.hidden}));
  layer.forward({.hidden = mirror.in(x)}, {.output = out}, workspace);
  mirror.fetch();
  const std::vector<float> first = y;
  mirror.poison();
  layer.forward({.hidden = mirror.in(x)}, {.output = out}, workspace);
  mirror.fetch();
  EXPECT_EQ(y, first) << "again";
  return y;
}

// The norm of the difference over that of `want`.
double relative_norm_of_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += difference * difference;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return std::sqrt(error / size);
}

// Both round the experts' inner results to the dtype, after sums in another order.
void expect_as_on_the_cpu(RandomLayer& made, const LayerOptions& options, std::int64_t tokens) {
  const LayerSpec& spec = made.spec;
  const Tensor x = made.hidden_states(tokens, options.dtype);
  const std::vector<float> got = forward(cuda(), made, spec, options, x, tokens);
  const std::vector<float> want = forward(cpu(), made, spec, options, x, tokens);
  EXPECT_LT(relative_norm_of_error(got, want), 0.01);
}
void expect_as_on_the_cpu(const LayerSpec& spec, const LayerOptions& options, std::int64_t tokens) {
  RandomLayer made(spec, 1);
  expect_as_on_the_cpu(made, options, tokens);
}

// As DeepSeek-V3's, whose checkpoint is in fp8 but for what routes.
TEST(LayerPackedOnAGpu, ASharedExpertHasAFormatOfItsOwn) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true}, 256, 384);
  spec.shared = {.intermediate = 136, .sigmoid_gate = true};
  for (const FormatSpec& format : formats()) {
    for (const bool alike : {false, true}) {
      RandomLayer made(spec, 3);
      made.pack(made.weights.shared, format, format);
      if (alike) made.pack(made.weights.experts, format, format);
      for (const std::int64_t tokens : {1, 5, 90}) {
        SCOPED_TRACE(to_string(format) + (alike ? ", experts too, " : ", ") +
                     std::to_string(tokens) + " tokens");
        expect_as_on_the_cpu(made, {.dtype = DType::bf16}, tokens);
      }
    }
  }
}

// compressed-tensors' strategy "channel": groups of gate and up are H long, down's I. And `int4`
// says 32.
TEST(LayerPackedOnAGpu, GroupsMayDifferFromProductToProduct) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true}, 256, 384);
  RandomLayer rows(spec, 4), usual(spec, 4);
  rows.pack(rows.weights.experts, {Format::int4, 256}, {Format::int4, 384});
  usual.pack(usual.weights.experts, {Format::int4, 32}, {Format::int4, 32});
  for (const std::int64_t tokens : {1, 5, 90, 700}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    expect_as_on_the_cpu(rows, {.dtype = DType::bf16}, tokens);
    expect_as_on_the_cpu(usual, {.dtype = DType::bf16, .format = {Format::int4}}, tokens);
  }
}

TEST(LayerPackedOnAGpu, EqualsTheCpuEngine) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  for (const FormatSpec& format : formats()) {
    for (const auto& [tokens, experts, dtype] : {std::tuple{1, 8, DType::bf16},
                                                 {5, 8, DType::bf16},
                                                 {8, 2, DType::bf16},
                                                 {3, 3, DType::f16},
                                                 {1, 3, DType::f16},
                                                 {40, 3, DType::bf16},
                                                 {700, 8, DType::bf16}}) {
      SCOPED_TRACE(to_string(format) + ", tokens " + std::to_string(tokens));
      const LayerSpec spec = small_layer({.experts = experts, .top_k = 2, .renormalize = true},
                                         experts == 3 ? 200 : 256, experts == 3 ? 136 : 384);
      expect_as_on_the_cpu(spec, {.dtype = dtype, .format = format}, tokens);
    }
  }
}

// Granite 3.0 1B: down by itself would take tiles of 256 after gate_up's of 128.
TEST(LayerPackedOnAGpu, BothProductsTakeTheSameTiles) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const LayerSpec spec = small_layer({.experts = 32, .top_k = 8, .renormalize = true}, 1024, 512);
  const LayerOptions options{.dtype = DType::bf16, .format = {Format::nvfp4}};
  const std::int64_t tokens = 768;
  RandomLayer made(spec, 1);
  const std::string words = Layer(spec, made.weights, cuda(), options).explain(tokens);
  std::vector<std::string> tiles;
  for (const char* line : {"  gate_up ", "  down "}) {
    const std::size_t from = words.find("tiles of ", words.find(line));
    ASSERT_NE(from, std::string::npos) << words;
    tiles.push_back(words.substr(from, words.find(" rows", from) - from));
  }
  EXPECT_EQ(tiles[0], tiles[1]) << words;
  expect_as_on_the_cpu(spec, options, tokens);
}

// Few tokens of many experts, whose matrices have more rows than a GPU has warps for tiles of 16:
// gate_up's, then down's. In 4 bits a warp takes 32 rows.
TEST(LayerPackedOnAGpu, EqualsTheCpuEngineWhereFewTokensHitManyExperts) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  for (const FormatSpec& format : formats()) {
    for (const auto& [hidden, inner] : {std::pair{136, 1040}, {1736, 72}}) {
      SCOPED_TRACE(to_string(format) + ", hidden " + std::to_string(hidden));
      const LayerSpec spec =
          small_layer({.experts = 32, .top_k = 4, .renormalize = true}, hidden, inner);
      for (const std::int64_t tokens : {5, 8}) {
        if (format.format == Format::dense3 && tokens == 8) continue;  // takes long to encode
        expect_as_on_the_cpu(spec, {.dtype = DType::bf16, .format = format}, tokens);
      }
    }
  }
}

// Of few rows sums are weighed, of many what is multiplied, as on the CPU.
TEST(LayerPackedOnAGpu, EqualsTheCpuEngineWithWeightsOnTheInput) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  for (const FormatSpec& format : formats()) {
    for (const std::int64_t tokens : {1, 3, 8, 20, 40, 150, 700}) {
      SCOPED_TRACE(to_string(format) + ", tokens " + std::to_string(tokens));
      const DType dtype = tokens == 3 ? DType::f16 : DType::bf16;
      const LayerSpec spec = small_layer(weights_on_the_input(tokens == 8 ? 2 : 1), 200, 136);
      expect_as_on_the_cpu(spec, {.dtype = dtype, .format = format}, tokens);
      expect_as_on_the_cpu(spec, {.dtype = dtype, .format = format, .batch_invariant = true},
                           tokens);
    }
  }
}

// GPTQ's order of activations, another for each expert, of gate and up the same one.
TEST(LayerPackedOnAGpu, EqualsTheCpuEngineInAnOrderOfActivations) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  for (const RouteSpec& route :
       {RouteSpec{.experts = 8, .top_k = 2, .renormalize = true}, weights_on_the_input(1)}) {
    const LayerSpec spec = small_layer(route, 200, 136);
    RandomLayer made(spec, 1);
    std::vector<test::Ordered> matrices;
    ExpertWeights& experts = made.weights.experts;
    for (unsigned e = 0; e < static_cast<unsigned>(route.experts); ++e) {
      for (const auto& [n, k] : {std::pair{136, 200}, {136, 200}, {200, 136}}) {
        matrices.emplace_back(n, k, 32, 3 * e + static_cast<unsigned>(matrices.size() % 3));
      }
    }
    for (std::size_t i = 0; i < matrices.size(); i += 3) {
      experts.packed_gate.push_back(matrices[i].shuffled);
      experts.packed_up.push_back(matrices[i + 1].shuffled);
      experts.packed_up.back().group_of = matrices[i].shuffled.group_of;
      experts.packed_down.push_back(matrices[i + 2].shuffled);
    }
    experts.gate.clear();
    experts.up.clear();
    experts.down.clear();
    for (const std::int64_t tokens : {1, 3, 8, 40, 700}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens, " + to_string(dtype));
        const Tensor x = made.hidden_states(tokens, dtype);
        const LayerOptions options{.dtype = dtype, .format = {Format::int4, 32}};
        EXPECT_LT(relative_norm_of_error(forward(cuda(), made, spec, options, x, tokens),
                                         forward(cpu(), made, spec, options, x, tokens)),
                  0.01);
      }
    }
  }
}

}  // namespace
}  // namespace shunt
