// Few pairs of bf16: pair_stream_16.cuh.
#include "gemm/pair_stream_16.cuh"

namespace shunt::cuda_engine {

namespace {
template <int depth>
using Stream = Stream16<__nv_bfloat16, depth>;
}  // namespace

bool pair_stream_bf16(const Gpu& gpu, const PairArgs& args) {
  return launch_stream_16<Stream>(gpu, args);
}

}  // namespace shunt::cuda_engine
