// The shared arithmetic: how exact it is, and that every instruction set computes the same bits.
#include "route/policy.hpp"

#include <cstdlib>

#include "core/check.hpp"
#include "cpu/features.hpp"
#include "route/route_util.hpp"

namespace shunt::test {
namespace {

// Distance in units in the last place of the f32 nearest to `exact`.
double units(float value, double exact) {
  const auto nearest = static_cast<float>(exact);
  const double unit = static_cast<double>(std::nextafter(std::abs(nearest), 1e38F)) -
                      static_cast<double>(std::abs(nearest));
  return std::abs(static_cast<double>(value) - exact) / unit;
}

template <class Approximate, class Exact>
double worst(float low, float high, Approximate approximate, Exact exact) {
  double result = 0;
  const int steps = 400000;
  for (int i = 0; i <= steps; ++i) {
    const float x = low + (high - low) * (static_cast<float>(i) / steps);
    result = std::max(result, units(approximate(x), exact(static_cast<double>(x))));
  }
  return result;
}

TEST(RoutePolicy, ExponentialIsWithinAUnit) {
  const auto exact = [](double x) { return std::exp(x); };
  EXPECT_LT(worst(-87, 0, routing::exp_of_negative, exact), 1.01);
  EXPECT_LT(worst(-1, 0, routing::exp_of_negative, exact), 1.01);
  EXPECT_LT(worst(-104, -87, routing::exp_of_negative, exact), 1.01);  // subnormal
  EXPECT_EQ(routing::exp_of_negative(0.0F), 1.0F);
  EXPECT_EQ(routing::exp_of_negative(-104.0F), 0.0F);
  EXPECT_EQ(routing::exp_of_negative(-std::numeric_limits<float>::infinity()), 0.0F);
}

TEST(RoutePolicy, ScoresAreWithinAFewUnits) {
  const auto logistic = [](double x) {
    return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
  };
  EXPECT_LT(worst(-86, 30, routing::sigmoid, logistic), 2.5);
  EXPECT_LT(worst(-4, 4, routing::sigmoid, logistic), 2.5);
  const auto root = [](double x) {
    return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
  };
  EXPECT_LT(worst(-86, 100, routing::sqrt_softplus, root), 2.5);
  EXPECT_LT(worst(-3, 3, routing::sqrt_softplus, root), 2.5);
  const auto tangent = [](double x) { return std::tanh(x); };
  EXPECT_LT(worst(-12, 12, routing::hyperbolic_tangent, tangent), 2.5);
  EXPECT_LT(worst(-0.7F, 0.7F, routing::hyperbolic_tangent, tangent), 2.5);
  EXPECT_LT(worst(0, 1e-4F, routing::hyperbolic_tangent, tangent), 2.5);
  EXPECT_EQ(routing::hyperbolic_tangent(std::numeric_limits<float>::infinity()), 1.0F);
  EXPECT_EQ(routing::soft_capped(-routing::largest, 0.5F), -0.5F);
}

TEST(RoutePolicy, SanitisedIsFiniteAndHasNoNegativeZero) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(routing::sanitised(std::nanf("")), -routing::largest);
  EXPECT_EQ(routing::sanitised(-std::nanf("")), -routing::largest);
  EXPECT_EQ(routing::sanitised(-infinity), -routing::largest);
  EXPECT_EQ(routing::sanitised(infinity), routing::largest);
  EXPECT_EQ(routing::bits_of(routing::sanitised(-0.0F)), 0);
  EXPECT_EQ(routing::sanitised(-1e-45F), -1e-45F);
  EXPECT_EQ(routing::finite_weight(std::nanf("")), 0.0F);
  EXPECT_EQ(routing::finite_weight(-infinity), -routing::largest);
}

TEST(RoutePolicy, KeysOrderByValueThenByLowerId) {
  const std::vector<float> values = {
      -routing::largest, -10, -1, -0.1F, -1e-45F, 0, 1e-45F, 0.1F, 1, 10, routing::largest};
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < values.size(); ++j) {
      for (const auto& [a, b] : {std::pair{0, 4095}, std::pair{7, 8}, std::pair{8, 7}}) {
        const bool first = values[i] > values[j] || (values[i] == values[j] && a < b);
        EXPECT_EQ(routing::key_of(values[i], a) > routing::key_of(values[j], b), first);
      }
    }
    EXPECT_EQ(routing::id_of(routing::key_of(values[i], 4095)), 4095);
    EXPECT_EQ(routing::id_of(routing::key_of(values[i], 0)), 0);
    EXPECT_GT(routing::key_of(values[i], 4095), routing::no_key);
  }
}

// A context on the named instruction set, or on this machine's best where that is null.
Context context_on(const char* isa, int threads) {
  if (isa != nullptr) setenv("SHUNT_ISA", isa, 1);
  const Context context = cpu({.threads = threads});
  unsetenv("SHUNT_ISA");
  return context;
}

TEST(RoutePolicy, InstructionSetsAndThreadsGiveTheSameBits) {
  std::vector<Context> contexts;
  for (const auto isa : {cpu_engine::Isa::scalar, cpu_engine::Isa::avx2, cpu_engine::Isa::avx512}) {
    if (!cpu_engine::supported(isa)) continue;
    contexts.push_back(context_on(cpu_engine::to_string(isa), 1));
    contexts.push_back(context_on(cpu_engine::to_string(isa), 3));
  }
  unsigned seed = 77;
  for (const auto& [experts, top_k, groups, keep] :
       {std::array{8, 2, 2, 1}, std::array{160, 6, 8, 3}, std::array{257, 9, 1, 1},
        std::array{1000, 64, 10, 9}}) {
    for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
      const RouteCase c = random_case(rule.spec, 300, ++seed);
      const RouteResult first = run(contexts[0], c);
      for (const Context& context : contexts) {
        EXPECT_TRUE(run(context, c) == first) << rule.name << " with " << experts << " experts";
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
