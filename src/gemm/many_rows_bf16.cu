// many_rows.cuh for bf16.
#include "gemm/many_rows.cuh"

namespace shunt::cuda_engine {

bool many_rows_bf16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                    HopperArgs args) {
  return launch_many_rows<__nv_bfloat16>(gpu, plan, product, args, true);
}

}  // namespace shunt::cuda_engine
