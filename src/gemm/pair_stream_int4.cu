// Few pairs by int4 with scales and zero points: pair_stream_fragments.cuh.
#include "gemm/pair_stream_fragments.cuh"

namespace shunt::cuda_engine {

bool pair_stream_int4(const Gpu& gpu, const FragmentLayout& layout, const PairArgs& args) {
  bool launched = false;
  const auto go = [&]<class L>(std::type_identity<L>) {
    launched = launch_fragment_stream<L>(gpu, args);
  };
  layout.dtype == DType::bf16 ? with_int4_lane<true>(layout, go)
                              : with_int4_lane<false>(layout, go);
  return launched;
}

}  // namespace shunt::cuda_engine
