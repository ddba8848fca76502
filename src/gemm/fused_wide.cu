// Both products of few rows by codes of 8 bits: fused_few.cuh.
#include "gemm/fused_few.cuh"

namespace shunt::cuda_engine {

namespace {

template <bool bf16>
void launch_wide(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                 const FusedArgs& args) {
  switch (form.codes) {
    case Codes::int8:
      return launch_fused<Lane<Codes::int8, 0, bf16>>(gpu, plan, args);
    case Codes::fp8:
      return launch_fused<Lane<Codes::fp8, 0, bf16>>(gpu, plan, args);
    default:
      return launch_fused<Lane<Codes::fp8_block, 0, bf16>>(gpu, plan, args);
  }
}

}  // namespace

void fused_wide(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                const FusedArgs& args) {
  (form.dtype == DType::bf16 ? launch_wide<true> : launch_wide<false>)(gpu, plan, form, args);
}

}  // namespace shunt::cuda_engine
