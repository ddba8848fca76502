// Router for two to eight tokens: hidden states [T, H] times router weights [C, H], C up to 256,
// then the whole of routing by the rules of token_rows.cuh, one launch. x and W of one 16-bit type,
// rows at multiples of 16 bytes, H a multiple of 8. As router_few.cu where parts meet in memory,
// the same bits; but each token has a block of its own that receives its sums and routes it, and no
// other rule's code is between what this one runs: code that is not in a cache yet costs more than
// the work.
//
// A block computes 16 columns of all tokens over one of `parts` cuts of H (router_slices.cuh).
//   warps    their sums in shared memory, warp 0 first                    __syncthreads
//   blocks   each sum goes to memory with the number of its launch in the other half of 8 bytes,
//            which memory never parts; a thread of token t's block, the t-th from the end, reads
//            the parts of its column until all are of this launch. No fence, no counting.
// and route_token(). Where the ids are sorted too, the last of these blocks to end does it
// (order/sort_tail.cuh).
//
// Bytes: W once, x once a tile of columns. Time predicted for 4 tokens, 256 x 2048 (1 MB) on an
// H200: as one token, 0.8 us launch, 1.2 until W is there, 0.2 for the sums of a block, 0.6 for the
// meeting, 0.7 for routing: 3.5. Measured: docs/notes/cuda-route.md.
#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "order/order_cuda.hpp"
#include "order/sort_tail.cuh"
#include "route/cuda.hpp"
#include "route/gate_rows.cuh"
#include "route/router_meeting.cuh"
#include "route/router_slices.cuh"
#include "route/token_rows.cuh"

namespace shunt::routing {

namespace {

constexpr int warps = slice_warps;
constexpr int threads = 32 * warps;
constexpr int most_parts = 16, most_tokens = 8;

struct Operands {
  WholeOperands of;
  int columns, parts, tokens;
  int pitch;       // sums of a token: C to fours
  uint2* meeting;  // [parts, T, pitch]: a sum, and the launch that it is from
  std::uint32_t* launches;
};

// What a block has summed goes to memory, and in token `mine`'s block each thread then has the raw
// logit of its column. False in blocks without a token.
__device__ __forceinline__ bool meet(const Operands& o, std::uint32_t launch, int thread, int mine,
                                     float& raw) {
  using Shape = Tile<1, 1>;
  constexpr int stride = Shape::stride;
  __shared__ float shared[warps * Shape::floats];
  const int lane = thread & 31, warp = thread >> 5;
  const int part = static_cast<int>(blockIdx.x) % o.parts;
  const int first_column = static_cast<int>(blockIdx.x) / o.parts * Shape::columns;
  const int columns = min(o.columns - first_column, Shape::columns);
  const int steps = (o.of.hidden + 31) / 32;
  const int slice = part * warps + warp, slices = o.parts * warps;
  float sums[1][1][4] = {};
  multiply_slice<1, 1>(o.of, 0, o.tokens, first_column, columns, steps * slice / slices,
                       steps * (slice + 1) / slices, lane, sums);
  float* const to = shared + warp * Shape::floats + 2 * (lane & 3) * stride + (lane >> 2);
  to[0] = sums[0][0][0];
  to[stride] = sums[0][0][1];
  to[8] = sums[0][0][2];
  to[stride + 8] = sums[0][0][3];
  __syncthreads();
  const int token = thread / Shape::columns, column = thread % Shape::columns;
  if (token < o.tokens && column < columns) {
    const float* const from = shared + token * stride + column;
    float sum = from[0];
#pragma unroll
    for (int w = 1; w < warps; ++w) sum += from[w * Shape::floats];
    send(o.meeting + (part * o.tokens + token) * o.pitch + first_column + column, sum, launch);
  }
  if (mine >= o.tokens) return false;

  const uint2* const from = o.meeting + mine * o.pitch + min(thread, o.columns - 1);
  uint2 of[most_parts];
  bool there = false;
  while (!there) {
#pragma unroll
    for (int p = 0; p < most_parts; ++p) {
      if (p < o.parts) of[p] = receive(from + p * o.tokens * o.pitch);
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
    flat(const __grid_constant__ Operands o, const __grid_constant__ TokenRoute r,
         const __grid_constant__ ordering::SortTail tail) {
  __shared__ TokenScratch<S> scratch;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  if constexpr (ordered) ordering::zero_ahead(tail, blockIdx.x, gridDim.x);
  const std::uint32_t launch = this_launch(o.launches);
  const int token = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  float raw = 0;
  if (!meet(o, launch, thread, token, raw)) return;
  // All blocks have sent: each had read the number before.
  if (token == 0) {
    __syncthreads();
    if (thread == 0) *o.launches = launch;
  }
  if (token >= valid_tokens(r)) {
    clear_slot(r, token, thread);
  } else if constexpr (usual && S::in_groups) {
    route_token<S, false>(as_deepseek_v3(r), raw, scratch, token, warp, lane);
  } else {
    route_token<S, usual>(r, raw, scratch, token, warp, lane);
  }
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

 private:
  template <class S, bool usual, bool ordered>
  void start() const {
    ordering::SortTail tail;
    std::size_t bytes = 0;
    if constexpr (ordered) {
      tail = ordering::sort_tail(gpu, *order, 1, threads, static_cast<unsigned>(o.tokens));
      bytes = tail.job.plan.shared_bytes();
    }
    constexpr int each = Tile<1, 1>::columns;
    const int tiles = (o.columns + each - 1) / each;
    auto* const kernel = flat<S, usual, ordered>;
    cuda_engine::prefer_shared_memory(kernel);
    cuda_engine::launch(
        "route: router", gpu,
        {.grid = {static_cast<unsigned>(tiles * o.parts)}, .block = {threads}, .shared = bytes},
        kernel, o, TokenRoute(r), tail);
  }
};

}  // namespace

bool router_flat(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, const OrderCall* ordered) {
  const int columns = r.rule.columns;
  const int tiles = (columns + 15) / 16;
  if (r.tokens < 2 || r.tokens > most_tokens || columns > 32 * warps || r.fast.lanes == 0 ||
      r.rule.top_k > 8 || plan.ranks != 1 || plan.columns != 16 || plan.parts > most_parts ||
      tiles * plan.parts < r.tokens) {
    return false;
  }
  const Operands o{.of = operands,
                   .columns = columns,
                   .parts = plan.parts,
                   .tokens = static_cast<int>(r.tokens),
                   .pitch = (columns + 3) / 4 * 4,
                   .meeting = reinterpret_cast<uint2*>(gpu.tickets + cuda_engine::router_meeting),
                   .launches = gpu.tickets + cuda_engine::router_launches};
  const Launch launch{gpu, r, o, ordered};
  if (is_softmax_of_top(r)) {
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
