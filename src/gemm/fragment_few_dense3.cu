// Few rows by dense3: fragment_few_rows.cuh.
#include "gemm/fragment_few_rows.cuh"

namespace shunt::cuda_engine {

void fragment_few_dense3(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                         const FragmentArgs& args, const FewChain& chain) {
  (layout.dtype == DType::bf16
       ? launch_few_rows<Lane<Codes::dense3, 0, true>>
       : launch_few_rows<Lane<Codes::dense3, 0, false>>)(gpu, plan, args, chain);
}

}  // namespace shunt::cuda_engine
