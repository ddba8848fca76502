// Both products of few rows by 4-bit integers, a scale for 16, 32, 64 or 128 of k: fused_few.cuh.
#include "gemm/fused_few.cuh"

namespace shunt::cuda_engine {

namespace {

template <bool bf16>
void launch_int4(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                 const FusedArgs& args) {
  switch (form.groups) {
    case 1:
      return launch_fused<Lane<Codes::int4, 1, bf16>>(gpu, plan, args);
    case 2:
      return launch_fused<Lane<Codes::int4, 2, bf16>>(gpu, plan, args);
    case 4:
      return launch_fused<Lane<Codes::int4, 4, bf16>>(gpu, plan, args);
    default:
      return launch_fused<Lane<Codes::int4, 8, bf16>>(gpu, plan, args);
  }
}

}  // namespace

void fused_int4(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                const FusedArgs& args) {
  (form.dtype == DType::bf16 ? launch_int4<true> : launch_int4<false>)(gpu, plan, form, args);
}

}  // namespace shunt::cuda_engine
