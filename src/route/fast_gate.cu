// Gate, for the rules of fast_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch.
//
// A warp takes 1, 2 or 4 tokens (32 / lanes), once; blocks of 4 warps share nothing and never
// synchronise. Few tokens: one a warp, which ends soonest; many: four a warp, which takes the
// fewest instructions. Bytes: logits once, outputs once. Time: 1.3 us + the larger of bytes /
// bandwidth and warp instructions (fast_rows.cuh) over all multiprocessors.
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/fast_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int block_warps = 4;

struct Logits {
  const void* data = nullptr;
  Form form = Form::f32;
  std::int64_t stride = 0;
  bool runs = false;  // whole runs of a lane are aligned
};

// The logits of a warp's tokens.
struct RowsOfWarp {
  const char* data;
  std::int64_t bytes;  // from row to row
  Form form;
  __device__ RowsOfWarp(const Logits& logits, std::int64_t first)
      : bytes(logits.stride * (logits.form == Form::f32 ? 4 : 2)), form(logits.form) {
    data = static_cast<const char*>(logits.data) + first * bytes;
  }
  __device__ LogitRow row(int i) const { return {data + i * bytes, form}; }
  __device__ float operator()(int i, int e) const { return row(i)(e); }
};

template <class T, class S>
__device__ __forceinline__ void load_row(const T* row, bool runs, int experts, int q,
                                         float (&v)[S::held]) {
  struct alignas(S::run * sizeof(T)) Run {
    T of[S::run];
  };
  if (S::run == 1 || runs) {
#pragma unroll
    for (int i = 0; i < S::blocks; ++i) {
      const Run run =
          *reinterpret_cast<const Run*>(row + S::run_within(32 * i + q * S::run, experts));
#pragma unroll
      for (int j = 0; j < S::run; ++j) v[i * S::run + j] = static_cast<float>(run.of[j]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      v[n] = static_cast<float>(row[min(S::expert(n, q), experts - 1)]);
    }
  }
}

template <class S>
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
  const RowsOfWarp rows(logits, first);
  const LogitRow row = rows.row(there ? lane / S::lanes : 0);
  const int q = lane & (S::lanes - 1);
  float v[S::held];
  switch (row.form) {
    case Form::bf16:
      load_row<__nv_bfloat16, S>(static_cast<const __nv_bfloat16*>(row.data), logits.runs,
                                 r.rule.experts, q, v);
      break;
    case Form::f16:
      load_row<__half, S>(static_cast<const __half*>(row.data), logits.runs, r.rule.experts, q, v);
      break;
    default:
      load_row<float, S>(static_cast<const float*>(row.data), logits.runs, r.rule.experts, q, v);
      break;
  }
  route_fast<S>(r, rows, v, scratch + warp * S::tokens, t, there, lane);
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
    const std::int64_t each = block_warps * S::tokens;
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {static_cast<unsigned>((r.tokens + each - 1) / each), 1, 1},
                         .block = {32 * block_warps, 1, 1}},
                        fast_gate<S>, r, logits);
  }

  template <int lanes, int best, int blocks>
  void of() const {
    if constexpr (blocks == 8) {
      if (plan.in_groups) return go<FastShape<lanes, best, blocks, Ranked::score_in_groups>>();
    }
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
  const FastPlan plan = fast_plan(r, r.tokens > few);
  if (plan.lanes == 0) return false;
  const std::int64_t size = logits.dtype == DType::f32 ? 4 : 2;
  const std::int64_t run = 32 / plan.lanes, run_bytes = run * size;
  const bool runs =
      r.rule.experts % run == 0 &&
      reinterpret_cast<std::uintptr_t>(logits.data) % static_cast<std::size_t>(run_bytes) == 0 &&
      (r.tokens == 1 || logits.strides[0] % run == 0);
  const Logits from{logits.data, static_cast<Form>(logits.dtype), logits.strides[0], runs};
  const Launch launch{gpu, r, from, plan};
  if (plan.lanes == 16) {
    launch.with_blocks<16, 16>();
  } else if (plan.best == 16) {
    launch.with_blocks<32, 16>();
  } else if (plan.best == 8) {
    plan.lanes == 8 ? launch.with_blocks<8, 8>() : launch.with_blocks<32, 8>();
  } else if (plan.best == 4) {
    plan.lanes == 8 ? launch.with_blocks<8, 4>() : launch.with_blocks<32, 4>();
  } else {
    plan.lanes == 8 ? launch.with_blocks<8, 1>() : launch.with_blocks<32, 1>();
  }
  return true;
}

}  // namespace shunt::routing
