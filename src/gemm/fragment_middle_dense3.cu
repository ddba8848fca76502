// Tall tiles by dense3: fragment_middle_rows.cuh.
#include "gemm/fragment_middle_rows.cuh"

namespace shunt::cuda_engine {

void fragment_middle_dense3(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                            const FragmentArgs& args) {
  (layout.dtype == DType::bf16
       ? launch_middle_rows<Lane<Codes::dense3, 0, true>>
       : launch_middle_rows<Lane<Codes::dense3, 0, false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
