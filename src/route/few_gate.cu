// Gate for few tokens of up to 32 experts by the usual rule, in bf16, all tokens valid. One launch
// takes what a launch takes, so nothing but what this rule needs is in the way: no stack, 44 bytes
// of parameters, code of 60 and of 100 instructions. The successor is let go when the load is on
// its way: before, it costs up to 0.03 us.
//
//   first_of_few  k = 1 of 8, 16 or 32: 4 experts a lane
//   best_of_few   k = 2, 4 or 8 of up to 32: a warp a token, an expert a lane
#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/few_experts.cuh"
#include "route/gate_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int most_threads = 128;

struct FewRows {
  const char* logits;
  std::int32_t* ids;
  float* weights;
  int bytes, ids_stride, weights_stride;  // from row to row; elements
  int tokens, experts;
};

__device__ __forceinline__ void store(const FewRows& r, int t, int slot, int id, float weight) {
  r.ids[std::int64_t{t} * r.ids_stride + slot] = id;
  r.weights[std::int64_t{t} * r.weights_stride + slot] = weight;
}

template <int experts>
__global__ void __launch_bounds__(most_threads) first_of_few(const __grid_constant__ FewRows r) {
  constexpr unsigned lanes = experts / 4;
  cuda_engine::wait_for_predecessor();
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int t = static_cast<int>(thread / lanes), q = static_cast<int>(thread % lanes);
  const char* const row = r.logits + std::int64_t{min(t, r.tokens - 1)} * r.bytes;
  const uint2 words = reinterpret_cast<const uint2*>(row)[q];
  cuda_engine::let_successor_start();
  const int id = first_of_lanes<lanes>(words, row, q);
  if (t < r.tokens && q == 0) store(r, t, 0, id, 1);
}

// `whole`: 32 experts.
template <int k, bool whole>
__global__ void __launch_bounds__(32) best_of_few(const __grid_constant__ FewRows r) {
  cuda_engine::wait_for_predecessor();
  const int lane = static_cast<int>(threadIdx.x), t = static_cast<int>(blockIdx.x);
  const int experts = whole ? 32 : r.experts;
  const auto* const row =
      reinterpret_cast<const std::uint16_t*>(r.logits + std::int64_t{t} * r.bytes);
  const std::uint32_t bits = row[min(lane, experts - 1)];
  cuda_engine::let_successor_start();
  const Selected own = best_of_warp<k>(bits, experts, lane);
  if (own.slot >= 0) store(r, t, own.slot, lane, own.weight);
}

}  // namespace

bool few_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const int experts = r.rule.experts, k = r.rule.top_k;
  constexpr std::int64_t largest_stride = 1 << 29;
  if (!is_softmax_of_top(r) || logits.dtype != DType::bf16 || experts > 32 ||
      r.valid_tokens != nullptr || r.ids.data == nullptr || r.weights.data == nullptr ||
      std::abs(logits.strides[0]) > largest_stride || std::abs(r.ids.stride) > largest_stride ||
      std::abs(r.weights.stride) > largest_stride) {
    return false;
  }
  const bool first = k == 1 && (experts == 8 || experts == 16 || experts == 32) &&
                     aligned_logits(logits, experts, 4).runs;
  const bool best = k == 2 || k == 4 || k == 8;
  // From there on the gates that take several tokens a thread or warp are as fast.
  if (!(first && r.tokens <= 4096) && !(best && r.tokens <= gpu.multiprocessors)) return false;
  const FewRows rows{static_cast<const char*>(logits.data),
                     r.ids.data,
                     r.weights.data,
                     static_cast<int>(logits.strides[0] * 2),
                     static_cast<int>(r.ids.stride),
                     static_cast<int>(r.weights.stride),
                     static_cast<int>(r.tokens),
                     experts};
  cuda_engine::Shape shape{.grid = {static_cast<unsigned>(r.tokens), 1, 1}, .block = {32, 1, 1}};
  if (first) {
    // On as many multiprocessors as there are.
    const std::int64_t warps = (r.tokens * (experts / 4) + 31) / 32;
    const std::int64_t each = std::clamp<std::int64_t>(
        (warps + gpu.multiprocessors - 1) / gpu.multiprocessors, 1, most_threads / 32);
    shape = {.grid = {static_cast<unsigned>((warps + each - 1) / each), 1, 1},
             .block = {32 * static_cast<unsigned>(each), 1, 1}};
  }
  const auto with = [&](auto* kernel) {
    cuda_engine::prefer_shared_memory(kernel);
    cuda_engine::launch("route: gate", gpu, shape, kernel, rows);
    return true;
  };
  if (first) {
    return with(experts == 8    ? first_of_few<8>
                : experts == 16 ? first_of_few<16>
                                : first_of_few<32>);
  }
  if (k == 2) return with(experts == 32 ? best_of_few<2, true> : best_of_few<2, false>);
  if (k == 4) return with(experts == 32 ? best_of_few<4, true> : best_of_few<4, false>);
  return with(experts == 32 ? best_of_few<8, true> : best_of_few<8, false>);
}

}  // namespace shunt::routing
