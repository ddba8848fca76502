#include "capi/specs.hpp"

namespace shunt::capi {

// What the header's constants must equal.
static_assert(static_cast<int>(Status::internal) == SHUNT_INTERNAL);
static_assert(static_cast<int>(DType::boolean) == SHUNT_BOOL);
static_assert(static_cast<int>(DType::f4_e2m1) == SHUNT_F4_E2M1);
static_assert(static_cast<int>(DeviceType::cuda) == SHUNT_CUDA);
static_assert(static_cast<int>(Score::sparsemixer) == SHUNT_SCORE_SPARSEMIXER);
static_assert(static_cast<int>(ScoreStage::after_top_k) == SHUNT_AFTER_TOP_K);
static_assert(static_cast<int>(GroupRank::sum_of_top_2) == SHUNT_GROUP_SUM_OF_TOP_2);
static_assert(static_cast<int>(EpsilonRule::floor) == SHUNT_EPSILON_FLOOR);
static_assert(static_cast<int>(SharedWeight::joint) == SHUNT_SHARED_JOINT);
static_assert(static_cast<int>(Quantise::block_128) == SHUNT_QUANTISE_BLOCK_128);
static_assert(static_cast<int>(Activation::situ) == SHUNT_ACTIVATION_SITU);
static_assert(static_cast<int>(LimitOn::output) == SHUNT_LIMIT_ON_OUTPUT);

RouteSpec to_spec(const Call& call, const shunt_route_spec* spec) {
  const shunt_route_spec defaults = SHUNT_ROUTE_SPEC_INIT;
  const shunt_route_spec s = call.read("spec", spec, defaults);
  return {
      .experts = s.experts,
      .top_k = s.top_k,
      .score = call.choice("spec.score", s.score, Score::sparsemixer),
      .score_stage = call.choice("spec.score_stage", s.score_stage, ScoreStage::after_top_k),
      // 0: of callers who fill the fields in one by one.
      .logit_scale = s.logit_scale == 0 ? 1 : s.logit_scale,
      .router_bias = call.flag("spec.router_bias", s.router_bias),
      .soft_cap = s.soft_cap,
      .selection_bias = call.flag("spec.selection_bias", s.selection_bias),
      .groups = {.count = s.group_count,
                 .keep = s.group_keep,
                 .rank_by = call.choice("spec.group_rank", s.group_rank, GroupRank::sum_of_top_2),
                 .limit = s.group_limit},
      .renormalize = call.flag("spec.renormalize", s.renormalize),
      .renormalize_epsilon = s.renormalize_epsilon,
      .epsilon_rule = call.choice("spec.epsilon_rule", s.epsilon_rule, EpsilonRule::floor),
      .scale = s.scale,
      .scale_in_weights = call.flag("spec.scale_in_weights", s.scale_in_weights),
      .per_expert_scale = call.flag("spec.per_expert_scale", s.per_expert_scale),
      .hashed = call.flag("spec.hashed", s.hashed),
      .jitter = s.jitter,
      .shared = {.count = s.shared_count,
                 .weight = call.choice("spec.shared_weight", s.shared_weight, SharedWeight::joint)},
      .weight_on_input = call.flag("spec.weight_on_input", s.weight_on_input),
      .batch_invariant = call.flag("spec.batch_invariant", s.batch_invariant),
  };
}

OrderSpec to_spec(const Call& call, const shunt_order_spec* spec) {
  const shunt_order_spec defaults = SHUNT_ORDER_SPEC_INIT;
  const shunt_order_spec s = call.read("spec", spec, defaults);
  return {
      .experts = s.experts,
      .slots = s.slots,
      .first_expert = s.first_expert,
      .local_experts = s.local_experts,
      .expert_map = call.flag("spec.expert_map", s.expert_map),
      .tile = s.tile,
      .sentinel = s.sentinel,
      .tile_for_empty_expert = call.flag("spec.tile_for_empty_expert", s.tile_for_empty_expert)};
}

GatherSpec to_spec(const Call& call, const shunt_gather_spec* spec) {
  const shunt_gather_spec defaults = SHUNT_GATHER_SPEC_INIT;
  const shunt_gather_spec s = call.read("spec", spec, defaults);
  call.reserved("spec.reserved", s.reserved);
  return {.slots = s.slots,
          .scale_by_weight = call.flag("spec.scale_by_weight", s.scale_by_weight),
          .quantise = call.choice("spec.quantise", s.quantise, Quantise::block_128),
          .scale_upper_bound = s.scale_upper_bound,
          .power_of_two_scales = call.flag("spec.power_of_two_scales", s.power_of_two_scales)};
}

QuantiseSpec to_spec(const Call& call, const shunt_quantise_spec* spec) {
  const shunt_quantise_spec defaults = SHUNT_QUANTISE_SPEC_INIT;
  const shunt_quantise_spec s = call.read("quantise", spec, defaults);
  call.reserved("quantise.reserved", s.reserved);
  return {.quantise = call.choice("quantise.quantise", s.quantise, Quantise::block_128),
          .scale_upper_bound = s.scale_upper_bound,
          .power_of_two_scales = call.flag("quantise.power_of_two_scales", s.power_of_two_scales)};
}

GroupedGemmSpec to_spec(const Call& call, const shunt_grouped_gemm_spec* spec) {
  const shunt_grouped_gemm_spec defaults = SHUNT_GROUPED_GEMM_SPEC_INIT;
  const shunt_grouped_gemm_spec s = call.read("spec", spec, defaults);
  call.reserved("spec.reserved", s.reserved);
  return {.groups = s.groups,
          .n = s.n,
          .k = s.k,
          .dtype = call.choice("spec.dtype", s.dtype, DType::f4_e2m1),
          .bias = call.flag("spec.bias", s.bias),
          .prepared = call.flag("spec.prepared", s.prepared),
          .format = resolved(to_format(s.format)),
          .rows = to_rows(call, "spec.rows", s.rows),
          .batch_invariant = call.flag("spec.batch_invariant", s.batch_invariant),
          .fast_accumulation = call.flag("spec.fast_accumulation", s.fast_accumulation)};
}

std::string to_text(const Call& call, const std::string& name, const char (&text)[32]) {
  if (std::memchr(text, '\0', sizeof text) == nullptr) {
    call.wrong("{} does not end within {} bytes", name, sizeof text);
  }
  return text;
}

FormatSpec to_format(const char* text) {
  return text == nullptr || *text == '\0' ? FormatSpec{} : format_from_string(text);
}

RowFormat to_rows(const Call& call, const char* name, std::int32_t value) {
  return call.choice(name, value, RowFormat::nvfp4);
}

PackedMatrix to_packed(const Call& call, const std::string& name,
                       const shunt_packed_matrix& given) {
  call.reserved((name + ".reserved").c_str(), given.reserved);
  const auto tensor = [&](const char* field, const shunt_tensor& part) {
    return part.rank == 0 ? Tensor{} : call.tensor((name + field).c_str(), &part);
  };
  return {.format = resolved(to_format(to_text(call, name + ".format", given.format).c_str())),
          .n = given.n,
          .k = given.k,
          .values = tensor(".values", given.values),
          .scales = tensor(".scales", given.scales),
          .zeros = tensor(".zeros", given.zeros),
          .group_of = tensor(".group_of", given.group_of),
          .positions = tensor(".positions", given.positions),
          .global_scale = given.global_scale};
}

ActivationSpec to_spec(const Call& call, const shunt_activation_spec* spec) {
  const shunt_activation_spec defaults = SHUNT_ACTIVATION_SPEC_INIT;
  const shunt_activation_spec s = call.read("spec", spec, defaults);
  return {.kind = call.choice("spec.kind", s.kind, Activation::situ),
          .gated = call.flag("spec.gated", s.gated),
          .alpha = s.alpha,
          .limit = s.limit,
          .limit_on = call.choice("spec.limit_on", s.limit_on, LimitOn::output),
          .up_offset = s.up_offset,
          .beta = s.beta,
          .linear_beta = s.linear_beta};
}

CombineSpec to_spec(const Call& call, const shunt_combine_spec* spec) {
  const shunt_combine_spec defaults = SHUNT_COMBINE_SPEC_INIT;
  const shunt_combine_spec s = call.read("spec", spec, defaults);
  return {.slots = s.slots,
          .weighted = call.flag("spec.weighted", s.weighted),
          .identity_from = s.identity_from,
          .identity_until = s.identity_until,
          .shared_gate = call.flag("spec.shared_gate", s.shared_gate),
          .shared_scale = s.shared_scale};
}

ShuffleSpec to_spec(const Call& call, const shunt_shuffle_spec* spec) {
  const shunt_shuffle_spec defaults = SHUNT_SHUFFLE_SPEC_INIT;
  const shunt_shuffle_spec s = call.read("spec", spec, defaults);
  return {.ranks = s.ranks,
          .experts = s.experts,
          .first_expert = s.first_expert,
          .end_expert = s.end_expert,
          .padded = call.flag("spec.padded", s.padded),
          .zero_fill = call.flag("spec.zero_fill", s.zero_fill)};
}

ScatterAddSpec to_spec(const Call& call, const shunt_scatter_add_spec* spec) {
  const shunt_scatter_add_spec defaults = SHUNT_SCATTER_ADD_SPEC_INIT;
  const shunt_scatter_add_spec s = call.read("spec", spec, defaults);
  call.reserved("spec.reserved", s.reserved);
  return {.accumulate = call.flag("spec.accumulate", s.accumulate)};
}

LayerOptions to_options(const Call& call, const shunt_layer_options* options) {
  const shunt_layer_options defaults = SHUNT_LAYER_OPTIONS_INIT;
  const shunt_layer_options o =
      options == nullptr ? defaults : call.read("options", options, defaults);
  call.reserved("options.reserved", o.reserved);
  return {.dtype = call.choice("options.dtype", o.dtype, DType::f4_e2m1),
          .format = to_format(o.format),
          .rows = to_rows(call, "options.rows", o.rows),
          .in_place = call.flag("options.in_place", o.in_place),
          .batch_invariant = call.flag("options.batch_invariant", o.batch_invariant),
          .fast_accumulation = call.flag("options.fast_accumulation", o.fast_accumulation)};
}

}  // namespace shunt::capi
