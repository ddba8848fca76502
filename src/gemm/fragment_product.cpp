// From a product of packed weights and 16-bit rows to one of the kernels, and their arguments.
#include "gemm/fragment_product.hpp"

#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "gemm/pair_stream.hpp"
#include "gemm/tile_counter.hpp"
#include "gemm/weighed.hpp"

namespace shunt::cuda_engine {

namespace {

std::int64_t width(DType dtype) { return bits(dtype) / 8; }

// Whether rows are as they are multiplied, in aligned and whole pieces of 16 bytes (memcheck counts
// a copy of fewer as one of 16).
bool as_they_are(const FragmentProduct& p) {
  return p.rows.dtype == p.layout.dtype && p.layout.k % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(p.rows.data) % 16 == 0 &&
         (p.rows.shape[0] <= 1 || (p.rows.strides[0] >= 0 && p.rows.strides[0] % 8 == 0 &&
                                   p.rows.shape[0] * (p.rows.strides[0] / 8) < 0xffffffff));
}

FragmentLaunch* many_launcher(const FragmentLayout& layout, const PackedPlan& plan) {
  const bool bf16 = layout.dtype == DType::bf16;
  const auto of = [&](FragmentLaunch* middle, FragmentLaunch* many) {
    return plan.tile_tokens <= most_middle_tokens ? middle : many;
  };
  switch (layout.codes()) {
    case Codes::nvfp4:
    case Codes::mxfp4:
      return bf16 ? of(fragment_middle_fp4_bf16, fragment_many_fp4_bf16)
                  : of(fragment_middle_fp4_f16, fragment_many_fp4_f16);
    case Codes::int4:
      return bf16 ? of(fragment_middle_int4_bf16, fragment_many_int4_bf16)
                  : of(fragment_middle_int4_f16, fragment_many_int4_f16);
    case Codes::sparse:
      return of(fragment_middle_sparse, fragment_many_sparse);
    case Codes::dense3:
      return of(fragment_middle_dense3, fragment_many_dense3);
    default:
      return of(fragment_middle_wide, fragment_many_wide);
  }
}

FragmentLaunch* portable_launcher(const FragmentLayout& layout) {
  switch (layout.codes()) {
    case Codes::nvfp4:
    case Codes::mxfp4:
    case Codes::sparse:
      return mma_fragments_fp4;
    case Codes::int4:
      return mma_fragments_int4;
    case Codes::dense3:
      return mma_fragments_dense3;
    default:
      return mma_fragments_wide;
  }
}

FragmentPairStream* pair_launcher(const FragmentLayout& layout) {
  switch (layout.codes()) {
    case Codes::nvfp4:
    case Codes::mxfp4:
    case Codes::sparse:
      return pair_stream_fp4;
    case Codes::int4:
      return pair_stream_int4;
    case Codes::dense3:
      return pair_stream_dense3;
    default:
      return pair_stream_wide;
  }
}

FewFragmentLaunch* few_launcher(const FragmentLayout& layout) {
  const bool bf16 = layout.dtype == DType::bf16;
  switch (layout.codes()) {
    case Codes::nvfp4:
    case Codes::mxfp4:
      return bf16 ? fragment_few_fp4_bf16 : fragment_few_fp4_f16;
    case Codes::int4:
      return bf16 ? fragment_few_int4_bf16 : fragment_few_int4_f16;
    case Codes::sparse:
      return fragment_few_sparse;
    case Codes::dense3:
      return fragment_few_dense3;
    default:
      return fragment_few_wide;
  }
}

// Where all kernels multiply the same operands, scale nothing but whole sums and end alike: SiLU
// and SiTU of pairs are exact in kernels for many rows where bulk stores cannot reach the results
// (map_results()), and fast in those for few; in f32 in none (docs/notes/cuda-layer.md,
// "Batch-invariant layers").
bool has_same_sums(const FragmentLayout& layout) {
  const Codes codes = layout.codes();
  return codes != Codes::int4 && codes != Codes::dense3 && codes != Codes::fp8_block &&
         (!layout.paired || layout.out_columns() % 8 == 0);
}
bool ends_alike(const FragmentProduct& p) {
  return !p.layout.paired || p.out.dtype == DType::f32 ||
         (p.out.dtype == p.layout.dtype && p.out.strides[0] % 8 == 0 &&
          reinterpret_cast<std::uintptr_t>(p.out.data) % 16 == 0);
}

}  // namespace

PackedSizes sizes_of(const FragmentLayout& layout, int groups, std::int64_t rows) {
  return {.groups = groups,
          .rows = rows,
          .group_rows = layout.rows(),
          .k = layout.k,
          .bits = bits_per_weight(layout.format),
          .same_sums = has_same_sums(layout),
          .sparse = layout.codes() == Codes::sparse,
          .looked_up = layout.codes() == Codes::dense3};
}

PackedSizes sizes_of(const FragmentProduct& p) {
  PackedSizes sizes = sizes_of(p.layout, p.groups, p.out.shape[0]);
  sizes.same_sums = sizes.same_sums && ends_alike(p);
  sizes.expected = expected_rows(p);
  sizes.whole_k = p.whole_k;
  sizes.tile_before = p.tile_before;
  sizes.rows_in_place = p.permutation == nullptr && p.row_scale == nullptr && as_they_are(p);
  return sizes;
}

bool gathering_pays(const Gpu& gpu, const FragmentLayout& layout, int groups, std::int64_t rows,
                    const PickedRows& picked) {
  // Rows that are not copied as they are come slowly, number by number.
  if ((picked.other || (picked.weighed && picked.whole_k)) && rows >= 256) return true;
  const GpuFigures f = figures(gpu);
  PackedSizes sizes = sizes_of(layout, groups, rows);
  const double after = plan_fragments(sizes, f).us;
  sizes.rows_in_place = false;
  const PackedPlan on_the_way = plan_fragments(sizes, f);
  if (picked.weighed && !picked.whole_k && on_the_way.kernel == PackedPlan::many_rows) return true;
  const double gather_us = 2 + 4.0 * static_cast<double>(rows * layout.k) / (f.read_gbps * 1e3);
  return after + gather_us < on_the_way.us;
}

FragmentArgs args_of(const FragmentProduct& p) {
  const FragmentLayout& layout = p.layout;
  const bool bf16 = layout.dtype == DType::bf16;
  const bool activates =
      p.activation.kind != cpu_engine::ActivationRule::identity || p.activation.limit < INFINITY;
  const bool silu =
      layout.paired ? p.activation.gated && p.activation.kind == cpu_engine::ActivationRule::silu
                    : !activates;
  FragmentArgs args{.groups = p.groups,
                    .walk = walk_of(p),
                    .steps = static_cast<int>(layout.steps()),
                    .columns = static_cast<int>(layout.row_tiles()),
                    .tiles = static_cast<const char*>(p.prepared),
                    .group_bytes = layout.group_bytes(),
                    .factors_at = layout.factors_at(),
                    .unscale = unscale(layout.codes(), bf16),
                    .early = p.early,
                    .source = p.rows.as<const char>(),
                    .source_dtype = p.rows.dtype,
                    .source_rows = p.rows.shape[0],
                    .source_row_bytes = width(p.rows.dtype) * p.rows.strides[0],
                    .k = layout.k,
                    .direct = p.row_scale == nullptr && as_they_are(p),
                    .permutation = p.permutation,
                    .slots = p.slots,
                    .row_scale = p.row_scale,
                    .finish = {.paired = layout.paired,
                               .activates = activates,
                               .plain = silu && p.out.dtype != DType::f32,
                               .rule = p.activation,
                               .out = p.out.data,
                               .out_dtype = p.out.dtype,
                               .out_stride = p.out.strides[0],
                               .out_columns = layout.out_columns()}};
  args.finish.situ = takes_fast_situ(args.finish);
  if (p.bias) {
    args.finish.bias = p.bias.data;
    args.finish.bias_dtype = p.bias.dtype;
    args.finish.bias_group_stride = p.bias.strides[0];
    args.finish.bias_stride = p.bias.strides[1];
  }
  return args;
}

namespace {

bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const FragmentProduct& p,
                         const FewChain& chain) {
  if (plan.kernel == PackedPlan::none) return false;
  FragmentArgs args = args_of(p);
  args.counter = tile_counter(gpu, p.early);
  if (plan.kernel == PackedPlan::many_rows) {
    many_launcher(p.layout, plan)(gpu, plan, p.layout, args);
    return true;
  }
  if (!p.whole_k) {
    args.sum_scale = std::exchange(args.row_scale, nullptr);
    args.direct = as_they_are(p);
  }
  if (plan.kernel == PackedPlan::few_rows) {
    if (args.direct && !p.whole_k && pairs_stream(chain, p.layout.k)) {
      PairArgs few = pair_args(args, p.layout, chain);
      few.scales_at = args.factors_at;
      few.unscale = args.unscale;
      if (pair_launcher(p.layout)(gpu, p.layout, few)) return true;
    }
    few_launcher(p.layout)(gpu, plan, p.layout, args, chain);
  } else {
    portable_launcher(p.layout)(gpu, plan, p.layout, args);
  }
  return true;
}

}  // namespace

bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const FragmentProduct& p) {
  return multiply_as_planned(gpu, plan, p, {});
}

bool takes_pairs(const Gpu& gpu, const FragmentProduct& p) {
  return !p.layout.format.ordered && (p.row_scale == nullptr || !p.whole_k) && few_enough(p) &&
         plan_fragments(sizes_of(p), figures(gpu)).kernel == PackedPlan::few_rows;
}

void multiply_fragments(const Gpu& gpu, const FragmentProduct& given, void* memory,
                        const FewChain& chain) {
  if (given.out.elements() == 0) return;
  const FragmentProduct p = given.layout.format.ordered ? order_rows(gpu, given, memory) : given;
  const PackedPlan plan = plan_fragments(sizes_of(p), figures(gpu));
  if (!multiply_as_planned(gpu, plan, p, chain)) {
    fail(Status::unsupported,
         "grouped_gemm: {} rows by {} matrices [{}, {}] of {} are too many: rows, and matrices "
         "times n, must be less than 2^30",
         p.out.shape[0], p.groups, p.layout.n, p.layout.k, to_string(p.layout.format));
  }
}

std::string product_words(const Gpu& gpu, const PackedSizes& sizes) {
  const GpuFigures f = figures(gpu);
  return fragment_words(plan_fragments(sizes, f)) + weighed(fragment_candidates(sizes, f));
}

}  // namespace shunt::cuda_engine
