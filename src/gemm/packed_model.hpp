// What the cost models of the kernels for packed weights share: packed_plan.cpp's, whose rows are
// fp8, and fragment_plan.cpp's, whose rows have 16 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/packed_plan.hpp"
#include "gemm/plan_math.hpp"

namespace shunt::cuda_engine {

// fp8's few rows: blocks that a multiprocessor has, in tiles of so many rows at most.
inline constexpr int few_together = 2, most_tokens_together = 16;

struct PackedModel {
  static constexpr double few_start_us = 4;
  static constexpr double memory_share = 0.94;     // of what memory's clock says
  static constexpr double few_bytes_a_clock = 36;  // that one block streams at most
  static constexpr double split_us = 3;

  const PackedSizes& sizes;
  const GpuFigures& gpu;
  std::int64_t expected, steps, columns;  // rows, steps, tiles
  double hit;                             // groups that have rows, where routing is uniform
  double mean;                            // rows of such a group

  PackedModel(const PackedSizes& s, const GpuFigures& g)
      : sizes(s),
        gpu(g),
        expected(s.expected > 0 ? s.expected : s.rows),
        steps(ceil_div(s.k, 128)),
        columns(ceil_div(s.group_rows, 128)),
        hit(groups_with_rows(s.groups, static_cast<double>(expected))),
        mean(static_cast<double>(expected) / std::max(1.0, hit)) {}

  // Whether kernels can have the sizes: rows, coordinates and tiles in 32 bits.
  static bool countable(const PackedSizes& s) {
    constexpr std::int64_t most = std::int64_t{1} << 30;
    return s.k > 0 && s.groups >= 1 && s.rows > 0 && s.group_rows > 0 && s.rows < most &&
           s.k < most && s.group_rows < most / s.groups &&
           (s.rows / 8 + s.groups) < most / ceil_div(s.group_rows, 128);
  }
  static constexpr int least_multiprocessors = 16;
  // Hopper's, which list the groups.
  static bool fits(const PackedSizes& s, const GpuFigures& gpu) {
    constexpr std::int64_t most_groups = 1024;
    const bool hopper = gpu.compute == 90 && gpu.shared_bytes >= 227 * 1024 &&
                        gpu.largest_cluster >= 8 && gpu.multiprocessors >= least_multiprocessors;
    return hopper && s.groups <= most_groups && countable(s);
  }

  // Memory and products hinder each other where they take about as long.
  static double both(double memory, double products) {
    return std::pow(std::pow(memory, 4) + std::pow(products, 4), 0.25);
  }
  double us(double clocks) const { return clocks / (gpu.clock_ghz * 1e3); }
  // `tiles`: of a group, each of which reads its weights.
  double memory_us(double tiles = 1) const {
    const double weights = hit * static_cast<double>(sizes.group_rows * sizes.k) * sizes.bits / 8;
    const double bytes = weights * reads_of_weights(tiles) +
                         static_cast<double>(expected * sizes.k) * (sizes.packed_rows ? 1 : 2) +
                         static_cast<double>(expected * sizes.group_rows) * 2;
    return bytes / (gpu.read_gbps * memory_share * 1e3);
  }
  // Groups are of different sizes.
  double planned() const { return mean + deviation(sizes.groups, mean) / 2; }
  std::int64_t most_tiles(std::int64_t wide, int tokens) const {
    return wide * (ceil_div(sizes.rows, tokens) + std::min<std::int64_t>(sizes.groups, sizes.rows));
  }
  // Few rows in tiles of `tokens`: `step` clocks for 128 of k.
  PackedPlan few_rows(int tokens, int split, double step) const {
    PackedPlan plan{.kernel = PackedPlan::few_rows, .tile_tokens = tokens, .split = split};
    // Where rows are rounded on the way, small tiles are faster though some groups have two.
    const double usual = std::ceil(planned() / tokens);
    const double down =
        sizes.packed_rows ? std::max(usual, tiles_of_group(sizes.groups, mean, tokens)) : usual;
    const double tiles = hit * static_cast<double>(columns) * down;
    const std::int64_t clusters =
        split <= 2 ? gpu.multiprocessors / split : gpu.multiprocessors / 16 * (16 / split);
    // Blocks without a tile leave more of the memory to the others: only the first round is whole.
    const double turns = std::max(1.0, tiles / static_cast<double>(clusters));
    const double each = static_cast<double>(ceil_div(steps, split)) * step + 800;
    const double memory = memory_us(sizes.packed_rows ? down : 1), products = turns * us(each);
    // Rows that are rounded on the way: the larger alone puts where rounding beforehand begins to
    // pay close to where it was measured (docs/notes/cuda-fp8.md, "Where memory decides").
    plan.us = few_start_us + split_us * (split == 4 ? 3 : split - 1) +
              (sizes.packed_rows ? both(memory, products) : std::max(memory, products));
    plan.blocks = static_cast<int>(split * std::min(clusters, most_tiles(columns, tokens)));
    return plan;
  }
};

}  // namespace shunt::cuda_engine
