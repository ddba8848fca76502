// Many rows of bf16 by 4-bit integers, a scale for 16, 32, 64 or 128 of k: fragment_many_rows.cuh.
#include "gemm/fragment_many_rows.cuh"

namespace shunt::cuda_engine {

void fragment_many_int4_bf16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                             const FragmentArgs& args) {
  with_int4_lane<true>(
      layout, [&]<class L>(std::type_identity<L>) { launch_many_rows<L>(gpu, plan, args); });
}

}  // namespace shunt::cuda_engine
