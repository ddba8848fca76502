// Gate: from logits [T, C] in memory to ids and weights, one launch: every rule. Those that serve
// models most go to fast_gate.cu.
//
// A warp takes one row after the other, striding over the grid, and has the next row's logits on
// their way while it selects. Blocks share nothing and never synchronise. Bytes: logits once,
// outputs once. Time: 1.3 us + the larger of bytes / bandwidth and rows * 190 to 400 warp
// instructions over all multiprocessors (rows.cuh).
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/rows.cuh"

namespace shunt::routing {

namespace {

constexpr int block_warps = 4;

template <class T, int N>
__device__ __forceinline__ void load_run(const T* from, float (&to)[N]) {
  constexpr int vector = 16 / sizeof(T);
  constexpr int each = N < vector ? N : vector;
  struct alignas(each * sizeof(T)) Pack {
    T of[each];
  };
#pragma unroll
  for (int i = 0; i < N; i += each) {
    const Pack pack = *reinterpret_cast<const Pack*>(from + i);
#pragma unroll
    for (int j = 0; j < each; ++j) to[i + j] = static_cast<float>(pack.of[j]);
  }
}

// The raw logits of a lane's experts. `runs`: rows are aligned for whole vectors of a lane's run.
template <int N, bool grouped>
__device__ __forceinline__ void load_own(const DeviceRoute& r, const LogitRow& row, bool runs,
                                         int lane, float (&own)[N]) {
  if constexpr (grouped && (N & (N - 1)) == 0) {
    if (runs) {
      if (lane * N >= r.rule.experts) return;
      switch (row.form) {
        case Form::bf16:
          return load_run(static_cast<const __nv_bfloat16*>(row.data) + lane * N, own);
        case Form::f16:
          return load_run(static_cast<const __half*>(row.data) + lane * N, own);
        default:
          return load_run(static_cast<const float*>(row.data) + lane * N, own);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = expert_of<N, grouped>(lane, i);
    own[i] = e < r.rule.experts ? row(e) : 0.0F;
  }
}

template <int N, bool grouped>
__global__ void __launch_bounds__(32 * block_warps)
    gate(const __grid_constant__ DeviceRoute r, const DeviceVector logits,
         const std::int64_t stride, const bool runs) {
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t warps = std::int64_t{gridDim.x} * block_warps;
  const std::int64_t valid = valid_tokens(r);
  const auto row = [&](std::int64_t t) {
    const std::int64_t bytes = logits.form == Form::f32 ? 4 : 2;
    return LogitRow{static_cast<const char*>(logits.data) + t * stride * bytes, logits.form};
  };
  std::int64_t t = std::int64_t{blockIdx.x} * block_warps + (threadIdx.x >> 5);
  float own[N] = {};
  if (r.quick && t < valid) load_own<N, grouped>(r, row(t), runs, lane, own);
  for (; t < r.tokens; t += warps) {
    if (t >= valid) {
      clear_row(r, t, lane);
      continue;
    }
    float next[N] = {};
    if (r.quick && t + warps < valid) load_own<N, grouped>(r, row(t + warps), runs, lane, next);
    route_row<N, grouped>(r, row(t), own, t, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = next[i];
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  DeviceVector logits;
  std::int64_t stride;
  bool runs;

  template <int N, bool grouped>
  void go() const {
    const std::int64_t blocks = (r.tokens + block_warps - 1) / block_warps;
    // As many blocks as are resident: 12 of 4 warps.
    const auto grid = static_cast<unsigned>(
        std::min<std::int64_t>(blocks, std::int64_t{gpu.multiprocessors} * 12));
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {grid, 1, 1}, .block = {32 * block_warps, 1, 1}}, gate<N, grouped>,
                        r, logits, stride, runs);
  }
};

}  // namespace

void gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  if (few_gate_cuda(gpu, r, logits) || first_gate_cuda(gpu, r, logits) ||
      token_gate_cuda(gpu, r, logits) || plain_gate_cuda(gpu, r, logits) ||
      deepseek_gate_cuda(gpu, r, logits) || fast_gate_cuda(gpu, r, logits)) {
    return;
  }
  const DeviceVector data{logits.data, static_cast<Form>(logits.dtype)};
  const std::int64_t stride = logits.strides[0];
  const std::int64_t size = logits.dtype == DType::f32 ? 4 : 2;
  const std::int64_t run = std::min<std::int64_t>(16, r.per_lane * size);
  const bool runs =
      r.rule.experts % r.per_lane == 0 &&
      reinterpret_cast<std::uintptr_t>(logits.data) % static_cast<std::size_t>(run) == 0 &&
      (r.tokens == 1 || stride * size % run == 0);
  const Launch launch{gpu, r, data, stride, runs};
  with_per_lane(r.per_lane,
                [&]<int N>() { r.grouped ? launch.go<N, true>() : launch.go<N, false>(); });
}

}  // namespace shunt::routing
