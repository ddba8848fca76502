// Both products of few rows by e2m1 with scales: fused_few.cuh.
#include "gemm/fused_few.cuh"

namespace shunt::cuda_engine {

namespace {

template <bool bf16>
void launch_fp4(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                const FusedArgs& args) {
  (form.codes == Codes::nvfp4 ? launch_fused<Lane<Codes::nvfp4, 0, bf16>>
                              : launch_fused<Lane<Codes::mxfp4, 0, bf16>>)(gpu, plan, args);
}

}  // namespace

void fused_fp4(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
               const FusedArgs& args) {
  (form.dtype == DType::bf16 ? launch_fp4<true> : launch_fp4<false>)(gpu, plan, form, args);
}

}  // namespace shunt::cuda_engine
