#include "prune/calibration.hpp"

#include "core/check.hpp"
#include "core/convert.hpp"
#include "gemm/fused.hpp"
#include "shunt/gemm.hpp"
#include "shunt/route.hpp"

namespace shunt {

namespace {

// Rows that are gathered, multiplied and summed together.
constexpr std::int64_t rows_at_once = 1024;

// A bias as the GEMM takes it, gate's before up's.
std::vector<float> bias_of(const ExpertWeights& weights, std::size_t expert) {
  std::vector<float> values;
  for (const auto* list : {&weights.gate_bias, &weights.up_bias}) {
    if (expert >= list->size()) continue;
    const Tensor& bias = (*list)[expert];
    for (std::int64_t i = 0; i < bias.shape[0]; ++i) {
      values.push_back(load_f32(bias.data, bias.dtype, i * bias.strides[0]));
    }
  }
  return values;
}

}  // namespace

Support supports_calibration(const LayerSpec& spec) {
  if (spec.latent > 0) return refuse("its experts lie behind a latent projection");
  if (spec.input_norm.enabled) return refuse("its experts' input is normalised");
  if (spec.router_norm.enabled) return refuse("its router's input is normalised");
  if (spec.route.weight_on_input) return refuse("its routing weights are on the experts' input");
  if (spec.route.shared.count > 0) return refuse("shared experts stand among the routed ones");
  return {};
}

LayerCalibration::LayerCalibration(const Context& context, const LayerSpec& spec,
                                   const LayerWeights& weights, const Tensor& hidden,
                                   const Tensor& token_ids)
    : context_(context), spec_(spec), weights_(weights), hidden_(hidden) {
  require(supports_calibration(spec), "calibration");
  check_tensor("calibration: hidden", hidden,
               {.dtypes = float_dtypes, .shape = {any_size, spec.hidden}, .rows_dense = true},
               Device{});
  if (!weights.router) {
    fail(
        Status::unsupported,
        "calibration: weights.router is missing: hidden states alone do not say which experts they "
        "go to");
  }
  tokens_.resize(static_cast<std::size_t>(spec.experts.experts));
  const std::int64_t count = hidden.shape[0];
  const int slots = spec.route.slots();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count * slots) + 1);
  const std::size_t bytes = route_workspace_bytes(context, spec.route, count, spec.hidden);
  const Buffer workspace = context.allocate(bytes);
  route(context, spec.route,
        {.hidden = hidden,
         .router_weight = weights.router,
         .router_bias = weights.router_bias,
         .selection_bias = weights.selection_bias,
         .per_expert_scale = weights.per_expert_scale,
         .token_ids = token_ids,
         .hash_table = weights.hash_table},
        {.ids = view(ids.data(), {count, slots})}, workspace);
  for (std::int64_t t = 0; t < count; ++t) {
    for (int s = 0; s < slots; ++s) {
      const std::int32_t id = ids[static_cast<std::size_t>(t * slots + s)];
      if (id >= 0 && id < spec.experts.experts) {  // zero-compute experts multiply nothing
        tokens_[static_cast<std::size_t>(id)].push_back(static_cast<std::int32_t>(t));
      }
    }
  }
}

std::int64_t LayerCalibration::tokens(int expert) const {
  return static_cast<std::int64_t>(tokens_.at(static_cast<std::size_t>(expert)).size());
}

LayerCalibration::Inputs LayerCalibration::inputs(int expert, const Tensor& gate, const Tensor& up,
                                                  bool products) const {
  const std::int64_t hidden = spec_.experts.hidden, width = spec_.experts.intermediate;
  const bool gated = spec_.experts.activation.gated;
  Inputs result{InputStatistics(hidden, products), InputStatistics(width, products)};
  const auto& list = tokens_.at(static_cast<std::size_t>(expert));
  if (list.empty()) return result;

  const std::int64_t n = gated ? 2 * width : width;
  const Buffer memory = context_.allocate(prepared_bytes(context_, f32, 1, n, hidden, gated));
  const PreparedWeights prepared = gated ? prepare_paired(context_, f32, {gate}, {up}, memory)
                                         : prepare(context_, f32, {up}, memory);
  const std::vector<float> bias = bias_of(weights_.experts, static_cast<std::size_t>(expert));
  const auto most = std::min(rows_at_once, static_cast<std::int64_t>(list.size()));
  const Buffer workspace = context_.allocate(mlp_workspace_bytes(context_, prepared, most));
  std::vector<float> x(static_cast<std::size_t>(most * hidden));
  std::vector<float> h(static_cast<std::size_t>(most * width));
  for (std::size_t begin = 0; begin < list.size(); begin += static_cast<std::size_t>(most)) {
    const auto rows = std::min(most, static_cast<std::int64_t>(list.size() - begin));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = list[begin + static_cast<std::size_t>(r)] * hidden_.strides[0];
      for (std::int64_t i = 0; i < hidden; ++i) {
        x[static_cast<std::size_t>(r * hidden + i)] =
            load_f32(hidden_.data, hidden_.dtype, row + i);
      }
    }
    const Tensor inputs = view(x.data(), {rows, hidden});
    const Tensor outputs = view(h.data(), {rows, width});
    result.gate_up.add(context_, inputs);
    mlp_gate_up(context_, prepared, spec_.experts.activation,
                {.rows = inputs, .bias = bias.empty() ? nullptr : bias.data()}, outputs, workspace);
    result.down.add(context_, outputs);
  }
  return result;
}

}  // namespace shunt
