// From hidden states: the router's product, its fixed order, dtypes, strides and threads.
#include "route/route_util.hpp"

namespace shunt::test {
namespace {

struct Hidden {
  std::int64_t tokens, columns, width;
  std::vector<float> x, w;

  Hidden(std::int64_t t, std::int64_t c, std::int64_t h, unsigned seed)
      : tokens(t), columns(c), width(h), x(at(t * h)), w(at(c * h)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& v : x) v = normal(random);
    for (float& v : w) v = normal(random) / std::sqrt(static_cast<float>(h));
  }
  RouteInputs inputs() const {
    return {.hidden = view(x.data(), {tokens, width}),
            .router_weight = view(w.data(), {columns, width})};
  }
  void check_logits(const RouteResult& out, double tolerance = 2e-6) const {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t c = 0; c < columns; ++c) {
        double sum = 0, size = 0, largest = 0;
        for (std::int64_t h = 0; h < width; ++h) {
          const double product =
              static_cast<double>(x[at(t * width + h)]) * static_cast<double>(w[at(c * width + h)]);
          sum += product;
          size += std::abs(product);
          largest = std::max(largest, std::abs(sum));
        }
        ASSERT_NEAR(static_cast<double>(out.logits[at(t * columns + c)]), sum,
                    tolerance * size + tensor_core_loss(width, largest))
            << "token " << t << " expert " << c << " of [" << tokens << ", " << columns << ", "
            << width << "]";
      }
    }
  }
};

TEST(RouteHidden, LogitsAndWhatFollowsFromThem) {
  for (const int threads : {1, 3}) {
    const Context context = engine(threads);
    for (const std::int64_t experts : {1, 3, 4, 5, 6, 31, 64, 130}) {
      for (const std::int64_t width : {1, 15, 16, 17, 64, 100, 1024, 1025, 2500}) {
        for (const std::int64_t tokens : {1, 2, 3, 5, 70}) {
          if (experts * width * tokens > 2000000) continue;
          const Hidden hidden(tokens, experts, width, 1);
          const RouteSpec spec{.experts = static_cast<int>(experts),
                               .top_k = static_cast<int>(std::min<std::int64_t>(experts, 4)),
                               .renormalize = true};
          const RouteResult out = run(context, spec, hidden.inputs());
          hidden.check_logits(out);
          // The rest is what route makes of these logits.
          RouteCase c(spec, tokens);
          c.logits = out.logits;
          EXPECT_TRUE(run(context, c) == out);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(RouteHidden, ARowsBitsDependOnNothingElse) {
  // The CUDA engine shares H out over more blocks when tokens are few.
  SHUNT_ON_CPU_ONLY();
  const Hidden hidden(150, 37, 1300, 2);
  const RouteSpec spec{.experts = 37, .top_k = 5};
  const RouteResult all = run(engine(1), spec, hidden.inputs());
  for (const int threads : {2, 3, 4}) {
    EXPECT_TRUE(run(engine(threads), spec, hidden.inputs()) == all) << threads;
  }
  const Context context = engine(2);
  for (const auto& [begin, end] :
       {std::pair{0, 1}, std::pair{149, 150}, std::pair{10, 13}, std::pair{7, 80}}) {
    RouteInputs in = hidden.inputs();
    in.hidden = in.hidden.rows(begin, end);
    const RouteResult some = run(context, spec, in);
    EXPECT_TRUE(std::equal(some.logits.begin(), some.logits.end(), all.logits.begin() + begin * 37))
        << begin;
    EXPECT_TRUE(
        std::equal(some.weights.begin(), some.weights.end(), all.weights.begin() + begin * 5))
        << begin;
  }
}

TEST(RouteHidden, EveryPairOfDtypesAndStrides) {
  const Context context = engine(2);
  const RouteSpec spec{.experts = 21, .top_k = 3};
  for (const std::int64_t tokens : {1, 9, 80}) {
    for (const DType dtype : {f32, bf16, f16}) {
      for (const DType weight_dtype : {f32, bf16, f16}) {
        Hidden hidden(tokens, 21, 530, 3);
        const auto round = [](std::vector<float>& values, DType to) {
          for (float& v : values) {
            if (to == bf16) v = bf16_to_f32(f32_to_bf16(v));
            if (to == f16) v = f16_to_f32(f32_to_f16(v));
          }
        };
        round(hidden.x, dtype);
        round(hidden.w, weight_dtype);
        // Seven elements of NaN after each row.
        const auto strided = [](const std::vector<float>& values, std::int64_t width) {
          std::vector<float> out;
          for (std::size_t i = 0; i < values.size(); i += at(width)) {
            out.insert(out.end(), values.begin() + static_cast<std::ptrdiff_t>(i),
                       values.begin() + static_cast<std::ptrdiff_t>(i) + width);
            out.insert(out.end(), 7, std::nanf(""));
          }
          return out;
        };
        const std::vector<float> x = strided(hidden.x, 530);
        const std::vector<float> w = strided(hidden.w, 530);
        const auto x_short = narrowed(x, dtype);
        const auto w_short = narrowed(w, weight_dtype);
        RouteInputs in{.hidden = dtype == f32 ? view(x.data(), {tokens, 530})
                                              : view(x_short.data(), dtype, {tokens, 530}),
                       .router_weight = weight_dtype == f32
                                            ? view(w.data(), {21, 530})
                                            : view(w_short.data(), weight_dtype, {21, 530})};
        in.hidden.strides[0] = in.router_weight.strides[0] = 537;
        const RouteResult out = run(context, spec, in);
        hidden.check_logits(out);
        // The same numbers in f32 give the same bits.
        EXPECT_TRUE(run(context, spec, hidden.inputs()) == out);
      }
    }
  }
}

TEST(RouteHidden, JointSharedExpertsHaveRowsInTheRouter) {
  const Context context = engine(2);
  const RouteSpec spec = rules(30, 4, 1, 1)[20].spec;
  ASSERT_EQ(spec.shared.weight, SharedWeight::joint);
  const Hidden hidden(11, spec.columns(), 48, 5);
  RouteCase c = random_case(spec, 11, 5);
  RouteInputs in = c.extras();
  in.hidden = hidden.inputs().hidden;
  in.router_weight = hidden.inputs().router_weight;
  const RouteResult out = run(context, spec, in);
  hidden.check_logits(out);
  c.logits = out.logits;
  check(c, out);
}

TEST(RouteHidden, NonFiniteHiddenStatesSpoilTheirRowOnly) {
  const Context context = engine(2);
  const RouteSpec spec{.experts = 16, .top_k = 4, .renormalize = true};
  Hidden hidden(6, 16, 40, 6);
  const RouteResult clean = run(context, spec, hidden.inputs());
  hidden.x[at(2 * 40 + 3)] = std::nanf("");
  hidden.x[at(4 * 40 + 1)] = std::numeric_limits<float>::infinity();
  const RouteResult out = run(context, spec, hidden.inputs());
  for (std::int64_t t = 0; t < 6; ++t) {
    std::set<int> seen;
    for (int s = 0; s < 4; ++s) {
      const std::size_t i = at(t * 4 + s);
      EXPECT_TRUE(out.ids[i] >= 0 && out.ids[i] < 16 && seen.insert(out.ids[i]).second);
      EXPECT_TRUE(std::isfinite(out.weights[i]));
      if (t != 2 && t != 4) {
        EXPECT_EQ(out.ids[i], clean.ids[i]);
        EXPECT_EQ(out.weights[i], clean.weights[i]);
      }
    }
  }
}

TEST(RouteHidden, WorkspaceOfManyTokensServesFewer) {
  const Context context = engine(3);
  const RouteSpec spec{.experts = 50, .top_k = 4};
  std::size_t last = 0;
  for (const std::int64_t tokens : {0, 1, 2, 63, 64, 65, 500, 5000, 100000}) {
    const std::size_t bytes = route_workspace_bytes(context, spec, tokens, 256);
    EXPECT_GE(bytes, last);
    last = bytes;
  }
}

}  // namespace
}  // namespace shunt::test
