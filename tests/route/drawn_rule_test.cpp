// Rules of routing drawn at random: what they give of given logits is right against the reference
// and, on a GPU, to the bit what the CPU engine gives; of hidden states it follows from the logits
// that the router itself reports.
//
// SHUNT_DRAWN=first:count takes other seeds than the few of every run.
#include "route/drawn_rule.hpp"

#include <algorithm>
#include <cmath>

#include "route/route_util.hpp"

namespace shunt::test {
namespace {

void expect_of_logits(Draw& draw, const RouteSpec& spec, std::int64_t tokens, unsigned seed) {
  // Two scores of x and -x are 1 together for every x, a tie that rounding decides.
  const bool ties = spec.groups.rank_by == GroupRank::max;
  const Values values =
      ties ? draw.any({Values::normal, Values::permuted, Values::coarse}) : Values::normal;
  RouteCase c = random_case(spec, tokens, seed, values);
  std::int32_t valid = static_cast<std::int32_t>(draw.between(0, tokens + 2));
  const DType dtype = draw.dtype();
  const auto narrow = dtype == f32 ? std::vector<std::uint16_t>{} : narrowed(c.logits, dtype);
  RouteInputs in = c.inputs();
  if (dtype != f32) {
    in.logits = view(narrow.data(), dtype, {tokens, c.columns()});
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      c.logits[i] = load_f32(narrow.data(), dtype, static_cast<std::int64_t>(i));
    }
  }
  if (draw.one_in(4)) {
    in.valid_tokens = view(&valid, {1});
  } else {
    valid = static_cast<std::int32_t>(tokens);
  }
  const RouteResult got = run(engine(static_cast<int>(draw.between(1, 3))), spec, in);
  for (std::int64_t t = 0; t < tokens && !::testing::Test::HasFailure(); ++t) {
    if (t < valid) {
      (void)check_row(c, got, t);
      continue;
    }
    for (std::int64_t s = t * spec.slots(); s < (t + 1) * spec.slots(); ++s) {
      EXPECT_EQ(got.ids[at(s)], -1) << "token " << t;
      EXPECT_EQ(got.weights[at(s)], 0) << "token " << t;
    }
  }
  if (on_gpu()) {
    EXPECT_TRUE(run(cpu({.threads = 2}), spec, in) == got);
  }
}

void expect_of_hidden_states(Draw& draw, const RouteSpec& spec, std::int64_t tokens,
                             unsigned seed) {
  RouteCase c = random_case(spec, tokens, seed);
  const std::int64_t width = draw.width(900);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(at(tokens * width)), w(at(c.columns() * width));
  for (float& v : x) v = normal(random);
  for (float& v : w) v = normal(random) / std::sqrt(static_cast<float>(width));
  const DType of_x = draw.dtype(), of_w = draw.dtype();
  const auto x_narrow = of_x == f32 ? std::vector<std::uint16_t>{} : narrowed(x, of_x);
  const auto w_narrow = of_w == f32 ? std::vector<std::uint16_t>{} : narrowed(w, of_w);
  RouteInputs in = c.extras();
  in.hidden =
      of_x == f32 ? view(x.data(), {tokens, width}) : view(x_narrow.data(), of_x, {tokens, width});
  in.router_weight = of_w == f32 ? view(w.data(), {c.columns(), width})
                                 : view(w_narrow.data(), of_w, {c.columns(), width});
  const Context context = engine();
  const RouteResult got = run(context, spec, in);
  EXPECT_TRUE(run(context, spec, in) == got) << "again";
  // Logits as selection saw them, with scale, bias and cap: what follows from those.
  RouteCase capped = c;
  capped.spec.logit_scale = 1;
  capped.spec.router_bias = false;
  capped.spec.soft_cap = 0;
  capped.logits = got.logits;
  EXPECT_TRUE(run(cpu({.threads = 2}), capped) == got)
      << to_string(of_x) << ", " << to_string(of_w);
  for (std::int64_t t = 0; t < tokens; t += 1 + tokens / 20) {
    for (std::int64_t e = 0; e < c.columns(); e += 1 + c.columns() / 40) {
      double sum = 0, terms = 0, largest = 0;
      for (std::int64_t i = 0; i < width; ++i) {
        const double product =
            static_cast<double>(load_f32(in.hidden.data, of_x, t * width + i)) *
            static_cast<double>(load_f32(in.router_weight.data, of_w, e * width + i));
        sum += product;
        terms += std::abs(product);
        largest = std::max(largest, std::abs(sum));
      }
      sum *= static_cast<double>(spec.logit_scale);
      const double bound = (0x1p-20 * terms + tensor_core_loss(width, largest)) *
                               static_cast<double>(spec.logit_scale) +
                           1e-6;
      if (spec.router_bias) sum += static_cast<double>(c.router_bias[at(e)]);
      const auto cap = static_cast<double>(spec.soft_cap);
      if (cap > 0) sum = cap * std::tanh(sum / cap);
      ASSERT_NEAR(static_cast<double>(got.logits[at(t * c.columns() + e)]), sum, bound)
          << "token " << t << ", expert " << e << ", width " << width;
    }
  }
}

void check_seed(unsigned seed) {
  Draw draw(seed);
  RouteSpec spec = drawn_rule(
      draw, static_cast<int>(
                draw.any({draw.between(1, 40), draw.between(1, 300), draw.between(1, 1100)})));
  if (draw.one_in(3)) spec.scale_in_weights = false;
  if (spec.shared.count > 0 && draw.one_in(3) && spec.shared.weight != SharedWeight::joint) {
    spec.shared.weight = SharedWeight::sigmoid_gate;
  }
  const std::int64_t tokens = draw.any({draw.between(1, 9), draw.between(1, 200)});
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_json(spec) + ", tokens " +
               std::to_string(tokens));
  ASSERT_TRUE(supports(spec, engine().device())) << supports(spec, engine().device()).reason;
  if (draw.one_in(2)) {
    expect_of_logits(draw, spec, tokens, seed);
  } else {
    expect_of_hidden_states(draw, spec, tokens, seed);
  }
}

TEST(DrawnRules, AreRight) { each_seed(on_gpu() ? 600 : 300, check_seed); }

}  // namespace
}  // namespace shunt::test
