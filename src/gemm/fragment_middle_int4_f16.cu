// Tall tiles of f16 by 4-bit integers, a scale for 16, 32, 64 or 128 of k:
// fragment_middle_rows.cuh.
#include "gemm/fragment_middle_rows.cuh"

namespace shunt::cuda_engine {

void fragment_middle_int4_f16(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                              const FragmentArgs& args) {
  switch (layout.groups()) {
    case 1:
      return launch_middle_rows<Lane<Codes::int4, 1, false>>(gpu, plan, args);
    case 2:
      return launch_middle_rows<Lane<Codes::int4, 2, false>>(gpu, plan, args);
    case 4:
      return launch_middle_rows<Lane<Codes::int4, 4, false>>(gpu, plan, args);
    default:
      return launch_middle_rows<Lane<Codes::int4, 8, false>>(gpu, plan, args);
  }
}

}  // namespace shunt::cuda_engine
