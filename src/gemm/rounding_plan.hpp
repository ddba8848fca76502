// Where rows of an expert's two fp8 products are rounded: a pure function, as packed_plan.hpp.
#pragma once

#include "gemm/fused.hpp"
#include "gemm/packed_plan.hpp"

namespace shunt::cuda_engine {

// The fastest by the sum of what is predicted for both products and the passes between them.
Rounding plan_rounding(PackedSizes gate_up, PackedSizes down, const GpuFigures& gpu);

}  // namespace shunt::cuda_engine
