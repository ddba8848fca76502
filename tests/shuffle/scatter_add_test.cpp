#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sanitizer.hpp"
#include "shuffle/scatter_case.hpp"

namespace shunt::test {
namespace {

void expect_near(const ScatterCase& c, const std::vector<std::uint32_t>& got,
                 const std::vector<std::uint32_t>& want, const std::string& what) {
  const float unit = c.to == f32 ? 1e-6F : c.to == f16 ? 1e-3F : 8e-3F;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < c.width; ++h) {
      const std::int64_t at = t * (c.width + c.gap) + h;
      const float a = load_f32(got.data(), c.to, at), b = load_f32(want.data(), c.to, at);
      // Not ASSERT_NEAR: millions of values.
      if (const float limit = unit * (4 + std::abs(b)); !(std::abs(a - b) <= limit)) {
        FAIL() << a << " for " << b << ", " << what << " at " << t << ", " << h;
      }
    }
    for (std::int64_t h = c.width; h < c.width + c.gap; ++h) {
      const std::int64_t at = t * (c.width + c.gap) + h;
      ASSERT_EQ(load_f32(got.data(), c.to, at), load_f32(want.data(), c.to, at)) << what;
    }
  }
}

std::string name(const ScatterCase& c) {
  return fmt::format("{} EP{} E{} T{} K{} D{} gap {} {} to {}", to_json(c.spec), c.ranks,
                     c.counts.size(), c.tokens, c.token_of.size(), c.width, c.gap,
                     to_string(c.from), to_string(c.to));
}

TEST(ScatterAdd, EqualsTheReference) {
  const Context context = engine(2);
  for (const bool accumulate : {true, false}) {
    for (const DType from : {f32, bf16, f16}) {
      for (const DType to : {f32, bf16, f16}) {
        for (const auto& [ranks, experts] : {std::pair{1, 1}, {2, 4}, {8, 8}, {4, 64}}) {
          for (const std::int64_t tokens : {0, 1, 5, 40}) {
            for (const std::int64_t width : {1, 8, 130, 1032}) {
              if (SHUNT_SANITIZED && width == 1032 && from != to) continue;
              const ScatterCase c = make_scatter({.accumulate = accumulate}, ranks, experts, tokens,
                                                 3, width, width % 16 == 8 ? 0 : 3, from, to);
              expect_near(c, c.on(context), c.reference(), name(c));
            }
          }
        }
      }
    }
  }
}

// A sum whose order shows: 2^24 + 1 + 1 is 2^24 from the left and 2^24 + 2 from the right.
TEST(ScatterAdd, AscendingPositions) {
  ScatterCase c = make_scatter({.accumulate = true}, 2, 2, 2, 2, 4, 0, f32, f32);
  c.counts = {2, 1};
  c.token_of = {1, 1, 1, 0};
  const auto set = [&](std::int64_t rank, std::int64_t p, float value) {
    for (std::int64_t h = 0; h < 4; ++h) c.row(rank, p, h, value);
  };
  const float big = 16777216;
  set(0, 0, big), set(0, 1, 1), set(1, 2, 1);
  set(1, 0, 1e9F), set(1, 1, 1e9F), set(0, 2, 1e9F);  // padding: never read
  for (std::int64_t h = 0; h < 4; ++h) store_f32(c.out.data(), f32, 4 + h, 2);
  auto got = c.on(engine());
  EXPECT_EQ(load_f32(got.data(), f32, 4), big + 2);  // (big + 1 + 1) + the old 2
  set(0, 0, 1), set(0, 1, 1), set(1, 2, big);
  got = c.on(engine());
  EXPECT_EQ(load_f32(got.data(), f32, 4), big + 4);
  c.spec.accumulate = false;
  got = c.on(engine());
  EXPECT_EQ(load_f32(got.data(), f32, 4), big + 2);
  EXPECT_EQ(load_f32(got.data(), f32, 0), 0.0F);  // no position is its own
}

// Far more positions of one token than tokens have on average; duplicates of a token in an expert.
TEST(ScatterAdd, OneTokenHasAll) {
  for (const int positions : {15, 16, 17, 300, 2000}) {
    ScatterCase c = make_scatter({}, 4, 8, 7, 1, 72, 0, bf16, f32, positions);
    for (auto& token : c.token_of) token = 3;
    expect_near(c, c.on(engine()), c.reference(), name(c));
    for (std::size_t p = 0; p < c.token_of.size(); p += 3) c.token_of[p] = p % 2 == 0 ? 5 : -1;
    expect_near(c, c.on(engine()), c.reference(), name(c));
  }
}

TEST(ScatterAdd, AnyRunGivesTheSameBits) {
  const ScatterCase c = make_scatter({}, 8, 32, 150, 6, 520, 0, bf16, bf16);
  const auto want = c.on(engine(1));
  for (const int threads : {1, 2, 3, 4}) ASSERT_EQ(c.on(engine(threads)), want) << threads;
}

TEST(ScatterAdd, F16Saturates) {
  ScatterCase c = make_scatter({.accumulate = false}, 1, 1, 1, 2, 3, 0, f16, f16);
  c.counts = {2};
  c.token_of = {0, 0};
  for (std::int64_t p = 0; p < 2; ++p) {
    c.row(0, p, 0, 60000), c.row(0, p, 1, -60000), c.row(0, p, 2, p == 0 ? 60000.0F : -60000.0F);
  }
  const auto got = c.on(engine());
  EXPECT_EQ(load_f32(got.data(), f16, 0), 65504.0F);
  EXPECT_EQ(load_f32(got.data(), f16, 1), -65504.0F);
  EXPECT_EQ(load_f32(got.data(), f16, 2), 0.0F);
}

TEST(ScatterAdd, WorkspaceForManyIsEnoughForFewer) {
  const Context context = engine();
  for (const std::int64_t positions : {0, 1, 63, 1000, 4096, 70000}) {
    std::size_t before = 0;
    for (std::int64_t tokens = 0; tokens < 3000; ++tokens) {
      const std::size_t needed = scatter_add_workspace_bytes(context, {}, tokens, positions);
      ASSERT_GE(needed, before) << tokens << " tokens, " << positions << " positions";
      before = needed;
    }
  }
}

TEST(ScatterAdd, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  std::vector<float> rows(24), out(12);
  std::vector<std::int32_t> counts = {1, 0, 1, 1}, token_of = {0, 1, 2};
  const Buffer workspace = context.allocate(scatter_add_workspace_bytes(context, {}, 3, 3));
  const ScatterAddInputs good{.rows = view(rows.data(), {2, 3, 4}),
                              .token_counts = view(counts.data(), {4}),
                              .token_indices = view(token_of.data(), {3})};
  const auto added = [&](const ScatterAddInputs& in, const Tensor& y, std::size_t missing = 0) {
    return message([&] {
      scatter_add_padded(context, {}, in, y, {workspace.data(), workspace.bytes() - missing});
    });
  };
  const Tensor y = view(out.data(), {3, 4});
  EXPECT_EQ(added(good, y), "not refused");
  expect(added(good, {}), "scatter_add_padded: out is (none)");
  expect(added(good, view(out.data(), {3, 3})), "rows is f32 [2, 3, 4]");
  expect(added(good, view(out.data(), i32, {3, 4})), "out is i32");
  expect(added(good, y, 64), "workspace has");
  Tensor overlapping = y;
  overlapping.strides[0] = 3;
  expect(added(good, overlapping), "row stride of 3");
  expect(added(good, view(rows.data() + 20, {3, 4})),
         "scatter_add_padded: out overlaps rows: must lie apart");
  const std::string in_workspace = "scatter_add_padded: workspace overlaps ";
  Tensor over = y;
  over.data = workspace.data();
  expect(added(good, over), in_workspace + "out: must lie apart");
  ScatterAddInputs inside = good;
  inside.rows.data = workspace.data();
  expect(added(inside, y), in_workspace + "rows: must lie apart");
  // A rank's rows end before the next one's begin, and a row before the next: what lies between
  // them may be written.
  std::vector<float> wide(120);
  ScatterAddInputs bad = good;
  bad.rows = view(wide.data(), {2, 3, 4});
  bad.rows.strides = {60, 10, 1, 0};
  const std::string within = "scatter_add_padded: out overlaps rows: must lie apart";
  Tensor between = view(wide.data() + 4, {3, 4});
  between.strides[0] = 10;
  EXPECT_EQ(added(bad, between), "not refused");
  EXPECT_EQ(added(bad, view(wide.data() + 30, {3, 4})), "not refused");
  between.data = wide.data() + 63;
  expect(added(bad, between), within);
  expect(added(bad, view(wide.data() + 52, {3, 4})), within);
  bad = good;
  bad.token_counts = view(out.data() + 8, i32, {4});
  expect(added(bad, y), "scatter_add_padded: out overlaps token_counts: must lie apart");
  bad = good;
  bad.token_indices = view(out.data() + 8, i32, {3});
  expect(added(bad, y), "scatter_add_padded: out overlaps token_indices: must lie apart");
  bad = good;
  bad.token_counts = view(counts.data(), {3});
  expect(added(bad, y), "3 experts and rows 2 ranks");
  bad = good;
  bad.token_indices = view(token_of.data(), {2});
  expect(added(bad, y), "token_indices is i32 [2]");
  bad = good;
  bad.rows = view(rows.data(), {6, 4});
  expect(added(bad, y), "rows is f32 [6, 4]");
  counts[2] = 3;
  expect(added(good, y), "token_counts[2] is 3: must be 0 to 2");
  counts[2] = -1;
  expect(added(good, y), "token_counts[2] is -1");
  counts[2] = 1;
  token_of[1] = 3;
  expect(added(good, y), "token_indices[1] is 3: must be -1 to 2");
  token_of[1] = -2;
  expect(added(good, y), "token_indices[1] is -2");
  token_of[1] = -1;
  EXPECT_EQ(added(good, y), "not refused");
}

// On any engine: sizes that its 32-bit indices cannot count never wrap round.
TEST(ScatterAdd, WorkspaceRefusesSizesThatNoCallMayHave) {
  const Context context = engine();
  const auto refused = [&](std::int64_t tokens, std::int64_t positions) {
    return message([&] { scatter_add_workspace_bytes(context, {}, tokens, positions); });
  };
  expect(refused(-1, 3), "scatter_add_padded: tokens is -1: must be 0 to 2147483646");
  expect(refused(3, -1), "scatter_add_padded: positions is -1: must be 0 to 2147483647");
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(refused(most - 1, most), "not refused");
  expect(refused(most, 10), "tokens is 2147483647: must be 0 to 2147483646");
  expect(refused(10, most + 1), "positions is 2147483648: must be 0 to 2147483647");
  for (const std::int64_t huge :
       {std::int64_t{1} << 60, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    expect(refused(huge, 10), "tokens is " + std::to_string(huge));
    expect(refused(10, huge), "positions is " + std::to_string(huge));
  }
}

}  // namespace
}  // namespace shunt::test
