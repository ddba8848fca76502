// The engine against the reference: every rule over the shapes of published models.
#include <tuple>

#include "route/route_util.hpp"

namespace shunt::test {
namespace {

struct Shape {
  int experts, top_k, groups, keep;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "E" << s.experts << "_k" << s.top_k << "_g" << s.groups << "_" << s.keep;
}

class RouteGrid : public ::testing::TestWithParam<Shape> {
 protected:
  Context context = engine(2);
};

TEST_P(RouteGrid, MatchesReference) {
  const auto [experts, top_k, groups, keep] = GetParam();
  unsigned seed = 1;
  for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
    SCOPED_TRACE(rule.name);
    for (const Values values : {Values::normal, Values::permuted, Values::coarse}) {
      const std::int64_t tokens = values == Values::normal ? 33 : 7;
      const RouteCase c = random_case(rule.spec, tokens, ++seed, values);
      check(c, run(context, c));
      if (HasFailure()) return;
    }
  }
}

TEST_P(RouteGrid, ReadsShortFloatsAndStridedRows) {
  const auto [experts, top_k, groups, keep] = GetParam();
  unsigned seed = 1000;
  for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
    for (const DType dtype : {bf16, f16}) {
      SCOPED_TRACE(rule.name + " " + to_string(dtype));
      RouteCase c = random_case(rule.spec, 5, ++seed);
      for (float& l : c.logits) {
        l = dtype == bf16 ? bf16_to_f32(f32_to_bf16(l)) : f16_to_f32(f32_to_f16(l));
      }
      // Rows three elements further apart than they are wide, with NaN between.
      const std::int64_t columns = c.columns();
      std::vector<float> strided(at(c.tokens * (columns + 3)), std::nanf(""));
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        std::copy_n(c.row(t), columns, strided.begin() + t * (columns + 3));
      }
      const std::vector<std::uint16_t> stored = narrowed(strided, dtype);
      RouteInputs in = c.extras();
      in.logits = view(stored.data(), dtype, {c.tokens, columns});
      in.logits.strides[0] = columns + 3;
      const RouteResult out = run(context, c.spec, in);
      check(c, out);
      EXPECT_TRUE(out == run(context, c));
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RouteGrid,
    ::testing::Values(Shape{1, 1, 1, 1}, Shape{2, 2, 1, 1}, Shape{7, 5, 7, 6}, Shape{8, 2, 1, 1},
                      Shape{16, 1, 4, 2}, Shape{32, 4, 1, 1}, Shape{33, 33, 3, 3},
                      Shape{60, 4, 1, 1}, Shape{64, 6, 1, 1}, Shape{64, 8, 64, 8},
                      Shape{72, 6, 1, 1}, Shape{96, 8, 1, 1}, Shape{128, 1, 1, 1},
                      Shape{128, 8, 4, 2}, Shape{160, 6, 8, 3}, Shape{160, 8, 1, 1},
                      Shape{256, 8, 8, 4}, Shape{257, 9, 1, 1}, Shape{384, 8, 1, 1},
                      Shape{512, 10, 1, 1}, Shape{512, 22, 1, 1}, Shape{512, 16, 16, 8},
                      Shape{513, 11, 27, 5}, Shape{896, 16, 1, 1}, Shape{1024, 8, 1, 1},
                      Shape{4096, 64, 64, 32}, Shape{4095, 64, 45, 7}));

TEST(RouteManyTokens, MatchReference) {
  const Context context = engine(2);
  const RouteSpec spec{.experts = 64, .top_k = 6, .renormalize = true};
  for (const std::int64_t tokens : {1, 2, 3, 4, 8, 16, 31, 64, 127, 255, 256, 257, 1023, 4096}) {
    const RouteCase c = random_case(spec, tokens, static_cast<unsigned>(tokens));
    check(c, run(context, c));
  }
}

}  // namespace
}  // namespace shunt::test
