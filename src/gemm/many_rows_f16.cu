// many_rows.cuh for f16.
#include "gemm/many_rows.cuh"

namespace shunt::cuda_engine {

bool many_rows_f16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                   HopperArgs args) {
  return launch_many_rows<__half>(gpu, plan, product, args, false);
}

}  // namespace shunt::cuda_engine
