// Tall tiles by e2m1 of which two of four are kept: fragment_middle_rows.cuh.
#include "gemm/fragment_middle_rows.cuh"

namespace shunt::cuda_engine {

void fragment_middle_sparse(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                            const FragmentArgs& args) {
  (layout.dtype == DType::bf16
       ? launch_middle_rows<Lane<Codes::sparse, 0, true>>
       : launch_middle_rows<Lane<Codes::sparse, 0, false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
