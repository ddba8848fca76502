// Few rows of f16 by 4-bit integers, a scale for 16, 32, 64 or 128 of k: fragment_few_rows.cuh.
#include "gemm/fragment_few_rows.cuh"

namespace shunt::cuda_engine {

void fragment_few_int4_f16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                           const FragmentArgs& args, const FewChain& chain) {
  with_int4_lane<false>(
      layout, [&]<class L>(std::type_identity<L>) { launch_few_rows<L>(gpu, plan, args, chain); });
}

}  // namespace shunt::cuda_engine
