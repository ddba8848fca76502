// Gate for DeepSeek-V3's rule, by deepseek_rows.cuh: from f32 logits [T, 256] in memory to ids and
// weights, one launch, a token a warp. Bytes: logits and bias once, outputs once. Time: that of a
// launch that reads, and 0.9 us for up to four tokens a multiprocessor.
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/deepseek_rows.cuh"
#include "route/gate_rows.cuh"

namespace shunt::routing {

namespace {

// Blocks of one warp: those of four take 0.1 to 0.2 us more.
__global__ void __launch_bounds__(32) deepseek_gate(const __grid_constant__ DeepseekRoute r) {
  __shared__ DeepseekScratch scratch;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t t = blockIdx.x;
  if (r.valid_tokens != nullptr && t >= valid_tokens(r)) {
    if (lane >= deepseek_k) return;
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + lane] = -1;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + lane] = 0;
    return;
  }
  route_deepseek(r, r.logits + t * r.stride, scratch, t, lane);
}

}  // namespace

bool deepseek_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const Logits from = aligned_logits(logits, r.rule.experts, 4);
  // As long as all blocks run at once; of more tokens, several a warp are faster.
  const std::int64_t most = std::int64_t{gpu.multiprocessors} * 32;
  if (r.tokens > most || !is_deepseek_v3(r) || from.form != Form::f32 || !from.runs ||
      reinterpret_cast<std::uintptr_t>(r.selection_bias.data) % 16 != 0) {
    return false;
  }
  const DeepseekRoute of{.logits = static_cast<const float*>(from.data),
                         .stride = from.stride,
                         .bias = static_cast<const float*>(r.selection_bias.data),
                         .ids = r.ids,
                         .weights = r.weights,
                         .tokens = r.tokens,
                         .valid_tokens = r.valid_tokens,
                         .epsilon = r.rule.epsilon,
                         .factor = r.rule.factor};
  cuda_engine::launch("route: gate", gpu,
                      {.grid = {static_cast<unsigned>(r.tokens)}, .block = {32}}, deepseek_gate,
                      of);
  return true;
}

}  // namespace shunt::routing
