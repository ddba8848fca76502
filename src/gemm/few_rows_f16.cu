// few_rows.cuh for f16.
#include "gemm/few_rows.cuh"

namespace shunt::cuda_engine {

bool few_rows_f16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                  HopperArgs args, const FewChain& chain) {
  return launch_few_rows<__half>(gpu, plan, product, args, chain, false);
}

}  // namespace shunt::cuda_engine
