// What a layer's call must be.
#include <algorithm>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "layer/impl.hpp"
#include "layer/plan.hpp"
#include "shunt/order.hpp"

namespace shunt {

namespace {

// What is written lies apart from each other, and from all that a call reads.
void check_apart_from_rows(const LayerInputs& in, std::initializer_list<NamedTensor> written) {
  check_all_apart("forward", written, {{"hidden", in.hidden}, {"residual", in.residual}});
}
void check_apart_from_rest(const LayerInputs& in, std::initializer_list<NamedTensor> written) {
  check_all_apart("forward", written,
                  {{"token_ids", in.token_ids},
                   {"logits", in.logits},
                   {"ids", in.ids},
                   {"weights", in.weights},
                   {"expert_map", in.expert_map},
                   {"valid_tokens", in.valid_tokens}});
}

}  // namespace

void Layer::Impl::check_call(const LayerInputs& in, const LayerOutputs& out,
                             Workspace workspace) const {
  const Device device = context.device();
  check_prepared("forward");
  check_tensor("forward: hidden", in.hidden,
               {.dtypes = float_dtypes, .shape = {any_size, spec.hidden}, .rows_dense = true},
               device);
  const std::int64_t tokens = in.hidden.shape[0];
  check_tensor(
      "forward: output", out.output,
      {.dtypes = float_dtypes, .shape = {tokens, spec.hidden}, .rows_dense = true, .written = true},
      device);
  check_same_or_apart("forward: output", out.output, "hidden", in.hidden);
  if (in.residual) {
    check_tensor("forward: residual", in.residual,
                 {.dtypes = float_dtypes, .shape = {tokens, spec.hidden}, .rows_dense = true},
                 device);
    check_same_or_apart("forward: output", out.output, "residual", in.residual);
  }
  if (check_given("forward: token_ids", in.token_ids, spec.route.hashed && !in.ids,
                  "the layer's routing")) {
    check_tensor("forward: token_ids", in.token_ids,
                 {.dtypes = {DType::i32, DType::i64}, .shape = {tokens}, .dense = true}, device);
  }
  const RouteSpec& route = spec.route;
  if (in.logits) {
    if (spec.routed_outside) {
      fail(Status::invalid_argument,
           "forward: logits are given: must be ids and weights, for the layer is routed_outside");
    }
    if (in.ids) fail(Status::invalid_argument, "forward: logits are given beside ids: must be one");
    check_tensor("forward: logits", in.logits,
                 {.dtypes = float_dtypes, .shape = {tokens, route.columns()}, .rows_dense = true},
                 device);
  }
  if (!held.views.router && !in.ids && !in.logits) {
    fail(Status::invalid_argument,
         "forward: ids are missing: the layer {}, so that ids and weights{} must be given",
         spec.routed_outside ? "is routed_outside" : "has no router",
         spec.routed_outside ? "" : ", or logits,");
  }
  if (in.expert_map) {
    if (!in.ids || spec.zero_experts > 0) {
      fail(Status::invalid_argument, "forward: expert_map is given: must be absent {}",
           in.ids ? "where the layer has zero_experts" : "without ids");
    }
    check_tensor("forward: expert_map", in.expert_map,
                 {.dtypes = {DType::i32}, .shape = {any_size}, .dense = true}, device);
    if (in.expert_map.shape[0] < spec.experts.experts) {
      fail(Status::invalid_argument, "forward: expert_map has {} ids: must be {} or more",
           in.expert_map.shape[0], spec.experts.experts);
    }
    const bool normed = spec.latent_norm.enabled || spec.output_norm.enabled;
    if (normed && in.expert_map.shape[0] > spec.experts.experts) {
      fail(
          Status::invalid_argument,
          "forward: expert_map has {} ids: must be {} in a layer with {}, which is of all experts' "
          "sum",
          in.expert_map.shape[0], spec.experts.experts,
          spec.latent_norm.enabled ? "latent_norm" : "output_norm");
    }
    OrderSpec by_expert = order_spec(spec);
    by_expert.experts = static_cast<int>(std::min<std::int64_t>(in.expert_map.shape[0], INT32_MAX));
    by_expert.expert_map = true;
    require(supports(by_expert, device), "forward: expert_map");
  }
  if (check_given("forward: weights", in.weights, static_cast<bool>(in.ids), "the call's ids")) {
    check_tensor("forward: ids", in.ids,
                 {.dtypes = {DType::i32}, .shape = {tokens, route.slots()}, .dense = true}, device);
    check_tensor("forward: weights", in.weights,
                 {.dtypes = {DType::f32}, .shape = {tokens, route.slots()}, .dense = true}, device);
    if (out.ids || out.weights) {
      fail(Status::invalid_argument,
           "forward: outputs.{} are asked for: must be absent where the call gives ids",
           out.ids ? "ids" : "weights");
    }
  }
  if (in.valid_tokens) {
    check_tensor("forward: valid_tokens", in.valid_tokens, {.dtypes = {DType::i32}, .shape = {1}},
                 device);
  }
  if (out.ids) {
    check_tensor("forward: outputs.ids", out.ids,
                 {.dtypes = {DType::i32}, .shape = {tokens, spec.route.top_k}, .dense = true},
                 device);
  }
  if (out.weights) {
    check_tensor("forward: outputs.weights", out.weights,
                 {.dtypes = {DType::f32}, .shape = {tokens, spec.route.top_k}, .dense = true},
                 device);
  }
  // The output may be the rows, each in its place (above).
  check_apart_from_rows(in, {{"outputs.ids", out.ids}, {"outputs.weights", out.weights}});
  check_apart_from_rest(
      in, {{"output", out.output}, {"outputs.ids", out.ids}, {"outputs.weights", out.weights}});
  const std::size_t needed =
      carve(spec, options, rows_dtype(), tokens, stage_bytes(tokens), {}).total_bytes;
  check_workspace("forward", workspace, needed);
  const Tensor used = bytes_at(workspace.data, needed, device);
  check_apart_from_rows(in, {{"workspace", used}});
  check_apart_from_rest(in, {{"workspace", used}});
  check_all_apart(
      "forward", {{"workspace", used}},
      {{"output", out.output}, {"outputs.ids", out.ids}, {"outputs.weights", out.weights}});
}

}  // namespace shunt
