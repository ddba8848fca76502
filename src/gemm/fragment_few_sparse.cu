// Few rows by e2m1 of which two of four are kept: fragment_few_rows.cuh.
#include "gemm/fragment_few_rows.cuh"

namespace shunt::cuda_engine {

void fragment_few_sparse(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                         const FragmentArgs& args, const FewChain& chain) {
  (layout.dtype == DType::bf16
       ? launch_few_rows<Lane<Codes::sparse, 0, true>>
       : launch_few_rows<Lane<Codes::sparse, 0, false>>)(gpu, plan, args, chain);
}

}  // namespace shunt::cuda_engine
