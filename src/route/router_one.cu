// Router for one token: hidden states [1, H] times router weights [C, H], C up to 256, then the
// whole of routing, one launch. x and W of one 16-bit type, rows at multiples of 16 bytes, H a
// multiple of 8.
//
// A block has two columns, over one of `parts` cuts of H in chunks of 256; its 8 warps take every
// eighth. Fragments of mma.sync come straight from memory, a chunk of a row by 32 lanes of 16
// bytes: the rows of A are the eight pieces of 32 of a chunk of both columns, and the columns of B
// are the same pieces of x, so that the products that count lie on the diagonal of the result. The
// others cost nothing, for nothing is converted, and whole rows of W are read in one go.
//   warps    8 sums each and column, in shared memory                     __syncthreads
//   blocks   each sum goes to memory with the number of its launch in the other half of 8 bytes,
//            which memory never parts; a thread of the last block reads the parts of its column
//            until all are of this launch. No fence, no counting.
// and route_token() for the rules of token_rows.cuh, route_shared_rows() by one warp for others.
// Where the ids are sorted too, that block does it (order/sort_tail.cuh).
//
// Bytes: W once, x once a block. Time predicted for 256 x 7168 (3.7 MB) on an H200: 0.8 us launch,
// 1.4 until W is there, 0.15 for the sums of a block, 0.5 for the meeting, 0.7 for routing: 3.6.
// Measured: 4.3 (docs/notes/cuda-route.md).
#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "order/order_cuda.hpp"
#include "order/sort_tail.cuh"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"
#include "route/router_meeting.cuh"
#include "route/shared_rows.cuh"
#include "route/token_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int most_parts = 4;
constexpr int chunk_of_warp = 256;
constexpr int batch = 4;  // chunks of a warp on their way at once

struct Operands {
  const std::uint16_t* x;
  const std::uint16_t* w;
  std::int64_t w_stride;  // elements
  int hidden, columns, parts;
  bool bf16;
  uint2* meeting;  // [parts, C]: a sum, and the launch that it is from
  std::uint32_t* launches;
};

template <class T>
__device__ __forceinline__ void multiply(const uint4& a, const uint4& b, const uint4& x,
                                         float (&sums)[4]) {
  const std::uint32_t low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
  cuda_engine::mma_16816(T{}, sums, low, x.x, x.y);
  cuda_engine::mma_16816(T{}, sums, high, x.z, x.w);
}

// A warp's share of both columns' sums, in 8 lanes: those whose piece is both row and column.
__device__ __forceinline__ float2 multiply_chunks(const Operands& o, int first_column, int part,
                                                  int warp, int lane, bool& counts) {
  const int chunks = (o.hidden + chunk_of_warp - 1) / chunk_of_warp;
  const int begin = chunks * part / o.parts, end = chunks * (part + 1) / o.parts;
  const std::uint16_t* const a = o.w + first_column * o.w_stride + 8 * lane;
  const std::uint16_t* const b = o.w + min(first_column + 1, o.columns - 1) * o.w_stride + 8 * lane;
  const std::uint16_t* const x = o.x + 8 * lane;
  float sums[batch][4] = {};  // short chains
  for (int at = begin + warp; at < end; at += warps * batch) {
    uint4 of_a[batch], of_b[batch], of_x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int h = (at + warps * i) * chunk_of_warp;
      const bool there = at + warps * i < end && h + 8 * lane < o.hidden;
      of_a[i] = load_where(a + h, there);
      of_b[i] = load_where(b + h, there);
      of_x[i] = load_where(x + h, there);
    }
    if (o.bf16) {
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        multiply<__nv_bfloat16>(of_a[i], of_b[i], of_x[i], sums[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < batch; ++i) multiply<__half>(of_a[i], of_b[i], of_x[i], sums[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[0][j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
  const int piece = lane >> 2;
  counts = (lane & 3) == piece >> 1;
  return (piece & 1) != 0 ? make_float2(sums[0][1], sums[0][3])
                          : make_float2(sums[0][0], sums[0][2]);
}

// What a block has summed goes to memory, and in the last block of the grid each thread then has
// the raw logit of its column. False in all others.
__device__ __forceinline__ bool meet(const Operands& o, std::uint32_t launch, int thread,
                                     float& raw) {
  __shared__ __align__(16) float sums[2][8 * warps];
  const int lane = thread & 31, warp = thread >> 5;
  const int part = static_cast<int>(blockIdx.x) % o.parts;
  const int first_column = static_cast<int>(blockIdx.x) / o.parts * 2;
  bool counts = false;
  const float2 mine = multiply_chunks(o, first_column, part, warp, lane, counts);
  if (counts) {
    sums[0][8 * warp + (lane >> 2)] = mine.x;
    sums[1][8 * warp + (lane >> 2)] = mine.y;
  }
  __syncthreads();
  if (warp == 0) {
    const int column = lane >> 2 & 1;
    const auto* const quads = reinterpret_cast<const float4*>(sums[column]) + 4 * (lane & 3);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += (quads[i].x + quads[i].y) + (quads[i].z + quads[i].w);
    sum += __shfl_xor_sync(every_lane, sum, 1);
    sum += __shfl_xor_sync(every_lane, sum, 2);
    if ((lane & 3) == 0 && lane < 8 && first_column + column < o.columns) {
      send(o.meeting + part * o.columns + first_column + column, sum, launch);
    }
  }
  if (blockIdx.x != gridDim.x - 1) return false;

  const uint2* const from = o.meeting + min(thread, o.columns - 1);
  uint2 of[most_parts];
  bool there = false;
  while (!there) {
#pragma unroll
    for (int p = 0; p < most_parts; ++p) {
      if (p < o.parts) of[p] = receive(from + p * o.columns);
    }
    there = true;
#pragma unroll
    for (int p = 0; p < most_parts; ++p) {
      if (p < o.parts) there = there && of[p].y == launch;
    }
  }
  raw = __uint_as_float(of[0].x);
#pragma unroll
  for (int p = 1; p < most_parts; ++p) {
    if (p < o.parts) raw += __uint_as_float(of[p].x);
  }
  return true;
}

// `usual`: is_softmax_of_top(), or is_deepseek_v3().
template <class S, bool usual, bool ordered>
__global__ void __launch_bounds__(threads)
    one(const __grid_constant__ Operands o, const __grid_constant__ TokenRoute r,
        const __grid_constant__ ordering::SortTail tail) {
  __shared__ TokenScratch<S> scratch;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const std::uint32_t launch = this_launch(o.launches);
  if constexpr (ordered) ordering::zero_ahead(tail, blockIdx.x, gridDim.x);
  float raw = 0;
  if (!meet(o, launch, thread, raw)) return;
  if (valid_tokens(r) < 1) {
    __syncthreads();  // every column is there, as route_token() waits for too
    clear_slot(r, 0, thread);
  } else if constexpr (usual && S::in_groups) {
    route_token<S, false>(as_deepseek_v3(r), raw, scratch, 0, warp, lane);
  } else {
    route_token<S, usual>(r, raw, scratch, 0, warp, lane);
  }
  // All blocks have sent: each had read the number before.
  if (thread == 0) *o.launches = launch;
  if constexpr (ordered) {
    __syncthreads();
    ordering::run_sort_tail(tail, 0);
  }
}

// Other rules, and outputs that route_token() does not write: the same sums, so that a row's bits
// do not depend on what is asked for.
template <bool ordered>
__global__ void __launch_bounds__(threads)
    one_of_any_rule(const __grid_constant__ Operands o, const __grid_constant__ DeviceRoute r,
                    const __grid_constant__ ordering::SortTail tail) {
  __shared__ __align__(16) float logits[threads];
  __shared__ SharedRoute route;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  route.fill(r, thread, threads);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const std::uint32_t launch = this_launch(o.launches);
  if constexpr (ordered) ordering::zero_ahead(tail, blockIdx.x, gridDim.x);
  float raw = 0;
  if (!meet(o, launch, thread, raw)) return;
  logits[thread] = raw;  // past the last column that one's again
  __syncthreads();
  route_shared_rows<512>(route.get(), logits, threads, 0, 1, warp, warps, lane);
  if (thread == 0) *o.launches = launch;
  if constexpr (ordered) {
    __syncthreads();
    ordering::run_sort_tail(tail, 0);
  }
}

struct Launch {
  const cuda_engine::Gpu& gpu;
  const DeviceRoute& r;
  const Operands& o;
  const OrderCall* order;

  template <int best, Ranked ranked, bool usual = false>
  void go() const {
    using S = TokenShape<warps, best, ranked>;
    order != nullptr ? start<S, usual, true>() : start<S, usual, false>();
  }
  void go_any() const { order != nullptr ? start_any<true>() : start_any<false>(); }

 private:
  template <class S, bool usual, bool ordered>
  void start() const {
    launch<ordered>(one<S, usual, ordered>, TokenRoute(r));
  }
  template <bool ordered>
  void start_any() const {
    launch<ordered>(one_of_any_rule<ordered>, r);
  }
  template <bool ordered, class Route>
  void launch(void (*kernel)(Operands, Route, ordering::SortTail), const Route& route) const {
    ordering::SortTail tail;
    std::size_t bytes = 0;
    if constexpr (ordered) {
      tail = ordering::sort_tail(gpu, *order, 1, threads, 1);
      bytes = tail.job.plan.shared_bytes();
    }
    const int pairs = (o.columns + 1) / 2;
    cuda_engine::prefer_shared_memory(kernel);
    cuda_engine::launch(
        "route: router", gpu,
        {.grid = {static_cast<unsigned>(pairs * o.parts)}, .block = {threads}, .shared = bytes},
        kernel, o, route, tail);
  }
};

}  // namespace

bool router_one(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                const OrderCall* ordered) {
  if (r.tokens != 1 || r.rule.columns > 32 * warps) return false;
  const int pairs = (r.rule.columns + 1) / 2;
  const int chunks = (operands.hidden + chunk_of_warp - 1) / chunk_of_warp;
  const Operands o{
      .x = static_cast<const std::uint16_t*>(operands.x),
      .w = static_cast<const std::uint16_t*>(operands.w),
      .w_stride = operands.w_stride,
      .hidden = operands.hidden,
      .columns = r.rule.columns,
      .parts = std::clamp(std::min(gpu.multiprocessors / pairs, chunks / warps), 1, most_parts),
      .bf16 = operands.bf16,
      .meeting = reinterpret_cast<uint2*>(gpu.tickets + cuda_engine::router_meeting),
      .launches = gpu.tickets + cuda_engine::router_launches};
  const Launch launch{gpu, r, o, ordered};
  if (r.fast.lanes == 0 || r.rule.top_k > 8) {
    launch.go_any();
  } else if (is_softmax_of_top(r)) {
    r.rule.top_k <= 4 ? launch.go<4, Ranked::logit, true>() : launch.go<8, Ranked::logit, true>();
  } else if (r.fast.in_groups) {
    is_deepseek_v3(r) ? launch.go<8, Ranked::score_in_groups, true>()
                      : launch.go<8, Ranked::score_in_groups>();
  } else if (r.fast.scored) {
    launch.go<8, Ranked::score>();
  } else {
    r.rule.top_k <= 4 ? launch.go<4, Ranked::logit>() : launch.go<8, Ranked::logit>();
  }
  return true;
}

}  // namespace shunt::routing
