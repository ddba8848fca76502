// route_and_order: route, and order of the ids that it chose. One launch on a GPU while the batch
// is small; the same results, to the bit, as route() followed by order(), on any engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/order.hpp"
#include "shunt/route.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Whether the engine routes by one spec and orders by the other, and the two belong together:
// order.slots is route.slots(), and order.experts is route.experts + route.shared.count.
Support supports(const RouteSpec& route, const OrderSpec& order, Device device);

// Bytes of workspace for up to `tokens` tokens of width `hidden` (0: from logits), whichever
// outputs are asked for. Throws Error for specs that supports() refuses.
std::size_t route_and_order_workspace_bytes(const Context& context, const RouteSpec& route,
                                            const OrderSpec& order, std::int64_t tokens,
                                            std::int64_t hidden);

// `routed`: as of route(), but ids and weights must be dense, and none is required: ids and weights
// that only the order needs stay in the workspace. `ordered`: as of order(), at least one; zeroed
// must not overlap anything that is read. expert_map: as of OrderInputs. Tokens at or past
// in.valid_tokens have ids -1, so the order skips them.
//
// CUDA: one launch
//   from logits         by a rule that no fast gate serves, of up to 512 experts: up to 512 pairs
//                       (tokens x slots) and 16 tokens a block of the largest cluster, 256 on an
//                       H100 or H200
//   from hidden states  where one launch of few tokens routes them (up to 16, or more of few
//                       columns) and up to 1024 pairs
// and two otherwise, the second of which starts while the first ends.
//
// Throws Error for specs that supports() refuses, and for what route() and order() refuse in their
// arguments, before anything runs.
void route_and_order(const Context& context, const RouteSpec& route, const RouteInputs& in,
                     const RouteOutputs& routed, const OrderSpec& order,
                     const OrderOutputs& ordered, Workspace workspace,
                     const Tensor& expert_map = {});

}  // namespace shunt
