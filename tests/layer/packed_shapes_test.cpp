// Packed layers of the sizes of published models against double precision over what their experts
// hold: with as many experts as a token has, so that every token meets all; and some with all of
// theirs and many tokens. Codes are drawn, and an expert's matrices are rows of one that all share:
// packing the largest would take long. On the CPU the smallest ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "format/drawn_packed.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/model_shapes.hpp"

namespace shunt {
namespace {

using bench::Model;
using testing::name_of_model;
using testing::RandomLayer;
using testing::Result;
using testing::Routed;
using testing::run;

// Gates and ups of every expert are rows of one matrix, downs of another.
class SharedExperts {
 public:
  SharedExperts(const LayerSpec& spec, const FormatSpec& format)
      : spec_(spec),
        // fp8_block's begin where a block does.
        apart_(format.format == Format::fp8_block ? 128 : 8),
        both_(format, spec.experts.intermediate + (2 * spec.experts.experts - 1) * apart_,
              spec.experts.hidden, 1, 2 / std::sqrt(static_cast<double>(spec.experts.hidden))),
        down_(format, spec.experts.hidden + (spec.experts.experts - 1) * apart_,
              spec.experts.intermediate, 2,
              1 / std::sqrt(static_cast<double>(spec.experts.intermediate))),
        both_numbers_(both_.decoded()),
        down_numbers_(down_.decoded()) {}

  // The same weights, packed and plain, in place of those of `weights`.
  LayerWeights packed(LayerWeights weights) const {
    ExpertWeights& e = weights.experts;
    e = {};
    for (std::int64_t i = 0; i < spec_.experts.experts; ++i) {
      if (gated()) e.packed_gate.push_back(part(both_, 2 * i, spec_.experts.intermediate));
      e.packed_up.push_back(part(both_, 2 * i + 1, spec_.experts.intermediate));
      e.packed_down.push_back(part(down_, i, spec_.experts.hidden));
    }
    return weights;
  }
  LayerWeights plain(LayerWeights weights) const {
    ExpertWeights& e = weights.experts;
    e = {};
    for (std::int64_t i = 0; i < spec_.experts.experts; ++i) {
      if (gated()) {
        e.gate.push_back(part(both_, both_numbers_, 2 * i, spec_.experts.intermediate));
      }
      e.up.push_back(part(both_, both_numbers_, 2 * i + 1, spec_.experts.intermediate));
      e.down.push_back(part(down_, down_numbers_, i, spec_.experts.hidden));
    }
    return weights;
  }

 private:
  bool gated() const { return spec_.experts.activation.gated; }
  PackedMatrix part(const DrawnPacked& of, std::int64_t nth, std::int64_t rows) const {
    return of.matrix().rows(nth * apart_, nth * apart_ + rows);
  }
  Tensor part(const DrawnPacked& of, const std::vector<float>& numbers, std::int64_t nth,
              std::int64_t rows) const {
    const std::int64_t k = of.matrix().k;
    return view(numbers.data() + nth * apart_ * k, {rows, k});
  }

  LayerSpec spec_;
  std::int64_t apart_;
  DrawnPacked both_, down_;
  std::vector<float> both_numbers_, down_numbers_;
};

struct Kind {
  FormatSpec format;
  RowFormat rows = RowFormat::as_dtype;
  LayerOptions options() const { return {.dtype = DType::bf16, .format = format, .rows = rows}; }
  std::string text() const { return to_string(format) + ", rows " + to_string(rows); }
  // Of weights as they are packed, what rows in bf16 allow (shapes_test.cpp); with rows in e4m3,
  // which are off by 2^-4 at most and by half of that in the mean, what a token's does to gate and
  // to up, and an inner result's to down.
  double bound() const { return rows == RowFormat::as_dtype ? 3 * 0x1p-8 : 3 * 0x1p-5; }
};
constexpr Kind fp8_block{{Format::fp8_block}, RowFormat::fp8_block};

// Whether there are kernels here, as must be on a Hopper.
bool supported(const LayerSpec& spec, const Kind& kind, const Context& context) {
  const Support support = supports(spec, kind.options(), context.device());
  EXPECT_TRUE(support || (kind.rows != RowFormat::as_dtype && !test::on_hopper()))
      << support.reason;
  return static_cast<bool>(support);
}

// For every token of `hidden` that is compared: all experts, and what they weigh.
std::vector<Routed> all_experts(const LayerSpec& spec, const LayerWeights& weights,
                                const Tensor& hidden, const std::vector<std::int64_t>& tokens) {
  std::vector<Routed> all;
  for (const std::int64_t t : tokens) {
    const RouteReference routed = testing::routing_reference(
        spec, weights, router_input_reference(spec, weights, hidden.rows(t, t + 1)));
    all.push_back({t,
                   {routed.ids.begin(), routed.ids.end()},
                   {routed.weights.begin(), routed.weights.end()}});
  }
  return all;
}

void expect_double_over_what_experts_hold(const Model& model, const Kind& kind) {
  const LayerSpec& of = model.spec;
  const int k = of.route.top_k;
  LayerSpec spec = bench::plain_layer(of.hidden, of.experts.intermediate, k, k);
  spec.experts.activation = of.experts.activation;
  const Context context = test::engine();
  if (!supported(spec, kind, context)) return;
  RandomLayer random(spec, 32, DType::bf16, testing::rows_apart);
  const SharedExperts experts(spec, kind.format);
  const Layer layer(spec, experts.packed(random.weights), context, kind.options());
  const LayerWeights held = experts.plain(random.weights);

  // Calls of the first so many tokens; the first one and each one's last are compared.
  const bool large = k * testing::numbers_of(spec) > 4e8;
  std::vector<std::int64_t> calls = {1, 2, 4, 9, 64, 700};
  if (!test::on_gpu()) calls = {1, 9};
  const Tensor hidden = random.hidden_states(calls.back(), DType::bf16);
  std::vector<std::int64_t> compared;
  for (const std::int64_t tokens : calls) {
    if (!large || tokens == 1 || tokens == 9 || tokens == 700) compared.push_back(tokens - 1);
  }
  const std::vector<Routed> wanted_of = all_experts(spec, held, hidden, compared);
  const std::vector<std::vector<double>> wanted =
      testing::references(spec, held, hidden, wanted_of);
  for (const std::int64_t tokens : calls) {
    SCOPED_TRACE(kind.text() + ", " + std::to_string(tokens) + " tokens");
    const LayerInputs in{.hidden = hidden.rows(0, tokens)};
    const Result got = run(context, layer, in);
    std::vector<Routed> there;
    std::vector<std::vector<double>> of_these;
    for (std::size_t n = 0; n < wanted_of.size(); ++n) {
      if (wanted_of[n].token >= tokens) continue;
      there.push_back(wanted_of[n]);
      of_these.push_back(wanted[n]);
    }
    EXPECT_LT(testing::relative_length(got, spec.hidden, there, of_these), kind.bound());
    EXPECT_EQ(run(context, layer, in).output, got.output) << "again";
  }
}

std::vector<Model> on_this_engine() {
  std::vector<Model> some = bench::models();
  if (test::on_gpu()) return some;
  std::erase_if(some, [](const Model& model) {
    return model.spec.route.top_k * testing::numbers_of(model.spec) > 1.5e7;
  });
  return some;
}
std::vector<Model> named(const std::vector<std::string>& names) {
  std::vector<Model> some;
  for (const std::string& name : names) {
    if (test::on_gpu()) some.push_back(*bench::find_model(name));
  }
  return some;
}

class PackedShapes : public ::testing::TestWithParam<Model> {};
class PackedShapesInMoreFormats : public ::testing::TestWithParam<Model> {};
class ManyTokensInFp8 : public ::testing::TestWithParam<Model> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PackedShapesInMoreFormats);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ManyTokensInFp8);

TEST_P(PackedShapes, EqualDoubleOverWhatExpertsHold) {
  expect_double_over_what_experts_hold(GetParam(), {{Format::nvfp4}});
  if (test::on_gpu()) {
    expect_double_over_what_experts_hold(GetParam(), fp8_block);
    return;
  }
  for (const FormatSpec& format :
       {FormatSpec{Format::fp8_block}, FormatSpec{Format::mxfp4}, FormatSpec{Format::int4, 128}}) {
    expect_double_over_what_experts_hold(GetParam(), {format});
  }
}

// A few, of unlike widths: large and small experts, k that no power of two divides, many slots.
TEST_P(PackedShapesInMoreFormats, EqualDoubleOverWhatExpertsHold) {
  for (const FormatSpec& format :
       {FormatSpec{Format::sparse_nvfp4}, FormatSpec{Format::int4, 128}, FormatSpec{Format::mxfp4},
        FormatSpec{Format::mxfp8}, FormatSpec{Format::int8}, FormatSpec{Format::dense3}}) {
    expect_double_over_what_experts_hold(GetParam(), {format});
  }
  expect_double_over_what_experts_hold(GetParam(), {{Format::fp8_channel}, RowFormat::fp8_token});
}

// All experts, and routing that chooses among them.
TEST_P(ManyTokensInFp8, EqualDoubleOverWhatExpertsHold) {
  const LayerSpec& of = GetParam().spec;
  LayerSpec spec =
      bench::plain_layer(of.hidden, of.experts.intermediate, of.experts.experts, of.route.top_k);
  spec.experts.activation = of.experts.activation;
  const Context context = cuda();
  if (!supported(spec, fp8_block, context)) GTEST_SKIP() << "about Hopper's kernels";
  RandomLayer random(spec, 33, DType::bf16, testing::rows_apart);
  const SharedExperts experts(spec, fp8_block.format);
  const Layer layer(spec, experts.packed(random.weights), context, fp8_block.options());
  const LayerWeights held = experts.plain(random.weights);
  const Tensor hidden = random.hidden_states(16384, DType::bf16);
  for (const std::int64_t tokens : {8192, 16384}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const LayerInputs in{.hidden = hidden.rows(0, tokens)};
    const Result got = run(context, layer, in);
    EXPECT_LT(testing::error_of(spec, held, in.hidden, got, 1e9), fp8_block.bound());
    EXPECT_EQ(run(context, layer, in).output, got.output) << "again";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PackedShapes, ::testing::ValuesIn(on_this_engine()),
                         name_of_model);
INSTANTIATE_TEST_SUITE_P(Models, PackedShapesInMoreFormats,
                         ::testing::ValuesIn(named({"qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b",
                                                    "mixtral-8x7b", "qwen3-next-80b-a3b",
                                                    "granite-3.0-1b-a400m"})),
                         name_of_model);
INSTANTIATE_TEST_SUITE_P(Models, ManyTokensInFp8,
                         ::testing::ValuesIn(named({"qwen3-30b-a3b", "deepseek-v2-lite"})),
                         name_of_model);

}  // namespace
}  // namespace shunt
