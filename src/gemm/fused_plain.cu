// Both products of few rows by weights of 16 bits: fused_few.cuh.
#include "gemm/fused_few.cuh"

namespace shunt::cuda_engine {

void fused_plain(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                 const FusedArgs& args) {
  (form.dtype == DType::bf16 ? launch_fused<PlainWeights<true>>
                             : launch_fused<PlainWeights<false>>)(gpu, plan, args);
}

}  // namespace shunt::cuda_engine
