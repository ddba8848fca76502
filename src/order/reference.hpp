// order, plain: what every engine is checked against.
#pragma once

#include "shunt/order.hpp"

namespace shunt {

// Takes what order() takes, checks nothing, allocates.
void order_reference(const OrderSpec& spec, const OrderInputs& in, const OrderOutputs& out);

// Takes what gather() takes; computes in double.
void gather_reference(const GatherSpec& spec, const GatherInputs& in, Tensor rows,
                      Tensor scales = {});

}  // namespace shunt
