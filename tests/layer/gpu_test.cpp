// The layer on a GPU: against what transformers recorded, against the CPU engine, and in CUDA
// graphs, whose inputs change between replays.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "checkpoint/golden.hpp"
#include "checkpoint/unpack_experts.hpp"
#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/format_limits.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/layer.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt {
namespace {

using testing::layer_specs;
using testing::NamedSpec;
using testing::RandomLayer;
using testing::Result;
using testing::run;
using testing::run_in_stages;

// Cases only where there is something to run them on.
template <class T>
std::vector<T> on_gpu_only(const std::vector<T>& cases) {
  return test::on_gpu() ? cases : std::vector<T>{};
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenOnGpu);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LayerOnGpu);

// The largest error over the largest magnitude, less what the rounding of experts' rows, which the
// CPU engine does not do, may account for under the routing of `ours`.
double error_beyond_rounding(const LayerSpec& spec, const LayerWeights& weights,
                             const Tensor& hidden, const Result& ours,
                             const std::vector<float>& expected, DType dtype) {
  const std::vector<double> spread =
      testing::spread_of_rows(spec, weights, hidden, ours.ids, ours.weights);
  double error = 0, magnitude = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto wanted = static_cast<double>(expected[i]);
    const double beyond = std::abs(static_cast<double>(ours.output[i]) - wanted) -
                          testing::row_rounding(dtype) * spread[i];
    error = std::isnan(beyond) ? beyond : std::max(error, beyond);
    magnitude = std::max(magnitude, std::abs(wanted));
  }
  return magnitude > 0 ? error / magnitude : error;
}

class GoldenOnGpu : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenOnGpu, GivesWhatWasRecordedAndTheIdsOfTheCpu) {
  const std::string folder = test::golden(GetParam());
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const SafetensorsFile file = SafetensorsFile::open(folder + "/golden.safetensors");
  const std::vector<test::Recorded> blocks = test::recorded(file);
  ASSERT_FALSE(blocks.empty());
  const Context gpu = cuda(), host = cpu({.threads = 2});
  for (const test::Recorded& block : blocks) {
    SCOPED_TRACE(block.module);
    LayerWeights weights = checkpoint.weights(block.layer);
    const bool packed = !weights.experts.packed_up.empty();
    std::vector<std::vector<float>> memory;
    test::unpack_experts(weights.experts, memory);
    for (const DType dtype : {f32, bf16, f16}) {
      if (packed && dtype == f32) continue;
      const LayerInputs in{.hidden = block.input, .token_ids = block.token_ids};
      const Result ours = run(gpu, Layer(checkpoint, block.layer, gpu, {.dtype = dtype}), in);
      const Result theirs = run(host, Layer(checkpoint, block.layer, host, {.dtype = dtype}), in);
      EXPECT_LE(error_beyond_rounding(checkpoint.spec(block.layer), weights, block.input, ours,
                                      test::floats(block.output), dtype),
                dtype == f32 ? 1e-5 : 1e-2);
      EXPECT_EQ(ours.ids, theirs.ids);
      EXPECT_LE(test::relative_error(ours.weights, theirs.weights), 1e-5);
    }
  }
}

// Experts in every format that the family and the GPU take, with rows in 16 bits and in fp8:
// refused by name, or about as far from what was recorded as on the CPU.
TEST_P(GoldenOnGpu, InEveryFormat) {
  const std::string folder = test::golden(GetParam());
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const SafetensorsFile file = SafetensorsFile::open(folder + "/golden.safetensors");
  const Context gpu = cuda();
  for (const test::Recorded& block : test::recorded(file)) {
    const LayerSpec spec = checkpoint.spec(block.layer);
    const std::vector<float> wanted = test::floats(block.output);
    const LayerWeights weights = checkpoint.weights(block.layer);
    const std::vector<PackedMatrix>& packed = weights.experts.packed_up;
    for (const FormatSpec& format : known_formats()) {
      if (!packed.empty() && packed[0].format != format) continue;
      for (const RowFormat rows :
           {RowFormat::as_dtype, RowFormat::fp8_token, RowFormat::fp8_block}) {
        const LayerOptions options{.dtype = bf16, .format = format, .rows = rows};
        SCOPED_TRACE(block.module + " in " + to_string(format) + ", rows " + to_string(rows));
        if (const Support support = supports(spec, options, gpu.device()); !support) {
          EXPECT_NE(rows, RowFormat::as_dtype) << support.reason;
          EXPECT_NE(support.reason.find(to_string(rows)), std::string::npos) << support.reason;
          // Where these do go together, a width does not fit them, or this GPU's kernels.
          EXPECT_TRUE(support.reason.find(to_string(format)) != std::string::npos ||
                      support.reason.find("LayerSpec.experts.intermediate is ") == 0)
              << support.reason;
          continue;
        }
        const Layer layer(checkpoint, block.layer, gpu, options);
        const LayerInputs in{.hidden = block.input, .token_ids = block.token_ids};
        const Result ours = run(gpu, layer, in);
        // Rows are rounded too.
        EXPECT_LE(test::relative_power(ours.output, wanted),
                  test::format_limits().at(to_string(format)).high + 2e-3);
        EXPECT_EQ(ours.output, run(gpu, layer, in).output);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenOnGpu,
                         ::testing::ValuesIn(on_gpu_only(test::golden_families())),
                         [](const auto& parameter) { return parameter.param; });

class LayerOnGpu : public ::testing::TestWithParam<NamedSpec> {};

TEST_P(LayerOnGpu, GivesTheIdsOfTheCpuAndNearlyItsOutput) {
  RandomLayer random(GetParam().spec, 21);
  const Context gpu = cuda(), host = cpu({.threads = 2});
  LayerInputs in{.hidden = random.hidden_states(90)};
  if (random.spec.route.hashed) in.token_ids = random.token_ids(90);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Result ours = run(gpu, Layer(random.spec, random.weights, gpu, {.dtype = dtype}), in);
    const Result theirs = run(host, Layer(random.spec, random.weights, host, {.dtype = dtype}), in);
    EXPECT_EQ(ours.ids, theirs.ids);
    EXPECT_LE(test::relative_error(ours.weights, theirs.weights), 1e-5);
    // A sum that ends beside the middle between two bf16 numbers may go to either.
    const double bound = dtype == DType::f32 ? 4e-6 : dtype == DType::bf16 ? 5e-3 : 1e-3;
    EXPECT_LE(
        error_beyond_rounding(random.spec, random.weights, in.hidden, ours, theirs.output, dtype),
        bound);
  }
}

// The GPU of the context need not be the calling thread's current one.
TEST_P(LayerOnGpu, AnotherGpuThanTheCurrentOne) {
  Context second = cpu();
  try {
    second = cuda({.index = 1});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  RandomLayer random(GetParam().spec, 23);
  const Context first = cuda();
  LayerInputs in{.hidden = random.hidden_states(40)};
  if (random.spec.route.hashed) in.token_ids = random.token_ids(40);
  const auto on = [&](const Context& gpu) {
    return run(gpu, Layer(random.spec, random.weights, gpu, {.dtype = bf16}), in).output;
  };
  EXPECT_EQ(on(second), on(first));
}

// Weights may stand on the device already.
TEST_P(LayerOnGpu, WeightsOfTheDeviceGiveTheSameBits) {
  RandomLayer random(GetParam().spec, 22);
  const Context gpu = cuda();
  LayerInputs in{.hidden = random.hidden_states(9)};
  if (random.spec.route.hashed) in.token_ids = random.token_ids(9);
  test::Mirror mirror(gpu);
  const LayerWeights there =
      testing::moved(random.weights, [&](const Tensor& one) { return mirror.in(one); });
  const Result from_host = run(gpu, Layer(random.spec, random.weights, gpu), in);
  const Result from_device = run(gpu, Layer(random.spec, there, gpu), in);
  EXPECT_EQ(from_device.output, from_host.output);
  EXPECT_EQ(from_device.ids, from_host.ids);
}

// Norms read a row once where all of it fits a block's registers, else twice.
TEST(Layer, NormsOfLongRowsOnAGpu) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  for (const auto& [tokens, hidden] :
       {std::pair{5, 2504}, {5, 8192}, {5, 8193}, {5, 17000}, {200, 2504}, {1100, 520}}) {
    SCOPED_TRACE(std::to_string(tokens) + " rows of " + std::to_string(hidden));
    LayerSpec spec = testing::small_layer({.experts = 4, .top_k = 2}, hidden, 16);
    spec.input_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
    spec.output_norm = {.enabled = true, .weight = true, .weight_first = true};
    spec.output_bias = true;  // so that what is normed is not what lay there
    RandomLayer random(spec, 29);
    const Context gpu = cuda(), host = cpu({.threads = 2});
    const LayerInputs in{.hidden = random.hidden_states(tokens)};
    const Result ours = run(gpu, Layer(spec, random.weights, gpu, {.dtype = f32}), in);
    const Result theirs = run(host, Layer(spec, random.weights, host, {.dtype = f32}), in);
    EXPECT_EQ(ours.ids, theirs.ids);
    EXPECT_LE(test::relative_error(ours.output, theirs.output), 1e-5);
  }
}

// Few tokens have no order: the products' blocks make theirs from ids, the layer's, or of a token
// or two the caller's, and a kernel of their own shares out k in another way. Stage by stage there
// is an order, where batch-invariant layers give the same bits.
TEST_P(LayerOnGpu, FewTokensGiveWhatThoseThatAreOrderedGive) {
  RandomLayer random(GetParam().spec, 24);
  const LayerSpec& spec = random.spec;
  const Context gpu = cuda();
  for (const auto& [dtype, invariant] :
       {std::pair{DType::bf16, false}, {DType::bf16, true}, {DType::f16, false}}) {
    const Layer layer(spec, random.weights, gpu, {.dtype = dtype, .batch_invariant = invariant});
    for (std::int64_t tokens = 1; tokens <= 9; ++tokens) {
      LayerInputs in{.hidden = random.hidden_states(tokens, dtype)};
      if (spec.route.hashed) in.token_ids = random.token_ids(tokens);
      const Result routed = run(gpu, layer, in);
      EXPECT_EQ(run(gpu, layer, in).output, routed.output) << tokens << " tokens again";
      const std::vector<float> ordered = run_in_stages(gpu, layer, in).output;
      if (invariant) {
        EXPECT_EQ(routed.output, ordered) << tokens << " tokens";
      } else {
        const double bound = dtype == DType::bf16 ? 5e-3 : 1e-3;
        EXPECT_LE(
            error_beyond_rounding(random.spec, random.weights, in.hidden, routed, ordered, dtype),
            bound)
            << tokens << " tokens";
      }
      if (spec.route.shared.count > 0) continue;  // of whose slots the layer tells nothing
      in.token_ids = {};
      in.ids = view(routed.ids.data(), {tokens, spec.route.top_k});
      in.weights = view(routed.weights.data(), {tokens, spec.route.top_k});
      Result given = run(gpu, layer, in);
      if (spec.shared.intermediate > 0 && !invariant) {  // whose own k may be shared out or not
        given.ids = routed.ids, given.weights = routed.weights;
        const double bound = dtype == DType::bf16 ? 5e-3 : 1e-3;
        EXPECT_LE(
            error_beyond_rounding(random.spec, random.weights, in.hidden, given, ordered, dtype),
            bound)
            << tokens << " tokens, ids given";
        EXPECT_EQ(run(gpu, layer, in).output, given.output) << tokens << " tokens, ids given";
      } else {
        EXPECT_EQ(given.output, tokens > 2 ? ordered : routed.output)
            << tokens << " tokens, ids given";
      }
    }
  }
}

#if SHUNT_CUDA_BUILT
// The shared expert's products run beside the experts', on the same multiprocessors, at no fixed
// time: what waits too little shows. In fp8, at these sizes of DeepSeek-V2-Lite, one call of ten
// had other bits while warps arrived at a barrier before they had the scales that it guards.
void expect_the_same_bits(const LayerSpec& spec, std::initializer_list<FormatSpec> formats) {
  constexpr std::int64_t calls = 6, rounds = 60;
  const std::int64_t hidden = spec.hidden, intermediate = spec.experts.intermediate;
  RandomLayer random(spec, 27, DType::bf16, 8);  // rows overlap
  const test::Stream stream;
  const Context context = cuda({.stream = stream.get(), .dependent_launch = true});
  for (const FormatSpec& format : formats) {
    LayerWeights weights = random.weights;
    std::vector<Packed> packed;
    if (format != FormatSpec{}) {  // one expert's for all, since packing takes long
      packed.reserve(3);
      const auto pack = [&](std::vector<Tensor>& plain, std::vector<PackedMatrix>& to,
                            std::int64_t n, std::int64_t k) {
        packed.push_back(Packed::of(format, normal_values(n * k, 5), n, k));
        to.assign(plain.size(), packed.back().packed);
        plain.clear();
      };
      ExpertWeights& e = weights.experts;
      pack(e.gate, e.packed_gate, intermediate, spec.experts.hidden);
      pack(e.up, e.packed_up, intermediate, spec.experts.hidden);
      pack(e.down, e.packed_down, spec.experts.hidden, intermediate);
    }
    const bool fp8 = format.format == Format::fp8_block;
    const Layer layer(spec, weights, context,
                      {.dtype = DType::bf16,
                       .format = format,
                       .rows = fp8 ? RowFormat::fp8_block : RowFormat::as_dtype});
    for (const std::int64_t tokens : {1, 2, 48, 64}) {
      test::Mirror mirror(context);
      const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
      std::vector<std::vector<float>> first, now;
      std::vector<Tensor> in, out;
      for (std::int64_t c = 0; c < calls; ++c) {
        in.push_back(mirror.in(random.hidden_states(tokens, DType::bf16)));
        now.emplace_back(static_cast<std::size_t>(tokens * hidden));
        out.push_back(mirror.out(view(now.back().data(), {tokens, hidden})));
      }
      int differ = 0;
      for (std::int64_t round = 0; round < rounds; ++round) {
        for (std::size_t c = 0; c < in.size(); ++c) {
          layer.forward({.hidden = in[c]}, {.output = out[c]}, workspace);
        }
        mirror.fetch();
        if (round == 0) first = now;
        for (std::size_t c = 0; c < in.size(); ++c) differ += now[c] != first[c];
      }
      EXPECT_EQ(differ, 0) << to_string(format) << ", " << tokens << " tokens, of "
                           << calls * rounds << " calls";
    }
  }
}

LayerSpec with_a_shared_expert() {
  constexpr std::int64_t hidden = 2048, intermediate = 1408;
  LayerSpec spec =
      testing::small_layer({.experts = 64, .top_k = 6, .renormalize = true}, hidden, intermediate);
  spec.shared = {.intermediate = 2 * intermediate};
  return spec;
}

TEST(SharedExpertBeside, LeavesTheBitsAlone) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  expect_the_same_bits(with_a_shared_expert(),
                       {{}, {Format::fp8_block}, {Format::nvfp4}, {Format::int8}});
}

// Projections lie between, and down may add a token's latents up.
TEST(SharedExpertBeside, LeavesTheBitsOfLatentExpertsAlone) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  LayerSpec spec = with_a_shared_expert();
  spec.latent = spec.experts.hidden = 1024;
  expect_the_same_bits(spec, {{}, {Format::nvfp4}});
}

TEST(SharedExpertBeside, StreamsItsWeightsWhereTokensAreFew) {
  if (!test::on_hopper()) GTEST_SKIP() << "about a Hopper GPU";
  LayerSpec spec = testing::small_layer({.experts = 16, .top_k = 4, .renormalize = true}, 512, 256);
  spec.shared = {.intermediate = 192};
  RandomLayer random(spec, 28, DType::bf16);
  const Context context = cuda();
  const auto streams = [&](std::int64_t tokens, const LayerOptions& options) {
    const std::string words = Layer(spec, random.weights, context, options).explain(tokens);
    EXPECT_NE(words.find("shared   on a stream of its own beside routing"), std::string::npos)
        << words;
    return words.find("its weights in one pass") != std::string::npos;
  };
  EXPECT_TRUE(streams(1, {}));
  EXPECT_TRUE(streams(8, {}));
  EXPECT_FALSE(streams(9, {}));
  EXPECT_FALSE(streams(1, {.batch_invariant = true}));
}

TEST(LatentExperts, StreamTheirProjectionsWhereTokensAreFew) {
  if (!test::on_hopper()) GTEST_SKIP() << "about a Hopper GPU";
  LayerSpec spec = testing::small_layer({.experts = 16, .top_k = 4, .renormalize = true}, 512, 256);
  spec.latent = spec.experts.hidden = 128;
  RandomLayer random(spec, 30, DType::bf16);
  const Context context = cuda();
  const auto streams = [&](std::int64_t tokens, const LayerOptions& options) {
    const std::string words = Layer(spec, random.weights, context, options).explain(tokens);
    return words.find("its weights in one pass; ") != std::string::npos;
  };
  EXPECT_TRUE(streams(1, {}));
  EXPECT_FALSE(streams(9, {}));
  EXPECT_FALSE(streams(1, {.batch_invariant = true}));
}

// One graph, captured while its inputs were zeros, replayed over others: tokens, their number, the
// residual. Each time what a plain call gives, bit for bit.
TEST_P(LayerOnGpu, AGraphFollowsItsInputs) {
  RandomLayer random(GetParam().spec, 23);
  const LayerSpec& spec = random.spec;
  const std::int64_t tokens = 41;
  for (const bool dependent : {false, true}) {
    const test::Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const Layer layer(spec, random.weights, context);
    const Context plain_context = cuda();
    const Layer plain(spec, random.weights, plain_context);

    Result result(spec, tokens);
    std::vector<float> x(result.output.size(), 0.0F), residual(x.size(), 0.0F);
    std::vector<std::int32_t> token_ids(static_cast<std::size_t>(tokens), 0);
    std::int32_t valid = 0;
    LayerInputs in{.hidden = view(x.data(), {tokens, spec.hidden}),
                   .residual = view(residual.data(), {tokens, spec.hidden}),
                   .valid_tokens = view(&valid, {1})};
    if (spec.route.hashed) in.token_ids = view(token_ids.data(), {tokens});
    test::Mirror mirror(context);
    const LayerInputs there{.hidden = mirror.in(in.hidden),
                            .token_ids = mirror.in(in.token_ids),
                            .residual = mirror.in(in.residual),
                            .valid_tokens = mirror.in(in.valid_tokens)};
    const LayerOutputs out{
        .output = mirror.out(view(result.output.data(), {tokens, spec.hidden})),
        .ids = mirror.out(view(result.ids.data(), {tokens, spec.route.top_k})),
        .weights = mirror.out(view(result.weights.data(), {tokens, spec.route.top_k}))};
    const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
    layer.forward(there, out, workspace);  // loads the kernels
    context.synchronize();
    const test::Graph graph(stream, [&] { layer.forward(there, out, workspace); });
    for (const std::int32_t count : {41, 0, 7, 40, 1000, -1, 41}) {
      const Tensor states = random.hidden_states(tokens), more = random.hidden_states(tokens);
      std::copy_n(states.as<float>(), x.size(), x.begin());
      std::copy_n(more.as<float>(), x.size(), residual.begin());
      const Tensor ids = random.token_ids(tokens);
      std::copy_n(ids.as<std::int32_t>(), token_ids.size(), token_ids.begin());
      valid = count;
      context.copy(there.hidden.data, x.data(), x.size() * sizeof(float));
      context.copy(there.residual.data, residual.data(), x.size() * sizeof(float));
      if (there.token_ids) {
        context.copy(there.token_ids.data, token_ids.data(), token_ids.size() * 4);
      }
      context.copy(there.valid_tokens.data, &valid, sizeof valid);
      graph.replay();
      mirror.fetch();
      const Result want = run(plain_context, plain, in);
      EXPECT_EQ(result.output, want.output) << count << " valid tokens";
      EXPECT_EQ(result.ids, want.ids) << count << " valid tokens";
      EXPECT_EQ(result.weights, want.weights) << count << " valid tokens";
    }
  }
}

// Few tokens, whose products order them by themselves: likewise, over other tokens and so others'
// experts, and over numbers of tokens.
TEST_P(LayerOnGpu, AGraphOfFewTokensFollowsItsInputs) {
  RandomLayer random(GetParam().spec, 25);
  const LayerSpec& spec = random.spec;
  if (spec.route.hashed) GTEST_SKIP() << "ids come with the call";
  for (const std::int64_t tokens : {1, 3, 8}) {
    const test::Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = true});
    const LayerOptions options{.dtype = DType::bf16};
    const Layer layer(spec, random.weights, context, options);
    const Context plain_context = cuda();
    const Layer plain(spec, random.weights, plain_context, options);
    Result result(spec, tokens);
    test::Mirror mirror(context);
    const Tensor first = random.hidden_states(tokens, DType::bf16);
    std::int32_t valid = 0;
    const LayerInputs there{.hidden = mirror.in(first),
                            .valid_tokens = mirror.in(view(&valid, {1}))};
    const LayerOutputs out{.output = mirror.out(view(result.output.data(), {tokens, spec.hidden}))};
    const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
    layer.forward(there, out, workspace);
    context.synchronize();
    const test::Graph graph(stream, [&] {
      layer.forward(there, out, workspace);
      layer.forward(there, out, workspace);
    });
    for (int replay = 0; replay < 8; ++replay) {
      const Tensor states = random.hidden_states(tokens, DType::bf16);
      context.copy(there.hidden.data, states.data,
                   static_cast<std::size_t>(states.elements()) * sizeof(std::uint16_t));
      valid = static_cast<std::int32_t>(tokens - replay % (tokens + 1));
      context.copy(there.valid_tokens.data, &valid, sizeof valid);
      graph.replay();
      mirror.fetch();
      LayerInputs in{.hidden = states};
      const std::vector<float> all = run(plain_context, plain, in).output;
      in.valid_tokens = view(&valid, {1});
      EXPECT_EQ(result.output, run(plain_context, plain, in).output)
          << valid << " of " << tokens << " tokens, replay " << replay;
      const auto some = all.begin() + valid * spec.hidden;
      EXPECT_TRUE(std::equal(all.begin(), some, result.output.begin()))
          << valid << " of " << tokens << " tokens, replay " << replay;
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Specs, LayerOnGpu, ::testing::ValuesIn(on_gpu_only(layer_specs())),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// 65536 pairs over 64 experts: groups of many tiles.
TEST(Layer, ManyTokensOnAGpu) {
  if (!test::on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  RandomLayer random(
      testing::small_layer({.experts = 64, .top_k = 8, .renormalize = true}, 128, 64), 24);
  const Context gpu = cuda(), host = cpu({.threads = 0});
  const LayerInputs in{.hidden = random.hidden_states(8192, DType::bf16)};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Layer layer(random.spec, random.weights, gpu, {.dtype = dtype});
    const Result ours = run(gpu, layer, in);
    const Result theirs = run(host, Layer(random.spec, random.weights, host, {.dtype = dtype}), in);
    EXPECT_EQ(ours.ids, theirs.ids);
    Result some(random.spec, 0);
    std::vector<float> expected;
    for (std::int64_t t = 0; t < 8192; t += 32) {
      const auto rows = [&](auto& to, const auto& from, std::int64_t width) {
        to.insert(to.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
      };
      rows(some.output, ours.output, random.spec.hidden);
      rows(some.ids, ours.ids, random.spec.route.top_k);
      rows(some.weights, ours.weights, random.spec.route.top_k);
      rows(expected, theirs.output, random.spec.hidden);
    }
    Tensor every = in.hidden;
    every.shape[0] /= 32;
    every.strides[0] *= 32;
    EXPECT_LE(error_beyond_rounding(random.spec, random.weights, every, some, expected, dtype),
              dtype == DType::f32 ? 4e-6 : 5e-3);
    EXPECT_LE(test::relative_error(ours.output, theirs.output), dtype == DType::f32 ? 4e-6 : 2e-2);
    EXPECT_EQ(run(gpu, layer, in).output, ours.output);
    // One token by itself; the router cuts its sums elsewhere, so the bits may differ.
    const Result alone = run(gpu, layer, {.hidden = in.hidden.rows(5000, 5001)});
    const auto among = ours.output.begin() + 5000 * random.spec.hidden;
    EXPECT_LE(
        test::relative_error(alone.output, std::vector<float>(among, among + random.spec.hidden)),
        dtype == DType::f32 ? 4e-6 : 5e-3);
  }
}

}  // namespace
}  // namespace shunt
