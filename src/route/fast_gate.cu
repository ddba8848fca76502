// Gate, for the rules of fast_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch.
//
// A warp takes 1, 2 or 4 tokens (32 / lanes), once; blocks of 4 warps share nothing and never
// synchronise. Few tokens: one a warp, which ends soonest; many: four a warp, which takes the
// fewest instructions. Bytes: logits once, outputs once. Time: 1.3 us + the larger of bytes /
// bandwidth and warp instructions (fast_rows.cuh) over all multiprocessors.
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int block_warps = 4;

// `usual`: is_deepseek_v3(), of f32 in whole runs, the bias aligned.
template <class S, bool usual>
__global__ void __launch_bounds__(32 * block_warps)
    fast_gate(const __grid_constant__ DeviceRoute r, const Logits logits) {
  __shared__ FastScratch<S> scratch[block_warps * S::tokens];
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int64_t first = (std::int64_t{blockIdx.x} * block_warps + warp) * S::tokens;
  const std::int64_t t = first + lane / S::lanes;
  const std::int64_t valid = valid_tokens(r);
  if (first >= r.tokens) return;
  const bool there = t < valid;
  RowsOfWarp rows(logits, first);
  if constexpr (usual) rows.form = Form::f32;
  const LogitRow row = rows.row(there ? lane / S::lanes : 0);
  const int q = lane & (S::lanes - 1);
  float v[S::held];
  const auto load = [&]<class T>(T) {
    load_row<T, S>(static_cast<const T*>(row.data), usual || logits.runs, r.rule.experts, q, v);
  };
  if constexpr (usual) {
    __builtin_assume(reinterpret_cast<std::uintptr_t>(r.selection_bias.data) % 16 == 0);
    load(float{});
    route_fast<S>(as_deepseek_v3(r), r, rows, v, scratch + warp * S::tokens, t, there, lane);
  } else {
    switch (row.form) {
      case Form::bf16:
        load(__nv_bfloat16{});
        break;
      case Form::f16:
        load(__half{});
        break;
      default:
        load(float{});
        break;
    }
    route_fast<S>(r, r, rows, v, scratch + warp * S::tokens, t, there, lane);
  }
  if (__all_sync(every_lane, there || t >= r.tokens)) return;
  for (int i = 0; i < S::tokens; ++i) {
    if (first + i >= valid && first + i < r.tokens) clear_row(r, first + i, lane);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Logits& logits;
  const FastPlan& plan;

  template <class S>
  void go() const {
    if constexpr (S::ranked == Ranked::score_in_groups) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(r.selection_bias.data) % 16 == 0;
      if (logits.form == Form::f32 && logits.runs && aligned && is_deepseek_v3(r)) {
        return go<S, true>();
      }
    }
    go<S, false>();
  }
  template <class S, bool usual>
  void go() const {
    const std::int64_t each = block_warps * S::tokens;
    // One warp starts a little sooner than four.
    const auto warps = static_cast<unsigned>(
        std::min<std::int64_t>(block_warps, (r.tokens + S::tokens - 1) / S::tokens));
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {static_cast<unsigned>((r.tokens + each - 1) / each), 1, 1},
                         .block = {32 * warps, 1, 1}},
                        fast_gate<S, usual>, r, logits);
  }

  template <int lanes, int best, int blocks>
  void of() const {
    if constexpr (blocks == 8) {
      if (plan.in_groups) return go<FastShape<lanes, best, blocks, Ranked::score_in_groups>>();
    }
    if (plan.shares) return go<FastShape<lanes, best, blocks, Ranked::share>>();
    if (plan.scored) return go<FastShape<lanes, best, blocks, Ranked::score>>();
    go<FastShape<lanes, best, blocks, Ranked::logit>>();
  }

  template <int lanes, int best>
  void with_blocks() const {
    constexpr int most = lanes;  // experts of a lane: blocks * 32 / lanes, to 32
    switch (plan.blocks) {
      case 1:
        return of<lanes, best, 1>();
      case 2:
        return of<lanes, best, 2>();
      case 4:
        return of<lanes, best, 4>();
      case 8:
        return of<lanes, best, 8>();
      case 16:
        if constexpr (most >= 16) of<lanes, best, 16>();
        return;
      default:
        if constexpr (most >= 32) of<lanes, best, 32>();
        return;
    }
  }
};

}  // namespace

bool fast_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  // One token a warp until every scheduler has 4 warps; 16 with groups, where several tokens a warp
  // are a long way one after the other.
  const std::int64_t few = std::int64_t{gpu.multiprocessors} * (r.rule.groups > 1 ? 64 : 16);
  const FastPlan plan = fast_plan(r, r.tokens > few, true);
  if (plan.lanes == 0) return false;
  const Logits from = aligned_logits(logits, r.rule.experts, 32 / plan.lanes);
  const Launch launch{gpu, r, from, plan};
  if (plan.lanes == 8) {
    launch.with_blocks<8, 8>();
  } else if (plan.lanes == 16) {
    launch.with_blocks<16, 16>();
  } else {
    plan.best == 8 ? launch.with_blocks<32, 8>() : launch.with_blocks<32, 16>();
  }
  return true;
}

}  // namespace shunt::routing
