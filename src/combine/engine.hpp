// What the engines of combine work on, checked by combine().
#pragma once

#include "shunt/combine.hpp"

namespace shunt {

void combine_cpu(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                 const Tensor& out);
// early: inverse and weights were there before the launch that precedes this one.
void combine_cuda(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                  const Tensor& out, bool early);
// combine(), with that.
void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out,
             bool early);

}  // namespace shunt
