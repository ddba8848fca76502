// Layers of the sizes of published models, all of their experts, against double precision, routing
// and all; and with as many experts as a token has, packed. On the CPU the smallest ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "bench/shapes/models.hpp"
#include "engine.hpp"
#include "layer/random_layer.hpp"
#include "layer/routing_reference.hpp"
#include "layer/run_layer.hpp"
#include "shunt/format.hpp"

namespace shunt {

namespace bench {
void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }
}  // namespace bench

namespace {

using bench::Model;
using testing::RandomLayer;
using testing::Result;
using testing::run;

// Rows of a matrix overlap but for so many numbers: as many as no tile has.
constexpr std::int64_t apart = 5;

// Of an expert.
double numbers_of(const LayerSpec& spec) {
  return 3.0 * static_cast<double>(spec.hidden) * static_cast<double>(spec.experts.intermediate);
}

struct Call {
  std::int64_t tokens;
  float scale = 1;     // of hidden states
  bool alike = false;  // all but every fourth token are one, so that a few experts have most
};

// In bf16.
Tensor hidden_states(RandomLayer& random, const Call& call) {
  const std::int64_t hidden = random.spec.hidden;
  const Tensor states = random.hidden_states(call.tokens, DType::bf16);
  auto* const x = states.as<std::uint16_t>();
  for (std::int64_t i = 0; i < call.tokens * hidden; ++i) {
    x[i] = f32_to_bf16(call.scale * bf16_to_f32(x[i]));
    if (call.alike && i / hidden % 4 != 0) x[i] = x[i % hidden];
  }
  return states;
}

// What experts were compared by, the best first.
std::vector<double> best_first(const std::vector<double>& compared, const std::vector<int>& ids) {
  std::vector<double> values;
  for (const int id : ids) values.push_back(compared.at(static_cast<std::size_t>(id)));
  std::sort(values.rbegin(), values.rend());
  return values;
}

// Of some tokens, as many as take `work` products: ids are as good as the best in double, but
// for what sums in f32 are off by; the error's length over the result's.
double error_of(const LayerSpec& spec, const LayerWeights& weights, const Tensor& hidden,
                const Result& got, double work) {
  const std::int64_t tokens = hidden.shape[0], k = spec.route.top_k;
  const auto each = static_cast<double>(k) * numbers_of(spec) +
                    3.0 * static_cast<double>(spec.hidden * spec.shared.intermediate);
  const auto count = static_cast<std::int64_t>(
      std::clamp(work / each, 1.0, std::min(6.0, static_cast<double>(tokens))));
  double error = 0, size = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t t = count == 1 ? tokens - 1 : n * (tokens - 1) / (count - 1);
    const Tensor row = hidden.rows(t, t + 1);
    const std::vector<double> x = router_input_reference(spec, weights, row);
    RouteReference routed = testing::routing_reference(spec, weights, x);
    const std::vector<int> ids(got.ids.begin() + t * k, got.ids.begin() + (t + 1) * k);
    EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), ids.size()) << "token " << t;
    const std::vector<double> chosen = best_first(routed.compared, ids);
    routed.ids.resize(static_cast<std::size_t>(k));
    const std::vector<double> best = best_first(routed.compared, routed.ids);
    for (std::size_t slot = 0; slot < best.size(); ++slot) {
      EXPECT_NEAR(chosen[slot], best[slot], 0x1p-20 * std::max(1.0, std::abs(best[slot])))
          << "token " << t;
    }
    LayerSpec given = spec;  // of these ids: where f32 sees a tie, double may choose others
    given.route.hashed = true;
    routed = testing::routing_reference(given, weights, x, ids);
    const std::vector<float> routing(routed.weights.begin(), routed.weights.end());
    const std::vector<double> want =
        layer_reference(spec, weights, row, routed.ids.data(), routing.data());
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      const double expected = want[static_cast<std::size_t>(i)];
      const double off =
          static_cast<double>(got.output[static_cast<std::size_t>(t * spec.hidden + i)]) - expected;
      error += off * off;
      size += expected * expected;
    }
  }
  return std::sqrt(error / size);
}

// Those that do not take long there.
std::vector<Model> on_this_engine() {
  std::vector<Model> some = bench::models();
  if (test::on_gpu()) return some;
  std::erase_if(some, [](const Model& model) {
    return model.spec.experts.experts * numbers_of(model.spec) > 2e8;
  });
  return some;
}
std::vector<Model> packed_here() {
  std::vector<Model> some = test::on_gpu() ? bench::models() : std::vector<Model>{};
  std::erase_if(some, [](const Model& model) {  // packing them does
    return model.spec.route.top_k * numbers_of(model.spec) > 2.5e8;
  });
  return some;
}
std::string name_of(const ::testing::TestParamInfo<Model>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

class Shapes : public ::testing::TestWithParam<Model> {};
class PackedShapes : public ::testing::TestWithParam<Model> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PackedShapes);

// Hidden states and weights are bf16; rounded are rows that a router's weight meets, inner results
// and results. Each moves a number by 2^-8 of itself at most, and the sums behind them by no more
// of theirs than that, in the mean.
TEST_P(Shapes, EqualDouble) {
  const LayerSpec& spec = GetParam().spec;
  RandomLayer random(spec, 31, DType::bf16, apart);
  const Context context = test::engine();
  test::Mirror mirror(context);
  const LayerWeights there =
      testing::moved(random.weights, [&](const Tensor& one) { return mirror.in(one); });
  const Layer layer(spec, there, context, {.dtype = DType::bf16});
  std::vector<Call> calls = {{1}, {2}, {7}, {33}, {33, 64}};
  if (test::on_gpu())
    calls.insert(calls.end(), {{4}, {16}, {200}, {1000, 1, true}, {1025}, {8192}});
  for (const Call& call : calls) {
    SCOPED_TRACE(std::to_string(call.tokens) + " tokens" + (call.alike ? ", most alike" : "") +
                 (call.scale > 1 ? ", large" : ""));
    const LayerInputs in{.hidden = hidden_states(random, call)};
    const Result got = run(context, layer, in);
    EXPECT_LT(error_of(spec, random.weights, in.hidden, got, 3e8), 3 * 0x1p-8);
    EXPECT_EQ(run(context, layer, in).output, got.output) << "again";
  }
}

// As many experts as a token has, so that every token meets all. Of weights as they are packed,
// what rows in bf16 allow; with rows in e4m3, which are off by 2^-4 at most and by half of that in
// the mean, what a token's does to gate and to up, and an inner result's to down.
TEST_P(PackedShapes, EqualDoubleOverWhatExpertsHold) {
  const LayerSpec& model = GetParam().spec;
  const int k = model.route.top_k;
  LayerSpec spec = bench::plain_layer(model.hidden, model.experts.intermediate, k, k);
  spec.experts.activation = model.experts.activation;
  RandomLayer random(spec, 32, DType::bf16, apart);
  const Context context = cuda();
  for (const LayerOptions& options :
       {LayerOptions{.dtype = DType::bf16, .format = {Format::nvfp4}},
        LayerOptions{
            .dtype = DType::bf16, .format = {Format::fp8_block}, .rows = RowFormat::fp8_block}}) {
    const Layer layer(spec, random.weights, context, options);
    // What the packed experts hold.
    std::vector<std::vector<float>> decoded;
    const auto unpacked = [&](const Tensor& matrix) {
      const std::int64_t n = matrix.shape[0], columns = matrix.shape[1];
      const Buffer memory = cpu().allocate(packed_bytes(options.format, n, columns));
      auto& to = decoded.emplace_back(static_cast<std::size_t>(n * columns));
      unpack(pack(options.format, matrix, memory), view(to.data(), {n, columns}));
      return view(to.data(), {n, columns});
    };
    LayerWeights held = random.weights;
    for (auto* list : {&held.experts.gate, &held.experts.up, &held.experts.down}) {
      for (Tensor& one : *list) one = unpacked(one);
    }
    for (const std::int64_t tokens : {1, 2, 4, 9, 64, 700}) {
      SCOPED_TRACE(to_string(options.format) + ", " + std::to_string(tokens) + " tokens");
      const LayerInputs in{.hidden = hidden_states(random, {tokens})};
      const Result got = run(context, layer, in);
      const bool rounded = options.rows == RowFormat::fp8_block;
      EXPECT_LT(error_of(spec, held, in.hidden, got, 1e8), rounded ? 3 * 0x1p-5 : 3 * 0x1p-8);
      EXPECT_EQ(run(context, layer, in).output, got.output) << "again";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Shapes, ::testing::ValuesIn(on_this_engine()), name_of);
INSTANTIATE_TEST_SUITE_P(Models, PackedShapes, ::testing::ValuesIn(packed_here()), name_of);

}  // namespace
}  // namespace shunt
