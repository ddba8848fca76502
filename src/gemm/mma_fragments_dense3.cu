// On any GPU: rows by dense3: mma_fragments.cuh.
#include "gemm/mma_fragments.cuh"

namespace shunt::cuda_engine {

void mma_fragments_dense3(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                          const FragmentArgs& args) {
  (layout.dtype == DType::bf16
       ? launch_mma_fragments<Lane<Codes::dense3, 0, true>>
       : launch_mma_fragments<Lane<Codes::dense3, 0, false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
