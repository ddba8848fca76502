// On any GPU: rows by 4-bit integers, a scale for 16, 32, 64 or 128 of k: mma_fragments.cuh.
#include "gemm/mma_fragments.cuh"

namespace shunt::cuda_engine {

void mma_fragments_int4(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                        const FragmentArgs& args) {
  const auto go = [&]<class L>(std::type_identity<L>) { launch_mma_fragments<L>(gpu, plan, args); };
  layout.dtype == DType::bf16 ? with_int4_lane<true>(layout, go)
                              : with_int4_lane<false>(layout, go);
}

}  // namespace shunt::cuda_engine
