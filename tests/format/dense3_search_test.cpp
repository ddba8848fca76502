// The search for a group's codes, in every instruction set: against all paths there are.
#include "format/dense3_search.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/test_isa.hpp"
#include "format/dense3.hpp"

namespace shunt::cpu_engine {
namespace {

Dense3Sets all_numbers() {
  Dense3Sets sets;
  for (std::size_t w = 0; w < 64; ++w) sets.of[w % 8][w / 8] = dense3_values[w];
  return sets;
}

std::vector<float> normal_numbers(std::size_t count) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

// The cheapest of all paths of `count` codes that end in `last`, and the code before the last.
std::pair<float, int> cheapest_path(const Dense3Sets& sets, const float* x, int count, double unit,
                                    int last) {
  std::pair<float, int> best{std::numeric_limits<float>::infinity(), 0};
  const int paths = 1 << 3 * (count - 1);
  for (int path = 0; path < paths; ++path) {
    float cost = 0;
    int before = 0, code = 0;
    for (int i = 0; i < count; ++i) {
      before = i == 0 ? 0 : code;
      code = i == count - 1 ? last : path >> 3 * i & 7;
      const float y = static_cast<float>(static_cast<double>(x[i]) / unit);
      const float distance = y - sets.of[before][code];
      cost += distance * distance;
    }
    if (cost < best.first || (cost == best.first && before < best.second)) best = {cost, before};
  }
  return best;
}

class Dense3SearchIsa : public testing::TestWithParam<Isa> {};

TEST_P(Dense3SearchIsa, FindsTheCheapestOfAllPaths) {
  const Dense3Search search = dense3_search(GetParam());
  Dense3Sets sets = all_numbers();
  const std::vector<float> x = normal_numbers(4 * 20);
  const double units[] = {1, 0.7, 1.3, 0.01, 40, 1.1};
  for (const bool some_infinite : {false, true}) {
    if (some_infinite) {
      for (auto& set : sets.of) set[7] = std::numeric_limits<float>::infinity();
    }
    for (int many = 1; many <= most_dense3_units; ++many) {
      for (int count = 1; count <= 4; ++count) {
        const float* const from = &x[static_cast<std::size_t>(4 * many)];
        std::array<Dense3Costs, most_dense3_units> costs;
        search(sets, from, count, units, many, costs.data());
        for (int u = 0; u < many; ++u) {
          for (int last = 0; last < dense3_codes; ++last) {
            const auto [cost, before] = cheapest_path(sets, from, count, units[u], last);
            EXPECT_EQ(costs[static_cast<std::size_t>(u)].last[last], cost) << many << " " << count;
            if (count > 1 && std::isfinite(cost)) {
              EXPECT_EQ(costs[static_cast<std::size_t>(u)].before[count - 1][last], before);
            }
          }
        }
      }
    }
  }
}

// Of equal costs the lowest code: numbers and weights that make many of them equal.
TEST_P(Dense3SearchIsa, IsTheScalarSearchBitForBit) {
  const Dense3Search search = dense3_search(GetParam()), plain = dense3_search(Isa::scalar);
  std::vector<float> x = normal_numbers(400 * 32);
  for (std::size_t i = 0; i < x.size() / 2; ++i) x[i] = std::round(2 * x[i]) / 2;
  for (const bool coarse : {false, true}) {
    Dense3Sets sets = all_numbers();
    if (coarse) {
      for (auto& set : sets.of) {
        for (float& value : set) value = std::round(value);
      }
    }
    for (std::size_t at = 0; at < x.size(); at += 32) {
      const int many = 1 + static_cast<int>(at / 32 % most_dense3_units);
      const int count = at / 32 % 7 == 0 ? 1 + static_cast<int>(at / 224 % 32) : 32;
      const double units[] = {1, 0.5, 2, 0.25, 4, 1e30};
      std::array<Dense3Costs, most_dense3_units> got, want;
      search(sets, &x[at], count, units, many, got.data());
      plain(sets, &x[at], count, units, many, want.data());
      for (std::size_t u = 0; u < static_cast<std::size_t>(many); ++u) {
        ASSERT_EQ(std::memcmp(got[u].last, want[u].last, sizeof want[u].last), 0) << at;
        for (int i = 1; i < count; ++i) {
          ASSERT_EQ(std::memcmp(got[u].before[i], want[u].before[i], dense3_codes), 0) << at;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Dense3SearchIsa, testing::ValuesIn(test::all_isas()),
                         [](const auto& set) { return test::isa_name(set.param); });

}  // namespace
}  // namespace shunt::cpu_engine
