// The CUDA engine against the CPU's, to the bit: the same logits give the same ids and weights.
#include "route/route_util.hpp"

namespace shunt::test {
namespace {

struct Shape {
  int experts, top_k, groups, keep;
};
// Published models', with a fused shared expert too, and what no kernel is laid out for.
const std::vector<Shape> shapes = {
    {8, 2, 1, 1},       {16, 1, 1, 1},     {32, 4, 1, 1},   {60, 4, 1, 1},   {64, 6, 1, 1},
    {64, 8, 1, 1},      {72, 6, 1, 1},     {96, 8, 1, 1},   {128, 1, 1, 1},  {128, 4, 4, 2},
    {128, 8, 1, 1},     {160, 6, 8, 3},    {160, 8, 1, 1},  {256, 8, 8, 4},  {256, 8, 1, 1},
    {257, 9, 1, 1},     {384, 6, 1, 1},    {384, 8, 1, 1},  {385, 9, 1, 1},  {512, 10, 1, 1},
    {512, 22, 1, 1},    {512, 16, 16, 8},  {513, 11, 1, 1}, {896, 16, 1, 1}, {1024, 8, 1, 1},
    {1024, 64, 64, 40}, {4096, 64, 64, 3}, {33, 33, 3, 3},  {1, 1, 1, 1},    {17, 17, 1, 1},
    {24, 24, 1, 1},     {100, 20, 1, 1},   {512, 24, 1, 1}};

class RouteEngines : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (!on_gpu()) GTEST_SKIP() << "compares the CUDA engine with the CPU's";
  }
};

// Ids and weights alone: what kernels that know their rule are compiled for.
RouteResult compact(const Context& context, const RouteSpec& spec, const RouteInputs& in) {
  RouteResult result(spec, in.logits.shape[0]);
  RouteOutputs out = result.outputs(spec, in.logits.shape[0]);
  out.dense = out.logits = out.replay = {};
  route_on(context, spec, in, out);
  return result;
}

TEST_P(RouteEngines, TheSameBits) {
  const auto [experts, top_k, groups, keep] = GetParam();
  const Context host = cpu({.threads = 2});
  const Context gpu = cuda();
  unsigned seed = 7;
  for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
    SCOPED_TRACE(rule.name);
    for (const Values values : {Values::normal, Values::permuted, Values::coarse}) {
      const std::int64_t tokens = values == Values::normal ? 256 : 33;
      const RouteCase c = random_case(rule.spec, tokens, ++seed, values);
      EXPECT_TRUE(run(gpu, c) == run(host, c)) << to_json(rule.spec);
      EXPECT_TRUE(compact(gpu, c.spec, c.inputs()) == compact(host, c.spec, c.inputs()))
          << to_json(rule.spec);
      for (const DType dtype : {bf16, f16}) {
        const auto logits = narrowed(c.logits, dtype);
        RouteInputs in = c.inputs();
        in.logits = view(logits.data(), dtype, {tokens, c.columns()});
        EXPECT_TRUE(run(gpu, c.spec, in) == run(host, c.spec, in)) << to_string(dtype);
        EXPECT_TRUE(compact(gpu, c.spec, in) == compact(host, c.spec, in)) << to_string(dtype);
      }
      if (HasFailure()) return;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(, RouteEngines, ::testing::ValuesIn(shapes));

TEST(RouteManyRows, TheSameBits) {
  if (!on_gpu()) GTEST_SKIP() << "compares the CUDA engine with the CPU's";
  const Context host = cpu({.threads = 2});
  const Context gpu = cuda();
  for (const std::int64_t tokens :
       {0, 1, 2, 3, 4, 7, 8, 16, 17, 31, 127, 1023, 2049, 16384, 65536}) {
    for (const auto& [experts, top_k, groups, keep] : {Shape{256, 8, 8, 4}, Shape{60, 4, 1, 1}}) {
      if (tokens * experts > 5000000) continue;
      const RouteCase c =
          random_case(rules(experts, top_k, groups, keep)[groups > 1 ? 5 : 0].spec, tokens, 3);
      EXPECT_TRUE(run(gpu, c) == run(host, c)) << tokens;
      EXPECT_TRUE(compact(gpu, c.spec, c.inputs()) == compact(host, c.spec, c.inputs())) << tokens;
    }
  }
}

// Hidden states: what follows from the logits that the router itself reports.
TEST(RouteManyRows, FromHiddenStates) {
  if (!on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  const Context host = cpu({.threads = 2});
  const Context gpu = cuda();
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const auto& [tokens, experts, width] :
       {std::array{1, 256, 7168}, std::array{64, 256, 2048}, std::array{300, 128, 512},
        std::array{2500, 16, 128}, std::array{9000, 64, 96}, std::array{40, 512, 1000},
        std::array{70, 513, 640}, std::array{5, 1100, 72}}) {
    for (const DType dtype : {bf16, f16, f32}) {
      std::vector<float> x(at(std::int64_t{tokens} * width)), w(at(std::int64_t{experts} * width));
      for (float& v : x) v = normal(random);
      for (float& v : w) v = normal(random) / std::sqrt(static_cast<float>(width));
      const auto x_short = narrowed(x, dtype), w_short = narrowed(w, dtype);
      const RouteSpec spec{.experts = experts, .top_k = 4, .renormalize = true};
      RouteInputs in;
      in.hidden = dtype == f32 ? view(x.data(), {tokens, width})
                               : view(x_short.data(), dtype, {tokens, width});
      in.router_weight = dtype == f32 ? view(w.data(), {experts, width})
                                      : view(w_short.data(), dtype, {experts, width});
      const RouteResult got = run(gpu, spec, in);
      EXPECT_TRUE(run(gpu, spec, in) == got);
      const RouteResult want = run(host, spec, in);
      for (std::size_t i = 0; i < want.logits.size(); ++i) {
        // Sums of such numbers go some way beyond where they end.
        const double largest = 2 * std::max(1.0, std::abs(static_cast<double>(want.logits[i])));
        ASSERT_NEAR(static_cast<double>(got.logits[i]), static_cast<double>(want.logits[i]),
                    3e-5 + tensor_core_loss(width, largest))
            << tokens << " x " << experts << " x " << width << " " << to_string(dtype) << " at "
            << i;
      }
      RouteCase c(spec, tokens);
      c.logits = got.logits;
      EXPECT_TRUE(run(host, c) == got) << tokens << " x " << experts << " " << to_string(dtype);
    }
  }
}

}  // namespace
}  // namespace shunt::test
