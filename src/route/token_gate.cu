// Gate for few tokens, by token_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch, a block for each token: up to 8 slots, or 17 to 24. Time: that of a launch that reads,
// and 500 to 1500 cycles: one token of 32 experts 1.6 us, of DeepSeek-V3's 256 in groups 2.0.
#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"
#include "route/token_rows.cuh"

namespace shunt::routing {

namespace {

// `usual`: is_softmax_of_top(), of bf16, or is_deepseek_v3(), of f32.
template <class S, bool usual>
__global__ void __launch_bounds__(32 * S::warps)
    token_gate(const void* logits, const std::int64_t bytes, const Form form,
               const __grid_constant__ TokenRoute r) {
  __shared__ TokenScratch<S> scratch;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int e = static_cast<int>(threadIdx.x);
  const std::int64_t t = blockIdx.x;
  const std::int64_t valid = valid_tokens(r);
  const LogitRow row{static_cast<const char*>(logits) + t * bytes, !usual         ? form
                                                                   : S::in_groups ? Form::f32
                                                                                  : Form::bf16};
  const float raw = row(min(e, r.rule.experts - 1));
  if (t >= valid) return clear_slot(r, t, e);
  if constexpr (usual && S::in_groups) {
    route_token<S, false>(as_deepseek_v3(r), raw, scratch, t, e >> 5, e & 31);
  } else {
    route_token<S, usual>(r, raw, scratch, t, e >> 5, e & 31);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Tensor& logits;

  template <class S>
  void go() const {
    if constexpr (S::ranked == Ranked::logit && S::best <= 8) {
      if (logits.dtype == DType::bf16 && is_softmax_of_top(r)) return go<S, true>();
    }
    if constexpr (S::in_groups) {
      if (logits.dtype == DType::f32 && is_deepseek_v3(r)) return go<S, true>();
    }
    go<S, false>();
  }
  template <class S, bool usual>
  void go() const {
    const std::int64_t size = logits.dtype == DType::f32 ? 4 : 2;
    cuda_engine::prefer_shared_memory(token_gate<S, usual>);
    cuda_engine::launch(
        "route: gate", gpu,
        {.grid = {static_cast<unsigned>(r.tokens), 1, 1}, .block = {32 * S::warps, 1, 1}},
        token_gate<S, usual>, logits.data, logits.strides[0] * size,
        static_cast<Form>(logits.dtype), TokenRoute(r));
  }
  template <int best, Ranked ranked>
  void with_warps() const {
    switch (r.fast.blocks) {
      case 1:
        return go<TokenShape<1, best, ranked>>();
      case 2:
        return go<TokenShape<2, best, ranked>>();
      case 4:
        return go<TokenShape<4, best, ranked>>();
      case 8:
        return go<TokenShape<8, best, ranked>>();
      default:
        return go<TokenShape<16, best, ranked>>();
    }
  }
};

}  // namespace

bool token_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  // Up to here it is ahead of a token a warp, or several; from 17 slots on of gate.cu.
  const bool plain = r.plain_best != 0 && logits.dtype != DType::f32;
  const bool usual = logits.dtype == DType::f32 && is_deepseek_v3(r);
  const std::int64_t limit = gpu.multiprocessors * std::int64_t{plain ? 1 : usual ? 2 : 4};
  const int k = r.rule.top_k;
  const bool served = r.fast.served() && (k <= 8 || k > 16);
  if (!served || r.fast.blocks > 16 || r.tokens > limit) return false;
  const Launch launch{gpu, r, logits};
  if (r.fast.in_groups) {
    launch.go<TokenShape<8, 8, Ranked::score_in_groups>>();
  } else if (k > 8) {
    r.fast.scored ? launch.go<TokenShape<16, 24, Ranked::score>>()
                  : launch.go<TokenShape<16, 24, Ranked::logit>>();
  } else if (r.fast.scored) {
    launch.with_warps<8, Ranked::score>();
  } else if (k <= 4) {
    launch.with_warps<4, Ranked::logit>();
  } else {
    launch.with_warps<8, Ranked::logit>();
  }
  return true;
}

}  // namespace shunt::routing
