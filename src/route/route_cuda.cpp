// The host side of the CUDA engine: a call resolved into what kernels are given.
#include "core/check.hpp"
#include "route/cuda.hpp"

namespace shunt {

namespace routing {

namespace {

DeviceVector vector_of(const Tensor& tensor) {
  return {tensor.data, static_cast<Form>(tensor.dtype)};
}
DeviceIndices indices_of(const Tensor& tensor) { return {tensor.data, tensor.dtype == DType::i64}; }
template <class T>
DeviceRows<T> rows_of(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.strides[0]};
}

// Whether the rule may be selected quickly, and what that leaves out.
void choose_selection(const RouteCall& call, DeviceRoute& r) {
  const Rule& rule = r.rule;
  r.quick = false;
  if (rule.top_k > 63 || rule.weigh == Weigh::sparsemixer) return;
  for (const int n : per_lane_choices) {
    if (32 * n >= rule.experts) fit_per_lane(r, n);
    if (r.quick) break;
  }
  const bool about =
      rule.scores_rank && (rule.weigh == Weigh::sigmoid || rule.weigh == Weigh::softmax_of_all);
  r.approximation = about ? 4e-7F : 0;
  r.keys_are_exact = call.hidden == 0 && call.in.logits.dtype != DType::f32 &&
                     !call.spec.router_bias && !call.spec.selection_bias && rule.soft_cap == 0 &&
                     rule.logit_scale == 1;
}

}  // namespace

void fit_per_lane(DeviceRoute& r, int per_lane) {
  const Rule& rule = r.rule;
  r.quick = true;
  r.per_lane = per_lane;
  r.grouped = rule.groups > 1;
  if (!r.grouped) return;
  // Whole lanes to a group, and a power of two of them.
  const int lanes = rule.group_size / per_lane;
  r.quick = rule.group_size % per_lane == 0 && (lanes & (lanes - 1)) == 0 && rule.groups <= 32;
  r.lanes_per_group = r.quick ? lanes : 1;
}

DeviceRoute device_route(const RouteCall& call) {
  DeviceRoute r;
  r.rule = resolve(call.spec);
  r.tokens = call.tokens;
  r.valid_tokens = call.in.valid_tokens.as<const std::int32_t>();
  r.router_bias = vector_of(call.in.router_bias);
  r.selection_bias = vector_of(call.in.selection_bias);
  r.per_expert_scale = vector_of(call.in.per_expert_scale);
  r.hashed = call.spec.hashed;
  if (r.hashed) {
    r.token_ids = indices_of(call.in.token_ids);
    r.token_stride = call.in.token_ids.strides[0];
    r.hash_table = indices_of(call.in.hash_table);
    r.hash_row_stride = call.in.hash_table.strides[0];
    r.hash_column_stride = call.in.hash_table.strides[1];
    r.vocabulary = call.in.hash_table.shape[0];
  }
  r.shared_logits = rows_of<const float>(call.in.shared_logits);
  r.ids = rows_of<std::int32_t>(call.out.ids);
  r.weights = rows_of<float>(call.out.weights);
  r.dense = rows_of<float>(call.out.dense);
  r.logits_out = rows_of<float>(call.out.logits);
  r.replay = rows_of<std::int16_t>(call.out.replay);
  choose_selection(call, r);
  r.fast = fast_plan(r, false);
  if (r.fast.lanes > 0 && !r.fast.scored && r.rule.top_k <= 8)
    r.plain_best = r.rule.top_k <= 4 ? 4 : 8;
  return r;
}

FastPlan fast_plan(const DeviceRoute& r, bool many, bool gate) {
  const Rule& rule = r.rule;
  const bool biased = r.selection_bias.data != nullptr;
  const bool shares = biased && rule.weigh == Weigh::softmax_of_all;
  const bool rule_fits = r.quick && !r.hashed && rule.logit_scale == 1 && rule.soft_cap == 0 &&
                         rule.shared_count == 0 && rule.top_k <= 24 && rule.experts <= 1024 &&
                         r.dense.data == nullptr && r.logits_out.data == nullptr &&
                         (!biased || r.selection_bias.form == Form::f32) &&
                         (!shares || (gate && rule.scores_rank && rule.groups <= 1));
  if (!rule_fits) return {};
  FastPlan plan{.best = rule.top_k <= 8 ? 8 : 16, .scored = biased, .shares = shares};
  while (32 * plan.blocks < rule.experts) plan.blocks *= 2;
  if (rule.top_k > 16) {
    if (rule.groups > 1 || shares) return {};
    plan.best = 24;
    return plan;
  }
  if (rule.groups > 1) {
    if (rule.group_limit > 0 || !biased || rule.groups != 8 || rule.group_size != 32) return {};
    plan.in_groups = true;
  }
  const int most = many ? 32 / plan.blocks : 1;  // tokens of a warp whose experts registers hold
  plan.lanes = plan.best <= 8 && most >= 4 ? 8 : most >= 2 ? 16 : 32;
  if (plan.lanes == 16) plan.best = 16;
  return plan;
}

}  // namespace routing

std::size_t route_cuda_workspace_bytes(const cuda_engine::Gpu& gpu, const RouteSpec& spec,
                                       std::int64_t tokens, std::int64_t hidden) {
  return hidden > 0 ? routing::router_workspace_bytes(gpu, tokens, spec.columns()) : 0;
}

void route_cuda(const Context& context, const RouteCall& call, Workspace workspace) {
  const cuda_engine::Gpu& gpu = cuda_engine::gpu(context);
  const routing::DeviceRoute r = routing::device_route(call);
  if (call.hidden > 0) return routing::router_cuda(gpu, call, r, workspace);
  routing::gate_cuda(gpu, r, call.in.logits);
}

}  // namespace shunt
