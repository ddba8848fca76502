// combine, plain: what every engine is checked against.
#pragma once

#include "shunt/combine.hpp"

namespace shunt {

// Takes what combine() takes, checks nothing; sums in double.
void combine_reference(const CombineSpec& spec, const CombineInputs& in, Tensor out);

}  // namespace shunt
