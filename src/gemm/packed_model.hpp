// What the cost models of the kernels for packed weights share: packed_plan.cpp's, whose rows are
// fp8, and fragment_plan.cpp's, whose rows have 16 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/packed_plan.hpp"

namespace shunt::cuda_engine {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct PackedModel {
  static constexpr double few_start_us = 4;
  static constexpr double memory_share = 0.94;     // of what memory's clock says
  static constexpr double few_bytes_a_clock = 36;  // that one block streams at most
  static constexpr double split_us = 3;

  const PackedSizes& sizes;
  const GpuFigures& gpu;
  std::int64_t expected, hit, steps, columns;  // rows, groups that have some, steps, tiles
  double mean;                                 // rows of a group

  PackedModel(const PackedSizes& s, const GpuFigures& g)
      : sizes(s),
        gpu(g),
        expected(s.expected > 0 ? s.expected : s.rows),
        hit(std::min<std::int64_t>(s.groups, expected)),
        steps(ceil_div(s.k, 128)),
        columns(ceil_div(s.group_rows, 128)),
        mean(static_cast<double>(expected) / static_cast<double>(std::max<std::int64_t>(1, hit))) {}

  // Whether Hopper's kernels can have the sizes: groups that they list, and rows, coordinates and
  // tiles in 32 bits.
  static bool fits(const PackedSizes& s, const GpuFigures& gpu) {
    constexpr std::int64_t most_groups = 1024, most = std::int64_t{1} << 30;
    const bool hopper = gpu.compute == 90 && gpu.shared_bytes >= 227 * 1024 &&
                        gpu.largest_cluster >= 8 && gpu.multiprocessors >= 16;
    return hopper && s.k > 0 && s.groups >= 1 && s.groups <= most_groups && s.rows > 0 &&
           s.group_rows > 0 && s.rows < most && s.k < most && s.group_rows < most / s.groups &&
           (s.rows / 8 + s.groups) < most / ceil_div(s.group_rows, 128);
  }

  double us(double clocks) const { return clocks / (gpu.clock_ghz * 1e3); }
  // `again`: how often weights are read, after the first time from the L2 mostly.
  double memory_us(double again = 1) const {
    const double weights =
        static_cast<double>(hit * sizes.group_rows) * static_cast<double>(sizes.k) * sizes.bits / 8;
    const double bytes = weights * (1 + 0.3 * (again - 1)) +
                         static_cast<double>(expected * sizes.k) * (sizes.packed_rows ? 1 : 2) +
                         static_cast<double>(expected * sizes.group_rows) * 2;
    return bytes / (gpu.read_gbps * memory_share * 1e3);
  }
  // Groups are of different sizes.
  double planned() const { return sizes.groups > 1 ? mean + std::sqrt(mean) / 2 : mean; }
  std::int64_t most_tiles(std::int64_t wide, int tokens) const {
    return wide * (ceil_div(sizes.rows, tokens) + hit);
  }
  // Few rows in tiles of `tokens`: `step` clocks for 128 of k, weights read `again` times.
  PackedPlan few_rows(int tokens, int split, double step, double again) const {
    PackedPlan plan{.kernel = PackedPlan::few_rows, .tile_tokens = tokens, .split = split};
    const double tiles = static_cast<double>(hit * columns) * std::ceil(planned() / tokens);
    const std::int64_t clusters =
        split <= 2 ? gpu.multiprocessors / split : gpu.multiprocessors / 16 * (16 / split);
    // Blocks without a tile leave more of the memory to the others: only the first round is whole.
    const double turns = std::max(1.0, tiles / static_cast<double>(clusters));
    const double each = static_cast<double>(ceil_div(steps, split)) * step + 800;
    plan.us = few_start_us + split_us * (split == 4 ? 3 : split - 1) +
              std::max(memory_us(again), turns * us(each));
    plan.blocks = static_cast<int>(split * std::min(clusters, most_tiles(columns, tokens)));
    return plan;
  }
};

}  // namespace shunt::cuda_engine
