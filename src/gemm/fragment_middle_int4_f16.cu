// Tall tiles of f16 by 4-bit integers, a scale for 16, 32, 64 or 128 of k:
// fragment_middle_rows.cuh.
#include "gemm/fragment_middle_rows.cuh"

namespace shunt::cuda_engine {

void fragment_middle_int4_f16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                              const FragmentArgs& args) {
  with_int4_lane<false>(
      layout, [&]<class L>(std::type_identity<L>) { launch_middle_rows<L>(gpu, plan, args); });
}

}  // namespace shunt::cuda_engine
