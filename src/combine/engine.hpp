// What the engines of combine work on, checked by combine().
#pragma once

#include <cstdint>
#include <limits>

#include "shunt/combine.hpp"

namespace shunt {

// The last id of a zero-compute expert.
inline std::int32_t last_identity(const CombineSpec& spec) {
  return spec.identity_until > 0 ? spec.identity_until - 1
                                 : std::numeric_limits<std::int32_t>::max();
}

void combine_cpu(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                 const Tensor& out);
// early: inverse and weights were there before the launch that precedes this one.
void combine_cuda(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                  const Tensor& out, bool early);
// combine(), with that.
void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out,
             bool early);

}  // namespace shunt
