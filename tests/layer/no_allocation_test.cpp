// The hot path does not allocate: what a layer's call allocates is counted. And what becomes of
// weights where an allocation fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "allocations.hpp"
#include "layer/random_layer.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

// Counts itself: an aligned buffer, as forward() could ask its context for one.
TEST(Layer, AllocationsAreCounted) {
  if (SHUNT_SANITIZED || test::on_gpu()) GTEST_SKIP() << "counted elsewhere";
  const Context context = cpu({.threads = 1});
  const long before = test::allocations();
  const Buffer memory = context.allocate(1 << 20);
  EXPECT_GT(test::allocations(), before);
}

TEST(Layer, ForwardDoesNotAllocate) {
  const Context context = test::engine(3);
  const LayerOptions all[] = {{},
                              {.dtype = DType::bf16},
                              {.dtype = DType::bf16, .format = {Format::nvfp4}},
                              {.dtype = DType::bf16, .format = {Format::int8}},
                              {.batch_invariant = true}};
  for (const auto& named : testing::layer_specs()) {
    testing::RandomLayer random(named.spec, 5);
    const RouteSpec& route = random.spec.route;
    for (const LayerOptions& options : all) {
      if (!supports(random.spec, options, context.device())) continue;
      const Layer layer(random.spec, random.weights, context, options);
      for (const std::int64_t tokens : {1, 19, 150}) {
        const LayerInputs base{.hidden = random.hidden_states(tokens)};
        std::vector<float> output(static_cast<std::size_t>(tokens * named.spec.hidden));
        std::vector<float> logits(static_cast<std::size_t>(tokens * route.columns()), 0.5F);
        std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * route.slots()), 0);
        std::vector<float> weights(ids.size(), 0.25F);
        test::Mirror mirror(context);
        const Tensor y = mirror.out(view(output.data(), {tokens, named.spec.hidden}));
        const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
        for (int from = 0; from < 3; ++from) {
          LayerInputs in{.hidden = mirror.in(base.hidden)};
          if (from != 2 && route.hashed) in.token_ids = mirror.in(random.token_ids(tokens));
          if (from == 1) in.logits = mirror.in(view(logits.data(), {tokens, route.columns()}));
          if (from == 2) {
            in.ids = mirror.in(view(ids.data(), {tokens, route.slots()}));
            in.weights = mirror.in(view(weights.data(), {tokens, route.slots()}));
          }
          layer.forward(in, {.output = y}, workspace);  // a GPU's driver loads kernels at first
          const long before = test::allocations();
          layer.forward(in, {.output = y}, workspace);
          EXPECT_EQ(test::allocations(), before) << named.name << ", " << tokens << " tokens, "
                                                 << to_string(options.format) << ", " << from;
        }
      }
    }
  }
}

TEST(PrepareInPlace, WhereMemoryIsOutWeightsAreWhatTheyWere) {
  if (SHUNT_SANITIZED || test::on_gpu()) GTEST_SKIP() << "allocations fail on the CPU alone";
  const Context context = cpu({.threads = 1});
  constexpr std::int64_t groups = 3, n = 128, k = 64;
  const Buffer memory = context.allocate(groups * n * k * sizeof(float));
  const Buffer scratch = context.allocate(n * k * sizeof(float));
  std::vector<float> numbers(groups * n * k);
  std::iota(numbers.begin(), numbers.end(), 1.0F);
  auto* const placed = static_cast<float*>(memory.data());
  for (const bool paired : {false, true}) {
    long failures = 0;
    for (bool threw = true; threw;) {
      std::copy(numbers.begin(), numbers.end(), placed);
      const Tensor matrices = view(placed, {groups, n, k});
      threw = false;
      test::before_failure = failures;
      try {
        prepare_in_place(context, matrices, paired, scratch);
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      test::before_failure = -1;
      failures += threw ? 1 : 0;
      const bool same = std::equal(numbers.begin(), numbers.end(), placed);
      EXPECT_EQ(same, threw) << "after " << failures;
    }
    EXPECT_GE(failures, groups);
  }
}

}  // namespace
}  // namespace shunt
