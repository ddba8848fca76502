// A token's bits in batches of any size and company, with LayerOptions::batch_invariant.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine.hpp"
#include "layer/random_layer.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::small_layer;

struct Rows {
  std::vector<float> output, weights;
  std::vector<std::int32_t> ids;
};

Rows run(const Context& context, const Layer& layer, const Tensor& hidden) {
  const LayerSpec& spec = layer.spec();
  const std::int64_t tokens = hidden.shape[0], k = spec.route.top_k;
  Rows rows;
  rows.output.assign(static_cast<std::size_t>(tokens * spec.hidden), std::nanf(""));
  rows.weights.assign(static_cast<std::size_t>(tokens * k), std::nanf(""));
  rows.ids.assign(rows.weights.size(), -7);
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  test::Mirror mirror(context);
  layer.forward({.hidden = mirror.in(hidden)},
                {.output = mirror.out(view(rows.output.data(), {tokens, spec.hidden})),
                 .ids = mirror.out(view(rows.ids.data(), {tokens, k})),
                 .weights = mirror.out(view(rows.weights.data(), {tokens, k}))},
                workspace);
  mirror.fetch();
  return rows;
}

template <class T>
bool same(const std::vector<T>& part, std::int64_t at, const std::vector<T>& all, std::int64_t from,
          std::int64_t rows, std::int64_t width) {
  return std::memcmp(part.data() + at * width, all.data() + from * width,
                     static_cast<std::size_t>(rows * width) * sizeof(T)) == 0;
}

// Products whose k a GPU would share out for few rows, and routers of every form.
std::vector<LayerSpec> specs() {
  LayerSpec wide = small_layer({.experts = 16, .top_k = 4, .renormalize = true}, 1024, 256);
  wide.shared = {.intermediate = 512, .sigmoid_gate = true};
  LayerSpec soft = small_layer({.experts = 128, .top_k = 8}, 512, 64);
  soft.output_norm = {.enabled = true, .weight = true};
  LayerSpec grouped =
      small_layer({.experts = 256,
                   .top_k = 8,
                   .score = Score::sigmoid,
                   .selection_bias = true,
                   .groups = {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2},
                   .renormalize = true,
                   .scale = 2.5F},
                  256, 32);
  LayerSpec many = small_layer({.experts = 600, .top_k = 6}, 128, 16);
  return {wide, soft, grouped, many};
}

TEST(BatchInvariant, ATokensBitsDoNotDependOnTheOthers) {
  const Context context = test::engine();
  unsigned seed = 61;
  for (const LayerSpec& spec : specs()) {
    RandomLayer random(spec, seed++);
    constexpr std::int64_t most = 700;
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Layer layer(spec, random.weights, context, {.dtype = dtype, .batch_invariant = true});
      const Tensor x = random.hidden_states(most, dtype);
      const Rows all = run(context, layer, x);
      for (const std::int64_t tokens : {1, 2, 3, 8, 16, 17, 31, 64, 130, 257}) {
        for (const std::int64_t from : {std::int64_t{0}, most / 2, most - tokens}) {
          const Rows some = run(context, layer, x.rows(from, from + tokens));
          EXPECT_TRUE(same(some.ids, 0, all.ids, from, tokens, spec.route.top_k))
              << "ids: " << spec.route.experts << " experts, " << tokens << " from " << from;
          EXPECT_TRUE(same(some.weights, 0, all.weights, from, tokens, spec.route.top_k))
              << "weights: " << spec.route.experts << " experts, " << tokens << " from " << from;
          EXPECT_TRUE(same(some.output, 0, all.output, from, tokens, spec.hidden))
              << "output: " << spec.route.experts << " experts, " << tokens << " from " << from;
        }
      }
    }
  }
}

TEST(BatchInvariant, ExplainSaysWhatItCosts) {
  const Context context = test::engine();
  RandomLayer random(small_layer({.experts = 4, .top_k = 1}, 1024, 512), 65);
  const Layer plain(random.spec, random.weights, context);
  const Layer same(random.spec, random.weights, context, {.batch_invariant = true});
  EXPECT_EQ(plain.explain(1).find("batch-invariant"), std::string::npos);
  const std::string words = same.explain(1);
  EXPECT_NE(words.find("batch-invariant"), std::string::npos) << words;
  EXPECT_EQ(words.find("us longer") != std::string::npos, test::on_gpu()) << words;
}

}  // namespace
}  // namespace shunt
