// Few rows by codes of 8 bits: fragment_few_rows.cuh.
#include "gemm/fragment_few_rows.cuh"

namespace shunt::cuda_engine {

void fragment_few_wide(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                       const FragmentArgs& args, const FewChain& chain) {
  const auto go = [&]<class L>(std::type_identity<L>) {
    launch_few_rows<L>(gpu, plan, args, chain);
  };
  layout.dtype == DType::bf16 ? with_wide_lane<true>(layout, go)
                              : with_wide_lane<false>(layout, go);
}

}  // namespace shunt::cuda_engine
