// Which launches route and order a batch on CUDA.
#include "route_and_order/cuda.hpp"

#include "route_and_order/engine.hpp"

namespace shunt {

namespace {

// Of rules that no quick gate serves, in one launch; more are ordered sooner by all of the GPU than
// by the cluster that routed them.
constexpr std::int64_t most_gate_pairs = 512;

}  // namespace

void route_and_order_cuda(const Context& context, const RouteCall& call, const OrderCall& ordered,
                          Workspace workspace) {
  cuda_engine::Gpu gpu = cuda_engine::gpu(context);
  if (call.tokens > 0) {
    const routing::DeviceRoute r = routing::device_route(call);
    const std::int64_t pairs = call.tokens * r.rule.slots();
    if (call.hidden == 0 && !r.fast.served() && pairs <= most_gate_pairs &&
        routing::gate_order_cuda(gpu, r, call.in.logits, ordered)) {
      return;
    }
    if (call.hidden > 0) {
      const bool few = pairs <= routing::most_router_pairs;
      if (routing::router_order_cuda(gpu, call, r, workspace, few ? &ordered : nullptr)) return;
    } else {
      routing::gate_cuda(gpu, r, call.in.logits);
    }
    // Routing starts after all that came before, so its successor may start early, whoever asked.
    gpu.dependent_launch = true;
  }
  ordering::launch_sort(gpu, ordered, ordering::choose_plan(ordered, ordering::sort_limits(gpu)));
}

}  // namespace shunt
