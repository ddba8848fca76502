#include <fmt/core.h>

#include "shuffle/shuffle_case.hpp"

namespace shunt::test {
namespace {

const ShuffleSpec specs[] = {
    {.ranks = 1, .experts = 1},
    {.ranks = 4, .experts = 6},
    {.ranks = 3, .experts = 40, .first_expert = 7, .end_expert = 31},
    {.ranks = 16, .experts = 5, .first_expert = 4},
    {.ranks = 40, .experts = 70, .end_expert = 33},
    {.ranks = 2, .experts = 1100, .first_expert = 900, .end_expert = 1090},
};

TEST(Shuffle, EqualsTheReference) {
  const Context context = engine(2);
  for (ShuffleSpec spec : specs) {
    for (const bool padded : {false, true}) {
      for (const bool combines : {true, false}) {
        for (const bool zero_fill : {false, true}) {
          if (combines && zero_fill) continue;
          spec.padded = padded;
          spec.zero_fill = zero_fill;
          for (const int most : {0, 1, 5}) {
            if (most == 5 && spec.experts > 1000) continue;
            const ShuffleCase c = make_case(spec, most, 11);
            for (const ShuffleLayout layout :
                 {ShuffleLayout{bf16, 64, 0}, ShuffleLayout{f32, 7, 3},
                  ShuffleLayout{DType::f8_e4m3, 1, 0}, ShuffleLayout{DType::u8, 33, 4}}) {
              std::mt19937 random(5);
              Rows from(layout.dtype, c.rows, layout.width, layout.gap);
              from.randomise(random);
              ASSERT_EQ(shuffle_on(context, c, combines, layout, from).to,
                        shuffle_reference(c, combines, layout, from).to)
                  << to_json(spec) << (combines ? " combine" : " split") << " width "
                  << layout.width << " most " << most;
              ASSERT_EQ(shuffle_on(context, c, combines, layout, from).counts,
                        shuffle_reference(c, combines, layout, from).counts);
            }
          }
        }
      }
    }
  }
}

// The example of the header's formulas, by hand: two ranks, three experts.
TEST(Shuffle, ByHand) {
  const Context context = engine();
  ShuffleCase c{.spec = {.ranks = 2, .experts = 3}, .rows = 7, .n = {1, 0, 2, 2, 1, 1}};
  Rows from(f32, 7, 1, 0);
  for (std::int64_t t = 0; t < 7; ++t) store_f32(from.memory.data(), f32, t, static_cast<float>(t));
  const auto floats = [](const Shuffled& s) {
    std::vector<float> values;
    for (const std::uint32_t word : s.to) values.push_back(std::bit_cast<float>(word));
    values.resize(7);
    return values;
  };
  // Rank 0: expert 0 has row 0, expert 2 rows 1 and 2. Rank 1: rows 3 and 4, row 5, row 6.
  const Shuffled combined = shuffle_on(context, c, true, {f32, 1, 0}, from);
  EXPECT_EQ(floats(combined), (std::vector<float>{0, 3, 4, 5, 1, 2, 6}));
  EXPECT_EQ(combined.counts, (std::vector<std::int32_t>{3, 1, 3, 7}));
  // Only experts 1 and 2; what is not theirs keeps its 0.
  c.spec.first_expert = 1;
  c.spec.zero_fill = true;
  EXPECT_EQ(floats(shuffle_on(context, c, false, {f32, 1, 0}, from)),
            (std::vector<float>{0, 1, 2, 0, 0, 0, 3}));
}

// Split undoes combine, for the experts that were combined.
TEST(Shuffle, SplitUndoesCombine) {
  const Context context = engine(2);
  for (const bool padded : {false, true}) {
    ShuffleSpec spec{.ranks = 8, .experts = 24, .padded = padded};
    const ShuffleCase c = make_case(spec, 9, 3, 0);
    const ShuffleLayout layout{bf16, 40, 0};
    std::mt19937 random(9);
    Rows from(bf16, c.rows, 40, 0);
    from.randomise(random);
    Rows middle(bf16, c.rows, 40, 0);
    middle.memory = shuffle_on(context, c, true, layout, from).to;
    middle.tensor.data = middle.memory.data();
    const std::vector<std::uint32_t> back = shuffle_on(context, c, false, layout, middle).to;
    std::int64_t row = 0;
    for (int r = 0; r < spec.ranks; ++r) {
      if (padded) row = r * (c.rows / spec.ranks);
      for (int e = 0; e < spec.experts; ++e) row += c.n[static_cast<std::size_t>(24 * r + e)];
      const std::int64_t begin = padded ? r * (c.rows / spec.ranks) : 0;
      for (std::int64_t word = begin * 20; word < row * 20; ++word) {
        ASSERT_EQ(back[static_cast<std::size_t>(word)],
                  from.memory[static_cast<std::size_t>(word)]);
      }
    }
  }
}

// What a sanitizer sees: nothing is copied from or to no memory.
TEST(Shuffle, RowsOfNoWidthAreCounted) {
  const Context context = cpu({.threads = 1});
  const ShuffleSpec spec{.ranks = 2, .experts = 2};
  const std::vector<std::int32_t> n = {1, 0, 2, 1};
  std::vector<std::int32_t> counts(3, -1);
  const Buffer workspace = context.allocate(shuffle_workspace_bytes(context, spec));
  const Tensor rows = view(static_cast<const float*>(nullptr), {4, 0});
  combine_shuffling(context, spec, rows, view(n.data(), {2, 2}), rows, view(counts.data(), {3}),
                    workspace);
  EXPECT_EQ(counts, (std::vector<std::int32_t>{3, 1, 4}));
  split_shuffling(context, spec, rows, view(n.data(), {2, 2}), rows, workspace);
}

TEST(Shuffle, AnyThreadsGiveTheSameBits) {
  const ShuffleCase c =
      make_case({.ranks = 4, .experts = 8, .padded = true, .zero_fill = true}, 60, 1);
  const ShuffleLayout layout{bf16, 2048, 0};
  std::mt19937 random(2);
  Rows from(bf16, c.rows, 2048, 0);
  from.randomise(random);
  const Shuffled want = shuffle_reference(c, false, layout, from);
  for (const int threads : {1, 2, 3, 4}) {
    ASSERT_EQ(shuffle_on(engine(threads), c, false, layout, from).to, want.to) << threads;
  }
}

TEST(ShuffleSpecs, JsonAndReasons) {
  const ShuffleSpec spec{.ranks = 8,
                         .experts = 64,
                         .first_expert = 8,
                         .end_expert = 16,
                         .padded = true,
                         .zero_fill = true};
  EXPECT_EQ(shuffle_spec_from_json(to_json(spec)), spec);
  EXPECT_EQ(scatter_add_spec_from_json(to_json(ScatterAddSpec{false})), ScatterAddSpec{false});
  EXPECT_EQ(scatter_add_spec_from_json("{}"), ScatterAddSpec{});
  expect(message([] { scatter_add_spec_from_json(R"({"add": 1})"); }), "ScatterAddSpec.add");
  expect(message([] { shuffle_spec_from_json(R"({"ranks": 2})"); }), "experts is missing");
  expect(message([] { shuffle_spec_from_json(R"({"ranks": 2, "experts": 2, "first": 1})"); }),
         "first is unknown");
  expect(
      message([] { shuffle_spec_from_json(R"({"ranks": 2, "experts": 2, "first_expert": 2})"); }),
      "first_expert is 2: must be 0 to experts - 1, 1");
  const auto reason = [](const ShuffleSpec& s) { return supports(s, Device{}).reason; };
  EXPECT_EQ(reason({.ranks = 0, .experts = 1}), "ranks is 0: must be 1 to 4096");
  EXPECT_EQ(reason({.ranks = 1, .experts = 0}), "experts is 0: must be 1 to 65536");
  EXPECT_EQ(reason({.ranks = 4096, .experts = 300}),
            "experts is 300: times ranks, 4096, must be at most 1048576");
  EXPECT_EQ(reason({.ranks = 1, .experts = 4, .first_expert = 2, .end_expert = 2}),
            "end_expert is 2: must be 3 to 4, or -1 for the last");
  EXPECT_TRUE(supports(spec, Device{}));
}

TEST(Shuffle, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  std::vector<float> a(24), b(24);
  std::vector<std::int32_t> n = {1, 1, 1, 1, 1, 1}, counts(4);
  const ShuffleSpec good{.ranks = 2, .experts = 3};
  const Tensor from = view(a.data(), {6, 4}), to = view(b.data(), {6, 4});
  const Tensor token_counts = view(n.data(), {2, 3});
  const Buffer workspace = context.allocate(shuffle_workspace_bytes(context, good));
  const auto combined = [&](const ShuffleSpec& spec, const Tensor& x, const Tensor& c,
                            const Tensor& y, const Tensor& out, std::size_t missing = 0) {
    return message([&] {
      combine_shuffling(context, spec, x, c, y, out,
                        {workspace.data(), workspace.bytes() - missing});
    });
  };
  const Tensor out = view(counts.data(), {4});
  EXPECT_EQ(combined(good, from, token_counts, to, out), "not refused");
  EXPECT_EQ(combined(good, from, token_counts, to, {}), "not refused");
  expect(combined(good, from, token_counts, to, view(n.data() + 2, {4})),
         "combine_shuffling: counts overlaps token_counts: must lie apart");
  expect(combined(good, from, token_counts, to, view(a.data() + 20, i32, {4})),
         "combine_shuffling: counts overlaps tokens: must lie apart");
  expect(combined(good, from, token_counts, to, view(b.data() + 20, i32, {4})),
         "combine_shuffling: counts overlaps rows: must lie apart");
  const std::string in_workspace = "combine_shuffling: workspace overlaps ";
  Tensor over = from;
  over.data = workspace.data();
  expect(combined(good, over, token_counts, to, out), in_workspace + "tokens: must lie apart");
  expect(combined(good, from, view(static_cast<std::int32_t*>(workspace.data()), {2, 3}), to, out),
         in_workspace + "token_counts: must lie apart");
  std::vector<float> words(30);
  const Tensor in_words = view(words.data() + 24, i32, {2, 3});
  expect(combined(good, from, in_words, view(words.data() + 1, {6, 4}), {}),
         "combine_shuffling: rows overlaps token_counts: must lie apart");
  expect(
      message([&] {
        split_shuffling(context, good, from, in_words, view(words.data() + 1, {6, 4}), workspace);
      }),
      "split_shuffling: tokens overlaps token_counts: must lie apart");
  expect(combined({.ranks = 0, .experts = 3}, from, token_counts, to, out),
         "combine_shuffling: ranks is 0");
  expect(combined({.ranks = 2, .experts = 3, .zero_fill = true}, from, token_counts, to, out),
         "zero_fill is true");
  expect(combined(good, {}, token_counts, to, out), "tokens is (none)");
  expect(combined(good, from, view(n.data(), {3, 2}), to, out), "token_counts is i32 [3, 2]");
  expect(combined(good, from, token_counts, view(b.data(), {5, 4}), out), "rows is f32 [5, 4]");
  expect(combined(good, from, token_counts, view(b.data(), bf16, {6, 4}), out), "rows is bf16");
  expect(combined(good, from, token_counts, to, view(counts.data(), {3})), "counts is i32 [3]");
  expect(combined(good, from, token_counts, to, out, 64), "workspace has");
  Tensor overlapping = to;
  overlapping.strides[0] = 3;
  expect(combined(good, from, token_counts, overlapping, out), "row stride of 3");
  expect(combined(good, from, token_counts, from, out),
         "combine_shuffling: rows overlaps tokens: must lie apart");
  expect(message([&] { split_shuffling(context, good, to, token_counts, to, workspace); }),
         "split_shuffling: tokens overlaps rows: must lie apart");
  expect(combined({.ranks = 2, .experts = 3, .padded = true}, view(a.data(), {5, 4}), token_counts,
                  view(b.data(), {5, 4}), out),
         "must be a multiple of ranks, 2");
  const Tensor packed = view(a.data(), DType::f4_e2m1, {6, 4});
  expect(combined(good, packed, token_counts, packed, out), "whole bytes");
  n[4] = -1;
  expect(combined(good, from, token_counts, to, out), "token_counts[1, 1] is -1");
  n[4] = 2;
  expect(combined(good, from, token_counts, to, out), "up to rank 1 is 7 rows: must be at most 6");
  expect(combined({.ranks = 2, .experts = 3, .padded = true}, from, token_counts, to, out),
         "up to rank 1 is 4 rows: must be at most 3");
  expect(message([&] { split_shuffling(context, good, from, token_counts, to, workspace); }),
         "split_shuffling: token_counts up to rank 1 is 7 rows");
}

}  // namespace
}  // namespace shunt::test
