// Gate, for the rules of plain_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch.
//
// A warp takes 1, 2, 4 or 8 tokens (32 / lanes), once; blocks of 4 warps share nothing and never
// synchronise. Few tokens: one a warp, which ends soonest; many: as many as registers hold. What
// plain_rows.cuh leaves is done a token at a time by fast_rows.cuh. Bytes: logits once, outputs
// once. Predicted for 32768 tokens of 128 experts, top 8, in 16 bits: 400 instructions a warp, 6
// us; measured 9.6 (docs/notes/cuda-route.md).
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"
#include "route/plain_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int block_warps = 4;

// A run of a lane's logits as 16-bit words.
template <class S>
__device__ __forceinline__ void load_words(const std::uint16_t* row, bool runs, int experts, int q,
                                           std::uint32_t (&bits)[S::held]) {
  struct alignas(S::run * 2) Run {
    std::uint16_t of[S::run];
  };
  if (S::run == 1 || runs) {
#pragma unroll
    for (int i = 0; i < S::blocks; ++i) {
      const Run run =
          *reinterpret_cast<const Run*>(row + S::run_within(32 * i + q * S::run, experts));
#pragma unroll
      for (int j = 0; j < S::run; ++j) bits[i * S::run + j] = run.of[j];
    }
  } else {
#pragma unroll
    for (int n = 0; n < S::held; ++n) bits[n] = row[min(S::expert(n, q), experts - 1)];
  }
}

template <class S>
__device__ __noinline__ void route_left(const DeviceRoute& r, const RowsOfWarp& rows,
                                        FastScratch<S>* scratch, std::int64_t first, int i,
                                        int lane) {
  float v[S::held];
#pragma unroll 1
  for (int n = 0; n < S::held; ++n) v[n] = rows(i, min(S::expert(n, lane), r.rule.experts - 1));
  const auto source = [&rows, i](int, int e) { return rows(i, e); };
  route_fast<S>(r, source, v, scratch, first + i, true, lane);
}

template <class S, bool packed>
__global__ void __launch_bounds__(32 * block_warps)
    plain_gate(const __grid_constant__ DeviceRoute r, const Logits logits) {
  using Whole = FastShape<32, 8, S::blocks, Ranked::logit>;
  __shared__ FastScratch<Whole> scratch[block_warps];
  __shared__ std::int32_t won[packed ? 1 : block_warps * S::tokens][8];
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int64_t first = (std::int64_t{blockIdx.x} * block_warps + warp) * S::tokens;
  const int token = lane / S::lanes, q = lane & (S::lanes - 1);
  const std::int64_t t = first + token;
  const std::int64_t valid = valid_tokens(r);
  if (first >= r.tokens) return;
  const bool there = t < valid;
  const RowsOfWarp rows(logits, first);
  const LogitRow row = rows.row(there ? token : 0);
  std::uint32_t left = 0;
  if constexpr (packed) {
    std::uint32_t bits[S::held];
    load_words<S>(static_cast<const std::uint16_t*>(row.data), logits.runs, r.rule.experts, q,
                  bits);
    left = route_packed<S>(r, logits.form == Form::bf16, bits, t, there, lane);
  } else {
    float v[S::held];
    load_row<float, S>(static_cast<const float*>(row.data), logits.runs, r.rule.experts, q, v);
    left = route_plain<S>(
        r, [&](std::int32_t e) { return static_cast<const float*>(row.data)[e]; }, v,
        won[warp * S::tokens + token], t, there, lane);
  }
  if (left == 0 && __all_sync(every_lane, there || t >= r.tokens)) return;
  __syncwarp();
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
  for (int i = 0; i < S::tokens; ++i) {
    if ((left >> (i * S::lanes) & of_token) != 0) {
      route_left<Whole>(r, rows, scratch + warp, first, i, lane);
    }
    if (first + i >= valid && first + i < r.tokens) clear_row(r, first + i, lane);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Logits& logits;

  template <class S>
  void go() const {
    const std::int64_t each = block_warps * S::tokens;
    // One warp starts a little sooner than four.
    const auto warps = static_cast<unsigned>(
        std::min<std::int64_t>(block_warps, (r.tokens + S::tokens - 1) / S::tokens));
    const cuda_engine::Shape shape{
        .grid = {static_cast<unsigned>((r.tokens + each - 1) / each), 1, 1},
        .block = {32 * warps, 1, 1}};
    const char* what = "route: gate";
    if (logits.form == Form::f32) {
      cuda_engine::launch(what, gpu, shape, plain_gate<S, false>, r, logits);
    } else {
      cuda_engine::launch(what, gpu, shape, plain_gate<S, true>, r, logits);
    }
  }
  template <int lanes, int best>
  void with_blocks() const {
    switch (r.fast.blocks) {
      case 1:
        return go<FastShape<lanes, best, 1, Ranked::logit>>();
      case 2:
        return go<FastShape<lanes, best, 2, Ranked::logit>>();
      case 4:
        return go<FastShape<lanes, best, 4, Ranked::logit>>();
      case 8:
        return go<FastShape<lanes, best, 8, Ranked::logit>>();
      case 16:
        return go<FastShape<lanes == 8 ? 16 : lanes, best, 16, Ranked::logit>>();
      default:
        return go<FastShape<32, best, 32, Ranked::logit>>();
    }
  }
};

}  // namespace

bool plain_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const bool wide = logits.dtype == DType::f32;
  if (r.plain_best == 0 || (!wide && r.router_bias.data != nullptr)) return false;
  const int k = r.rule.top_k, blocks = r.fast.blocks;
  // One token a warp until every scheduler has one.
  const bool many = r.tokens > std::int64_t{gpu.multiprocessors} * 4;
  const int lanes = !many || blocks == 32 ? 32 : blocks == 16 ? 16 : blocks == 1 && k <= 4 ? 4 : 8;
  const Logits from = aligned_logits(logits, r.rule.experts, lanes);
  const Launch launch{gpu, r, from};
  if (lanes == 4) {
    k == 1 ? launch.go<FastShape<4, 1, 1, Ranked::logit>>()
           : launch.go<FastShape<4, 4, 1, Ranked::logit>>();
  } else if (lanes == 32) {
    k == 1   ? launch.with_blocks<32, 1>()
    : k <= 4 ? launch.with_blocks<32, 4>()
             : launch.with_blocks<32, 8>();
  } else {
    k <= 4 ? launch.with_blocks<8, 4>() : launch.with_blocks<8, 8>();
  }
  return true;
}

}  // namespace shunt::routing
