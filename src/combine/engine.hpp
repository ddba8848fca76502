// What the engines of combine work on, checked by combine().
#pragma once

#include "shunt/combine.hpp"

namespace shunt {

void combine_cpu(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                 const Tensor& out);
void combine_cuda(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                  const Tensor& out);

}  // namespace shunt
