// Gate, for the rules of plain_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch.
//
// A warp takes 4 to 32 tokens (32 / lanes), once; blocks of up to 4 warps share nothing and never
// synchronise. As many tokens a warp as registers hold the logits of, as long as every scheduler
// has two warps. What plain_rows.cuh leaves is done a token at a time by fast_rows.cuh. Bytes:
// logits once, outputs once. Predicted for 32768 tokens of 128 experts, top 8, in 16 bits: 800
// instructions a warp of 16 tokens, 6.5 us; measured 6.9 (docs/notes/cuda-route.md).
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"
#include "route/plain_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int block_warps = 4;

// A lane's logits, two 16-bit words each.
template <class S>
__device__ __forceinline__ void load_pairs(const std::uint16_t* row, bool runs, int experts, int q,
                                           std::uint32_t (&words)[(S::held + 1) / 2]) {
  if constexpr (S::run > 1) {
    constexpr int each = S::run < 8 ? S::run : 8;  // numbers of a vector
    struct alignas(2 * each) Vector {
      std::uint32_t of[each / 2];
    };
    if (runs) {
#pragma unroll
      for (int n = 0; n < S::held; n += each) {
        const int first = S::run_within(S::width * (n / S::run) + q * S::run, experts) + n % S::run;
        const Vector vector = *reinterpret_cast<const Vector*>(row + first);
#pragma unroll
        for (int j = 0; j < each / 2; ++j) words[n / 2 + j] = vector.of[j];
      }
      return;
    }
  }
  const auto number = [&](int n) -> std::uint32_t {
    return row[min(S::expert(n < S::held ? n : 0, q), experts - 1)];
  };
#pragma unroll
  for (int n = 0; n < S::held; n += 2) words[n / 2] = number(n) | number(n + 1) << 16;
}

template <class S>
__device__ __noinline__ void route_left(const DeviceRoute& r, const Logits logits,
                                        FastScratch<S>* scratch, std::int64_t t, int lane) {
  const RowsOfWarp rows(logits, t);
  float v[S::held];
#pragma unroll 1
  for (int n = 0; n < S::held; ++n) v[n] = rows(0, min(S::expert(n, lane), r.rule.experts - 1));
  route_fast<S>(
      r, r, [&rows](int, int e) { return rows(0, e); }, v, scratch, t, true, lane);
}

// What a warp's tokens may be.
enum class Kind {
  f32,
  packed,  // 16 bits
  usual,   // bf16, aligned, and that of route_packed()
};

template <class S, Kind kind>
__global__ void __launch_bounds__(32 * block_warps)
    plain_gate(const Logits logits, const __grid_constant__ DeviceRoute r) {
  using Whole = FastShape<32, 8, S::blocks, Ranked::logit>;
  constexpr bool usual = kind == Kind::usual;
  __shared__ FastScratch<Whole> scratch[block_warps];
  __shared__ std::int32_t won[kind == Kind::f32 ? block_warps * S::tokens : 1][8];
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (blockDim.x >> 5) + warp) * S::tokens;
  const int token = lane / S::lanes, q = lane & (S::lanes - 1);
  const std::int64_t t = first + token;
  const std::int64_t valid = valid_tokens(r);
  if (first >= r.tokens) return;
  const bool there = t < valid;
  const auto* const row = static_cast<const char*>(logits.data) +
                          (there ? t : first) * logits.stride * (kind == Kind::f32 ? 4 : 2);
  std::uint32_t left = 0;
  if constexpr (kind == Kind::f32) {
    const auto* const numbers = reinterpret_cast<const float*>(row);
    float v[S::held];
    load_row<float, S>(numbers, logits.runs, r.rule.experts, q, v);
    left = route_plain<S>(
        r, [numbers](std::int32_t e) { return numbers[e]; }, v, won[warp * S::tokens + token], t,
        there, lane);
  } else {
    std::uint32_t words[(S::held + 1) / 2];
    load_pairs<S>(reinterpret_cast<const std::uint16_t*>(row), usual || logits.runs,
                  usual ? S::width * S::blocks : r.rule.experts, q, words);
    left = route_packed<S, usual>(r, usual || logits.form == Form::bf16, words, t, there, lane);
  }
  if (left == 0 && __all_sync(every_lane, there || t >= r.tokens)) [[likely]]
    return;
  __syncwarp();
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
#pragma unroll 1
  for (int i = 0; i < S::tokens; ++i) {
    if ((left >> (i * S::lanes) & of_token) != 0) {
      route_left<Whole>(r, logits, scratch + warp, first + i, lane);
    }
    if (first + i >= valid && first + i < r.tokens) clear_row(r, first + i, lane);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Tensor& logits;

  template <class S, Kind kind>
  void go() const {
    const Logits from = aligned_logits(logits, r.rule.experts, S::run);
    const Rule& rule = r.rule;
    if constexpr (kind == Kind::packed) {
      if (from.runs && from.form == Form::bf16 && rule.experts == S::width * S::blocks &&
          rule.top_k == S::best && rule.weigh == Weigh::softmax_of_selected && !rule.renormalize &&
          rule.factor == 1 && r.per_expert_scale.data == nullptr && r.replay.data == nullptr) {
        return go<S, Kind::usual>();
      }
    }
    // Few warps: on as many multiprocessors as there are.
    const std::int64_t warps = (r.tokens + S::tokens - 1) / S::tokens;
    const std::int64_t each = std::clamp<std::int64_t>(
        (warps + gpu.multiprocessors - 1) / gpu.multiprocessors, 1, block_warps);
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {static_cast<unsigned>((warps + each - 1) / each), 1, 1},
                         .block = {32 * static_cast<unsigned>(each), 1, 1}},
                        plain_gate<S, kind>, from, r);
  }
  template <int lanes, int blocks, Kind kind>
  void with_best() const {
    if (r.rule.top_k <= 4) return go<FastShape<lanes, 4, blocks, Ranked::logit>, kind>();
    go<FastShape<lanes, 8, blocks, Ranked::logit>, kind>();
  }
  template <int lanes, Kind kind>
  void with_blocks() const {
    switch (r.fast.blocks) {
      case 1:
        return with_best<lanes, 1, kind>();
      case 2:
        return with_best<lanes, 2, kind>();
      case 4:
        return with_best<lanes, 4, kind>();
      case 8:
        return with_best<lanes, 8, kind>();
      case 16:
        return with_best < lanes == 8 && kind == Kind::f32 ? 16 : lanes, 16, kind > ();
      default:
        return with_best<32, 32, kind>();
    }
  }
  // More than 4 tokens to a warp: false where that is not for this many, or runs would not fit.
  bool packed_many() const {
    const std::int64_t tokens = r.tokens, each = std::int64_t{gpu.multiprocessors} * 4;
    const int blocks = r.fast.blocks;
    int lanes = 8;
    while (lanes > 1 && tokens * lanes > 64 * each && blocks * 32 / lanes < 64 &&
           r.rule.experts % (64 / lanes) == 0) {
      lanes /= 2;
    }
    if (r.rule.experts % (32 / lanes) != 0) return false;
    if (blocks == 1 && lanes <= 2) return with_best<1, 1, Kind::packed>(), true;
    if (blocks == 1 && lanes == 4) return with_best<4, 1, Kind::packed>(), true;
    if (blocks == 2 && lanes <= 2) return with_best<2, 2, Kind::packed>(), true;
    if (blocks == 4 && lanes == 2) return with_best<2, 4, Kind::packed>(), true;
    if (blocks == 4 && lanes == 4) return with_best<4, 4, Kind::packed>(), true;
    if (blocks == 8 && lanes == 4) return with_best<4, 8, Kind::packed>(), true;
    return false;
  }
};

}  // namespace

bool plain_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const bool packed = logits.dtype != DType::f32;
  if (r.plain_best == 0 || (packed && r.router_bias.data != nullptr)) return false;
  const Launch launch{gpu, r, logits};
  if (!packed) {
    launch.with_blocks<8, Kind::f32>();
  } else if (!launch.packed_many()) {
    launch.with_blocks<8, Kind::packed>();
  }
  return true;
}

}  // namespace shunt::routing
