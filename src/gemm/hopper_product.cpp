// From a product to one of Hopper's kernels: what fits them, and their arguments.
#include "gemm/hopper_product.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gemm/pair_stream.hpp"
#include "gemm/tile_counter.hpp"
#include "gemm/weighed.hpp"

#ifndef SHUNT_BUILT_FOR_SM_90A
#define SHUNT_BUILT_FOR_SM_90A 0
#endif
#ifndef SHUNT_BUILT_FOR_SM_100A
#define SHUNT_BUILT_FOR_SM_100A 0
#endif

namespace shunt::cuda_engine {

namespace {

bool aligned(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

// Rows of 16-bit numbers that begin at multiples of 16 bytes.
bool readable(const Tensor& rows, DType dtype, bool whole_k) {
  if (rows.dtype != dtype) return false;
  const bool one = rows.shape[0] <= 1 && !whole_k;  // or one row were read where many are not
  return aligned(rows.data, one ? 0 : rows.strides[0]) && (one || rows.strides[0] > 0);
}

bool weights_readable(const GroupedProduct& p) {
  if (p.prepared != nullptr) return true;
  const Tensor& m = p.matrices;
  return m && m.dtype == p.layout.dtype && m.strides[2] == 1 && m.strides[1] > 0 &&
         m.strides[0] == m.shape[1] * m.strides[1] && aligned(m.data, m.strides[1]);
}

// The environment variable SHUNT_CUDA_GEMM=portable: what every GPU can run, so that it can be
// tested and timed on any.
bool only_portable() {
  static const bool only = [] {
    const char* const wanted = std::getenv("SHUNT_CUDA_GEMM");
    if (wanted == nullptr || *wanted == 0) return false;
    if (std::strcmp(wanted, "portable") == 0) return true;
    throw Error(Status::invalid_argument,
                std::string("SHUNT_CUDA_GEMM is '") + wanted + "': must be portable, or not set");
  }();
  return only;
}

bool has_kernels(int compute) {
  constexpr bool blackwell = SHUNT_BUILT_FOR_SM_100A != 0, hopper = SHUNT_BUILT_FOR_SM_90A != 0;
  return (blackwell && compute == 100) || (hopper && compute != 100);
}

}  // namespace

GpuFigures figures(const Gpu& gpu) {
  return {.compute = with_kernels(gpu.compute),
          .multiprocessors = gpu.multiprocessors,
          .shared_bytes = gpu.shared_bytes,
          .largest_cluster = gpu.largest_cluster,
          .read_gbps = gpu.read_gbps,
          .clock_ghz = gpu.clock_ghz};
}

int with_kernels(int compute) { return has_kernels(compute) && !only_portable() ? compute : 0; }

ProductSizes sizes_of(const RowLayout& layout, int groups, std::int64_t rows) {
  return {.dtype = layout.dtype,
          .groups = groups,
          .rows = rows,
          .group_rows = layout.rows(),
          .k = layout.k,
          .in_place = layout.k % 8 == 0};
}

ProductSizes sizes_of(const GroupedProduct& p) {
  return {.dtype = p.layout.dtype,
          .groups = p.groups,
          .rows = p.out.shape[0],
          .expected = expected_rows(p),
          .group_rows = p.layout.rows(),
          .k = p.layout.k,
          .gathered = p.permutation != nullptr,
          .in_place = p.layout.k % 8 == 0 && readable(p.rows, p.layout.dtype, p.whole_k) &&
                      weights_readable(p),
          .weighed = p.row_scale != nullptr,
          .whole_k = p.whole_k,
          .few_before = p.tile_before,
          .placed = p.places.rows != nullptr};
}

namespace {

bool multiply_as_planned(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p,
                         const FewChain& chain) {
  if (plan.kernel == ProductPlan::portable && plan.blocks == 0) return false;  // grouped_cuda.cu's
  const RowLayout& layout = p.layout;
  const bool activates =
      p.activation.kind != cpu_engine::ActivationRule::identity || p.activation.limit < INFINITY;
  const bool in_registers =
      layout.paired ? p.activation.kind == cpu_engine::ActivationRule::silu && p.activation.gated
                    : !activates;
  HopperArgs args{.groups = p.groups,
                  .walk = walk_of(p),
                  .steps = static_cast<int>((layout.k + 63) / 64),
                  .group_rows = static_cast<int>(layout.rows()),
                  .tiles = static_cast<const char*>(p.prepared),
                  .row_tiles = static_cast<int>(layout.row_tiles()),
                  .group_bytes = layout.group_bytes(),
                  .source = p.rows.as<const char>(),
                  .source_rows = p.rows.shape[0],
                  .source_row_bytes = 2 * p.rows.strides[0],
                  .k_bytes = 2 * layout.k,
                  .permutation = p.permutation,
                  .slots = p.slots,
                  .row_scale = p.row_scale,
                  .early = p.early,
                  .counter = tile_counter(gpu, p.early),
                  .finish = {.paired = layout.paired,
                             .activates = activates,
                             .plain = in_registers && p.out.dtype == layout.dtype &&
                                      aligned(p.out.data, p.out.strides[0]),
                             .rule = p.activation,
                             .out = p.out.data,
                             .out_dtype = p.out.dtype,
                             .out_stride = p.out.strides[0],
                             .out_columns = layout.out_columns(),
                             .places = p.places}};
  args.finish.situ = takes_fast_situ(args.finish);
  if (p.bias) {
    args.finish.bias = p.bias.data;
    args.finish.bias_dtype = p.bias.dtype;
    args.finish.bias_group_stride = p.bias.strides[0];
    args.finish.bias_stride = p.bias.strides[1];
  }
  if (plan.kernel == ProductPlan::portable) return mma_rows(gpu, plan, p, args);
  if (plan.kernel == ProductPlan::blackwell) return blackwell_rows(gpu, plan, p, args);
  const bool bf16 = layout.dtype == DType::bf16;
  if (plan.kernel == ProductPlan::many_rows) {
    return (bf16 ? many_rows_bf16 : many_rows_f16)(gpu, plan, p, args);
  }
  if (args.tiles != nullptr && !p.whole_k && pairs_stream(chain, layout.k)) {
    const PairArgs few = pair_args(args, layout, chain);
    if ((bf16 ? pair_stream_bf16 : pair_stream_f16)(gpu, few)) return true;
  }
  return (bf16 ? few_rows_bf16 : few_rows_f16)(gpu, plan, p, args, chain);
}

}  // namespace

bool multiply_as_planned(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p) {
  return multiply_as_planned(gpu, plan, p, {});
}

void multiply_groups(const Gpu& gpu, const GroupedProduct& p, const FewChain& chain) {
  const ProductPlan plan = plan_product(sizes_of(p), figures(gpu));
  if (plan.kernel != ProductPlan::few_rows || !multiply_as_planned(gpu, plan, p, chain)) {
    multiply_groups(gpu, p);
  }
}

bool takes_pairs(const Gpu& gpu, const GroupedProduct& p) {
  return few_enough(p) && plan_product(sizes_of(p), figures(gpu)).kernel == ProductPlan::few_rows;
}

bool takes_places(const Gpu& gpu, const GroupedProduct& p) {
  return places_fit(p, p.layout.dtype) &&
         plan_product(sizes_of(p), figures(gpu)).kernel == ProductPlan::many_rows;
}

bool gathering_pays(const Gpu& gpu, const RowLayout& layout, int groups, std::int64_t rows,
                    const PickedRows& picked) {
  ProductSizes sizes = sizes_of(layout, groups, rows);
  sizes.weighed = picked.weighed;
  sizes.whole_k = picked.whole_k;
  const GpuFigures f = figures(gpu);
  if (!picked.other) return gather_first(sizes, f);
  sizes.weighed = false;
  return plan_product(sizes, f).kernel != ProductPlan::portable;
}

std::string product_words(const Gpu& gpu, const ProductSizes& sizes) {
  const ProductPlan plan = plan_product(sizes, figures(gpu));
  const char* const words = plan.kernel != ProductPlan::portable ? ""
                            : sizes.dtype == DType::f32          ? "f32 FMA, "
                                                                 : "mma.sync m16n8k16, ";
  return words + describe(plan) + weighed(candidates(sizes, figures(gpu)));
}

int few_tile(const Gpu& gpu, const ProductSizes& sizes) {
  const ProductPlan plan = plan_product(sizes, figures(gpu));
  return plan.kernel == ProductPlan::few_rows ? plan.tile_tokens : 0;
}

}  // namespace shunt::cuda_engine
