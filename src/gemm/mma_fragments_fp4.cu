// On any GPU: rows by e2m1 with scales, all of it or two of four kept: mma_fragments.cuh.
#include "gemm/mma_fragments.cuh"

namespace shunt::cuda_engine {

namespace {

template <bool bf16>
void launch_fp4(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                const FragmentArgs& args) {
  switch (layout.codes()) {
    case Codes::nvfp4:
      return launch_mma_fragments<Lane<Codes::nvfp4, 0, bf16>>(gpu, plan, args);
    case Codes::mxfp4:
      return launch_mma_fragments<Lane<Codes::mxfp4, 0, bf16>>(gpu, plan, args);
    default:
      return launch_mma_fragments<Lane<Codes::sparse, 0, bf16>>(gpu, plan, args);
  }
}

}  // namespace

void mma_fragments_fp4(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                       const FragmentArgs& args) {
  (layout.dtype == DType::bf16 ? launch_fp4<true> : launch_fp4<false>)(gpu, plan, layout, args);
}

}  // namespace shunt::cuda_engine
