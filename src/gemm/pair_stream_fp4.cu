// Few pairs by e2m1 with scales, dense or 2:4 sparse: pair_stream_fragments.cuh.
#include "gemm/pair_stream_fragments.cuh"

namespace shunt::cuda_engine {

bool pair_stream_fp4(const Gpu& gpu, const FragmentLayout& layout, const PairArgs& args) {
  const auto go = [&]<Codes codes>() {
    return layout.dtype == DType::bf16 ? launch_fragment_stream<Lane<codes, 0, true>>(gpu, args)
                                       : launch_fragment_stream<Lane<codes, 0, false>>(gpu, args);
  };
  switch (layout.codes()) {
    case Codes::nvfp4:
      return go.template operator()<Codes::nvfp4>();
    case Codes::mxfp4:
      return go.template operator()<Codes::mxfp4>();
    default:
      return go.template operator()<Codes::sparse>();
  }
}

}  // namespace shunt::cuda_engine
