// Gate: from logits [T, C] in memory to ids and weights, one launch.
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
template <int N, bool grouped, class Row>
__device__ __forceinline__ void load_own(const DeviceRoute& r, const Row& row, bool runs, int lane,
                                         float (&own)[N]) {
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

// A row of logits whose form is known when compiled: a Kind that is plain.
template <Form form_>
struct RowOf {
  const void* data;
  static constexpr Form form = form_;
  __device__ __forceinline__ float operator()(std::int64_t c) const {
    return load_form(data, form_, c);
  }
};

// `Row`: LogitRow, or RowOf.
template <int N, bool grouped, class Kind, class Row>
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
    Row made;
    made.data = static_cast<const char*>(logits.data) + t * stride * bytes;
    if constexpr (!Kind::plain) made.form = logits.form;
    return made;
  };
  std::int64_t t = std::int64_t{blockIdx.x} * block_warps + (threadIdx.x >> 5);
  float own[N] = {};
  if ((Kind::plain || r.quick) && t < valid) load_own<N, grouped>(r, row(t), runs, lane, own);
  for (; t < r.tokens; t += warps) {
    if (t >= valid) {
      clear_row(r, t, lane);
      continue;
    }
    float next[N] = {};
    if ((Kind::plain || r.quick) && t + warps < valid)
      load_own<N, grouped>(r, row(t + warps), runs, lane, next);
    route_row<N, grouped, Kind>(r, row(t), own, t, lane);
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

  template <int N, bool grouped, class Kind, class Row>
  void go() const {
    const std::int64_t blocks = (r.tokens + block_warps - 1) / block_warps;
    // As many blocks as are resident: 12 of 4 warps.
    const auto grid = static_cast<unsigned>(
        std::min<std::int64_t>(blocks, std::int64_t{gpu.multiprocessors} * 12));
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {grid, 1, 1}, .block = {32 * block_warps, 1, 1}},
                        gate<N, grouped, Kind, Row>, r, logits, stride, runs);
  }

  template <int N, bool grouped, class Kind>
  void plain() const {
    if (logits.form == Form::bf16) return go<N, grouped, Kind, RowOf<Form::bf16>>();
    if (logits.form == Form::f16) return go<N, grouped, Kind, RowOf<Form::f16>>();
    go<N, grouped, Kind, RowOf<Form::f32>>();
  }

  template <int N>
  void of() const {
    if constexpr (N <= 16) {
      if (is_plain()) {
        if (r.grouped) {
          if (r.rule.weigh == Weigh::sigmoid) {
            return plain<N, true, PlainKind<Weigh::sigmoid>>();
          }
        } else if (r.rule.weigh == Weigh::sigmoid) {
          return plain<N, false, PlainKind<Weigh::sigmoid>>();
        } else if (r.rule.weigh == Weigh::softmax_of_all) {
          return plain<N, false, PlainKind<Weigh::softmax_of_all>>();
        } else if (r.rule.weigh == Weigh::softmax_of_selected) {
          return plain<N, false, PlainKind<Weigh::softmax_of_selected>>();
        } else if (r.rule.weigh == Weigh::logit) {
          return plain<N, false, PlainKind<Weigh::logit>>();
        }
      }
    }
    if (r.grouped) return go<N, true, AnyKind, LogitRow>();
    go<N, false, AnyKind, LogitRow>();
  }

  bool is_plain() const {
    const Rule& rule = r.rule;
    return r.quick && !r.hashed && rule.soft_cap == 0 && rule.shared_count == 0 &&
           rule.top_k < 32 && r.router_bias.data == nullptr && r.per_expert_scale.data == nullptr &&
           (r.selection_bias.data == nullptr || r.selection_bias.form == Form::f32) &&
           r.dense.data == nullptr && r.logits_out.data == nullptr && r.replay.data == nullptr;
  }
};

}  // namespace

void gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const DeviceVector data{logits.data, static_cast<Form>(logits.dtype)};
  const std::int64_t stride = logits.strides[0];
  const std::int64_t size = logits.dtype == DType::f32 ? 4 : 2;
  const std::int64_t run = std::min<std::int64_t>(16, r.per_lane * size);
  const bool runs =
      r.rule.experts % r.per_lane == 0 &&
      reinterpret_cast<std::uintptr_t>(logits.data) % static_cast<std::size_t>(run) == 0 &&
      (r.tokens == 1 || stride * size % run == 0);
  const Launch launch{gpu, r, data, stride, runs};
  with_per_lane(r.per_lane, [&]<int N>() { launch.of<N>(); });
}

}  // namespace shunt::routing
