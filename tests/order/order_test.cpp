#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "order/order_case.hpp"

namespace shunt::test {
namespace {

using Ints = std::vector<std::int32_t>;

// The example of moe-sorting in CK-tile: 6 experts, top 3, tiles of 4, 5 tokens. Its comment has
// two slips, which are kept apart here: the sentinel is 6 although there are 5 tokens, and the last
// entry, written 5, is token 4, whose third weight it carries.
TEST(Order, MoeSortingExample) {
  OrderCase c{.spec = {.experts = 6, .slots = 3, .tile = 4, .sentinel = 6},
              .ids = {0, 3, 5, 2, 3, 5, 1, 3, 5, 1, 2, 3, 1, 3, 5}};
  const float a = 1, b = 2, cc = 3, d = 4, e = 5, f = 6, g = 7, h = 8, i = 9, j = 10, k = 11,
              l = 12, m = 13, n = 14, o = 15, x = 0;
  c.weights = {a, b, cc, d, e, f, g, h, i, j, k, l, m, n, o};
  const OrderResult r = c.engine(test::engine(1));

  const Ints token_ids = {0, 6, 6, 6, 2, 3, 4, 6, 1, 3, 6, 6, 0, 1,
                          2, 3, 4, 6, 6, 6, 6, 6, 6, 6, 0, 1, 2, 4};
  const std::vector<float> weights = {a, x, x, x, g, j, m, x, d, k, x,  x, b, e,
                                      h, l, n, x, x, x, x, x, x, x, cc, f, i, o};
  ASSERT_EQ(r.post_padded, Ints{28});
  EXPECT_EQ(r.tiles, Ints{7});
  EXPECT_EQ(Ints(r.sorted_token_ids.begin(), r.sorted_token_ids.begin() + 28), token_ids);
  EXPECT_EQ(std::vector<float>(r.sorted_weights.begin(), r.sorted_weights.begin() + 28), weights);
  EXPECT_EQ(Ints(r.sorted_expert_ids.begin(), r.sorted_expert_ids.begin() + 7),
            (Ints{0, 1, 2, 3, 3, 4, 5}));
  // The comment's bound, topk * tokens + experts * (tile - 1), is 33; in whole tiles 36.
  EXPECT_EQ(r.sorted_token_ids.size(), 36U);
  EXPECT_EQ(Ints(r.sorted_token_ids.begin() + 28, r.sorted_token_ids.end()), Ints(8, 6));
  EXPECT_EQ(Ints(r.sorted_expert_ids.begin() + 7, r.sorted_expert_ids.end()), Ints(2, -1));

  EXPECT_EQ(r.offsets, (Ints{0, 1, 4, 6, 11, 11, 15}));
  EXPECT_EQ(r.permutation, (Ints{0, 6, 9, 12, 3, 10, 1, 4, 7, 11, 13, 2, 5, 8, 14}));
  EXPECT_EQ(r, c.reference());
}

struct Shape {
  int experts, slots;
};
class OrderGrid : public testing::TestWithParam<Shape> {};

TEST_P(OrderGrid, EqualsTheReference) {
  const auto [experts, slots] = GetParam();
  const Context one = engine(1);
  const Context three = engine(3);
  std::vector<OrderSpec> specs = {{.experts = experts, .slots = slots},
                                  {.experts = experts, .slots = slots, .tile = 16},
                                  {.experts = experts,
                                   .slots = slots,
                                   .tile = 1,
                                   .sentinel = 5000,
                                   .tile_for_empty_expert = false},
                                  {.experts = experts,
                                   .slots = slots,
                                   .first_expert = experts / 2,
                                   .local_experts = (experts + 3) / 4,
                                   .tile = 128,
                                   .tile_for_empty_expert = false}};
  for (const OrderSpec& spec : specs) {
    for (const std::int64_t tokens : {0, 1, 2, 3, 7, 8, 17, 31, 64, 150, 257, 1023}) {
      for (const Pattern pattern : patterns) {
        OrderCase c = make_case(spec, tokens, pattern, static_cast<std::uint32_t>(tokens) + 1);
        if (tokens % 2 == 1) c.valid = {static_cast<std::int32_t>(tokens / 2)};
        const OrderResult expected = c.reference();
        if (!on_gpu()) {
          ASSERT_EQ(c.engine(one), expected) << name(c);
        }
        ASSERT_EQ(c.engine(three), expected) << name(c);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, OrderGrid,
                         testing::Values(Shape{1, 1}, Shape{2, 5}, Shape{8, 2}, Shape{16, 1},
                                         Shape{60, 4}, Shape{96, 8}, Shape{128, 8}, Shape{160, 6},
                                         Shape{256, 8}, Shape{257, 9}, Shape{385, 9},
                                         Shape{513, 11}, Shape{1024, 8}, Shape{4097, 10}),
                         [](const auto& shape) {
                           return fmt::format("E{}k{}", shape.param.experts, shape.param.slots);
                         });

TEST(Order, ManyTokensAnyThreads) {
  for (const Pattern pattern : patterns) {
    OrderCase c = make_case({.experts = 128, .slots = 8, .tile = 64}, 16384, pattern);
    c.valid = {16000};
    const OrderResult expected = c.reference();
    for (const int threads : {1, 2, 3, 4}) {
      const Context context = engine(threads);
      ASSERT_EQ(c.engine(context), expected) << threads << " threads";
      ASSERT_EQ(c.engine(context), expected) << threads << " threads, again";
    }
  }
}

// A large buffer to zero wakes the threads even where there is nearly nothing to sort.
TEST(Order, FewTokensAnyThreads) {
  for (const std::int64_t tokens : {0, 1, 2, 5, 100}) {
    for (const Pattern pattern : patterns) {
      OrderCase c = make_case({.experts = 20, .slots = 4, .tile = 8}, tokens, pattern);
      c.zeroed_bytes = (std::size_t{1} << 20) + 3;
      const OrderResult expected = c.reference();
      ASSERT_EQ(std::count(expected.zeroed.begin(), expected.zeroed.end(), 0),
                static_cast<std::ptrdiff_t>(c.zeroed_bytes));
      for (const int threads : {1, 2, 3, 4}) {
        ASSERT_EQ(c.engine(engine(threads)), expected) << name(c) << " on " << threads;
      }
    }
  }
}

TEST(Order, ExpertMap) {
  // Every third expert is local, in reverse order; one local index stands for no expert.
  const int experts = 100;
  OrderSpec spec{
      .experts = experts, .slots = 6, .local_experts = 35, .expert_map = true, .tile = 8};
  std::vector<std::int32_t> map(experts, -1);
  for (int e = 0, local = 33; e < experts; e += 3) map[static_cast<std::size_t>(e)] = local--;
  for (const std::int64_t tokens : {0, 1, 9, 500}) {
    for (const Pattern pattern : patterns) {
      OrderCase c = make_case(spec, tokens, pattern);
      c.map = map;
      ASSERT_EQ(c.engine(test::engine(2)), c.reference()) << name(c);
    }
  }
}

TEST(Order, LocalRangesPartitionTheWhole) {
  const OrderCase whole = make_case({.experts = 96, .slots = 8}, 333, Pattern::poison);
  const Context context = engine(1);
  const OrderResult all = whole.engine(context);
  Ints permutation;
  for (int rank = 0; rank < 3; ++rank) {
    OrderCase part = whole;
    part.spec.first_expert = 32 * rank;
    part.spec.local_experts = 32;
    const OrderResult r = part.engine(context);
    permutation.insert(permutation.end(), r.permutation.begin(),
                       r.permutation.begin() + r.offsets.back());
  }
  EXPECT_EQ(permutation,
            Ints(all.permutation.begin(), all.permutation.begin() + all.offsets.back()));
}

TEST(Order, RoundTripAndStability) {
  for (const Pattern pattern : patterns) {
    const OrderCase c = make_case({.experts = 72, .slots = 6, .tile = 32}, 511, pattern);
    const OrderResult r = c.engine(test::engine(1));
    const std::int32_t rows = r.offsets.back();
    std::int32_t kept = 0;
    for (std::size_t pair = 0; pair < c.ids.size(); ++pair) {
      const bool mine = c.ids[pair] >= 0 && c.ids[pair] < c.spec.experts;
      ASSERT_EQ(r.inverse[pair] >= 0, mine);
      ASSERT_EQ(r.padded_inverse[pair] >= 0, mine);
      if (!mine) continue;
      ++kept;
      const auto row = static_cast<std::size_t>(r.inverse[pair]);
      const auto padded = static_cast<std::size_t>(r.padded_inverse[pair]);
      ASSERT_EQ(r.permutation[row], static_cast<std::int32_t>(pair));
      ASSERT_EQ(r.weights[row], c.weights[pair]);
      ASSERT_EQ(r.sorted_token_ids[padded], static_cast<std::int32_t>(pair) / c.spec.slots);
      ASSERT_EQ(r.sorted_weights[padded], c.weights[pair]);
      ASSERT_EQ(r.sorted_expert_ids[padded / 32], c.ids[pair]);
      const auto expert = static_cast<std::size_t>(c.ids[pair]);
      ASSERT_GE(r.inverse[pair], r.offsets[expert]);
      ASSERT_LT(r.inverse[pair], r.offsets[expert + 1]);
    }
    EXPECT_EQ(kept, rows);
    for (int e = 0; e < c.spec.experts; ++e) {
      EXPECT_TRUE(
          std::is_sorted(r.permutation.begin() + r.offsets[static_cast<std::size_t>(e)],
                         r.permutation.begin() + r.offsets[static_cast<std::size_t>(e) + 1]));
    }
  }
}

// Tokens in another order: every expert gets the same tokens, and counts do not change.
TEST(Order, TokenPermutation) {
  const OrderCase c = make_case({.experts = 40, .slots = 4}, 300, Pattern::distinct);
  std::vector<std::size_t> shuffled(300);
  std::iota(shuffled.begin(), shuffled.end(), 0U);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(7));
  OrderCase moved = c;
  for (std::size_t t = 0; t < 300; ++t) {
    std::copy_n(c.ids.begin() + static_cast<std::ptrdiff_t>(4 * shuffled[t]), 4,
                moved.ids.begin() + static_cast<std::ptrdiff_t>(4 * t));
  }
  const Context context = engine(1);
  const OrderResult before = c.engine(context);
  const OrderResult after = moved.engine(context);
  EXPECT_EQ(before.offsets, after.offsets);
  for (std::size_t e = 0; e < 40; ++e) {
    Ints was(before.permutation.begin() + before.offsets[e],
             before.permutation.begin() + before.offsets[e + 1]);
    Ints is;
    for (std::int32_t row = after.offsets[e]; row < after.offsets[e + 1]; ++row) {
      const auto pair = static_cast<std::size_t>(after.permutation[static_cast<std::size_t>(row)]);
      is.push_back(static_cast<std::int32_t>(4 * shuffled[pair / 4] + pair % 4));
    }
    std::sort(is.begin(), is.end());
    EXPECT_EQ(was, is);
  }
}

// The bound holds for every choice of ids, and some choice reaches it: all ids of small cases.
TEST(Order, CapacityIsTheLeastUpperBound) {
  for (const bool empty : {false, true}) {
    for (const int tile : {1, 2, 3, 4}) {
      for (const int experts : {1, 2, 3}) {
        for (const int pairs : {0, 1, 2, 3, 4, 5}) {
          OrderCase c{.spec = {.experts = experts,
                               .slots = 1,
                               .tile = tile,
                               .tile_for_empty_expert = empty},
                      .zeroed_bytes = 0};
          std::int64_t choices = 1;
          for (int p = 0; p < pairs; ++p) choices *= experts + 1;
          std::int32_t most = 0;
          for (std::int64_t choice = 0; choice < choices; ++choice) {
            c.ids.clear();
            for (std::int64_t p = 0, rest = choice; p < pairs; ++p, rest /= experts + 1) {
              c.ids.push_back(static_cast<std::int32_t>(rest % (experts + 1)) - 1);
            }
            c.weights.assign(c.ids.size(), 1.0F);
            most = std::max(most, c.reference().post_padded[0]);
          }
          EXPECT_EQ(padded_rows_capacity(c.spec, pairs), most) << name(c);
        }
      }
    }
  }
}

TEST(Order, AnySubsetOfOutputs) {
  const OrderCase c = make_case({.experts = 9, .slots = 2, .tile = 4}, 20, Pattern::distinct);
  const OrderResult all = c.reference();
  const Context context = engine(1);
  const Buffer workspace = context.allocate(order_workspace_bytes(context, c.spec, 20));
  OrderInputs in = c.inputs();
  in.weights = {};
  const auto call = [&](const OrderOutputs& out) {
    Mirror there(context);
    order(context, c.spec, mirrored(there, in), mirrored(there, out), workspace);
    there.fetch();
  };
  Ints inverse(40), offsets(10), tiles(1);
  call({.inverse = view(inverse.data(), {20, 2})});
  EXPECT_EQ(inverse, all.inverse);
  call({.offsets = view(offsets.data(), {10})});
  EXPECT_EQ(offsets, all.offsets);
  call({.num_sorted_tiles = view(tiles.data(), {1})});
  EXPECT_EQ(tiles, all.tiles);
}

}  // namespace
}  // namespace shunt::test
