// Layers of the sizes of published models, all of their experts, in bf16 and f16, against double
// precision, routing and all. On the CPU the smallest ones.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine.hpp"
#include "layer/model_shapes.hpp"

namespace shunt {
namespace {

using bench::Model;
using testing::error_of;
using testing::name_of_model;
using testing::RandomLayer;
using testing::Result;
using testing::run;

struct Call {
  std::int64_t tokens;
  float scale = 1;     // of hidden states
  bool alike = false;  // all but every fourth token are one, so that a few experts have most
};

Tensor hidden_states(RandomLayer& random, const Call& call, DType dtype) {
  const std::int64_t hidden = random.spec.hidden;
  const Tensor states = random.hidden_states(call.tokens, dtype);
  for (std::int64_t i = 0; i < call.tokens * hidden; ++i) {
    const std::int64_t from = call.alike && i / hidden % 4 != 0 ? i % hidden : i;
    const float scale = from == i ? call.scale : 1;  // the first token's have theirs
    store_f32(states.data, dtype, i, scale * load_f32(states.data, dtype, from));
  }
  return states;
}

// Those that do not take long there.
std::vector<Model> on_this_engine() {
  std::vector<Model> some = bench::models();
  if (test::on_gpu()) return some;
  std::erase_if(some, [](const Model& model) {
    return model.spec.experts.experts * testing::numbers_of(model.spec) > 2e8;
  });
  return some;
}
std::vector<Model> with_many_tokens() {
  std::vector<Model> some = test::on_gpu() ? bench::models() : std::vector<Model>{};
  std::erase_if(some, [](const Model& model) {
    return model.name != "qwen3-30b-a3b" && model.name != "deepseek-v2-lite" &&
           model.name != "gpt-oss-20b";
  });
  return some;
}

class Shapes : public ::testing::TestWithParam<Model> {
 protected:
  // Hidden states and weights are exact in either type; rounded are rows that a router's weight
  // meets, inner results and results. Each moves a number by `unit` of itself at most, and the sums
  // behind them by no more of theirs than that, in the mean. `work`: as error_of() has it.
  static void expect_double(const LayerSpec& spec, DType dtype, const std::vector<Call>& calls,
                            double work) {
    const double unit = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    RandomLayer random(spec, 31, dtype, testing::rows_apart);
    const Context context = test::engine();
    test::Mirror mirror(context);
    const LayerWeights there =
        testing::moved(random.weights, [&](const Tensor& one) { return mirror.in(one); });
    const Layer layer(spec, there, context, {.dtype = dtype});
    for (const Call& call : calls) {
      SCOPED_TRACE(std::to_string(call.tokens) + " tokens" + (call.alike ? ", most alike" : "") +
                   (call.scale > 1 ? ", large" : ""));
      const LayerInputs in{.hidden = hidden_states(random, call, dtype)};
      const Result got = run(context, layer, in);
      EXPECT_LT(error_of(spec, random.weights, in.hidden, got, work), 3 * unit);
      EXPECT_EQ(run(context, layer, in).output, got.output) << "again";
    }
  }
};
class ManyTokens : public Shapes {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ManyTokens);

TEST_P(Shapes, EqualDouble) {
  std::vector<Call> calls = {{1}, {2}, {7}, {33}, {33, 64}};
  if (test::on_gpu())
    calls.insert(calls.end(), {{4}, {16}, {200}, {1000, 1, true}, {1025}, {8192}});
  expect_double(GetParam().spec, DType::bf16, calls, 3e8);
}

// Inner results of hidden states 64 times as large would be beyond f16.
TEST_P(Shapes, EqualDoubleInF16) {
  std::vector<Call> calls = {{1}, {7, 8}};
  if (test::on_gpu())
    calls.insert(calls.end(), {{2}, {16}, {33, 8}, {200}, {1000, 1, true}, {1025}});
  expect_double(GetParam().spec, DType::f16, calls, test::on_gpu() ? 3e8 : 5e7);
}

// 16384 tokens of 8 slots are 131072 rows.
TEST_P(ManyTokens, EqualDouble) {
  expect_double(GetParam().spec, DType::bf16, {{16384}, {16384, 1, true}}, 3e8);
}

INSTANTIATE_TEST_SUITE_P(Models, Shapes, ::testing::ValuesIn(on_this_engine()), name_of_model);
INSTANTIATE_TEST_SUITE_P(Models, ManyTokens, ::testing::ValuesIn(with_many_tokens()),
                         name_of_model);

}  // namespace
}  // namespace shunt
