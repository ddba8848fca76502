// Gate for the best of few experts, k = 1, from logits of 16 bits: a thread a token, which reads
// its row as vectors and compares keys of number and id. Bytes: logits once, outputs once. Time:
// that of a launch that reads, and some 100 instructions.
#include "cuda/launch.hpp"
#include "route/cuda.hpp"
#include "route/few_experts.cuh"
#include "route/gate_rows.cuh"
#include "route/token_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int most_threads = 128;

struct RowsOfThreads {
  const char* logits;
  std::int64_t bytes;  // from row to row
  std::int64_t tokens;
  const std::int32_t* valid_tokens;
  DeviceRows<std::int32_t> ids;
  DeviceRows<float> weights;
};
// What else the weights of some rules need.
struct Rest {
  struct {
    Weigh weigh;
    float epsilon, factor;
    bool renormalize, epsilon_is_floor;
  } rule;
  DeviceRows<std::int16_t> replay;
  DeviceVector per_expert_scale;
};

// `experts`: 8, 16 or 32, all there are. `usual`: is_softmax_of_top(), so that weights are 1.
template <int experts, bool bf16, bool usual>
__global__ void __launch_bounds__(most_threads)
    first_gate(const __grid_constant__ RowsOfThreads r, const __grid_constant__ Rest rest) {
  constexpr int width = experts < 16 ? 16 : experts;
  using S = FastShape<1, 1, 1, Ranked::logit, width>;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t valid = valid_tokens(r);
  const bool there = t < valid;
  const char* const row = r.logits + (there ? t : 0) * r.bytes;
  uint4 vectors[experts / 8];
#pragma unroll
  for (int i = 0; i < experts / 8; ++i) vectors[i] = reinterpret_cast<const uint4*>(row)[i];
  std::uint32_t words[experts / 2];
#pragma unroll
  for (int i = 0; i < experts / 8; ++i) {
    words[4 * i] = finite_pair<bf16>(vectors[i].x);
    words[4 * i + 1] = finite_pair<bf16>(vectors[i].y);
    words[4 * i + 2] = finite_pair<bf16>(vectors[i].z);
    words[4 * i + 3] = finite_pair<bf16>(vectors[i].w);
  }
  float key = minus_infinity;
#pragma unroll
  for (int i = 0; i < experts / 2; ++i) {
    const auto id = static_cast<std::uint32_t>(2 * i);
    key = fmaxf(key, fmaxf(packed_key<false>(words[i], 0xffff, id),
                           packed_key<true>(words[i], 0xffff, id + 1)));
  }
  float best = value_of_packed(key, bf16);
  int id = id_of_packed(key);
  constexpr std::uint32_t most = (bf16 ? largest_bf16 : largest_f16) << 16;
  if (fabsf(key) >= float_of(most)) [[unlikely]] {
    constexpr Form form = bf16 ? Form::bf16 : Form::f16;
    id = first_by_turns(row, form, experts);
    if constexpr (!usual) best = sanitised(LogitRow{row, form}(id));
  }
  float w = 1;
  if constexpr (!usual) {
    if (rest.rule.weigh == Weigh::softmax_of_all) {
      float v[width];
#pragma unroll
      for (int e = 0; e < width; ++e) {
        const std::uint32_t pair = words[e / 2 % (experts / 2)];
        v[e] =
            e < experts ? widened(e % 2 != 0 ? pair >> 16 : pair & 0xffff, bf16) : minus_infinity;
      }
      w = 1 / sum_of_exponentials<S>(v, best);
    } else if (rest.rule.weigh == Weigh::sigmoid) {
      w = sigmoid(best);
    } else if (rest.rule.weigh == Weigh::sqrt_softplus) {
      w = sqrt_softplus(best);
    } else if (rest.rule.weigh == Weigh::logit) {
      w = best;
    }
    w = finite_weight(final_weight(rest, w, w, id));
  }
  if (t >= r.tokens) return;
  if (!there) id = -1, w = 0;
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride] = id;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride] = w;
  if constexpr (!usual) {
    if (rest.replay.data != nullptr) {
      rest.replay.data[t * rest.replay.stride] = static_cast<std::int16_t>(id);
    }
  }
}

}  // namespace

bool first_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits) {
  const int experts = r.rule.experts;
  if (r.plain_best == 0 || r.rule.top_k != 1 || logits.dtype == DType::f32 ||
      r.router_bias.data != nullptr || (experts != 8 && experts != 16 && experts != 32) ||
      !aligned_logits(logits, experts, 8).runs) {
    return false;
  }
  const RowsOfThreads rows{static_cast<const char*>(logits.data),
                           logits.strides[0] * 2,
                           r.tokens,
                           r.valid_tokens,
                           r.ids,
                           r.weights};
  const Rest rest{
      {r.rule.weigh, r.rule.epsilon, r.rule.factor, r.rule.renormalize, r.rule.epsilon_is_floor},
      r.replay,
      r.per_expert_scale};
  const bool bf16 = logits.dtype == DType::bf16;
  // Few tokens: on as many multiprocessors as there are.
  const std::int64_t warps = (r.tokens + 31) / 32;
  const std::int64_t each = std::clamp<std::int64_t>(
      (warps + gpu.multiprocessors - 1) / gpu.multiprocessors, 1, most_threads / 32);
  const cuda_engine::Shape shape{.grid = {static_cast<unsigned>((warps + each - 1) / each), 1, 1},
                                 .block = {32 * static_cast<unsigned>(each), 1, 1}};
  const auto with = [&]<int n>() {
    auto* const kernel = bf16 && is_softmax_of_top(r) ? first_gate<n, true, true>
                         : bf16                       ? first_gate<n, true, false>
                                                      : first_gate<n, false, false>;
    cuda_engine::launch("route: gate", gpu, shape, kernel, rows, rest);
  };
  experts == 8    ? with.template operator()<8>()
  : experts == 16 ? with.template operator()<16>()
                  : with.template operator()<32>();
  return true;
}

}  // namespace shunt::routing
