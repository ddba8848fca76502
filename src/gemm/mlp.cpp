// The products of the layer's experts: from what it calls for to the engine's terms.
#include <fmt/core.h>

#include <algorithm>

#include "activate/cpu_engine.hpp"
#include "cuda/current.hpp"
#include "gemm/beside_plan.hpp"
#include "gemm/cpu_engine.hpp"
#include "gemm/cuda_engine.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fp8_sizes.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/fused.hpp"
#include "gemm/layout.hpp"
#include "gemm/packed_panels.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/packed_product.hpp"
#include "gemm/pair_stream.hpp"

namespace shunt {

namespace {

// Packed weights that become numbers of the rows' type on a GPU.
bool decoded(const PreparedWeights& weights) {
  return weights.format != FormatSpec{} && weights.rows == RowFormat::as_dtype;
}

[[maybe_unused]] Tensor bias_of(const PreparedWeights& weights, const float* bias) {
  return bias != nullptr ? view(bias, {weights.groups, weights.n}) : Tensor{};
}

// The terms that all of the GPU's products share.
template <class Product, class Layout>
Product product_of(const Layout& layout, const PreparedWeights& weights,
                   const cpu_engine::ActivationRule& activation, const MlpInput& in,
                   const Tensor& out) {
  Product p;
  p.layout = layout;
  p.groups = weights.groups;
  p.prepared = weights.data;
  p.offsets = in.offsets;
  p.counts = in.valid;
  p.rows = in.rows;
  p.permutation = in.permutation;
  p.slots = in.slots;
  p.row_scale = in.row_scale;
  p.bias = bias_of(weights, in.bias);
  p.activation = activation;
  p.out = out;
  if constexpr (requires { p.early; }) p.whole_k = in.whole_k, p.early = in.early;
  if constexpr (requires { p.places; }) p.places = in.places;
  if constexpr (requires { p.tile_before; }) p.tile_before = in.tile_before;
  return p;
}
[[maybe_unused]] cuda_engine::RowLayout tiles_of(const PreparedWeights& weights) {
  return {weights.dtype, weights.n, weights.k, weights.paired};
}

// Of packed weights that are decoded.
[[maybe_unused]] cuda_engine::PackedSizes packed_sizes(const PreparedWeights& weights,
                                                       std::int64_t rows, const MlpWay& way) {
  cuda_engine::PackedSizes sizes;
  if constexpr (cuda_engine::built) {  // a build without has no such functions
    sizes = cuda_engine::sizes_of(cuda_engine::fragments_of(weights), weights.groups, rows);
  }
  sizes.whole_k = way.whole_k;
  sizes.rows_in_place = !way.gathers || weights.format.ordered;  // put in order beforehand
  sizes.tile_before = way.tile_before;
  return sizes;
}

// Of weights that are not packed.
[[maybe_unused]] cuda_engine::ProductSizes plain_sizes(const PreparedWeights& weights,
                                                       std::int64_t rows, const MlpWay& way) {
  cuda_engine::ProductSizes sizes;
  if constexpr (cuda_engine::built) {
    sizes = cuda_engine::sizes_of(tiles_of(weights), weights.groups, rows);
  }
  sizes.gathered = way.gathers;
  sizes.whole_k = way.whole_k;
  sizes.few_before = way.tile_before;
  sizes.placed = way.placed;
  return sizes;
}

// Of packed weights whose rows are rounded to fp8, beforehand or on the way.
[[maybe_unused]] cuda_engine::PackedSizes fp8_sizes(const PreparedWeights& weights,
                                                    std::int64_t rows, const MlpWay& way) {
  cuda_engine::PackedSizes sizes;
  if constexpr (cuda_engine::built) {
    sizes =
        cuda_engine::fp8_sizes(cuda_engine::layout_of(weights), weights.groups, rows, way.rounded);
  }
  sizes.whole_k = way.whole_k;
  return sizes;
}

// Calls with(product) in the terms of the one of the GPU's products that the weights are for.
template <class With>
[[maybe_unused]] void with_product(const Context& context, const PreparedWeights& weights,
                                   const cpu_engine::ActivationRule& activation, const MlpInput& in,
                                   const Tensor& out, const Tensor& out_scales, const With& with) {
  const auto terms = [&]<class Product>(const auto& layout) {
    return product_of<Product>(layout, weights, activation, in, out);
  };
  if (decoded(weights)) {
    const auto layout = cuda_engine::fragments_of(weights);
    with(terms.template operator()<cuda_engine::FragmentProduct>(layout));
  } else if (weights.rows == RowFormat::nvfp4) {
    const auto layout = cuda_engine::fp4_weights(context.gpu().compute, weights);
    with(terms.template operator()<cuda_engine::Fp4RowProduct>(layout));
  } else if (weights.format != FormatSpec{}) {
    const auto layout = cuda_engine::layout_of(weights);
    auto product = terms.template operator()<cuda_engine::PackedProduct>(layout);
    product.row_scales = in.row_scales;
    product.out_scales = out_scales;
    product.between = weights.dtype;
    product.fast_accumulation = in.fast_accumulation;
    with(product);
  } else {
    with(terms.template operator()<cuda_engine::GroupedProduct>(tiles_of(weights)));
  }
}

constexpr cpu_engine::ActivationRule no_activation{.kind = cpu_engine::ActivationRule::identity,
                                                   .gated = false};

struct Multiply {
  const cuda_engine::Gpu& gpu;
  const cuda_engine::FewChain& chain;
  bool beside;  // others, and without ids
  void* memory;
  void operator()(const cuda_engine::FragmentProduct& p) const {
    if (beside) return cuda_engine::multiply_beside(gpu, p, memory);
    cuda_engine::multiply_fragments(gpu, p, memory, chain);
  }
  void operator()(const cuda_engine::PackedProduct& p) const {
    beside ? cuda_engine::multiply_beside(gpu, p) : cuda_engine::multiply_packed(gpu, p, chain);
  }
  void operator()(const cuda_engine::GroupedProduct& p) const {
    beside ? cuda_engine::multiply_beside(gpu, p) : cuda_engine::multiply_groups(gpu, p, chain);
  }
  void operator()(const cuda_engine::Fp4RowProduct& p) const {
    cuda_engine::multiply_fp4_rows(gpu, p, memory);
  }
};

void multiply(const Context& context, const PreparedWeights& weights,
              const cpu_engine::ActivationRule& activation, const MlpInput& in, const Tensor& out,
              Workspace workspace, const Tensor& out_scales = {}) {
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context)) {
      return with_product(
          context, weights, activation, in, out, out_scales,
          Multiply{context.gpu(), in.chain, in.beside && in.chain.ids == nullptr, workspace.data});
    }
  }
  cpu_engine::multiply_groups(
      context.pool(),
      {.layout = PanelLayout(weights),
       .groups = weights.groups,
       .prepared = weights.data,
       .walk = GroupWalk::of_rows(in.offsets, in.valid, weights.groups, out.shape[0]),
       .rows = in.rows,
       .permutation = in.permutation,
       .slots = in.slots,
       .row_scale = in.row_scale,
       .bias = in.bias,
       .activation = activation,
       .out = out},
      workspace);
}

}  // namespace

void mlp_gate_up(const Context& context, const PreparedWeights& weights,
                 const ActivationSpec& activation, const MlpInput& in, Tensor out,
                 Workspace workspace, Tensor out_scales) {
  multiply(context, weights, cpu_engine::activation_rule(activation), in, out, workspace,
           out_scales);
}

bool mlp_takes_pairs(const Context& context, const PreparedWeights& weights,
                     const ActivationSpec* activation, const MlpInput& in, const Tensor& out) {
  bool takes = false;
  if constexpr (cuda_engine::built) {
    if (!cuda_engine::on_gpu(context)) return false;
    with_product(context, weights,
                 activation != nullptr ? cpu_engine::activation_rule(*activation) : no_activation,
                 in, out, {}, [&](const auto& product) {
                   if constexpr (requires { cuda_engine::takes_pairs(context.gpu(), product); }) {
                     takes = cuda_engine::takes_pairs(context.gpu(), product);
                   }
                 });
  }
  return takes;
}

std::optional<double> mlp_one_pass_us(const Context& context, const PreparedWeights& weights,
                                      std::int64_t pairs, std::int64_t tokens) {
  if constexpr (cuda_engine::built) {
    if (!cuda_engine::on_gpu(context) || weights.rows == RowFormat::nvfp4) return {};
    const cuda_engine::GpuFigures gpu = cuda_engine::figures(context.gpu());
    if (gpu.compute != 90 || !cuda_engine::rows_fit(tokens, weights.k)) return {};
    const auto of = [&](const auto& layout) -> std::optional<double> {
      const double hit = cuda_engine::groups_hit(weights.groups, static_cast<int>(pairs),
                                                 static_cast<int>(tokens));
      if (!cuda_engine::in_one_pass(layout.rows(), layout.steps(), hit, gpu.multiprocessors)) {
        return {};
      }
      return cuda_engine::one_pass_us(hit * static_cast<double>(layout.group_bytes()), gpu);
    };
    if (decoded(weights)) return of(cuda_engine::fragments_of(weights));
    if (weights.format != FormatSpec{}) return of(cuda_engine::layout_of(weights));
    if (weights.dtype != DType::f32) return of(tiles_of(weights));
  }
  return {};
}

bool mlp_takes_places(const Context& context, const PreparedWeights& weights, const MlpInput& in,
                      const Tensor& out) {
  bool takes = false;
  if constexpr (cuda_engine::built) {
    if (!cuda_engine::on_gpu(context) || in.chain.ids != nullptr) return false;
    with_product(context, weights, no_activation, in, out, {}, [&](const auto& product) {
      if constexpr (requires { cuda_engine::takes_places(context.gpu(), product); }) {
        takes = cuda_engine::takes_places(context.gpu(), product);
      }
    });
  }
  return takes;
}

cuda_engine::NextWeights mlp_next(const Context& context, const PreparedWeights& weights) {
  cuda_engine::NextWeights next;
  if (!cuda_engine::on_gpu(context)) return next;
  const auto fill = [&](const auto& layout, std::int64_t step_bytes) {
    next = {.tiles = static_cast<const char*>(weights.data),
            .group_bytes = layout.group_bytes(),
            .columns = static_cast<int>(layout.row_tiles()),
            .tile_bytes = static_cast<int>(layout.steps() * step_bytes)};
  };
  if constexpr (cuda_engine::built) {
    if (decoded(weights)) {
      const auto layout = cuda_engine::fragments_of(weights);
      fill(layout, layout.parts().bytes);
    } else if (weights.format != FormatSpec{} && weights.rows != RowFormat::nvfp4) {
      fill(cuda_engine::layout_of(weights), cuda_engine::PackedLayout::tile_bytes);
    } else if (weights.format == FormatSpec{} && weights.dtype != DType::f32) {
      fill(tiles_of(weights), std::int64_t{2} * 128 * 64);
    }
  }
  return next;
}

Rounding mlp_rounding(const Context& context, const PreparedWeights& gate_up,
                      const PreparedWeights& down, std::int64_t rows) {
  if constexpr (cuda_engine::built) {
    return cuda_engine::plan_rounding(context.gpu(), cuda_engine::layout_of(gate_up),
                                      cuda_engine::layout_of(down), gate_up.groups, rows);
  }
  return Rounding::on_the_way;
}

void mlp_gemm(const Context& context, const PreparedWeights& weights, const MlpInput& in,
              Tensor out, Workspace workspace) {
  multiply(context, weights, no_activation, in, out, workspace);
}

bool mlp_wants_gathered(const Context& context, const PreparedWeights& weights, std::int64_t rows,
                        const MlpSource& source) {
  [[maybe_unused]] const cuda_engine::PickedRows picked{
      .other = source.dtype != weights.dtype || (source.whole_k && !source.pieces),
      .weighed = source.scaled,
      .whole_k = source.whole_k};
  if (decoded(weights)) {
    if constexpr (cuda_engine::built) {
      if (!cuda_engine::on_gpu(context) || weights.format.ordered) return false;
      return cuda_engine::gathering_pays(context.gpu(), cuda_engine::fragments_of(weights),
                                         weights.groups, rows, picked);
    }
    return false;
  }
  if (weights.format != FormatSpec{}) return false;
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context)) {
      return cuda_engine::gathering_pays(context.gpu(), tiles_of(weights), weights.groups, rows,
                                         picked);
    }
  }
  return false;
}

std::size_t mlp_workspace_bytes(const Context& context, const PreparedWeights& weights,
                                std::int64_t rows, std::int64_t source_rows) {
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && weights.rows == RowFormat::nvfp4) {
      const bool sparse = weights.format.format == Format::sparse_nvfp4;
      return cuda_engine::Fp4Rows::at(nullptr, rows, weights.k, sparse).bytes;
    }
    if (cuda_engine::on_gpu(context) && weights.format.ordered) {
      return cuda_engine::ordered_rows_bytes(rows, weights.k);
    }
  }
  if (cuda_engine::on_gpu(context)) return 0;
  return cpu_engine::product_workspace_bytes(context.pool(), PanelLayout(weights), weights.groups,
                                             rows, source_rows < 0 ? rows : source_rows, true);
}

double mlp_us(const Context& context, const PreparedWeights& weights, std::int64_t rows,
              bool whole_k) {
  if constexpr (cuda_engine::built) {
    if (!cuda_engine::on_gpu(context)) return 0;
    const cuda_engine::GpuFigures gpu = cuda_engine::figures(context.gpu());
    const MlpWay way{.whole_k = whole_k};
    if (decoded(weights)) {
      return cuda_engine::plan_fragments(packed_sizes(weights, rows, way), gpu).us;
    }
    if (weights.format != FormatSpec{} && weights.rows != RowFormat::nvfp4) {
      return cuda_engine::plan_packed(fp8_sizes(weights, rows, way), gpu).us;
    }
    return cuda_engine::plan_product(plain_sizes(weights, rows, way), gpu).us;
  }
  return 0;
}

int mlp_tile(const Context& context, const PreparedWeights& weights, std::int64_t rows,
             const MlpWay& way) {
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && decoded(weights)) {
      const cuda_engine::PackedSizes sizes = packed_sizes(weights, rows, way);
      const cuda_engine::GpuFigures gpu = cuda_engine::figures(context.gpu());
      const cuda_engine::PackedPlan plan =
          way.beside ? plan_fragments_beside(sizes, gpu) : plan_fragments(sizes, gpu);
      return plan.tile_tokens;
    }
    if (way.beside) return 0;
    if (cuda_engine::on_gpu(context) && weights.format == FormatSpec{}) {
      return cuda_engine::few_tile(context.gpu(), plain_sizes(weights, rows, way));
    }
  }
  return 0;
}

std::string mlp_explain(const Context& context, const PreparedWeights& weights, std::int64_t rows,
                        int hit, const MlpWay& way) {
  if constexpr (cuda_engine::built) {
    if (way.beside && cuda_engine::on_gpu(context) && !decoded(weights) &&
        weights.rows != RowFormat::nvfp4) {
      const cuda_engine::GpuFigures gpu = cuda_engine::figures(context.gpu());
      if (weights.format != FormatSpec{}) {
        return (way.rounded ? "rows to fp8 beforehand, " : "rows to fp8 on the way, ") +
               cuda_engine::describe(cuda_engine::plan_beside(fp8_sizes(weights, rows, way), gpu));
      }
      const cuda_engine::ProductPlan plan =
          cuda_engine::plan_beside(plain_sizes(weights, rows, way), gpu);
      if (plan.kernel == cuda_engine::ProductPlan::few_rows) return cuda_engine::describe(plan);
    }
    if (cuda_engine::on_gpu(context) && decoded(weights)) {
      const cuda_engine::PackedSizes sizes = packed_sizes(weights, rows, way);
      return to_string(weights.format) +
             (weights.format.ordered ? ", rows put in order beforehand, " : ", ") +
             (way.beside ? fragment_words(
                               plan_fragments_beside(sizes, cuda_engine::figures(context.gpu())))
                         : product_words(context.gpu(), sizes));
    }
    if (cuda_engine::on_gpu(context) && weights.rows == RowFormat::nvfp4) {
      return to_string(weights.format) + ", rows to nvfp4 beforehand";
    }
    if (cuda_engine::on_gpu(context) && weights.format != FormatSpec{}) {
      return cuda_engine::fp8_words(context.gpu(), fp8_sizes(weights, rows, way));
    }
    if (cuda_engine::on_gpu(context)) {
      return cuda_engine::product_words(context.gpu(), plain_sizes(weights, rows, way));
    }
  }
  const PanelLayout layout(weights);
  const cpu_engine::Isa isa = context.pool().isa();
  const cpu_engine::ProductPlan plan = cpu_engine::plan_product(isa, layout, rows);
  const std::int64_t blocks = std::max<std::int64_t>(
      hit, (rows + plan.block_rows - 1) / std::max<std::int64_t>(1, plan.block_rows));
  return fmt::format(
      "{} {}{}{}{}, tiles of {} x 64, k in {}, {} tasks on {} thread{}", cpu_engine::to_string(isa),
      weights.format == FormatSpec{} ? "" : to_string(weights.format) + " decoded, ",
      plan.dot                         ? "bf16 dot"
      : plan.fixed > 0                 ? "rows in 16-bit integers"
      : isa == cpu_engine::Isa::scalar ? "f32"
                                       : "f32 FMA",
      plan.tiles.from > 0 ? fmt::format(", by AMX from {} rows of an expert", plan.tiles.from) : "",
      plan.widen ? ", weights widened once a block" : "",
      weights.format == FormatSpec{} ? cpu_engine::gemm_kernels(isa).tile_rows
                                     : cpu_engine::packed_kernels(isa, plan.dot).tile_rows,
      layout.k <= plan.stretch ? "one go" : fmt::format("stretches of {}", plan.stretch),
      blocks * layout.panels(), context.threads(), context.threads() == 1 ? "" : "s");
}

}  // namespace shunt
