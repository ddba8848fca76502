// The CUDA engine of order, for its own files and for kernels that end in a sort.
#pragma once

#include "cuda/runtime.hpp"
#include "order/sort_plan.hpp"

namespace shunt::ordering {

SortLimits sort_limits(const cuda_engine::Gpu& gpu);
// The tail of a kernel whose ids `arrivals` blocks of `threads` write. `blocks`: of one cluster,
// which sort together; with more than one arrival, 1.
SortTail sort_tail(const cuda_engine::Gpu& gpu, const OrderCall& call, unsigned blocks,
                   unsigned threads, unsigned arrivals);
void launch_sort(const cuda_engine::Gpu& gpu, const OrderCall& call, const SortPlan& plan);

}  // namespace shunt::ordering
