// Many rows by codes of 8 bits: fragment_many_rows.cuh.
#include "gemm/fragment_many_rows.cuh"

namespace shunt::cuda_engine {

namespace {

template <bool bf16>
void launch_wide(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                 const FragmentArgs& args) {
  switch (layout.codes()) {
    case Codes::int8:
      return launch_many_rows<Lane<Codes::int8, 0, bf16>>(gpu, plan, args);
    case Codes::fp8:
      return launch_many_rows<Lane<Codes::fp8, 0, bf16>>(gpu, plan, args);
    case Codes::mxfp8:
      return launch_many_rows<Lane<Codes::mxfp8, 0, bf16>>(gpu, plan, args);
    default:
      return launch_many_rows<Lane<Codes::fp8_block, 0, bf16>>(gpu, plan, args);
  }
}

}  // namespace

void fragment_many_wide(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                        const FragmentArgs& args) {
  (layout.dtype == DType::bf16 ? launch_wide<true> : launch_wide<false>)(gpu, plan, layout, args);
}

}  // namespace shunt::cuda_engine
