// Gate, for the rules of plain_rows.cuh: from logits [T, C] in memory to ids and weights, one
// launch.
//
// A warp takes 4 to 32 tokens (32 / lanes), once; blocks of up to 4 warps share nothing and never
// synchronise. As many tokens a warp as registers hold the logits of, as long as every scheduler
// has two warps. Bytes: logits once, outputs once. Predicted for 32768 tokens of 128 experts, top
// 8, in 16 bits: 800 instructions a warp of 16 tokens, 6.5 us; measured 6.9
// (docs/notes/cuda-route.md).
#include "cuda/carveout.hpp"
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

// What a warp's tokens may be.
enum class Kind {
  f32,
  packed,  // 16 bits
};

template <class S, Kind kind>
__global__ void __launch_bounds__(32 * block_warps)
    plain_gate(const Logits logits, const __grid_constant__ DeviceRoute r) {
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
  if constexpr (kind == Kind::f32) {
    const auto* const numbers = reinterpret_cast<const float*>(row);
    float v[S::held];
    load_row<float, S>(numbers, logits.runs, r.rule.experts, q, v);
    const std::uint32_t left =
        route_plain<S>(r, numbers, v, won[warp * S::tokens + token], t, there, lane);
    if (left != 0) [[unlikely]] {
      constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
#pragma unroll 1
      for (int i = 0; i < S::tokens; ++i) {
        if ((left >> (i * S::lanes) & of_token) == 0) continue;
        const auto* const all = static_cast<const float*>(logits.data);
        route_in_rounds(r, all + (first + i) * logits.stride, first + i, lane);
      }
    }
  } else {
    const auto* const numbers = reinterpret_cast<const std::uint16_t*>(row);
    std::uint32_t words[(S::held + 1) / 2];
    load_pairs<S>(numbers, logits.runs, r.rule.experts, q, words);
    route_packed<S, false>(r, logits.form == Form::bf16, numbers, words, t, there, lane);
  }
  if (first + S::tokens <= valid) return;
  for (int i = 0; i < S::tokens; ++i) {
    if (first + i >= valid && first + i < r.tokens) clear_row(r, first + i, lane);
  }
}

// is_softmax_of_top() of bf16 rows, aligned, whose E fills the blocks: with as few parameters and
// lines of code as that takes.
template <class S>
__global__ void __launch_bounds__(32 * block_warps)
    usual_gate(const std::uint16_t* logits, const std::int64_t stride,
               const __grid_constant__ TokenRoute r) {
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (blockDim.x >> 5) + warp) * S::tokens;
  const std::int64_t t = first + lane / S::lanes;
  const std::int64_t valid = valid_tokens(r);
  if (first >= r.tokens) return;
  const bool there = t < valid;
  const std::uint16_t* const row = logits + (there ? t : first) * stride;
  std::uint32_t words[(S::held + 1) / 2];
  load_pairs<S>(row, true, S::width * S::blocks, lane & (S::lanes - 1), words);
  route_packed<S, true>(r, true, row, words, t, there, lane);
  if (first + S::tokens <= valid) return;
  for (int i = 0; i < S::tokens; ++i) {
    if (first + i >= valid && first + i < r.tokens) clear_slot(r, first + i, lane);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Tensor& logits;

  template <class S, Kind kind>
  void go() const {
    const Logits from = aligned_logits(logits, r.rule.experts, S::run);
    if constexpr (kind == Kind::packed) {
      if (from.runs && from.form == Form::bf16 && r.rule.experts == S::width * S::blocks &&
          r.rule.top_k == S::best && is_softmax_of_top(r)) {
        return start<S>(usual_gate<S>, static_cast<const std::uint16_t*>(from.data), from.stride,
                        TokenRoute(r));
      }
    }
    start<S>(plain_gate<S, kind>, from, r);
  }
  template <class S, class Kernel, class... Arguments>
  void start(Kernel* kernel, const Arguments&... arguments) const {
    // Few warps: on as many multiprocessors as there are.
    const std::int64_t warps = (r.tokens + S::tokens - 1) / S::tokens;
    const std::int64_t each = std::clamp<std::int64_t>(
        (warps + gpu.multiprocessors - 1) / gpu.multiprocessors, 1, block_warps);
    cuda_engine::prefer_shared_memory(kernel);
    cuda_engine::launch("route: gate", gpu,
                        {.grid = {static_cast<unsigned>((warps + each - 1) / each), 1, 1},
                         .block = {32 * static_cast<unsigned>(each), 1, 1}},
                        kernel, arguments...);
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
