#include "layer/folded.hpp"

#include <algorithm>

#include "gemm/few_chain.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/pair_stream.hpp"
#include "layer/impl.hpp"

namespace shunt {

bool may_fold(const LayerSpec& spec, const LayerOptions& options, Device device) {
  const SharedExpertSpec& shared = spec.shared;
  const ExpertSpec& experts = spec.experts;
  const bool alike = shared.intermediate > 0 && shared.intermediate == experts.intermediate &&
                     shared.activation == experts.activation && !shared.gate_up_bias &&
                     !shared.down_bias && !experts.gate_up_bias && !experts.down_bias;
  // On the input a weight is not the output's.
  const bool weighed = !spec.route.weight_on_input || (!shared.sigmoid_gate && shared.scale == 1);
  // Both experts' input is x, and both rows join the same sum.
  const bool one_sum = spec.latent == 0 && spec.zero_experts == 0 && !spec.input_norm.enabled &&
                       !spec.expert_norm.enabled && spec.route.shared.count == 0 &&
                       !spec.routed_outside;
  return device.type == DeviceType::cuda && alike && weighed && one_sum &&
         options.dtype != DType::f32 && options.format == FormatSpec{} &&
         options.rows == RowFormat::as_dtype && !options.in_place && !options.batch_invariant &&
         supports(folded(spec), options, device);
}

bool folding_pays(const LayerSpec& spec, int multiprocessors) {
  const ExpertSpec& experts = spec.experts;
  const int pairs = spec.route.slots() + 1;
  const std::int64_t gate_up = (experts.activation.gated ? 2 : 1) * experts.intermediate;
  const auto one_pass = [&](std::int64_t rows, std::int64_t k) {
    return cuda_engine::in_one_pass(rows, (k + 63) / 64, pairs, multiprocessors);
  };
  return pairs <= cuda_engine::most_summed_pairs && one_pass(gate_up, spec.hidden) &&
         one_pass(spec.hidden, experts.intermediate);
}

bool folds(const LayerSpec& spec, const LayerOptions& options, const Context& context) {
  if constexpr (cuda_engine::built) {
    if (!may_fold(spec, options, context.device())) return false;
    const cuda_engine::GpuFigures gpu = cuda_engine::figures(context.gpu());
    return gpu.compute == 90 && folding_pays(spec, gpu.multiprocessors);
  }
  return false;
}

bool may_fold(const LayerWeights& weights) {
  const ExpertWeights& experts = weights.experts;
  if (is_packed(experts) || is_packed(weights.shared)) return false;
  const auto alike = [](const std::vector<Tensor>& many, const std::vector<Tensor>& one) {
    return std::all_of(one.begin(), one.end(), [&](const Tensor& matrix) {
      return matrix.dtype == many[0].dtype && matrix.device == many[0].device;
    });
  };
  return alike(experts.gate, weights.shared.gate) && alike(experts.up, weights.shared.up) &&
         alike(experts.down, weights.shared.down);
}

LayerSpec folded(const LayerSpec& spec) {
  LayerSpec result = spec;
  result.shared = {};
  result.route.shared = {.count = 1, .weight = SharedWeight::one};
  ++result.experts.experts;
  return result;
}

ExpertWeights joined(const LayerWeights& weights) {
  ExpertWeights all = weights.experts;
  const auto append = [](std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(all.gate, weights.shared.gate);
  append(all.up, weights.shared.up);
  append(all.down, weights.shared.down);
  return all;
}

void Layer::Impl::fold(PreparedExperts joint) {
  const int routed = spec.experts.experts;
  experts = joint.part(0, routed);
  shared = joint.part(routed, 1);
  with_shared = std::make_unique<Impl>();
  with_shared->spec = shunt::folded(spec);
  with_shared->options = options;
  with_shared->context = context;
  with_shared->held.views = held.views;
  with_shared->experts = std::move(joint);
  with_shared->fills_shared = true;
  with_shared->shared_scale = spec.shared.scale;
}

}  // namespace shunt
