// That prepared weights are those of a spec.
#pragma once

#include <string_view>

#include "shunt/gemm.hpp"

namespace shunt {

// Throws Error{invalid_argument} that begins with `who`.
void check_prepared(std::string_view who, const GroupedGemmSpec& spec,
                    const PreparedWeights& weights, const Context& context);
// That they are on the context's device, in memory that is large enough and aligned.
void check_prepared_memory(std::string_view who, const PreparedWeights& weights,
                           const Context& context);

}  // namespace shunt
