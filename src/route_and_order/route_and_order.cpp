// route_and_order(): checks, memory for what only passes between the stages, then the engine.
#include "shunt/route_and_order.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "cuda/current.hpp"
#include "route_and_order/engine.hpp"

namespace shunt {

namespace {

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// The workspace: ids, weights, then what the stages ask for, one after the other.
struct Layout {
  std::size_t ids = 0;     // bytes, as of weights
  std::size_t stages = 0;  // offset
  std::size_t bytes = 0;
};

Layout layout(const Context& context, const RouteSpec& route, const OrderSpec& order,
              std::int64_t tokens, std::int64_t hidden) {
  const std::size_t of_route = route_workspace_bytes(context, route, tokens, hidden);
  const std::size_t of_order = order_workspace_bytes(context, order, tokens);
  Layout made;
  made.ids = aligned(static_cast<std::size_t>(
      checked_product("route_and_order: bytes", tokens, std::int64_t{4} * route.slots())));
  made.stages = 2 * made.ids;
  made.bytes = made.stages + std::max(of_route, of_order);
  return made;
}

// A dense output, or memory of the workspace in its place.
Tensor given_or(const char* name, const Tensor& given, const Tensor& scratch, Device device) {
  if (!given) return scratch;
  check_tensor(
      name, given,
      {.dtypes = {scratch.dtype}, .shape = {scratch.shape[0], scratch.shape[1]}, .dense = true},
      device);
  return given;
}

}  // namespace

Support supports(const RouteSpec& route, const OrderSpec& order, Device device) {
  if (Support support = supports(route, device); !support) return support;
  if (Support support = supports(order, device); !support) return support;
  if (order.slots != route.slots()) {
    return refuse("slots of the order is {}: must be {}, the ids that routing gives a token",
                  order.slots, route.slots());
  }
  if (order.experts != route.experts + route.shared.count) {
    return refuse("experts of the order is {}: must be {}, the experts of the routing",
                  order.experts, route.experts + route.shared.count);
  }
  return {};
}

std::size_t route_and_order_workspace_bytes(const Context& context, const RouteSpec& route,
                                            const OrderSpec& order, std::int64_t tokens,
                                            std::int64_t hidden) {
  require_legal(supports(route, order, Device{}), "route_and_order");
  require(supports(route, order, context.device()), "route_and_order");
  return layout(context, route, order, tokens, hidden).bytes;
}

void route_and_order(const Context& context, const RouteSpec& route, const RouteInputs& in,
                     const RouteOutputs& routed, const OrderSpec& order,
                     const OrderOutputs& ordered, Workspace workspace, const Tensor& expert_map) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require_legal(supports(route, order, Device{}), "route_and_order");
  require(supports(route, order, device), "route_and_order");
  const auto [tokens, hidden] = route_shape(route, in, device);
  const Layout memory = layout(context, route, order, tokens, hidden);
  check_workspace("route_and_order", workspace, memory.bytes);
  auto* const base = static_cast<std::byte*>(workspace.data);
  const Workspace stages{base + memory.stages, workspace.bytes - memory.stages};

  const auto scratch = [&](std::size_t offset, DType dtype) {
    return view(base + offset, dtype, {tokens, route.slots()}, device);
  };
  RouteOutputs out = routed;
  out.ids = given_or("route_and_order: ids", routed.ids, scratch(0, i32), device);
  OrderInputs chosen{.ids = out.ids, .expert_map = expert_map};
  if (ordered.weights || ordered.sorted_weights) {
    out.weights =
        given_or("route_and_order: weights", routed.weights, scratch(memory.ids, f32), device);
    chosen.weights = out.weights;
  }
  const RouteCall routing = checked_route(context, route, in, out, stages);
  const OrderCall ordering = checked_order(context, order, chosen, ordered, stages);

  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) {
      return route_and_order_cuda(context, routing, ordering, stages);
    }
  }
  if (tokens > 0) route_cpu(context, routing, stages);
  order_cpu(context, ordering, stages);
}

}  // namespace shunt
