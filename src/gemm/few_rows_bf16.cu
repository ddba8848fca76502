// few_rows.cuh for bf16.
#include "gemm/few_rows.cuh"

namespace shunt::cuda_engine {

bool few_rows_bf16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                   HopperArgs args, const FewChain& chain) {
  return launch_few_rows<__nv_bfloat16>(gpu, plan, product, args, chain, true);
}

}  // namespace shunt::cuda_engine
