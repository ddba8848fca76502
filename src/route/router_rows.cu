// Router for up to 16 columns of up to 256 numbers, where the rule is is_softmax_of_top() and
// nothing but ids and weights is asked for: a warp routes eight tokens from loads to stores, by
// itself.
//
// Fragments as router_few.cu has them, all loads of a warp on their way at once; the sums of chunks
// of 32 along H are added one after the other, as that kernel's warps add theirs, so that the bits
// are the same. Selection on the accumulators: accumulator_rows.cuh. No shared memory, no barrier.
//
// Bytes: x once, W once a warp. Predicted on an H200, 512 x 8 x 128: 0.75 us for a launch, 0.7 for
// the loads, 0.1 for four chunks' products, 0.4 for the selection, 0.3 for stores and the end: 2.3
// us. Measured: 2.5, where the kernel for few tokens takes 4.3.
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "route/accumulator_rows.cuh"
#include "route/cuda.hpp"
#include "route/router_meeting.cuh"

namespace shunt::routing {

namespace {

struct Operands {
  const std::uint16_t *x, *w;       // rows at multiples of 16 bytes
  std::int64_t x_stride, w_stride;  // elements
  int hidden;
};

// chunks: of 32 along H, at least as many as there are.
template <class T, int chunks, int P>
__global__ void __launch_bounds__(32)
    route_rows(const __grid_constant__ Operands o, const __grid_constant__ TokenRoute r) {
  const int lane = static_cast<int>(threadIdx.x), g = lane >> 2, q = lane & 3;
  cuda_engine::wait_for_predecessor();
  const std::int64_t first = std::int64_t{blockIdx.x} * 8;
  const std::uint16_t* const x = o.x + min(first + g, r.tokens - 1) * o.x_stride + 8 * q;
  const std::uint16_t* const a = o.w + min(g, r.rule.experts - 1) * o.w_stride + 8 * q;
  const std::uint16_t* const b = o.w + min(g + 8, r.rule.experts - 1) * o.w_stride + 8 * q;
  uint4 of_x[chunks], of_a[chunks], of_b[chunks];
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const bool there = 32 * c + 8 * q < o.hidden;
    of_a[c] = load_where(a + 32 * c, there);
    of_b[c] = load_where(b + 32 * c, there);
    of_x[c] = load_where(x + 32 * c, there);
  }
  const std::int64_t valid = valid_tokens(r);
  cuda_engine::let_successor_start();
  float sums[4] = {};
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    float part[4] = {};
    const std::uint32_t low[4] = {of_a[c].x, of_b[c].x, of_a[c].y, of_b[c].y};
    const std::uint32_t high[4] = {of_a[c].z, of_b[c].z, of_a[c].w, of_b[c].w};
    cuda_engine::mma_16816(T{}, part, low, of_x[c].x, of_x[c].y);
    cuda_engine::mma_16816(T{}, part, high, of_x[c].z, of_x[c].w);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part[i];
  }
  route_accumulators<P>(r, sums, first, valid, lane);
}

template <class T, int chunks>
void launch_rows(const cuda_engine::Gpu& gpu, const Operands& o, const TokenRoute& r) {
  cuda_engine::launch(
      "route: router", gpu, {.grid = {static_cast<unsigned>((r.tokens + 7) / 8)}, .block = {32}},
      r.rule.top_k <= 4 ? route_rows<T, chunks, 4> : route_rows<T, chunks, 8>, o, r);
}

}  // namespace

bool router_rows(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan) {
  const bool fits = plan.parts == 1 && plan.rows == 8 && plan.columns == 16 &&
                    r.rule.columns == r.rule.experts && operands.hidden <= 256 &&
                    r.rule.top_k <= 8 && is_softmax_of_top(r) && r.dense.data == nullptr &&
                    r.logits_out.data == nullptr;
  if (!fits) return false;
  const Operands o{.x = static_cast<const std::uint16_t*>(operands.x),
                   .w = static_cast<const std::uint16_t*>(operands.w),
                   .x_stride = operands.x_stride,
                   .w_stride = operands.w_stride,
                   .hidden = operands.hidden};
  const TokenRoute usual(r);
  const auto launch = [&](auto type) {
    using T = decltype(type);
    o.hidden <= 128 ? launch_rows<T, 4>(gpu, o, usual) : launch_rows<T, 8>(gpu, o, usual);
  };
  operands.bf16 ? launch(__nv_bfloat16{}) : launch(__half{});
  return true;
}

}  // namespace shunt::routing
