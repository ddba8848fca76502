// Both products of few rows by sparse e2m1 with scales: fused_few.cuh.
#include "gemm/fused_few.cuh"

namespace shunt::cuda_engine {

void fused_sparse(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                  const FusedArgs& args) {
  (form.dtype == DType::bf16 ? launch_fused<Lane<Codes::sparse, 0, true>>
                             : launch_fused<Lane<Codes::sparse, 0, false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
