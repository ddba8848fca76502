// Many rows by dense3: fragment_many_rows.cuh.
#include "gemm/fragment_many_rows.cuh"

namespace shunt::cuda_engine {

void fragment_many_dense3(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                          const FragmentArgs& args) {
  (layout.dtype == DType::bf16 ? launch_many_rows<Lane<Codes::dense3, 0, true>>
                               : launch_many_rows<Lane<Codes::dense3, 0, false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
