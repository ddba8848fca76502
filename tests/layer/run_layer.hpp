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

// `in` is the host's. The workspace starts as garbage too.
inline Result run(const Context& context, const Layer& layer, const LayerInputs& in) {
  const LayerSpec& spec = layer.spec();
  const std::int64_t tokens = in.hidden.shape[0];
  Result result(spec, tokens);
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  const std::vector<unsigned char> garbage(workspace.bytes(), 0xff);
  context.copy(workspace.data(), garbage.data(), garbage.size());
  test::Mirror mirror(context);
  layer.forward({.hidden = mirror.in(in.hidden),
                 .token_ids = mirror.in(in.token_ids),
                 .residual = mirror.in(in.residual),
                 .valid_tokens = mirror.in(in.valid_tokens)},
                {.output = mirror.out(view(result.output.data(), {tokens, spec.hidden})),
                 .ids = mirror.out(view(result.ids.data(), {tokens, spec.route.top_k})),
                 .weights = mirror.out(view(result.weights.data(), {tokens, spec.route.top_k}))},
                workspace);
  mirror.fetch();
  return result;
}

}  // namespace shunt::testing
