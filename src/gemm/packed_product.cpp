// From a product of packed weights to one of Hopper's kernels: what fits them, and their arguments.
#include "gemm/packed_product.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fp8_sizes.hpp"
#include "gemm/packed_model.hpp"
#include "gemm/pair_stream.hpp"
#include "gemm/rounding_plan.hpp"
#include "gemm/tile_counter.hpp"
#include "gemm/weighed.hpp"

namespace shunt::cuda_engine {

namespace {

std::int64_t width(DType dtype) { return bits(dtype) / 8; }

bool aligned_to(const Tensor& rows, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % static_cast<std::size_t>(bytes) == 0 &&
         (rows.shape[0] <= 1 || rows.strides[0] * width(rows.dtype) % bytes == 0);
}

}  // namespace

Support packed_support(Device device, const FormatSpec& format, RowFormat rows) {
  const int compute = compute_capability(device.index);
  if (compute == 0) return {};
  if (rows == RowFormat::nvfp4) {
    if (Support kernels = fp4_support(compute, format.format); !kernels) return kernels;
    if (fp4_built(compute)) return {};
    return refuse("rows in nvfp4 have no kernel in this build: build it for {}a", compute);
  }
  if (rows == RowFormat::as_dtype) {
    if (compute >= 80) return {};
    return refuse("weights in {} have no kernel on compute capability {}.{}: must be 8.0 or more",
                  to_string(format), compute / 10, compute % 10);
  }
  if (with_kernels(compute) == 90) {
    const int count = multiprocessors(device.index);
    if (count == 0 || count >= PackedModel::least_multiprocessors) return {};
    return refuse("weights in {} with rows {} need {} multiprocessors or more: GPU {} has {}",
                  to_string(format), to_string(rows), PackedModel::least_multiprocessors,
                  device.index, count);
  }
  return refuse(
      "weights in {} with rows {} have no kernel on compute capability {}.{}: rows must be "
      "as_dtype, or it 9.0, in a build for it and without SHUNT_CUDA_GEMM=portable",
      to_string(format), to_string(rows), compute / 10, compute % 10);
}

PackedSizes sizes_of(const PackedProduct& p) {
  const bool packed = p.rows.dtype == DType::f8_e4m3;
  return {.groups = p.groups,
          .rows = p.out.shape[0],
          .expected = expected_rows(p),
          .group_rows = p.layout.rows(),
          .k = p.layout.k,
          .packed_rows = packed,
          .rows_in_place = p.permutation == nullptr && p.row_scale == nullptr &&
                           aligned_to(p.rows, 16) &&
                           (p.rows.shape[0] <= 1 || p.rows.strides[0] > 0),
          .whole_k = p.whole_k,
          .packed_out = p.out.dtype == DType::f8_e4m3};
}

namespace {

bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p,
                         const FewChain& chain) {
  if (plan.kernel == PackedPlan::none) return false;
  const PackedLayout& layout = p.layout;
  const bool activates =
      p.activation.kind != cpu_engine::ActivationRule::identity || p.activation.limit < INFINITY;
  PackedArgs args{
      .groups = p.groups,
      .walk = walk_of(p),
      .steps = static_cast<int>(layout.steps()),
      .row_tiles = static_cast<int>(layout.row_tiles()),
      .tiles = static_cast<const char*>(p.prepared),
      .group_bytes = layout.group_bytes(),
      .scales_at = layout.scales_at(),
      .block_scales = layout.block_scales(),
      .source = p.rows.as<const char>(),
      .source_dtype = p.rows.dtype,
      .source_rows = p.rows.shape[0],
      .source_row_bytes = width(p.rows.dtype) * p.rows.strides[0],
      .k = layout.k,
      .aligned = aligned_to(p.rows, p.rows.dtype == DType::f8_e4m3 ? 8 : 16),
      // Whole ones: memcheck counts a copy of fewer bytes as one of 16.
      .pieces = p.rows.dtype == DType::f8_e4m3 && (p.row_scale == nullptr || !p.whole_k) &&
                aligned_to(p.rows, 16) && layout.k % 16 == 0 && p.rows.strides[0] >= 0 &&
                p.rows.shape[0] * p.rows.strides[0] / 16 < 0xffffffff,
      .permutation = p.permutation,
      .slots = p.slots,
      .row_weight = p.row_scale,
      .early = p.early,
      .counter = tile_counter(gpu, p.early),
      .finish = {.paired = layout.paired,
                 .activates = activates,
                 .plain = layout.paired && p.activation.gated && p.out.dtype != DType::f32 &&
                          p.activation.kind == cpu_engine::ActivationRule::silu,
                 .rule = p.activation,
                 .out = p.out.data,
                 .out_dtype = p.out.dtype,
                 .out_stride = p.out.strides[0],
                 .out_columns = layout.out_columns(),
                 .places = p.places},
      .between = p.between};
  if (p.row_scales) {
    args.row_scales = p.row_scales.as<const float>();
    args.row_scale_stride = p.row_scales.strides[0];
    args.row_scale_step = p.row_scales.rank > 1 ? p.row_scales.strides[1] : 0;
  }
  if (p.out_scales) {
    args.out_scales = p.out_scales.as<float>();
    args.out_scale_stride = p.out_scales.strides[0];
    args.out_scale_step = p.out_scales.strides[1];
  }
  args.finish.situ = takes_fast_situ(args.finish);
  if (p.bias) {
    args.finish.bias = p.bias.data;
    args.finish.bias_dtype = p.bias.dtype;
    args.finish.bias_group_stride = p.bias.strides[0];
    args.finish.bias_stride = p.bias.strides[1];
  }
  if (plan.kernel == PackedPlan::many_rows) return fp8_many_rows(gpu, plan, p, args);
  if (!p.whole_k) args.sum_weight = std::exchange(args.row_weight, nullptr);
  if (args.block_scales && args.aligned && !p.whole_k &&
      (p.rows.dtype == DType::bf16 || p.rows.dtype == DType::f16) &&
      pairs_stream(chain, layout.k)) {
    PairArgs few = pair_args(args, layout, chain);
    few.scales_at = args.scales_at;
    few.source_dtype = args.source_dtype;
    if (pair_stream_fp8(gpu, few)) return true;
  }
  return fp8_few_rows(gpu, plan, args, chain);
}

}  // namespace

bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p) {
  return multiply_as_planned(gpu, plan, p, {});
}

bool takes_pairs(const Gpu& gpu, const PackedProduct& p) {
  return (p.row_scale == nullptr || !p.whole_k) && few_enough(p) &&
         plan_packed(sizes_of(p), figures(gpu)).kernel == PackedPlan::few_rows;
}

bool takes_places(const Gpu& gpu, const PackedProduct& p) {
  return places_fit(p, p.out.dtype) && !p.bias &&
         plan_packed(sizes_of(p), figures(gpu)).kernel == PackedPlan::many_rows;
}

void multiply_packed(const Gpu& gpu, const PackedProduct& p) { multiply_packed(gpu, p, {}); }

void multiply_packed(const Gpu& gpu, const PackedProduct& p, const FewChain& chain) {
  if (p.out.elements() == 0) return;
  const PackedPlan plan = plan_packed(sizes_of(p), figures(gpu));
  if (!multiply_as_planned(gpu, plan, p, chain)) {
    fail(Status::unsupported,
         "grouped_gemm: {} rows by {} matrices [{}, {}] of fp8 have no kernel on this GPU: it must "
         "be of compute capability 9.0, groups 1024 at most",
         p.out.shape[0], p.groups, p.layout.n, p.layout.k);
  }
}

Rounding plan_rounding(const Gpu& gpu, const PackedLayout& gate_up, const PackedLayout& down,
                       int groups, std::int64_t rows) {
  return plan_rounding(fp8_sizes(gate_up, groups, rows, false),
                       fp8_sizes(down, groups, rows, false), figures(gpu));
}

std::string fp8_words(const Gpu& gpu, const PackedSizes& sizes) {
  const GpuFigures f = figures(gpu);
  return (sizes.packed_rows ? "rows to fp8 beforehand, " : "rows to fp8 on the way, ") +
         describe(plan_packed(sizes, f)) + weighed(candidates(sizes, f));
}

}  // namespace shunt::cuda_engine
