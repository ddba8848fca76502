// Layers of the C ABI.
#include "shunt/layer.hpp"

#include <string>
#include <vector>

#include "capi/call.hpp"
#include "capi/handles.hpp"
#include "capi/specs.hpp"

using shunt::Tensor;
using shunt::capi::Call;
using shunt::capi::run;
using shunt::capi::to_options;

namespace {

shunt::ExpertWeights to_experts(const Call& call, const char* name,
                                const shunt_expert_weights* given) {
  if (given == nullptr) return {};
  const shunt_expert_weights w = call.read(name, given);
  call.reserved((std::string(name) + ".reserved").c_str(), w.reserved);
  if (w.count < 0) call.wrong("{}.count is {}: must be 0 or more", name, w.count);
  const auto list = [&](const char* field, const shunt_tensor* tensors) {
    std::vector<Tensor> result;
    for (int32_t i = 0; tensors != nullptr && i < w.count; ++i) {
      result.push_back(call.tensor(fmt::format("{}.{}[{}]", name, field, i).c_str(), tensors + i));
    }
    return result;
  };
  const auto packed = [&](const char* field, const shunt_packed_matrix* matrices) {
    std::vector<shunt::PackedMatrix> result;
    for (int32_t i = 0; matrices != nullptr && i < w.count; ++i) {
      result.push_back(
          shunt::capi::to_packed(call, fmt::format("{}.{}[{}]", name, field, i), matrices[i]));
    }
    return result;
  };
  return {.gate = list("gate", w.gate),
          .up = list("up", w.up),
          .down = list("down", w.down),
          .gate_bias = list("gate_bias", w.gate_bias),
          .up_bias = list("up_bias", w.up_bias),
          .down_bias = list("down_bias", w.down_bias),
          .packed_gate = packed("packed_gate", w.packed_gate),
          .packed_up = packed("packed_up", w.packed_up),
          .packed_down = packed("packed_down", w.packed_down)};
}

shunt::LayerWeights to_weights(const Call& call, const shunt_layer_weights* given) {
  const shunt_layer_weights w = call.read("weights", given);
  return {.router = call.tensor("weights.router", w.router),
          .router_bias = call.tensor("weights.router_bias", w.router_bias),
          .selection_bias = call.tensor("weights.selection_bias", w.selection_bias),
          .per_expert_scale = call.tensor("weights.per_expert_scale", w.per_expert_scale),
          .hash_table = call.tensor("weights.hash_table", w.hash_table),
          .experts = to_experts(call, "weights.experts", w.experts),
          .shared = to_experts(call, "weights.shared", w.shared),
          .shared_gate = call.tensor("weights.shared_gate", w.shared_gate),
          .latent_down = call.tensor("weights.latent_down", w.latent_down),
          .latent_up = call.tensor("weights.latent_up", w.latent_up),
          .output_bias = call.tensor("weights.output_bias", w.output_bias),
          .router_norm = call.tensor("weights.router_norm", w.router_norm),
          .input_norm = call.tensor("weights.input_norm", w.input_norm),
          .output_norm = call.tensor("weights.output_norm", w.output_norm),
          .latent_norm = call.tensor("weights.latent_norm", w.latent_norm),
          .latent_input_norm = call.tensor("weights.latent_input_norm", w.latent_input_norm),
          .expert_norm = call.tensor("weights.expert_norm", w.expert_norm)};
}

}  // namespace

shunt_status shunt_layer_supports(const shunt_context* context, const char* spec_json,
                                  const shunt_layer_options* options) {
  return shunt::capi::run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto spec = shunt::layer_spec_from_json(&call.not_null("spec_json", spec_json));
    return shunt::supports(spec, to_options(call, options), on.device());
  });
}

shunt_status shunt_layer_create(const shunt_context* context, const char* spec_json,
                                const shunt_layer_weights* weights,
                                const shunt_layer_options* options, shunt_layer** layer) {
  return run(__func__, [&](const Call& call) {
    shunt_layer*& out = call.not_null("layer", layer);
    const shunt::Context& on = call.not_null("context", context).context;
    const auto spec = shunt::layer_spec_from_json(&call.not_null("spec_json", spec_json));
    const auto with = to_options(call, options);
    out = new shunt_layer{shunt::Layer(spec, to_weights(call, weights), on, with)};
  });
}

shunt_status shunt_layer_create_from_checkpoint(const shunt_context* context,
                                                const shunt_checkpoint* checkpoint, int32_t index,
                                                const shunt_layer_options* options,
                                                shunt_layer** layer) {
  return run(__func__, [&](const Call& call) {
    shunt_layer*& out = call.not_null("layer", layer);
    const shunt::Context& on = call.not_null("context", context).context;
    const shunt::Checkpoint& from = call.not_null("checkpoint", checkpoint).checkpoint;
    out = new shunt_layer{shunt::Layer(from, index, on, to_options(call, options))};
  });
}

void shunt_layer_destroy(shunt_layer* layer) { delete layer; }

shunt_status shunt_layer_save_prepared(const shunt_layer* layer, const char* path) {
  return run(__func__, [&](const Call& call) {
    call.not_null("layer", layer).layer.save_prepared(&call.not_null("path", path));
  });
}

shunt_status shunt_layer_load_prepared(const shunt_context* context, const char* path,
                                       shunt_layer** layer) {
  return run(__func__, [&](const Call& call) {
    shunt_layer*& out = call.not_null("layer", layer);
    const shunt::Context& on = call.not_null("context", context).context;
    out = new shunt_layer{shunt::Layer::load_prepared(&call.not_null("path", path), on)};
  });
}

shunt_status shunt_layer_unprepare(shunt_layer* layer) {
  return run(__func__, [&](const Call& call) { call.not_null("layer", layer).layer.unprepare(); });
}

shunt_status shunt_layer_spec(const shunt_layer* layer, char* text, size_t capacity,
                              size_t* length) {
  return run(__func__, [&](const Call& call) {
    call.text(shunt::to_json(call.not_null("layer", layer).layer.spec()), text, capacity, length);
  });
}

shunt_status shunt_layer_describe(const shunt_layer* layer, char* text, size_t capacity,
                                  size_t* length) {
  return run(__func__, [&](const Call& call) {
    call.text(shunt::describe(call.not_null("layer", layer).layer.spec()), text, capacity, length);
  });
}

int64_t shunt_layer_hidden_size(const shunt_layer* layer) {
  return layer == nullptr ? 0 : layer->layer.spec().hidden;
}

size_t shunt_layer_prepared_bytes(const shunt_layer* layer) {
  return layer == nullptr ? 0 : layer->layer.prepared_bytes();
}

shunt_status shunt_layer_workspace_bytes(const shunt_layer* layer, int64_t max_tokens,
                                         size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    call.not_null("bytes", bytes) = call.not_null("layer", layer).layer.workspace_bytes(max_tokens);
  });
}

shunt_status shunt_layer_explain(const shunt_layer* layer, int64_t tokens, char* text,
                                 size_t capacity, size_t* length) {
  return run(__func__, [&](const Call& call) {
    call.text(call.not_null("layer", layer).layer.explain(tokens), text, capacity, length);
  });
}

shunt_status shunt_layer_forward(const shunt_layer* layer, const shunt_layer_inputs* inputs,
                                 const shunt_layer_outputs* outputs, void* workspace,
                                 size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt_layer_inputs in = call.read("inputs", inputs);
    const shunt_layer_outputs out = call.read("outputs", outputs);
    call.not_null("layer", layer)
        .layer.forward({.hidden = call.tensor("inputs.hidden", in.hidden),
                        .token_ids = call.tensor("inputs.token_ids", in.token_ids),
                        .residual = call.tensor("inputs.residual", in.residual),
                        .valid_tokens = call.tensor("inputs.valid_tokens", in.valid_tokens),
                        .logits = call.tensor("inputs.logits", in.logits),
                        .ids = call.tensor("inputs.ids", in.ids),
                        .weights = call.tensor("inputs.weights", in.weights),
                        .expert_map = call.tensor("inputs.expert_map", in.expert_map)},
                       {.output = call.tensor("outputs.output", out.output),
                        .ids = call.tensor("outputs.ids", out.ids),
                        .weights = call.tensor("outputs.weights", out.weights)},
                       {workspace, workspace_bytes});
  });
}
