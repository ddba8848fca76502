// Few pairs by codes of 8 bits: pair_stream_fragments.cuh.
#include "gemm/pair_stream_fragments.cuh"

namespace shunt::cuda_engine {

bool pair_stream_wide(const Gpu& gpu, const FragmentLayout& layout, const PairArgs& args) {
  bool launched = false;
  const auto go = [&]<class L>(std::type_identity<L>) {
    launched = launch_fragment_stream<L>(gpu, args);
  };
  layout.dtype == DType::bf16 ? with_wide_lane<true>(layout, go)
                              : with_wide_lane<false>(layout, go);
  return launched;
}

}  // namespace shunt::cuda_engine
