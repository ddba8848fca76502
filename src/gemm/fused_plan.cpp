// The plan of both products of few rows in one launch, and their arguments.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.hpp"
#include "gemm/fused_few.hpp"
#include "gemm/packed_model.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int static_bytes = 2048;  // barriers and the queue

// A step's weights: 128 of k.
int stage_weight_bytes(const FusedForm& form, int rows) {
  if (form.plain) return rows * 256;
  const TileParts parts = tile_parts(form.codes, form.groups);
  return parts.scales * (rows / 16) / 8 + parts.bytes - parts.scales;
}

// Clocks of a multiprocessor for a step of 128 rows, counted in docs/notes/cuda-w4.md.
double step_clocks(const FusedForm& form) {
  if (form.plain) return 120;
  switch (form.codes) {
    case Codes::sparse:
      return 260;
    case Codes::int8:
    case Codes::fp8:
    case Codes::fp8_block:
      return 430;
    default:
      return form.dtype == DType::bf16 ? 360 : 450;
  }
}

}  // namespace

FusedForm form_of(const RowLayout& layout) { return {.plain = true, .dtype = layout.dtype}; }
FusedForm form_of(const FragmentLayout& layout) {
  return {.plain = false,
          .dtype = layout.dtype,
          .codes = layout.codes(),
          .groups = layout.groups(),
          .bits_per_weight = bits_per_weight(layout.format)};
}

FusedPlans fused_candidates(const FusedForm& form, const FusedSizes& gate_up,
                            const FusedSizes& down, int groups, std::int64_t rows,
                            const GpuFigures& gpu) {
  const FusedSizes sizes[2] = {gate_up, down};
  FusedPlans plans;
  for (const FusedSizes& s : sizes) {
    const PackedSizes packed{.groups = groups, .rows = rows, .group_rows = s.group_rows, .k = s.k};
    if (!PackedModel::fits(packed, gpu)) return plans;
  }
  if (form.dtype == DType::f32 || rows > most_fused_rows) return plans;
  // Groups that some row is of, and how often their weights are read, by units of 8 rows.
  const double hit = groups * (1 - std::pow(1 - 1.0 / groups, static_cast<double>(rows)));
  const double mean = static_cast<double>(rows) / hit;
  const double again = std::max(1.0, (mean + std::sqrt(mean) / 2) / fused_tokens);
  double bytes = 0;
  for (const FusedSizes& s : sizes) {
    bytes += hit * (1 + 0.3 * (again - 1)) * static_cast<double>(s.group_rows * s.k) *
             form.bits_per_weight / 8;
  }
  const double memory_us = bytes / (gpu.read_gbps * PackedModel::memory_share * 1e3);
  constexpr double start_us = 2.5, end_us = 1.5, unit_clocks = 150, most_bytes_a_clock = 36;
  for (int first = 32; first <= 128; first *= 2) {
    for (int second = 32; second <= 128; second *= 2) {
      FusedPlan plan{.unit_rows = {first, second}, .blocks = gpu.multiprocessors};
      double clocks = 0;
      for (int i = 0; i < 2; ++i) {
        const auto k = static_cast<double>(sizes[i].k);
        const auto wide = static_cast<double>(plan.unit_rows[i]);
        const double unit = std::max(k / 128 * step_clocks(form) * wide / 128,
                                     wide * k * form.bits_per_weight / 8 / most_bytes_a_clock);
        const double rounds =
            hit * again * static_cast<double>(ceil_div(sizes[i].group_rows, plan.unit_rows[i])) /
            gpu.multiprocessors;
        // The last round of the first product goes on in the second; that of the second is whole.
        clocks += (unit + unit_clocks) * (i == 0 ? std::max(1.0, rounds) : std::ceil(rounds));
      }
      plan.us = start_us + std::max(memory_us, clocks / (gpu.clock_ghz * 1e3)) + end_us;
      const int stage = fused_token_bytes + stage_weight_bytes(form, std::max(first, second));
      plan.stage_bytes = (stage + 127) / 128 * 128;
      const int room = (gpu.shared_bytes - static_bytes - fused_fixed_bytes) / plan.stage_bytes;
      plan.stages = std::min(most_fused_stages, room);
      // A team's next step lies within the ring (fused_few.cuh).
      if (plan.stages >= 2 * (256 / std::min(first, second)) - 1) plans.add(plan);
    }
  }
  return plans;
}

FusedPlan fastest(const FusedPlans& plans) {
  FusedPlan best;
  for (const FusedPlan& plan : plans) {
    if (best.blocks == 0 || plan.us < best.us) best = plan;
  }
  return best;
}

std::string describe(const FusedPlan& plan) {
  return fmt::format(
      "both products in one launch, units of {} and {} weights x {} rows, {} blocks, {} stages, "
      "{:.1f} us predicted",
      plan.unit_rows[0], plan.unit_rows[1], fused_tokens, plan.blocks, plan.stages, plan.us);
}

namespace {

// RowLayout's tiles through the terms of FragmentArgs.
FragmentArgs args_of(const GroupedProduct& p) {
  const RowLayout& layout = p.layout;
  const FragmentLayout as{
      .dtype = layout.dtype, .n = layout.n, .k = layout.k, .paired = layout.paired};
  FragmentArgs args = args_of(FragmentProduct{.layout = as,
                                              .groups = p.groups,
                                              .prepared = p.prepared,
                                              .offsets = p.offsets,
                                              .counts = p.counts,
                                              .rows = p.rows,
                                              .permutation = p.permutation,
                                              .slots = p.slots,
                                              .row_scale = p.row_scale,
                                              .bias = p.bias,
                                              .activation = p.activation,
                                              .out = p.out});
  args.group_bytes = layout.group_bytes();
  return args;
}

template <class Product>
void multiply(const Gpu& gpu, const FusedPlan& plan, const Product& gate_up, const Product& down,
              std::uint32_t* counters) {
  const FusedForm form = form_of(gate_up.layout);
  FusedArgs args{
      .part = {}, .counters = counters, .stages = plan.stages, .stage_bytes = plan.stage_bytes};
  const Product* const products[2] = {&gate_up, &down};
  for (int i = 0; i < 2; ++i) {
    const auto& layout = products[i]->layout;
    args.part[i] = {.of = args_of(*products[i]),
                    .tiles_k = static_cast<int>(ceil_div(layout.k, 64)),
                    .unit_rows = plan.unit_rows[i],
                    .units = static_cast<int>(ceil_div(layout.rows(), plan.unit_rows[i]))};
  }
  const auto launch = [&]() -> FusedLaunch* {
    if (form.plain) return fused_plain;
    switch (form.codes) {
      case Codes::nvfp4:
      case Codes::mxfp4:
        return fused_fp4;
      case Codes::sparse:
        return fused_sparse;
      case Codes::int4:
        return fused_int4;
      default:
        return fused_wide;
    }
  }();
  launch(gpu, plan, form, args);
}

}  // namespace

void multiply_fused(const Gpu& gpu, const FusedPlan& plan, const GroupedProduct& gate_up,
                    const GroupedProduct& down, std::uint32_t* counters) {
  multiply(gpu, plan, gate_up, down, counters);
}
void multiply_fused(const Gpu& gpu, const FusedPlan& plan, const FragmentProduct& gate_up,
                    const FragmentProduct& down, std::uint32_t* counters) {
  multiply(gpu, plan, gate_up, down, counters);
}

}  // namespace shunt::cuda_engine
