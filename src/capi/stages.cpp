// The stages of the C ABI.
#include <algorithm>
#include <array>
#include <string_view>

#include "capi/call.hpp"
#include "capi/specs.hpp"

using shunt::Tensor;
using shunt::capi::Call;
using shunt::capi::run;
using shunt::capi::run_supports;
using shunt::capi::to_spec;

// ---- structs of tensors that two functions read -------------------------------------------------

namespace {

shunt::RouteInputs to_inputs(const Call& call, const shunt_route_inputs* inputs) {
  const shunt_route_inputs in = call.read("inputs", inputs);
  return {.logits = call.tensor("inputs.logits", in.logits),
          .hidden = call.tensor("inputs.hidden", in.hidden),
          .router_weight = call.tensor("inputs.router_weight", in.router_weight),
          .router_bias = call.tensor("inputs.router_bias", in.router_bias),
          .selection_bias = call.tensor("inputs.selection_bias", in.selection_bias),
          .per_expert_scale = call.tensor("inputs.per_expert_scale", in.per_expert_scale),
          .token_ids = call.tensor("inputs.token_ids", in.token_ids),
          .hash_table = call.tensor("inputs.hash_table", in.hash_table),
          .shared_logits = call.tensor("inputs.shared_logits", in.shared_logits),
          .valid_tokens = call.tensor("inputs.valid_tokens", in.valid_tokens)};
}

// "outputs.ids", without memory of its own: calls do not allocate.
class Member {
 public:
  Member(std::string_view of, std::string_view member) {
    char* const dot = std::copy(of.begin(), of.end(), text_.data());
    *dot = '.';
    std::copy(member.begin(), member.end(), dot + 1);
  }
  operator const char*() const { return text_.data(); }

 private:
  std::array<char, 48> text_{};
};

// `name`: of the argument, in messages.
shunt::RouteOutputs to_outputs(const Call& call, const char* name,
                               const shunt_route_outputs* outputs) {
  const shunt_route_outputs out = call.read(name, outputs);
  const auto tensor = [&](const char* member, const shunt_tensor* given) {
    return call.tensor(Member(name, member), given);
  };
  return {.ids = tensor("ids", out.ids),
          .weights = tensor("weights", out.weights),
          .dense = tensor("dense", out.dense),
          .logits = tensor("logits", out.logits),
          .replay = tensor("replay", out.replay)};
}

shunt::OrderOutputs to_outputs(const Call& call, const char* name,
                               const shunt_order_outputs* outputs) {
  const shunt_order_outputs out = call.read(name, outputs);
  const auto tensor = [&](const char* member, const shunt_tensor* given) {
    return call.tensor(Member(name, member), given);
  };
  return {.offsets = tensor("offsets", out.offsets),
          .permutation = tensor("permutation", out.permutation),
          .inverse = tensor("inverse", out.inverse),
          .weights = tensor("weights", out.weights),
          .sorted_token_ids = tensor("sorted_token_ids", out.sorted_token_ids),
          .sorted_weights = tensor("sorted_weights", out.sorted_weights),
          .sorted_expert_ids = tensor("sorted_expert_ids", out.sorted_expert_ids),
          .num_tokens_post_padded = tensor("num_tokens_post_padded", out.num_tokens_post_padded),
          .num_sorted_tiles = tensor("num_sorted_tiles", out.num_sorted_tiles),
          .padded_inverse = tensor("padded_inverse", out.padded_inverse),
          .zeroed = tensor("zeroed", out.zeroed)};
}

}  // namespace

// ---- route --------------------------------------------------------------------------------------

shunt_status shunt_route_supports(const shunt_context* context, const shunt_route_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_route_workspace_bytes(const shunt_context* context, const shunt_route_spec* spec,
                                         int64_t tokens, int64_t hidden, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::route_workspace_bytes(on, rule, tokens, hidden);
  });
}

shunt_status shunt_route(const shunt_context* context, const shunt_route_spec* spec,
                         const shunt_route_inputs* inputs, const shunt_route_outputs* outputs,
                         void* workspace, size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    shunt::route(on, rule, to_inputs(call, inputs), to_outputs(call, "outputs", outputs),
                 {workspace, workspace_bytes});
  });
}

// ---- order and gather ---------------------------------------------------------------------------

shunt_status shunt_padded_rows_capacity(const shunt_order_spec* spec, int64_t tokens,
                                        int64_t* rows) {
  return run(__func__, [&](const Call& call) {
    const auto rule = to_spec(call, spec);
    call.not_null("rows", rows) = shunt::padded_rows_capacity(rule, tokens);
  });
}

shunt_status shunt_order_supports(const shunt_context* context, const shunt_order_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_order_workspace_bytes(const shunt_context* context, const shunt_order_spec* spec,
                                         int64_t tokens, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::order_workspace_bytes(on, rule, tokens);
  });
}

shunt_status shunt_order(const shunt_context* context, const shunt_order_spec* spec,
                         const shunt_order_inputs* inputs, const shunt_order_outputs* outputs,
                         void* workspace, size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_order_inputs in = call.read("inputs", inputs);
    shunt::order(on, rule,
                 {.ids = call.tensor("inputs.ids", in.ids),
                  .weights = call.tensor("inputs.weights", in.weights),
                  .expert_map = call.tensor("inputs.expert_map", in.expert_map),
                  .valid_tokens = call.tensor("inputs.valid_tokens", in.valid_tokens)},
                 to_outputs(call, "outputs", outputs), {workspace, workspace_bytes});
  });
}

// ---- route and order together -------------------------------------------------------------------

shunt_status shunt_route_and_order_supports(const shunt_context* context,
                                            const shunt_route_spec* route_spec,
                                            const shunt_order_spec* order_spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, &call.not_null("route_spec", route_spec)),
                           to_spec(call, &call.not_null("order_spec", order_spec)), on.device());
  });
}

shunt_status shunt_route_and_order_workspace_bytes(const shunt_context* context,
                                                   const shunt_route_spec* route_spec,
                                                   const shunt_order_spec* order_spec,
                                                   int64_t tokens, int64_t hidden, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto routing = to_spec(call, &call.not_null("route_spec", route_spec));
    const auto ordering = to_spec(call, &call.not_null("order_spec", order_spec));
    call.not_null("bytes", bytes) =
        shunt::route_and_order_workspace_bytes(on, routing, ordering, tokens, hidden);
  });
}

shunt_status shunt_route_and_order(const shunt_context* context, const shunt_route_spec* route_spec,
                                   const shunt_route_inputs* inputs,
                                   const shunt_route_outputs* routed,
                                   const shunt_order_spec* order_spec,
                                   const shunt_order_outputs* ordered,
                                   const shunt_tensor* expert_map, void* workspace,
                                   size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto routing = to_spec(call, &call.not_null("route_spec", route_spec));
    const auto ordering = to_spec(call, &call.not_null("order_spec", order_spec));
    shunt::route_and_order(on, routing, to_inputs(call, inputs), to_outputs(call, "routed", routed),
                           ordering, to_outputs(call, "ordered", ordered),
                           {workspace, workspace_bytes}, call.tensor("expert_map", expert_map));
  });
}

shunt_status shunt_gather_supports(const shunt_context* context, const shunt_gather_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

namespace {

shunt_status run_gather(const char* function, const shunt_context* context,
                        const shunt_gather_spec* spec, const shunt_gather_inputs* inputs,
                        const shunt_tensor* rows, const shunt_tensor* scales) {
  return run(function, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_gather_inputs in = call.read("inputs", inputs);
    shunt::gather(on, rule,
                  {.hidden = call.tensor("inputs.hidden", in.hidden),
                   .permutation = call.tensor("inputs.permutation", in.permutation),
                   .rows = call.tensor("inputs.rows", in.rows),
                   .weights = call.tensor("inputs.weights", in.weights),
                   .inverse = call.tensor("inputs.inverse", in.inverse)},
                  call.tensor("rows", rows), call.tensor("scales", scales));
  });
}

}  // namespace

shunt_status shunt_gather(const shunt_context* context, const shunt_gather_spec* spec,
                          const shunt_gather_inputs* inputs, const shunt_tensor* rows) {
  return run_gather(__func__, context, spec, inputs, rows, nullptr);
}

shunt_status shunt_gather_quantised(const shunt_context* context, const shunt_gather_spec* spec,
                                    const shunt_gather_inputs* inputs, const shunt_tensor* rows,
                                    const shunt_tensor* scales) {
  return run_gather(__func__, context, spec, inputs, rows, scales);
}

// ---- activate and combine -----------------------------------------------------------------------

shunt_status shunt_activate_supports(const shunt_context* context,
                                     const shunt_activation_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_activate(const shunt_context* context, const shunt_activation_spec* spec,
                            const shunt_tensor* gate, const shunt_tensor* up,
                            const shunt_tensor* out, const shunt_tensor* rows) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const Tensor g = call.tensor("gate", gate);
    const Tensor u = call.tensor("up", up);
    const Tensor h = call.tensor("out", out);
    shunt::activate(on, rule, g, u, h, call.tensor("rows", rows));
  });
}

shunt_status shunt_activate_quantised(const shunt_context* context,
                                      const shunt_activation_spec* spec,
                                      const shunt_quantise_spec* quantise, const shunt_tensor* gate,
                                      const shunt_tensor* up, const shunt_tensor* out,
                                      const shunt_tensor* scales, const shunt_tensor* rows) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const auto rounding = to_spec(call, quantise);
    const Tensor g = call.tensor("gate", gate);
    const Tensor u = call.tensor("up", up);
    const Tensor h = call.tensor("out", out);
    const Tensor s = call.tensor("scales", scales);
    shunt::activate(on, rule, rounding, g, u, h, s, call.tensor("rows", rows));
  });
}

shunt_status shunt_combine_supports(const shunt_context* context, const shunt_combine_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_combine(const shunt_context* context, const shunt_combine_spec* spec,
                           const shunt_combine_inputs* inputs, const shunt_tensor* out) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_combine_inputs in = call.read("inputs", inputs);
    shunt::combine(on, rule,
                   {.rows = call.tensor("inputs.rows", in.rows),
                    .inverse = call.tensor("inputs.inverse", in.inverse),
                    .weights = call.tensor("inputs.weights", in.weights),
                    .ids = call.tensor("inputs.ids", in.ids),
                    .hidden = call.tensor("inputs.hidden", in.hidden),
                    .shared = call.tensor("inputs.shared", in.shared),
                    .shared_gate = call.tensor("inputs.shared_gate", in.shared_gate),
                    .residual = call.tensor("inputs.residual", in.residual),
                    .valid_tokens = call.tensor("inputs.valid_tokens", in.valid_tokens)},
                   call.tensor("out", out));
  });
}
