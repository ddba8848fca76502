// The shuffles and the padded scatter-add of the C ABI.
#include "capi/call.hpp"
#include "capi/specs.hpp"

using shunt::capi::Call;
using shunt::capi::run;
using shunt::capi::run_supports;
using shunt::capi::to_spec;

shunt_status shunt_shuffle_supports(const shunt_context* context, const shunt_shuffle_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_shuffle_workspace_bytes(const shunt_context* context,
                                           const shunt_shuffle_spec* spec, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::shuffle_workspace_bytes(on, rule);
  });
}

shunt_status shunt_combine_shuffling(const shunt_context* context, const shunt_shuffle_spec* spec,
                                     const shunt_tensor* tokens, const shunt_tensor* token_counts,
                                     const shunt_tensor* rows, const shunt_tensor* counts,
                                     void* workspace, size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt::combine_shuffling(on, to_spec(call, spec), call.tensor("tokens", tokens),
                             call.tensor("token_counts", token_counts), call.tensor("rows", rows),
                             call.tensor("counts", counts), {workspace, workspace_bytes});
  });
}

shunt_status shunt_split_shuffling(const shunt_context* context, const shunt_shuffle_spec* spec,
                                   const shunt_tensor* rows, const shunt_tensor* token_counts,
                                   const shunt_tensor* tokens, void* workspace,
                                   size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt::split_shuffling(on, to_spec(call, spec), call.tensor("rows", rows),
                           call.tensor("token_counts", token_counts), call.tensor("tokens", tokens),
                           {workspace, workspace_bytes});
  });
}

shunt_status shunt_offsets_from_counts(const shunt_context* context, const shunt_tensor* counts,
                                       const shunt_tensor* offsets) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt::offsets_from_counts(on, call.tensor("counts", counts), call.tensor("offsets", offsets));
  });
}

shunt_status shunt_counts_from_offsets(const shunt_context* context, const shunt_tensor* offsets,
                                       const shunt_tensor* counts) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt::counts_from_offsets(on, call.tensor("offsets", offsets), call.tensor("counts", counts));
  });
}

shunt_status shunt_scatter_add_supports(const shunt_context* context,
                                        const shunt_scatter_add_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_scatter_add_workspace_bytes(const shunt_context* context,
                                               const shunt_scatter_add_spec* spec, int64_t tokens,
                                               int64_t positions, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::scatter_add_workspace_bytes(on, rule, tokens, positions);
  });
}

shunt_status shunt_scatter_add_padded(const shunt_context* context,
                                      const shunt_scatter_add_spec* spec,
                                      const shunt_scatter_add_inputs* inputs,
                                      const shunt_tensor* out, void* workspace,
                                      size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_scatter_add_inputs in = call.read("inputs", inputs);
    shunt::scatter_add_padded(
        on, rule,
        {.rows = call.tensor("inputs.rows", in.rows),
         .token_counts = call.tensor("inputs.token_counts", in.token_counts),
         .token_indices = call.tensor("inputs.token_indices", in.token_indices)},
        call.tensor("out", out), {workspace, workspace_bytes});
  });
}
