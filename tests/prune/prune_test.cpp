// 2:4 pruning against plain references: what stays, and what the rest becomes.
#include "prune/prune.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "checkpoint/temporary.hpp"
#include "format/codes.hpp"
#include "format/rules.hpp"
#include "prune/factor.hpp"

namespace shunt::test {
namespace {

using Doubles = std::vector<double>;

std::vector<float> random_floats(std::size_t count, unsigned seed, float scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Inputs whose columns are alike and of very different sizes, as hidden states are.
std::vector<float> correlated_rows(std::int64_t rows, std::int64_t k, unsigned seed) {
  const std::vector<float> noise = random_floats(static_cast<std::size_t>(rows * (k + 3)), seed);
  std::vector<float> x(static_cast<std::size_t>(rows * k));
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* own = noise.data() + r * (k + 3);
    for (std::int64_t i = 0; i < k; ++i) {
      x[static_cast<std::size_t>(r * k + i)] =
          (own[i] + 0.8f * own[k + i % 3]) * (i % 7 == 0 ? 5.0f : 0.5f);
    }
  }
  return x;
}

InputStatistics statistics_of(const Context& context, const std::vector<float>& x, std::int64_t k,
                              bool products = true) {
  InputStatistics statistics(k, products);
  statistics.add(context, view(x.data(), {static_cast<std::int64_t>(x.size()) / k, k}));
  return statistics;
}

// A^-1 of the columns from `from` on, by Gauss and Jordan.
Doubles inverse_from(const Doubles& a, std::size_t k, std::size_t from) {
  const std::size_t m = k - from;
  Doubles work(m * 2 * m, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < m; ++j) work[i * 2 * m + j] = a[(i + from) * k + j + from];
    work[i * 2 * m + m + i] = 1;
  }
  for (std::size_t p = 0; p < m; ++p) {
    std::size_t best = p;
    for (std::size_t i = p; i < m; ++i) {
      if (std::fabs(work[i * 2 * m + p]) > std::fabs(work[best * 2 * m + p])) best = i;
    }
    std::swap_ranges(work.begin() + std::ptrdiff_t(p * 2 * m),
                     work.begin() + std::ptrdiff_t((p + 1) * 2 * m),
                     work.begin() + std::ptrdiff_t(best * 2 * m));
    const double pivot = work[p * 2 * m + p];
    for (std::size_t j = 0; j < 2 * m; ++j) work[p * 2 * m + j] /= pivot;
    for (std::size_t i = 0; i < m; ++i) {
      const double factor = work[i * 2 * m + p];
      if (i == p || factor == 0) continue;
      for (std::size_t j = 0; j < 2 * m; ++j) work[i * 2 * m + j] -= factor * work[p * 2 * m + j];
    }
  }
  Doubles result(m * m);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < m; ++j) result[i * m + j] = work[i * 2 * m + m + j];
  }
  return result;
}

// H with its damping, full.
Doubles hessian(const std::vector<float>& x, std::size_t k, double damping) {
  Doubles h(k * k, 0.0);
  for (std::size_t r = 0; r < x.size() / k; ++r) {
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) {
        h[i * k + j] += static_cast<double>(x[r * k + i]) * static_cast<double>(x[r * k + j]);
      }
    }
  }
  double trace = 0;
  for (std::size_t i = 0; i < k; ++i) trace += h[i * k + i];
  for (std::size_t i = 0; i < k; ++i) h[i * k + i] += damping * trace / static_cast<double>(k);
  return h;
}

// Indices of the two largest scores, the lower index first among equals.
std::vector<std::size_t> largest_two(const Doubles& scores) {
  std::vector<std::size_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  order.resize(std::min<std::size_t>(2, order.size()));
  return order;
}

// What zeroing the first `count` (1 | 2) of the columns that `inverse` [m, m] is of costs.
double obs_cost(const Doubles& inverse, std::size_t m, const double* w, std::size_t count) {
  if (count == 1) return w[0] * w[0] / inverse[0];
  const double a = inverse[0], b = inverse[1], d = inverse[m + 1];
  return (d * w[0] * w[0] - 2 * b * w[0] * w[1] + a * w[1] * w[1]) / (a * d - b * b);
}

// By the definition: every column with the inverse of what is left, made anew.
Doubles obs_reference(const std::vector<float>& w, std::size_t k, const Doubles& h,
                      bool pairs = false) {
  Doubles result(w.begin(), w.end());
  const std::size_t n = w.size() / k;
  std::vector<std::vector<std::size_t>> kept(n);
  for (std::size_t c = 0; c < k; ++c) {
    const Doubles inverse = inverse_from(h, k, c);
    const std::size_t m = k - c;
    for (std::size_t r = 0; r < n; ++r) {
      double* row = result.data() + r * k;
      if (c % 4 == 0 && pairs) {
        const auto cost = [&](std::size_t at) {
          if (at >= m) return -1.0;
          return obs_cost(inverse_from(h, k, c + at), m - at, row + c + at,
                          std::min<std::size_t>(2, m - at));
        };
        kept[r] =
            cost(0) >= cost(2) ? std::vector<std::size_t>{0, 1} : std::vector<std::size_t>{2, 3};
      } else if (c % 4 == 0) {
        Doubles scores;
        for (std::size_t i = 0; i < std::min<std::size_t>(4, m); ++i) {
          scores.push_back(row[c + i] * row[c + i] / inverse_from(h, k, c + i)[0]);
        }
        kept[r] = largest_two(scores);
      }
      if (std::count(kept[r].begin(), kept[r].end(), c % 4) > 0) continue;
      const double error = row[c] / inverse[0];
      for (std::size_t j = 0; j < m; ++j) row[c + j] -= error * inverse[j];
      row[c] = 0;
    }
  }
  return result;
}

// sum over rows of x and of w of ((w - v) . x)^2
double output_error(const std::vector<float>& w, const std::vector<float>& v,
                    const std::vector<float>& x, std::size_t k) {
  double total = 0;
  for (std::size_t r = 0; r < x.size() / k; ++r) {
    for (std::size_t n = 0; n < w.size() / k; ++n) {
      double sum = 0;
      for (std::size_t i = 0; i < k; ++i) {
        sum += static_cast<double>(w[n * k + i] - v[n * k + i]) * static_cast<double>(x[r * k + i]);
      }
      total += sum * sum;
    }
  }
  return total;
}

void expect_two_of_four(const std::vector<float>& w, std::size_t k) {
  for (std::size_t r = 0; r < w.size() / k; ++r) {
    for (std::size_t first = 0; first < k; first += 4) {
      int kept = 0;
      for (std::size_t i = first; i < std::min(first + 4, k); ++i) kept += w[r * k + i] != 0;
      ASSERT_LE(kept, 2) << "row " << r << " column " << first;
    }
  }
}

// Of every four at most one aligned pair, too.
void expect_pairs(const std::vector<float>& w, std::size_t k) {
  for (std::size_t r = 0; r < w.size() / k; ++r) {
    for (std::size_t first = 0; first < k; first += 4) {
      bool kept[2] = {};
      for (std::size_t i = first; i < std::min(first + 4, k); ++i) {
        kept[i % 4 / 2] = kept[i % 4 / 2] || w[r * k + i] != 0;
      }
      ASSERT_FALSE(kept[0] && kept[1]) << "row " << r << " column " << first;
    }
  }
}

const std::vector<std::int64_t> widths = {1, 2, 3, 4, 5, 6, 7, 8, 12, 30, 132, 135};

TEST(Prune, MagnitudeKeepsTheTwoLargestOfFour) {
  const Context context = cpu({.threads = 2});
  for (const std::int64_t k : widths) {
    const std::int64_t n = 37;
    const std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 1);
    std::vector<float> pruned = w;
    EXPECT_EQ(prune_2_of_4(context, {}, pruned.data(), n, k), PruneMethod::magnitude);
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t first = 0; first < k; first += 4) {
        Doubles scores;
        for (std::int64_t i = first; i < std::min(first + 4, k); ++i) {
          scores.push_back(std::fabs(w[static_cast<std::size_t>(r * k + i)]));
        }
        const auto kept = largest_two(scores);
        for (std::size_t i = 0; i < scores.size(); ++i) {
          const auto at = static_cast<std::size_t>(r * k + first) + i;
          const bool stays = std::count(kept.begin(), kept.end(), i) > 0;
          EXPECT_EQ(pruned[at], stays ? w[at] : 0.0f);
        }
      }
    }
  }
}

TEST(Prune, EqualMagnitudesStayByTheLowerIndex) {
  const Context context = cpu({.threads = 1});
  std::vector<float> w = {1, -1, 1, -1, 0, 0, 0, 0, 2, -3, 3, -3, 1, 2, 2, 1};
  prune_2_of_4(context, {}, w.data(), 1, 16);
  EXPECT_EQ(w, (std::vector<float>{1, -1, 0, 0, 0, 0, 0, 0, 0, -3, 3, 0, 0, 2, 2, 0}));
}

TEST(Prune, WandaWeighsByTheInputs) {
  const Context context = cpu({.threads = 1});
  const std::vector<float> x = {1, 10, 2, 0, 1, -10, 2, 0};
  const InputStatistics statistics = statistics_of(context, x, 4, false);
  std::vector<float> w = {5, 1, 3, 100, 1, 1, 1, 1};
  EXPECT_EQ(prune_2_of_4(context, {.method = PruneMethod::wanda}, w.data(), 2, 4, &statistics),
            PruneMethod::wanda);
  // Scores 5, 10, 6, 0 and 1, 10, 2, 0, times sqrt(2).
  EXPECT_EQ(w, (std::vector<float>{0, 1, 3, 0, 0, 1, 1, 0}));
}

// Inputs that never fired say nothing of their weights.
TEST(Prune, WandaOfInputsThatAreZeroIsMagnitude) {
  const Context context = cpu({.threads = 1});
  const std::vector<float> x = {0, 0, 0, 0, 1, 0, 0, 3};
  const InputStatistics statistics = statistics_of(context, x, 8, false);
  const std::vector<float> w = {1, -4, 2, 3, 1, 9, -8, 1};
  std::vector<float> two = w, pairs = w;
  EXPECT_EQ(prune_2_of_4(context, {.method = PruneMethod::wanda}, two.data(), 1, 8, &statistics),
            PruneMethod::wanda);
  EXPECT_EQ(two, (std::vector<float>{0, -4, 0, 3, 1, 0, 0, 1}));
  prune_2_of_4(context, {.method = PruneMethod::wanda, .pattern = PrunePattern::pairs},
               pairs.data(), 1, 8, &statistics);
  EXPECT_EQ(pairs, (std::vector<float>{1, -4, 0, 0, 0, 0, -8, 1}));
}

TEST(Prune, WandaOfEqualInputsIsMagnitude) {
  const Context context = cpu({.threads = 1});
  for (const std::int64_t k : widths) {
    const std::vector<float> x(static_cast<std::size_t>(3 * k), 2.0f);
    const InputStatistics statistics = statistics_of(context, x, k, false);
    std::vector<float> a = random_floats(static_cast<std::size_t>(9 * k), 2), b = a;
    prune_2_of_4(context, {}, a.data(), 9, k);
    prune_2_of_4(context, {.method = PruneMethod::wanda}, b.data(), 9, k, &statistics);
    EXPECT_EQ(a, b) << k;
  }
}

TEST(Prune, PairsStayByTheSumOfTheirSquares) {
  const Context context = cpu({.threads = 2});
  const PruneSpec pairs{.pattern = PrunePattern::pairs};
  for (const std::int64_t k : widths) {
    const std::int64_t n = 37;
    const std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 21);
    const std::vector<float> x = correlated_rows(5, k, 22);
    const InputStatistics statistics = statistics_of(context, x, k, false);
    for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda}) {
      PruneSpec spec = pairs;
      spec.method = method;
      std::vector<float> pruned = w;
      EXPECT_EQ(prune_2_of_4(context, spec, pruned.data(), n, k, &statistics), method);
      for (std::int64_t r = 0; r < n; ++r) {
        for (std::int64_t first = 0; first < k; first += 4) {
          double sums[2] = {0, -1};
          for (std::int64_t i = first; i < std::min(first + 4, k); ++i) {
            const double value = static_cast<double>(w[static_cast<std::size_t>(r * k + i)]);
            double& sum = sums[i % 4 / 2];
            if (sum < 0) sum = 0;
            sum += value * value *
                   (method == PruneMethod::wanda ? statistics.squares()[static_cast<std::size_t>(i)]
                                                 : 1);
          }
          for (std::int64_t i = first; i < std::min(first + 4, k); ++i) {
            const auto at = static_cast<std::size_t>(r * k + i);
            const bool stays = (i % 4 / 2 == 0) == (sums[0] >= sums[1]);
            EXPECT_EQ(pruned[at], stays ? w[at] : 0.0f) << "k " << k << " at " << i;
          }
        }
      }
    }
  }
  std::vector<float> equal = {1, -2, 2, -1, 0, 0, 0, 0, 3, 4, 0, 5, 0, 0, 0, 1e-30F};
  prune_2_of_4(context, pairs, equal.data(), 1, 16);
  EXPECT_EQ(equal, (std::vector<float>{1, -2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 1e-30F}));
}

TEST(Prune, ObsInPairsIsItsDefinition) {
  const Context context = cpu({.threads = 2});
  for (const std::int64_t k : {1, 2, 3, 4, 5, 6, 7, 8, 12, 30}) {
    const std::int64_t n = 19;
    const std::vector<float> x = correlated_rows(64, k, 3);
    const std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 23);
    const Doubles expected = obs_reference(w, static_cast<std::size_t>(k),
                                           hessian(x, static_cast<std::size_t>(k), 0.01), true);
    const InputStatistics statistics = statistics_of(context, x, k);
    std::vector<float> pruned = w;
    const PruneSpec spec{.method = PruneMethod::obs, .pattern = PrunePattern::pairs};
    EXPECT_EQ(prune_2_of_4(context, spec, pruned.data(), n, k, &statistics), PruneMethod::obs);
    if (k > 2) expect_pairs(pruned, static_cast<std::size_t>(k));
    for (std::size_t i = 0; i < w.size(); ++i) {
      EXPECT_NEAR(static_cast<double>(pruned[i]), expected[i], 1e-6 * (1 + std::fabs(expected[i])))
          << "k " << k << " at " << i;
    }
  }
}

// Both sides compute in double and round once; inverses of a damped H of these sizes are good to
// 1e-9, so that what differs is the last rounding to f32.
TEST(Prune, ObsIsItsDefinition) {
  const Context context = cpu({.threads = 2});
  for (const std::int64_t k : {1, 2, 3, 4, 5, 7, 8, 12, 30}) {
    const std::int64_t n = 19;
    const std::vector<float> x = correlated_rows(64, k, 3);
    const std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 4);
    const Doubles expected = obs_reference(w, static_cast<std::size_t>(k),
                                           hessian(x, static_cast<std::size_t>(k), 0.01));
    const InputStatistics statistics = statistics_of(context, x, k);
    std::vector<float> pruned = w;
    EXPECT_EQ(prune_2_of_4(context, {.method = PruneMethod::obs}, pruned.data(), n, k, &statistics),
              PruneMethod::obs);
    expect_two_of_four(pruned, static_cast<std::size_t>(k));
    for (std::size_t i = 0; i < w.size(); ++i) {
      EXPECT_NEAR(static_cast<double>(pruned[i]), expected[i], 1e-6 * (1 + std::fabs(expected[i])))
          << "k " << k << " at " << i;
    }
  }
}

// Blocks of columns change the order of sums and nothing else.
TEST(Prune, ObsOverSeveralBlocksIsItsDefinition) {
  const Context context = cpu({.threads = 2});
  const std::int64_t n = 3, k = 135;
  const std::vector<float> x = correlated_rows(300, k, 5);
  const std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 6);
  const Doubles h = hessian(x, static_cast<std::size_t>(k), 0.01);
  // By the recursion of the inverse: [H_F'^-1] is [H_F^-1] less its first column's part.
  Doubles inverse = inverse_from(h, static_cast<std::size_t>(k), 0);
  std::vector<Doubles> rows;  // the first row of each [H_F^-1]
  std::size_t m = static_cast<std::size_t>(k);
  while (m > 0) {
    rows.emplace_back(inverse.begin(), inverse.begin() + std::ptrdiff_t(m));
    Doubles next((m - 1) * (m - 1));
    for (std::size_t i = 1; i < m; ++i) {
      for (std::size_t j = 1; j < m; ++j) {
        next[(i - 1) * (m - 1) + j - 1] =
            inverse[i * m + j] - inverse[i * m] * inverse[j] / inverse[0];
      }
    }
    inverse = next;
    --m;
  }
  const InputStatistics statistics = statistics_of(context, x, k);
  std::vector<float> pruned = w;
  prune_2_of_4(context, {.method = PruneMethod::obs}, pruned.data(), n, k, &statistics);
  expect_two_of_four(pruned, static_cast<std::size_t>(k));
  for (std::int64_t r = 0; r < n; ++r) {
    Doubles row(w.begin() + r * k, w.begin() + (r + 1) * k);
    std::vector<std::size_t> kept;
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c % 4 == 0) {
        Doubles scores;
        for (std::size_t i = c; i < std::min(c + 4, row.size()); ++i) {
          scores.push_back(row[i] * row[i] / rows[i][0]);
        }
        kept = largest_two(scores);
      }
      if (std::count(kept.begin(), kept.end(), c % 4) == 0) {
        const double error = row[c] / rows[c][0];
        for (std::size_t j = c; j < row.size(); ++j) row[j] -= error * rows[c][j - c];
        row[c] = 0;
      }
      EXPECT_NEAR(static_cast<double>(pruned[static_cast<std::size_t>(r * k) + c]), row[c],
                  1e-5 * (1 + std::fabs(row[c])));
    }
  }
}

// Weights [48, k], and inputs whose columns are related.
struct Related {
  explicit Related(std::int64_t columns) : k(columns) {}
  // At the output.
  double error(const std::vector<float>& pruned) const {
    return output_error(w, pruned, x, static_cast<std::size_t>(k));
  }
  std::int64_t n = 48, k;
  Context context = cpu({.threads = 2});
  std::vector<float> x = correlated_rows(500, k, 7);
  std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 8);
  InputStatistics statistics = statistics_of(context, x, k);
};

// What the methods are for: the error at the output.
TEST(Prune, EachMethodIsBetterThanTheOneBeforeAtTheOutput) {
  const Related on(96);
  for (const PrunePattern pattern : {PrunePattern::two_of_four, PrunePattern::pairs}) {
    double before = INFINITY;
    for (const PruneMethod method :
         {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
      std::vector<float> pruned = on.w;
      EXPECT_EQ(prune_2_of_4(on.context, {.method = method, .pattern = pattern}, pruned.data(),
                             on.n, on.k, &on.statistics),
                method);
      expect_two_of_four(pruned, static_cast<std::size_t>(on.k));
      if (pattern == PrunePattern::pairs) expect_pairs(pruned, static_cast<std::size_t>(on.k));
      const double error = on.error(pruned);
      EXPECT_LT(error, 0.95 * before) << to_string(pattern) << " " << to_string(method);
      before = error;
    }
  }
}

// Rounded on the way, weights are codes, and the error at the output is less than that of rounding
// afterwards.
void check_rounding(PrunePattern pattern) {
  const Related on(90);
  const std::int64_t n = on.n, k = on.k, scaled = pattern == PrunePattern::pairs ? 32 : 16;
  std::vector<float> together = on.w, apart = on.w;
  PruneRounding rounding{.global = 1e-3F};
  const PruneSpec obs{.method = PruneMethod::obs, .pattern = pattern};
  EXPECT_EQ(prune_2_of_4(on.context, obs, together.data(), n, k, &on.statistics, &rounding),
            obs.method);
  expect_two_of_four(together, static_cast<std::size_t>(k));
  ASSERT_EQ(rounding.scales.size(), static_cast<std::size_t>(n * 6));
  for (std::size_t i = 0; i < rounding.scales.size(); i += 2) {
    if (scaled == 32) {
      EXPECT_EQ(rounding.scales[i], rounding.scales[i + 1]);
    }
  }
  const auto rounded = [&](const std::vector<float>& values, const std::uint8_t* scales,
                           std::vector<float>& to) {
    for (std::int64_t i = 0; i < n * k; ++i) {
      const double unit = static_cast<double>(e4m3_to_f32(scales[i / k * 6 + i % k / 16])) *
                          static_cast<double>(rounding.global);
      const auto at = static_cast<std::size_t>(i);
      to[at] = static_cast<float>(
          static_cast<double>(e2m1_values[to_e2m1(static_cast<double>(values[at]), unit)]) * unit);
    }
  };
  std::vector<float> again(together.size());
  rounded(together, rounding.scales.data(), again);
  EXPECT_EQ(again, together);
  prune_2_of_4(on.context, obs, apart.data(), n, k, &on.statistics);
  std::vector<std::uint8_t> scales(rounding.scales.size());
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t b = 0; b < 6; ++b) {
      const std::int64_t first = b * 16 / scaled * scaled;
      scales[static_cast<std::size_t>(r * 6 + b)] = nvfp4_block_scale(
          largest(apart.data() + r * k + first, std::min(scaled, k - first)), rounding.global);
    }
  }
  rounded(apart, scales.data(), apart);
  EXPECT_LT(on.error(together), 0.95 * on.error(apart));
}

TEST(Prune, ObsMakesUpForRoundingToo) { check_rounding(PrunePattern::two_of_four); }
TEST(Prune, ObsMakesUpForRoundingInPairs) { check_rounding(PrunePattern::pairs); }

TEST(Prune, BitsDoNotDependOnThreads) {
  const std::int64_t n = 50, k = 260;
  const std::vector<float> x = correlated_rows(400, k, 9);
  for (const PruneSpec& spec :
       {PruneSpec{}, PruneSpec{PruneMethod::wanda}, PruneSpec{PruneMethod::obs},
        PruneSpec{PruneMethod::obs, PrunePattern::pairs}}) {
    std::vector<float> first;
    for (const int threads : {1, 2, 5}) {
      const Context context = cpu({.threads = threads});
      const InputStatistics statistics = statistics_of(context, x, k);
      std::vector<float> w = random_floats(static_cast<std::size_t>(n * k), 10);
      PruneRounding rounding{.global = 1e-3F};
      prune_2_of_4(context, spec, w.data(), n, k, &statistics, &rounding);
      EXPECT_EQ(rounding.scales.empty(), spec.method != PruneMethod::obs);
      if (first.empty()) first = w;
      EXPECT_EQ(w, first) << to_string(spec.method) << threads;
    }
  }
}

// A column that is always 0, and inputs of fewer rows than columns, leave H singular: damping is
// what makes it one that can be inverted.
TEST(Prune, ObsTakesSingularInputs) {
  const Context context = cpu({.threads = 1});
  std::vector<float> x = correlated_rows(3, 16, 11);
  for (std::size_t r = 0; r < 3; ++r) x[r * 16 + 5] = 0;
  const InputStatistics statistics = statistics_of(context, x, 16);
  std::vector<float> w = random_floats(64, 12);
  EXPECT_EQ(prune_2_of_4(context, {.method = PruneMethod::obs}, w.data(), 4, 16, &statistics),
            PruneMethod::obs);
  for (const float value : w) EXPECT_TRUE(std::isfinite(value));
  expect_two_of_four(w, 16);
}

TEST(Prune, InputsThatSayNothingGiveMagnitude) {
  const Context context = cpu({.threads = 1});
  const InputStatistics none(8, true);
  const InputStatistics zero = statistics_of(context, std::vector<float>(16, 0.0f), 8);
  std::vector<float> expected = random_floats(24, 13);
  const std::vector<float> w = expected;
  prune_2_of_4(context, {}, expected.data(), 3, 8);
  for (const PruneMethod method : {PruneMethod::wanda, PruneMethod::obs}) {
    std::vector<float> pruned = w;
    EXPECT_EQ(prune_2_of_4(context, {.method = method}, pruned.data(), 3, 8, &none),
              PruneMethod::magnitude);
    EXPECT_EQ(pruned, expected);
  }
  const InputStatistics infinite =
      statistics_of(context, std::vector<float>(8, std::numeric_limits<float>::infinity()), 8);
  for (const auto& [method, statistics] : {std::pair{PruneMethod::obs, &zero},
                                           {PruneMethod::wanda, &zero},
                                           {PruneMethod::wanda, &infinite}}) {
    std::vector<float> pruned = w;
    EXPECT_EQ(prune_2_of_4(context, {.method = method}, pruned.data(), 3, 8, statistics),
              PruneMethod::magnitude);
    EXPECT_EQ(pruned, expected);
  }
}

TEST(Prune, RefusesWhatItCannotUse) {
  const Context context = cpu({.threads = 1});
  std::vector<float> w(8, 1.0f);
  const InputStatistics wrong(7, true), plain(8, false);
  const auto message = [&](PruneSpec spec, const InputStatistics* statistics) {
    return error_of([&] { prune_2_of_4(context, spec, w.data(), 1, 8, statistics); });
  };
  EXPECT_NE(message({.method = PruneMethod::wanda}, nullptr).find("wanda"), std::string::npos);
  EXPECT_NE(message({.method = PruneMethod::obs}, &wrong).find("7 columns"), std::string::npos);
  EXPECT_NE(message({.method = PruneMethod::obs}, &plain).find("products"), std::string::npos);
  EXPECT_NE(message({.damping = -1}, nullptr).find("damping is -1"), std::string::npos);
  w[3] = NAN;
  EXPECT_NE(message({}, nullptr).find("[0, 3]"), std::string::npos);
  EXPECT_NE(error_of([] { prune_method_from_string("best"); }).find("'best'"), std::string::npos);
  for (const char* name : {"magnitude", "wanda", "obs"}) {
    EXPECT_EQ(to_string(prune_method_from_string(name)), name);
  }
  EXPECT_NE(error_of([] { prune_pattern_from_string("1:4"); }).find("'1:4'"), std::string::npos);
  for (const char* name : {"2:4", "2:4-pairs"}) {
    EXPECT_EQ(to_string(prune_pattern_from_string(name)), name);
  }
}

TEST(InverseFactor, SquaresToTheInverse) {
  for (const std::size_t k : {1u, 2u, 5u, 40u}) {
    const std::vector<float> x = correlated_rows(100, static_cast<std::int64_t>(k), 14);
    const Doubles h = hessian(x, k, 0), damped = hessian(x, k, 0.1);
    const Doubles u = inverse_factor(h, static_cast<std::int64_t>(k), 0.1);
    ASSERT_EQ(u.size(), k * k);
    const Doubles inverse = inverse_from(damped, k, 0);
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) {
        double sum = 0;
        for (std::size_t c = 0; c < k; ++c) sum += u[c * k + i] * u[c * k + j];
        EXPECT_NEAR(sum, inverse[i * k + j], 1e-10 * std::fabs(inverse[0]) + 1e-14);
        if (j < i) {
          EXPECT_EQ(u[i * k + j], 0);
        }
      }
    }
  }
  EXPECT_TRUE(inverse_factor({1, 2, 2, 1}, 2, 0).empty());    // indefinite
  EXPECT_TRUE(inverse_factor({0, 0, 0, 0}, 2, 0.1).empty());  // nothing to damp with
}

}  // namespace
}  // namespace shunt::test
