// For layers of the sizes of published models: what they are compared with, on all cores.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bench/shapes/models.hpp"
#include "layer/random_layer.hpp"
#include "layer/routing_reference.hpp"
#include "layer/run_layer.hpp"

namespace shunt {

namespace bench {
inline void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }
}  // namespace bench

namespace testing {

// Rows of a matrix overlap but for so many numbers: as many as no tile has.
inline constexpr std::int64_t rows_apart = 5;

// Of an expert.
inline double numbers_of(const LayerSpec& spec) {
  return 3.0 * static_cast<double>(spec.hidden) * static_cast<double>(spec.experts.intermediate);
}

inline std::string name_of_model(const ::testing::TestParamInfo<bench::Model>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// fn(i) for every i below `count`.
template <class Fn>
void on_all_cores(std::size_t count, const Fn& fn) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) fn(i);
  };
  std::vector<std::thread> threads;
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  while (threads.size() + 1 < std::min(count, cores)) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

// A token, and where it goes.
struct Routed {
  std::int64_t token = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// What layer_reference() has of them, each expert's part by itself where no norm is of the sum.
inline std::vector<std::vector<double>> references(const LayerSpec& spec,
                                                   const LayerWeights& weights,
                                                   const Tensor& hidden,
                                                   const std::vector<Routed>& tokens) {
  const bool whole = spec.latent_norm.enabled || spec.output_norm.enabled;
  const auto slots = static_cast<std::size_t>(spec.route.slots());
  const std::size_t parts = whole ? 1 : slots + 1;  // and what every token has
  LayerSpec of_experts = spec;
  of_experts.shared = {};
  of_experts.output_bias = false;
  std::vector<std::vector<double>> all(tokens.size() * parts);
  on_all_cores(all.size(), [&](std::size_t i) {
    const Routed& one = tokens[i / parts];
    const std::size_t part = i % parts;
    std::vector<std::int32_t> ids = one.ids;
    for (std::size_t slot = 0; slot < slots && !whole; ++slot) {
      if (slot != part) ids[slot] = -1;
    }
    all[i] = layer_reference(whole || part == slots ? spec : of_experts, weights,
                             hidden.rows(one.token, one.token + 1), ids.data(), one.weights.data());
  });
  std::vector<std::vector<double>> sums;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    std::vector<double>& sum = sums.emplace_back(static_cast<std::size_t>(spec.hidden));
    for (std::size_t part = 0; part < parts; ++part) {
      for (std::size_t h = 0; h < sum.size(); ++h) sum[h] += all[t * parts + part][h];
    }
  }
  return sums;
}

// What experts were compared by, the best first.
inline std::vector<double> best_first(const std::vector<double>& compared,
                                      const std::vector<int>& ids) {
  std::vector<double> values;
  for (const int id : ids) values.push_back(compared.at(static_cast<std::size_t>(id)));
  std::sort(values.rbegin(), values.rend());
  return values;
}

// The error's length over the result's, of rows as `wanted` has them in turn.
inline double relative_length(const Result& got, std::int64_t hidden,
                              const std::vector<Routed>& tokens,
                              const std::vector<std::vector<double>>& wanted) {
  double error = 0, size = 0;
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    for (std::int64_t i = 0; i < hidden; ++i) {
      const double expected = wanted[n][static_cast<std::size_t>(i)];
      const double off =
          static_cast<double>(got.output[static_cast<std::size_t>(tokens[n].token * hidden + i)]) -
          expected;
      error += off * off;
      size += expected * expected;
    }
  }
  return std::sqrt(error / size);
}

// Of some tokens, as many as take `work` products: ids are as good as the best in double, but
// for what sums in f32 are off by; the error's length over the result's.
inline double error_of(const LayerSpec& spec, const LayerWeights& weights, const Tensor& hidden,
                       const Result& got, double work) {
  const std::int64_t tokens = hidden.shape[0], k = spec.route.top_k;
  const auto each = static_cast<double>(k) * numbers_of(spec) +
                    3.0 * static_cast<double>(spec.hidden * spec.shared.intermediate);
  const auto count = static_cast<std::int64_t>(
      std::clamp(work / each, 1.0, std::min(6.0, static_cast<double>(tokens))));
  std::vector<Routed> some;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t t = count == 1 ? tokens - 1 : n * (tokens - 1) / (count - 1);
    const std::vector<double> x = router_input_reference(spec, weights, hidden.rows(t, t + 1));
    RouteReference routed = routing_reference(spec, weights, x);
    const std::vector<int> ids(got.ids.begin() + t * k, got.ids.begin() + (t + 1) * k);
    EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), ids.size()) << "token " << t;
    const std::vector<double> ours = best_first(routed.compared, ids);
    routed.ids.resize(static_cast<std::size_t>(k));
    const std::vector<double> best = best_first(routed.compared, routed.ids);
    for (std::size_t slot = 0; slot < best.size(); ++slot) {
      EXPECT_NEAR(ours[slot], best[slot], 0x1p-20 * std::max(1.0, std::abs(best[slot])))
          << "token " << t;
    }
    LayerSpec given = spec;  // of these ids: where f32 sees a tie, double may choose others
    given.route.hashed = true;
    routed = routing_reference(given, weights, x, ids);
    some.push_back({t,
                    {routed.ids.begin(), routed.ids.end()},
                    {routed.weights.begin(), routed.weights.end()}});
  }
  return relative_length(got, spec.hidden, some, references(spec, weights, hidden, some));
}

}  // namespace testing
}  // namespace shunt
