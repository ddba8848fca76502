// On any GPU: rows by codes of 8 bits: mma_fragments.cuh.
#include "gemm/mma_fragments.cuh"

namespace shunt::cuda_engine {

void mma_fragments_wide(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                        const FragmentArgs& args) {
  const auto go = [&]<class L>(std::type_identity<L>) { launch_mma_fragments<L>(gpu, plan, args); };
  layout.dtype == DType::bf16 ? with_wide_lane<true>(layout, go)
                              : with_wide_lane<false>(layout, go);
}

}  // namespace shunt::cuda_engine
