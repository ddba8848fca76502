// Few pairs by dense3: pair_stream_fragments.cuh.
#include "gemm/pair_stream_fragments.cuh"

namespace shunt::cuda_engine {

bool pair_stream_dense3(const Gpu& gpu, const FragmentLayout& layout, const PairArgs& args) {
  return layout.dtype == DType::bf16
             ? launch_fragment_stream<Lane<Codes::dense3, 0, true>>(gpu, args)
             : launch_fragment_stream<Lane<Codes::dense3, 0, false>>(gpu, args);
}

}  // namespace shunt::cuda_engine
