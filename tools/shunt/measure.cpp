#include "measure.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

namespace shunt::tool {

namespace {

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

constexpr double least_sample_us = 50;  // the clock's own cost must vanish in it
constexpr double block_us = 20e3;
constexpr int least_blocks = 5;

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

Row measure(const Context& context, const Case& what, double seconds, Ceilings& ceilings) {
  std::int64_t next = 0;
  const auto call = [&] {
    what.call(next);
    next = (next + 1) % what.variants;
  };
  call();  // the first touch of workspace and code is nobody's time
  const double probe_start = now_us();
  call();
  const double probe = std::max(now_us() - probe_start, 0.01);
  const auto batch = static_cast<std::int64_t>(std::ceil(least_sample_us / probe));

  std::vector<double> times;
  std::vector<double> floors;
  std::vector<double> shares;
  std::vector<double> bytes;
  std::vector<double> flops;
  std::vector<double> block_times;
  std::vector<Cost> block_costs;

  Ceilings before = measure_ceilings(context, what.dtype);
  const double start = now_us();
  for (int block = 0;; ++block) {
    const double elapsed = now_us() - start;
    if (elapsed > seconds * 1e6 && (block >= least_blocks || elapsed > 4e6 * seconds)) break;
    block_times.clear();
    block_costs.clear();
    const double block_start = now_us();
    do {
      Cost cost;
      std::int64_t variant = next;
      for (std::int64_t i = 0; i < batch; ++i) {
        const Cost one = what.cost(variant);
        cost.bytes += one.bytes / static_cast<double>(batch);
        cost.flops += one.flops / static_cast<double>(batch);
        variant = (variant + 1) % what.variants;
      }
      const double sample_start = now_us();
      for (std::int64_t i = 0; i < batch; ++i) call();
      block_times.push_back((now_us() - sample_start) / static_cast<double>(batch));
      block_costs.push_back(cost);
    } while (now_us() - block_start < block_us);
    const Ceilings after = measure_ceilings(context, what.dtype);
    ceilings = mean(before, after);
    before = after;
    for (std::size_t i = 0; i < block_times.size(); ++i) {
      const double floor = ceilings.floor_us(block_costs[i].bytes, block_costs[i].flops);
      times.push_back(block_times[i]);
      floors.push_back(floor);
      shares.push_back(floor / block_times[i]);
      bytes.push_back(block_costs[i].bytes);
      flops.push_back(block_costs[i].flops);
    }
  }
  return {.op = what.op,
          .label = what.label,
          .dtype = what.dtype,
          .us = median(times),
          .us_min = *std::min_element(times.begin(), times.end()),
          .us_max = *std::max_element(times.begin(), times.end()),
          .bytes = median(bytes),
          .flops = median(flops),
          .floor_us = median(floors),
          .share = median(shares)};
}

}  // namespace shunt::tool
