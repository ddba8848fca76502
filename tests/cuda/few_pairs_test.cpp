// What the shuffles on a GPU read for each row that they write, found lane by lane on the host: the
// rows and counts of the orders as shunt/shuffle.hpp defines them.
// clang-format off
#include "cuda/warp_on_host.hpp"
#include "shuffle/few_pairs.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>

namespace shunt::test {
namespace {

using cuda_engine::FewPairs;
using cuda_engine::PairTables;

struct Moved {
  std::vector<std::int32_t> from;    // of each row that is written: -1 none, -2 zeros
  std::vector<std::int32_t> counts;  // of each expert that is moved, and all
  bool operator==(const Moved&) const = default;
};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// By the definition of the two orders.
Moved expected(const FewPairs& call) {
  std::vector<int> ranked(at(call.pairs())), sorted(at(call.pairs())), legal(at(call.pairs()));
  int row = 0;
  for (int p = 0; p < call.pairs(); ++p) {
    const auto given = std::max<std::int64_t>(call.token_counts[p], 0);
    ranked[at(p)] = row;
    legal[at(p)] = static_cast<int>(std::min<std::int64_t>(given, call.rows - row));
    row += legal[at(p)];
  }
  Moved moved{std::vector<std::int32_t>(at(call.rows), call.zero_fill ? -2 : -1), {}};
  row = 0;
  for (int e = call.first; e < call.end; ++e) {
    const int begin = row;
    for (int r = 0; r < call.ranks; ++r) {
      const int p = r * call.experts + e;
      sorted[at(p)] = row;
      row += legal[at(p)];
      for (int i = 0; i < legal[at(p)]; ++i) {
        const int a = ranked[at(p)] + i, b = sorted[at(p)] + i;
        moved.from[at(call.combines ? b : a)] = call.combines ? a : b;
      }
    }
    moved.counts.push_back(row - begin);
  }
  moved.counts.push_back(row);
  return moved;
}

Moved found(FewPairs call, int rows_of_block) {
  Moved moved{std::vector<std::int32_t>(at(call.rows), -7),
              std::vector<std::int32_t>(at(call.end - call.first + 1), -7)};
  call.counts = moved.counts.data();
  PairTables tables;
  HostWarp::run([&](int lane) {
    for (int first = 0; first < call.rows; first += rows_of_block) {
      cuda_engine::find_rows(call, tables, first, rows_of_block, lane);
      __syncwarp();
      if (lane < rows_of_block && first + lane < call.rows) {
        moved.from[at(first + lane)] = tables.from[lane];
      }
      __syncwarp();
    }
    cuda_engine::store_counts(call, tables, lane);
  });
  return moved;
}

void expect_found(FewPairs call, const std::vector<std::int32_t>& counts) {
  call.token_counts = counts.data();
  call.by_rank = cuda_engine::pair_reciprocal(call.ranks);
  call.by_expert = cuda_engine::pair_reciprocal(call.experts);
  for (const bool combines : {true, false}) {
    call.combines = combines;
    for (const int rows_of_block : {2, 32}) {
      call.zero_fill = !combines && rows_of_block == 2;
      EXPECT_EQ(found(call, rows_of_block), expected(call))
          << call.ranks << " ranks, " << call.experts << " experts from " << call.first << " to "
          << call.end << ", " << call.rows << " rows, combines: " << combines;
    }
  }
}

TEST(FewPairs, RowsAndCountsOfBothOrders) {
  std::mt19937 random(5);
  for (const auto& [ranks, experts, first, end] :
       {std::array{8, 16, 0, 16}, std::array{8, 16, 4, 6}, std::array{1, 128, 0, 128},
        std::array{128, 1, 0, 1}, std::array{3, 7, 2, 7}, std::array{1, 1, 0, 1}}) {
    std::vector<std::int32_t> counts(at(ranks * experts));
    int all = 0;
    // Some forty rows, many pairs with none.
    const auto most = static_cast<unsigned>(1 + 80 / counts.size());
    for (auto& n : counts)
      all += n = random() % 3 == 0 ? 0 : static_cast<int>(random() % (most + 1));
    for (const int rows : {all, all + 5, all / 2}) {
      if (rows > 0)
        expect_found({.ranks = ranks, .experts = experts, .first = first, .end = end, .rows = rows},
                     counts);
    }
  }
}

TEST(FewPairs, CountsThatNoneShouldGive) {
  const FewPairs call{.ranks = 2, .experts = 4, .first = 1, .end = 3, .rows = 20};
  expect_found(call, {3, -5, 2, 0, INT32_MAX, 4, INT32_MIN, 1});
  expect_found(call, {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, 1, 1, 1, 1});
  expect_found(call, {-1, -1, -1, -1, -1, -1, -1, -1});
}

}  // namespace
}  // namespace shunt::test
