// Layers whose caller routes: without a router, for some of the experts of a group, and over
// experts that other kernels have stored (k-major sparse FP4, gate's rows before up's).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>

#include "core/convert.hpp"
#include "engine.hpp"
#include "format/k_major.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

constexpr int experts = 4, all_experts = 10, slots = 3;
constexpr std::int64_t hidden = 96, inner = 48;

// As a fused sparse MoE forward takes them: w13 [E, .., 2 I], w2 [E, .., H].
struct Stored {
  std::vector<std::unique_ptr<KMajor>> w13, w2;
  LayerSpec spec;
  LayerWeights weights;

  explicit Stored(bool weight_on_input) {
    spec.hidden = hidden;
    spec.route = {.experts = experts, .top_k = slots, .weight_on_input = weight_on_input};
    spec.experts = {.experts = experts, .hidden = hidden, .intermediate = inner};
    for (int e = 0; e < experts; ++e) {
      const PackedMatrix& gate_up = read(w13, 2 * inner, hidden, 2 * e);
      weights.experts.packed_gate.push_back(gate_up.rows(0, inner));
      weights.experts.packed_up.push_back(gate_up.rows(inner, 2 * inner));
      weights.experts.packed_down.push_back(read(w2, hidden, inner, 2 * e + 1));
    }
  }

 private:
  PackedMatrix read(std::vector<std::unique_ptr<KMajor>>& to, std::int64_t n, std::int64_t k,
                    int seed) {
    const FormatSpec format{Format::sparse_nvfp4};
    const Packed p = Packed::of(format, normal_values(n * k, static_cast<unsigned>(seed)), n, k);
    to.push_back(std::make_unique<KMajor>(n, k));
    to_k_major(p.packed, to.back()->views);
    memory_.push_back(cpu({.threads = 1}).allocate(packed_bytes(format, n, k)));
    return from_k_major(to.back()->views, memory_.back());
  }
  std::vector<Buffer> memory_;
};

struct Routed {
  std::vector<float> x, weights;
  std::vector<std::int32_t> ids, map;
  explicit Routed(std::int64_t tokens)
      : x(static_cast<std::size_t>(tokens * hidden)),
        weights(static_cast<std::size_t>(tokens * slots)),
        ids(weights.size()),
        map(all_experts, -1) {
    std::mt19937 random(9);
    std::normal_distribution<float> normal(0, 0.3f);
    std::uniform_real_distribution<float> share(0.1f, 1);
    std::uniform_int_distribution<std::int32_t> any(-1, all_experts - 1);
    for (float& value : x) value = bf16_to_f32(f32_to_bf16(normal(random)));
    for (float& value : weights) value = share(random);
    for (std::int32_t& id : ids) id = any(random);
    map[7] = 0, map[2] = 1, map[9] = 2, map[4] = 3;
  }
};

// Its five steps in double.
std::vector<double> expected(const Stored& of, const Routed& in, std::int64_t tokens) {
  std::vector<double> y(static_cast<std::size_t>(tokens * hidden), 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int s = 0; s < slots; ++s) {
      const auto pair = static_cast<std::size_t>(t * slots + s);
      const std::int32_t id = in.ids[pair];
      const std::int32_t e = id < 0 ? -1 : in.map[static_cast<std::size_t>(id)];
      if (e < 0) continue;
      const auto weight = static_cast<double>(in.weights[pair]);
      const bool first = of.spec.route.weight_on_input;
      const auto row = [&](const KMajor& matrix, std::int64_t r, const auto& x) {
        double sum = 0;
        matrix.each(r, [&](double w, std::int64_t at) { sum += w * x(at); });
        return sum;
      };
      const auto u = [&](std::int64_t i) {
        return static_cast<double>(in.x[static_cast<std::size_t>(t * hidden + i)]) *
               (first ? weight : 1);
      };
      std::vector<double> h;
      const KMajor& w13 = *of.w13[static_cast<std::size_t>(e)];
      for (std::int64_t j = 0; j < inner; ++j) {
        const double gate = row(w13, j, u);
        h.push_back(gate / (1 + std::exp(-gate)) * row(w13, inner + j, u));
      }
      const KMajor& w2 = *of.w2[static_cast<std::size_t>(e)];
      for (std::int64_t i = 0; i < hidden; ++i) {
        y[static_cast<std::size_t>(t * hidden + i)] +=
            (first ? 1 : weight) *
            row(w2, i, [&](std::int64_t j) { return h[static_cast<std::size_t>(j)]; });
      }
    }
  }
  return y;
}

void expect_forward(const Context& context, const Layer& layer, const Stored& of) {
  for (const std::int64_t tokens : {1, 5, 70}) {
    const Routed in(tokens);
    std::vector<float> y(static_cast<std::size_t>(tokens * hidden), std::nanf(""));
    const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
    test::Mirror mirror(context);
    layer.forward({.hidden = mirror.in(view(in.x.data(), {tokens, hidden})),
                   .ids = mirror.in(view(in.ids.data(), {tokens, slots})),
                   .weights = mirror.in(view(in.weights.data(), {tokens, slots})),
                   .expert_map = mirror.in(view(in.map.data(), {all_experts}))},
                  {.output = mirror.out(view(y.data(), {tokens, hidden}))}, workspace);
    mirror.fetch();
    const std::vector<double> want = expected(of, in, tokens);
    double largest = 0;
    for (const double value : want) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(y[i]), want[i], (test::on_gpu() ? 1e-2 : 1e-5) * largest)
          << tokens << " tokens, " << i;
    }
  }
}

// A GPU's products are of one format, which is said.
LayerOptions options() {
  if (!test::on_gpu()) return {.dtype = DType::f32};
  return {.dtype = DType::bf16, .format = {Format::sparse_nvfp4}};
}

TEST(RoutedOutside, FusedSparseForwardInOneCall) {
  const Context context = test::engine();
  for (const bool weight_on_input : {false, true}) {
    const Stored of(weight_on_input);
    const Layer layer(of.spec, of.weights, context, options());
    EXPECT_NE(layer.explain(4).find("no router"), std::string::npos);
    expect_forward(context, layer, of);
    const std::string path = ::testing::TempDir() + "routed_outside.safetensors";
    layer.save_prepared(path);
    expect_forward(context, Layer::load_prepared(path, context), of);
    std::remove(path.c_str());
  }
}

TEST(RoutedOutside, RefusesWhatItCannotDoByName) {
  const Context context = test::engine();
  const Stored of(false);
  const Layer layer(of.spec, of.weights, context, options());
  const Routed in(2);
  std::vector<float> y(2 * hidden);
  const std::vector<float> logits(std::size_t{2} * experts);
  const std::vector<std::int32_t> outside(all_experts, experts);
  const auto message_of = [&](const Layer& asked, LayerInputs inputs) -> std::string {
    const Buffer workspace = context.allocate(asked.workspace_bytes(2));
    test::Mirror mirror(context);
    inputs.hidden = mirror.in(view(in.x.data(), {2, hidden}));
    for (Tensor* one : {&inputs.logits, &inputs.ids, &inputs.weights, &inputs.expert_map}) {
      *one = mirror.in(*one);
    }
    try {
      asked.forward(inputs, {.output = mirror.out(view(y.data(), {2, hidden}))}, workspace);
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  const auto message = [&](const LayerInputs& inputs) { return message_of(layer, inputs); };
  const Tensor ids = view(in.ids.data(), {2, slots}), weights = view(in.weights.data(), {2, slots});
  const Tensor map = view(in.map.data(), {all_experts});
  EXPECT_NE(message({}).find("ids are missing: the layer has no router"), std::string::npos);
  EXPECT_EQ(message({.logits = view(logits.data(), {2, experts})}), "(none)");
  EXPECT_NE(message({.logits = view(logits.data(), {2, experts}), .expert_map = map})
                .find("expert_map is given: must be absent without ids"),
            std::string::npos);
  EXPECT_NE(message({.ids = ids, .weights = weights, .expert_map = map.rows(0, 3)})
                .find("expert_map has 3 ids: must be 4 or more"),
            std::string::npos);
  {
    LayerSpec spec = of.spec;
    spec.output_norm = {.enabled = true};
    const Layer normed(spec, of.weights, context, options());
    const auto with = [&](const Tensor& to) {
      return message_of(normed, {.ids = ids, .weights = weights, .expert_map = to});
    };
    EXPECT_NE(with(map).find("expert_map has 10 ids: must be 4 in a layer with output_norm"),
              std::string::npos)
        << with(map);
    const std::vector<std::int32_t> turned = {2, 0, 3, 1};
    EXPECT_EQ(with(view(turned.data(), {experts})), "(none)");
  }
  if (!test::on_gpu()) {
    EXPECT_NE(
        message({.ids = ids, .weights = weights, .expert_map = view(outside.data(), {all_experts})})
            .find("expert_map"),
        std::string::npos);
    Tensor every_other = view(logits.data(), {1, experts});
    every_other.shape[0] = 2;
    every_other.strides = {0, 2};
    EXPECT_NE(message({.logits = every_other}).find("forward: logits is"), std::string::npos);
  }
}

// A rank that has fewer experts than a token's ids: of 10 experts 4 here, 8 ids a token, or one
// expert; against the same layer of more slots' worth of dummy experts, which nobody's ids name.
TEST(RoutedOutside, ATokenMayHaveMoreIdsThanTheLayerHasExperts) {
  const Context context = test::engine();
  for (const int have : {1, 2, 4}) {
    constexpr int ids_each = 8, ranks_experts = 512;
    Stored of(false);
    of.spec.routed_outside = true;
    of.spec.route = {.experts = have, .top_k = ids_each};
    of.spec.experts.experts = have;
    for (auto* list : {&of.weights.experts.packed_gate, &of.weights.experts.packed_up,
                       &of.weights.experts.packed_down}) {
      list->resize(static_cast<std::size_t>(have));
    }
    const Layer layer(of.spec, of.weights, context, options());
    EXPECT_EQ(layer_spec_from_json(to_json(of.spec)), of.spec);
    EXPECT_NE(describe(of.spec).find("8 ids a token from outside"), std::string::npos);
    EXPECT_NE(layer.explain(4).find("no router: 8 ids a token"), std::string::npos);
    // As many slots as experts, a call for each: sums in another order.
    LayerSpec one = of.spec;
    one.route.top_k = 1;
    const Layer each(one, of.weights, context, options());
    for (const std::int64_t tokens : {1, 2, 5, 70}) {
      SCOPED_TRACE(testing::Message() << have << " experts, " << tokens << " tokens");
      std::mt19937 random(static_cast<unsigned>(tokens));
      std::uniform_int_distribution<std::int32_t> any(0, ranks_experts - 1);
      std::normal_distribution<float> normal(0, 0.3F);
      std::vector<std::int32_t> map(ranks_experts, -1);
      for (int e = 0; e < have; ++e) map[std::size_t{100} * static_cast<std::size_t>(e) + 7] = e;
      std::vector<float> x(static_cast<std::size_t>(tokens * hidden));
      for (float& value : x) value = bf16_to_f32(f32_to_bf16(normal(random)));
      std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * ids_each));
      std::vector<float> weights(ids.size());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        // About half of them are here, and no token has one twice.
        const auto slot = static_cast<int>(i % ids_each);
        ids[i] = slot < have && any(random) % 4 != 0 ? slot * 100 + 7 : 8 + slot + any(random) % 80;
        weights[i] = 0.1F + 0.1F * static_cast<float>(slot);
      }
      const auto run = [&](const Layer& asked, const std::vector<std::int32_t>& to,
                           const std::vector<float>& by, int slots_each) {
        std::vector<float> y(x.size(), std::nanf(""));
        const Buffer workspace = context.allocate(asked.workspace_bytes(tokens));
        test::Mirror mirror(context);
        asked.forward({.hidden = mirror.in(view(x.data(), {tokens, hidden})),
                       .ids = mirror.in(view(to.data(), {tokens, slots_each})),
                       .weights = mirror.in(view(by.data(), {tokens, slots_each})),
                       .expert_map = mirror.in(view(map.data(), {ranks_experts}))},
                      {.output = mirror.out(view(y.data(), {tokens, hidden}))}, workspace);
        mirror.fetch();
        return y;
      };
      const std::vector<float> all = run(layer, ids, weights, ids_each);
      std::vector<double> sum(all.size(), 0);
      for (int slot = 0; slot < ids_each; ++slot) {
        std::vector<std::int32_t> to;
        std::vector<float> by;
        for (std::int64_t t = 0; t < tokens; ++t) {
          to.push_back(ids[static_cast<std::size_t>(t * ids_each + slot)]);
          by.push_back(weights[static_cast<std::size_t>(t * ids_each + slot)]);
        }
        const std::vector<float> part = run(each, to, by, 1);
        for (std::size_t i = 0; i < part.size(); ++i) sum[i] += static_cast<double>(part[i]);
      }
      double largest = 0;
      for (const double value : sum) largest = std::max(largest, std::abs(value));
      EXPECT_GT(largest, 0);
      for (std::size_t i = 0; i < all.size(); ++i) {
        ASSERT_NEAR(static_cast<double>(all[i]), sum[i], (test::on_gpu() ? 1e-2 : 1e-5) * largest);
      }
    }
  }
}

TEST(RoutedOutside, ALayerThatSaysSoTakesIdsAlone) {
  const Context context = test::engine();
  Stored of(false);
  of.spec.routed_outside = true;
  const auto refused = [&](const LayerSpec& spec) {
    return supports(spec, options(), context.device()).reason;
  };
  EXPECT_EQ(refused(of.spec), "");
  LayerSpec other = of.spec;
  other.route.renormalize = true;
  EXPECT_NE(refused(other).find("must have experts, top_k and weight_on_input alone"),
            std::string::npos)
      << refused(other);
  other.route.top_k = 9;
  EXPECT_NE(refused(other).find("LayerSpec.route has a rule"), std::string::npos);
  other = of.spec;
  other.route.top_k = 65;
  EXPECT_EQ(refused(other), "LayerSpec.route.top_k is 65: must be 1 to 64 where routed_outside");
  other = of.spec;
  other.router_norm = {.enabled = true, .multiplier = 3};
  EXPECT_NE(refused(other).find("router_norm.enabled is true: must be false"), std::string::npos);
  const std::vector<float> matrix(std::size_t{experts} * hidden);
  LayerWeights with_router = of.weights;
  with_router.router = view(matrix.data(), {experts, hidden});
  EXPECT_THROW(Layer(of.spec, with_router, context, options()), Error);
  const Layer layer(of.spec, of.weights, context, options());
  const Buffer workspace = context.allocate(layer.workspace_bytes(2));
  test::Mirror mirror(context);
  std::vector<float> y(2 * hidden);
  const Tensor x = mirror.in(view(matrix.data(), {2, hidden}));
  const LayerOutputs out{.output = mirror.out(view(y.data(), {2, hidden}))};
  for (const bool logits : {false, true}) {
    try {
      layer.forward(
          {.hidden = x, .logits = logits ? mirror.in(view(matrix.data(), {2, experts})) : Tensor{}},
          out, workspace);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("routed_outside"), std::string::npos)
          << error.what();
    }
  }
}

// What is found in ids and maps on the way is found before anything is written.
TEST(RoutedOutside, ARefusedCallHasWrittenNothing) {
  if (test::on_gpu()) GTEST_SKIP() << "whose host reads no values";
  const Context context = cpu({.threads = 2});
  const Stored of(false);
  const Layer layer(of.spec, of.weights, context, options());
  const Routed in(8);
  std::vector<float> y(8 * hidden, 7);
  const std::vector<std::int32_t> outside(all_experts, experts);
  const std::int32_t valid = 5;
  const Buffer workspace = context.allocate(layer.workspace_bytes(8));
  EXPECT_THROW(layer.forward({.hidden = view(in.x.data(), {8, hidden}),
                              .valid_tokens = view(&valid, {1}),
                              .ids = view(in.ids.data(), {8, slots}),
                              .weights = view(in.weights.data(), {8, slots}),
                              .expert_map = view(outside.data(), {all_experts})},
                             {.output = view(y.data(), {8, hidden})}, workspace),
               Error);
  EXPECT_EQ(y, std::vector<float>(8 * hidden, 7));
}

}  // namespace
}  // namespace shunt
