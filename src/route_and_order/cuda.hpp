// Kernels that route and order in one launch.
#pragma once

#include "order/order_cuda.hpp"
#include "route/cuda.hpp"

namespace shunt::routing {

// From logits. Returns false, and does nothing, where there are too many tokens or no kernel is
// laid out for the rule.
bool gate_order_cuda(const cuda_engine::Gpu& gpu, DeviceRoute r, const Tensor& logits,
                     const OrderCall& ordered);

// router_cuda(), with the same bits. Where `ordered` is given and the kernel is one for few tokens,
// the ids are sorted at its end, and the result is true. At most most_router_pairs.
inline constexpr std::int64_t most_router_pairs = 1024;
bool router_order_cuda(const cuda_engine::Gpu& gpu, const RouteCall& call, DeviceRoute r,
                       Workspace workspace, const OrderCall* ordered);

}  // namespace shunt::routing
