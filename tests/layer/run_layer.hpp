// A layer's call on any engine, with what it puts out.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "engine.hpp"
#include "shunt/layer.hpp"

namespace shunt::testing {

// Starts as garbage: whatever is not written shows.
struct Result {
  std::vector<float> output;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  Result(const LayerSpec& spec, std::int64_t tokens)
      : output(static_cast<std::size_t>(tokens * spec.hidden), std::nanf("")),
        ids(static_cast<std::size_t>(tokens * spec.route.top_k), -77),
        weights(ids.size(), std::nanf("")) {}
};

// A call of the layer with tensors of its context: forward() or forward_timed().
using Forward = void(const Layer& layer, const LayerInputs& in, const LayerOutputs& out,
                     Workspace workspace);

// `in` is the host's. The workspace starts as garbage too. Ids and weights are asked for where the
// layer routes.
inline Result run_by(Forward* forward, const Context& context, const Layer& layer,
                     const LayerInputs& in) {
  const LayerSpec& spec = layer.spec();
  const std::int64_t tokens = in.hidden.shape[0];
  Result result(spec, tokens);
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  const std::vector<unsigned char> garbage(workspace.bytes(), 0xff);
  context.copy(workspace.data(), garbage.data(), garbage.size());
  test::Mirror mirror(context);
  LayerOutputs out{.output = mirror.out(view(result.output.data(), {tokens, spec.hidden}))};
  if (!in.ids) {
    out.ids = mirror.out(view(result.ids.data(), {tokens, spec.route.top_k}));
    out.weights = mirror.out(view(result.weights.data(), {tokens, spec.route.top_k}));
  }
  forward(layer,
          {.hidden = mirror.in(in.hidden),
           .token_ids = mirror.in(in.token_ids),
           .residual = mirror.in(in.residual),
           .valid_tokens = mirror.in(in.valid_tokens),
           .logits = mirror.in(in.logits),
           .ids = mirror.in(in.ids),
           .weights = mirror.in(in.weights),
           .expert_map = mirror.in(in.expert_map)},
          out, workspace);
  mirror.fetch();
  return result;
}

inline Result run(const Context& context, const Layer& layer, const LayerInputs& in) {
  return run_by([](const Layer& of, const LayerInputs& there, const LayerOutputs& out,
                   Workspace workspace) { of.forward(there, out, workspace); },
                context, layer, in);
}

inline Result run_in_stages(const Context& context, const Layer& layer, const LayerInputs& in) {
  return run_by(
      [](const Layer& of, const LayerInputs& there, const LayerOutputs& out, Workspace workspace) {
        std::vector<StageTime> times;
        of.forward_timed(there, out, workspace, times);
      },
      context, layer, in);
}

}  // namespace shunt::testing
