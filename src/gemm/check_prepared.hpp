// That prepared weights are those of a spec.
#pragma once

#include <string_view>

#include "shunt/gemm.hpp"

namespace shunt {

// Throws Error{invalid_argument} that begins with `who`.
void check_prepared(std::string_view who, const GroupedGemmSpec& spec,
                    const PreparedWeights& weights, Device device);

}  // namespace shunt
