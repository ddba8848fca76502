// Grouped GEMM, plain and in double: what every engine is checked against.
#pragma once

#include <vector>

#include "shunt/gemm.hpp"

namespace shunt {

// out [R, n], where rows have three dimensions [groups * capacity, n], 0 where no row is there; and
// `magnitude`, as large, when not null: the sum of the absolute values of what was added, which
// error bounds are multiples of. Rows are rounded to spec.dtype, as engines round them. Takes
// in.weights.
std::vector<double> grouped_gemm_reference(const GroupedGemmSpec& spec, const GroupedGemmInputs& in,
                                           std::vector<double>* magnitude = nullptr);

}  // namespace shunt
