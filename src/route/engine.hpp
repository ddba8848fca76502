// What the engines of route work on: tensors that route() has checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/runtime.hpp"
#include "route/rule.hpp"
#include "shunt/route.hpp"

namespace shunt {

struct RouteCall {
  const RouteSpec& spec;
  const RouteInputs& in;
  const RouteOutputs& out;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;  // 0: from logits
};

// Element `offset` of an i32 or i64 tensor.
inline std::int64_t index_at(const Tensor& tensor, std::int64_t offset) {
  return tensor.dtype == DType::i64 ? tensor.as<const std::int64_t>()[offset]
                                    : tensor.as<const std::int32_t>()[offset];
}

// Rows that hold tokens.
inline std::int64_t valid_tokens(const RouteCall& call) {
  if (!call.in.valid_tokens) return call.tokens;
  const std::int64_t valid = *call.in.valid_tokens.as<const std::int32_t>();
  return std::clamp<std::int64_t>(valid, 0, call.tokens);
}

// Rows of the logits or the hidden states, and the width of the latter (0: from logits), checked.
struct RouteShape {
  std::int64_t tokens = 0, hidden = 0;
};
RouteShape route_shape(const RouteSpec& spec, const RouteInputs& in, Device device);
// What route() is asked for, checked. Throws Error as route() does. The call refers to its
// arguments.
RouteCall checked_route(const Context& context, const RouteSpec& spec, const RouteInputs& in,
                        const RouteOutputs& out, Workspace workspace);

// Whether the spec means something, whatever the engine.
Support legal(const RouteSpec& spec);
// A legal spec without what only a call knows: the biases.
routing::Rule resolve(const RouteSpec& spec);

std::size_t route_cpu_workspace_bytes(int threads, const RouteSpec& spec, std::int64_t tokens,
                                      std::int64_t hidden);
void route_cpu(const Context& context, const RouteCall& call, Workspace workspace);

std::size_t route_cuda_workspace_bytes(const cuda_engine::Gpu& gpu, const RouteSpec& spec,
                                       std::int64_t tokens, std::int64_t hidden);
void route_cuda(const Context& context, const RouteCall& call, Workspace workspace);

}  // namespace shunt
