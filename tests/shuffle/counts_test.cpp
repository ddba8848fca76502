// Counts and offsets: sums against plain ones, and a chain of stages that speaks both.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine.hpp"
#include "shunt/gemm.hpp"
#include "shunt/order.hpp"
#include "shunt/shuffle.hpp"

namespace shunt {
namespace {

using Ints = std::vector<std::int32_t>;

Tensor of(const Ints& values) {
  return view(values.data(), {static_cast<std::int64_t>(values.size())});
}

Ints offsets_of(const Context& context, const Ints& counts, std::size_t locals) {
  Ints offsets(locals + 1, -7);
  test::Mirror mirror(context);
  offsets_from_counts(context, mirror.in(of(counts)), mirror.out(of(offsets)));
  mirror.fetch();
  return offsets;
}

TEST(Counts, BecomeOffsetsAndBack) {
  const Context context = test::engine();
  std::mt19937 random(3);
  for (const std::size_t locals : {1, 2, 31, 32, 33, 256, 1023, 1024, 1025, 4096, 65536}) {
    SCOPED_TRACE(locals);
    Ints counts(locals), wanted(locals + 1);
    for (std::int32_t& count : counts) count = static_cast<std::int32_t>(random() % 40);
    std::partial_sum(counts.begin(), counts.end(), wanted.begin() + 1);
    EXPECT_EQ(offsets_of(context, counts, locals), wanted);
    Ints with_all = counts;
    with_all.push_back(-5);  // not read
    EXPECT_EQ(offsets_of(context, with_all, locals), wanted);
    for (const std::size_t more : {0, 1}) {
      Ints back(locals + more, -7);
      test::Mirror mirror(context);
      counts_from_offsets(context, mirror.in(of(wanted)), mirror.out(of(back)));
      mirror.fetch();
      if (more == 1) {
        EXPECT_EQ(back.back(), wanted.back());
        back.pop_back();
      }
      EXPECT_EQ(back, counts);
    }
  }
}

TEST(Counts, WhatCannotBeIsRefusedOrHeld) {
  const Context context = test::engine();
  // In place each would read what it has written.
  const Ints both = {2, 0, 3, 5};
  const auto in_place = [&](const auto& convert) -> std::string {
    test::Mirror mirror(context);
    const Tensor there = mirror.out(of(both));
    try {
      convert(context, there, there);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(in_place(offsets_from_counts),
            "offsets_from_counts: offsets overlaps counts: must lie apart");
  EXPECT_EQ(in_place(counts_from_offsets),
            "counts_from_offsets: counts overlaps offsets: must lie apart");
  const auto message = [&](const Ints& counts, std::size_t locals) -> std::string {
    try {
      offsets_of(context, counts, locals);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({1, 2, 3, 4}, 2).find("counts is i32 [4]: wrong shape; legal is i32 [2]"),
            std::string::npos)
      << message({1, 2, 3, 4}, 2);
  EXPECT_NE(message({}, 0).find("offsets is i32 [1]: must be [L + 1]"), std::string::npos);
  constexpr std::int32_t most = 0x7fffffff;
  if (test::on_gpu()) {
    EXPECT_EQ(offsets_of(context, {3, -4, 2}, 3), (Ints{0, 3, 3, 5}));
    EXPECT_EQ(offsets_of(context, {most, most, 1}, 3), (Ints{0, most, most, most}));
    return;
  }
  EXPECT_NE(message({3, -4}, 2).find("counts[1] is -4"), std::string::npos);
  EXPECT_NE(message({most, 1}, 2).find("counts[1] is 1"), std::string::npos);
  Ints counts(2);
  for (const Ints& offsets : {Ints{1, 2, 3}, Ints{0, 5, 4}}) {
    EXPECT_THROW(counts_from_offsets(context, of(offsets), of(counts)), Error);
  }
}

// Two ranks' tokens to experts' rows, a product of each, and back: what a rank does between two
// all-to-alls, where nothing is read on the host.
TEST(Counts, StagesOfARankChain) {
  const Context context = test::engine();
  constexpr int ranks = 2, experts = 3;
  constexpr std::int64_t width = 8, tokens = 5;
  const Ints ids = {0, 2, 1, 2, 2, 0, 1, 0, 2, 2};  // of rank 0's five tokens, then of rank 1's
  std::vector<float> x(static_cast<std::size_t>(ranks * tokens * width)), sent = x;
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 23) - 11;
  // Every rank orders its own: counts of a rank are what it says to the others.
  Ints all_counts;
  for (int r = 0; r < ranks; ++r) {
    Ints mine(experts), offsets(experts + 1), permutation(tokens);
    const Ints own(ids.begin() + r * tokens, ids.begin() + (r + 1) * tokens);
    const OrderSpec spec{.experts = experts, .slots = 1};
    const Buffer workspace = context.allocate(order_workspace_bytes(context, spec, tokens));
    test::Mirror mirror(context);
    const Tensor there = mirror.out(of(offsets));
    order(context, spec, {.ids = mirror.in(view(own.data(), {tokens, 1}))},
          {.offsets = there, .permutation = mirror.out(of(permutation))}, workspace);
    counts_from_offsets(context, there, mirror.out(of(mine)));
    mirror.fetch();
    all_counts.insert(all_counts.end(), mine.begin(), mine.end());
    for (std::int64_t i = 0; i < tokens; ++i) {
      std::copy_n(x.begin() + (r * tokens + permutation[static_cast<std::size_t>(i)]) * width,
                  width, sent.begin() + (r * tokens + i) * width);
    }
  }
  // Expert e multiplies by e + 1.
  std::vector<float> weights(static_cast<std::size_t>(experts * width * width), 0);
  for (int e = 0; e < experts; ++e) {
    for (std::int64_t i = 0; i < width; ++i) {
      weights[static_cast<std::size_t>((e * width + i) * width + i)] = static_cast<float>(e + 1);
    }
  }
  const auto pair_of = [](int rank, int expert) {
    return static_cast<std::size_t>(rank) * experts + static_cast<std::size_t>(expert);
  };
  const ShuffleSpec spec{.ranks = ranks, .experts = experts};
  const GroupedGemmSpec product{
      .groups = experts, .n = width, .k = width, .dtype = DType::f32, .prepared = false};
  const std::int64_t rows = ranks * tokens;
  std::vector<float> by_expert(x.size()), done(x.size()), back(x.size());
  Ints counts(experts + 1), offsets(experts + 1);
  const Buffer shuffling = context.allocate(shuffle_workspace_bytes(context, spec));
  const Buffer multiplying = context.allocate(grouped_gemm_workspace_bytes(context, product, rows));
  test::Mirror mirror(context);
  const Tensor n = mirror.in(view(all_counts.data(), {ranks, experts}));
  const Tensor gathered = mirror.out(view(by_expert.data(), {rows, width}));
  const Tensor sizes = mirror.out(of(counts)), where = mirror.out(of(offsets));
  const Tensor results = mirror.out(view(done.data(), {rows, width}));
  combine_shuffling(context, spec, mirror.in(view(sent.data(), {rows, width})), n, gathered, sizes,
                    shuffling);
  offsets_from_counts(context, sizes, where);
  grouped_gemm(context, product,
               {.rows = gathered,
                .offsets = where,
                .weights = mirror.in(view(weights.data(), {experts, width, width}))},
               results, multiplying);
  split_shuffling(context, spec, results, n, mirror.out(view(back.data(), {rows, width})),
                  shuffling);
  mirror.fetch();
  for (int r = 0; r < ranks; ++r) {
    std::int64_t row = r * tokens;
    for (int e = 0; e < experts; ++e) {
      for (int i = 0; i < all_counts[pair_of(r, e)]; ++i, ++row) {
        for (std::int64_t c = 0; c < width; ++c) {
          const auto at = static_cast<std::size_t>(row * width + c);
          ASSERT_EQ(back[at], sent[at] * static_cast<float>(e + 1)) << row << ", " << c;
        }
      }
    }
  }
  EXPECT_EQ(offsets.back(), rows);
}

}  // namespace
}  // namespace shunt
