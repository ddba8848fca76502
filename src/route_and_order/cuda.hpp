// Kernels that route and order in one launch.
#pragma once

#include "order/order_cuda.hpp"
#include "route/cuda.hpp"

namespace shunt::routing {

// From logits. Returns false, and does nothing, where there are too many tokens or no kernel is
// laid out for the rule.
bool gate_order_cuda(const cuda_engine::Gpu& gpu, DeviceRoute r, const Tensor& logits,
                     const OrderCall& ordered);

// router_cuda(), which sorts the ids at its end where `ordered` is given: at most
// most_router_pairs, and 512 columns.
inline constexpr std::int64_t most_router_pairs = 1024;
void router_order_cuda(const cuda_engine::Gpu& gpu, const RouteCall& call, DeviceRoute r,
                       Workspace workspace, const OrderCall* ordered);

}  // namespace shunt::routing
