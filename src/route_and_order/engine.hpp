// The CUDA engine of route_and_order: what has been checked, one launch or two.
#pragma once

#include "order/engine.hpp"
#include "route/engine.hpp"

namespace shunt {

// `ordered` sorts the ids that `call` writes.
void route_and_order_cuda(const Context& context, const RouteCall& call, const OrderCall& ordered,
                          Workspace workspace);

}  // namespace shunt
