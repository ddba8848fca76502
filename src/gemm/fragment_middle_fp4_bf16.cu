// Tall tiles of bf16 by e2m1 with scales: fragment_middle_rows.cuh.
#include "gemm/fragment_middle_rows.cuh"

namespace shunt::cuda_engine {

void fragment_middle_fp4_bf16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                              const FragmentArgs& args) {
  (layout.codes() == Codes::nvfp4
       ? launch_middle_rows<Lane<Codes::nvfp4, 0, true>>
       : launch_middle_rows<Lane<Codes::mxfp4, 0, true>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
