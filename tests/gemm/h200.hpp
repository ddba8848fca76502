// The figures that plans are made by, of an H200 as its driver says them.
#pragma once

#include "gemm/product_plan.hpp"

namespace shunt::cuda_engine {

inline constexpr GpuFigures h200{.compute = 90,
                                 .multiprocessors = 132,
                                 .shared_bytes = 232448,
                                 .largest_cluster = 8,
                                 .read_gbps = 4917,
                                 .clock_ghz = 1.98};

}  // namespace shunt::cuda_engine
