// Few rows of bf16 by e2m1 with scales: fragment_few_rows.cuh.
#include "gemm/fragment_few_rows.cuh"

namespace shunt::cuda_engine {

void fragment_few_fp4_bf16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                           const FragmentArgs& args, const FewChain& chain) {
  (layout.codes() == Codes::nvfp4
       ? launch_few_rows<Lane<Codes::nvfp4, 0, true>>
       : launch_few_rows<Lane<Codes::mxfp4, 0, true>>)(gpu, plan, args, chain);
}

}  // namespace shunt::cuda_engine
