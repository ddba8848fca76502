// Router for few tokens, or for few columns of few numbers: hidden states [T, H] times router
// weights [C, H], then the whole of routing, one launch. x and W of one 16-bit type, rows at
// multiples of 16 bytes, H a multiple of 8.
//
// A block computes 8 NT tokens x 16 MT columns over one of `parts` cuts of H. Its 8 warps cut that
// again, in chunks of 32 along H. Fragments of mma.sync come straight from global memory: W is A
// (m: columns), x is B (n: tokens); of a chunk, lane 4 g + q holds k = 8 q .. 8 q + 7 of rows g and
// g + 8 of A and of row g of B: 16 bytes each, which are the registers of two k16 products. Both
// operands permute k alike, so that the sum is over the same products. All loads of a batch of
// chunks are on their way before the first product (router_slices.cuh). Rows past T or C are those
// of the last one: what comes of them is dropped.
//
// Then, each sum in a fixed order:
//   warps     in shared memory, warp 0 first;                             __syncthreads
//   ranks     of a cluster, over distributed shared memory: rank p adds up and owns the tokens
//             [p share, (p + 1) share);                                   cluster barrier, and one
//             more that is only arrived at here and waited for at the end: no block leaves while
//             others read its sums
//   groups    parts / ranks clusters, and all column tiles, meet in memory: partial sums
//             [groups, T, pitch]. The last block of rank p to arrive at ticket p, which it resets,
//             reads its tokens' rows back. Without clusters every sum carries the number of its
//             launch in the other half of 8 bytes, which memory never parts, and the last block of
//             the grid reads until all have come: no fence, no counting. Where one cluster holds
//             whole rows (one column tile, one group), they never leave shared memory.
// and route_shared_rows with all warps. Who is last does not show in the bits. Where the ids are
// sorted too, the last of the blocks that routed does it (order/sort_tail.cuh). One token of up
// to 256 columns goes to router_one.cu, up to eight by the rules of most models to router_flat.cu,
// few columns by the usual rule to router_rows.cu.
//
// Bytes: W once a token tile, x once a column tile. Time predicted on an H200: 1.0 us launch, 0.8
// us for the first load, bytes / 5 TB/s, 0.2 for the warps, 0.6 for a cluster, 1.0 for the meeting
// in memory, 0.8 for routing: 1024 x 64 x 512 3.3 us. Measured: 5.4 (docs/notes/cuda-route.md).
#include "cuda/launch.hpp"
#include "cuda/vectors.cuh"
#include "order/order_cuda.hpp"
#include "order/sort_tail.cuh"
#include "route/cuda.hpp"
#include "route/fast_shared_rows.cuh"
#include "route/plain_shared_rows.cuh"
#include "route/router_meeting.cuh"
#include "route/router_slices.cuh"

namespace shunt::routing {

namespace {

using cuda_engine::cluster_barrier;

constexpr int warps = slice_warps;
constexpr int threads = 32 * warps;
constexpr int most_groups = 16;
constexpr int most_ranks = 8;

struct Operands {
  WholeOperands of;
  int parts = 1, ranks = 1, groups = 1;
  int pitch = 0;             // floats of a row of partial sums: C to whole vectors
  float* partial = nullptr;  // [groups, T, pitch]; null: blocks hold whole rows, or
  uint4* meeting = nullptr;  // [groups, T, pitch / 2] of two sums, each with its launch
  std::uint32_t* launches = nullptr;
  std::uint32_t* tickets = nullptr;  // [ranks]
  bool ordered = false;              // ids are sorted at the end
};

template <int NT, int MT>
__global__ void __launch_bounds__(threads, (Tile<NT, MT>::blocks))
    few(const __grid_constant__ DeviceRoute r, const __grid_constant__ Operands o,
        const __grid_constant__ ordering::SortTail tail) {
  using Shape = Tile<NT, MT>;
  constexpr int stride = Shape::stride, vectors = 4 * MT;
  extern __shared__ __align__(16) float shared[];
  __shared__ bool last;
  __shared__ FastSharedScratch scratch[warps];
  __shared__ PlainScratch plain[warps];
  __shared__ SharedRoute route;
  const int thread = cuda_engine::kept(static_cast<int>(threadIdx.x));
  const int lane = cuda_engine::kept(thread & 31), warp = cuda_engine::kept(thread >> 5);
  if (r.plain_best == 0) route.fill(r, thread, threads);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  if (o.ordered) {
    ordering::zero_ahead(tail, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
  }
  const std::uint32_t launch = o.meeting != nullptr ? this_launch(o.launches) : 0;
  const int part = static_cast<int>(blockIdx.x) % o.parts;
  const int rank = part % o.ranks, group = part / o.ranks;
  const int first_column = static_cast<int>(blockIdx.x) / o.parts * Shape::columns;
  const int columns = min(r.rule.columns - first_column, Shape::columns);
  const std::int64_t first_token = std::int64_t{blockIdx.y} * Shape::tokens;
  const auto tokens = static_cast<int>(min(r.tokens - first_token, std::int64_t{Shape::tokens}));

  const std::int64_t steps = (o.of.hidden + 31) / 32;
  const int slice = part * warps + warp, slices = o.parts * warps;
  float sums[MT][NT][4] = {};
  multiply_slice<NT, MT>(o.of, first_token, tokens, first_column, columns,
                         static_cast<int>(steps * slice / slices),
                         static_cast<int>(steps * (slice + 1) / slices), lane, sums);

  {
    float* const mine = shared + warp * Shape::floats + 2 * (lane & 3) * stride + (lane >> 2);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float* const to = mine + n * 8 * stride + m * 16;
        to[0] = sums[m][n][0];
        to[stride] = sums[m][n][1];
        to[8] = sums[m][n][2];
        to[stride + 8] = sums[m][n][3];
      }
    }
  }
  __syncthreads();
  // Where a vector of sums of token `row` (of the tile) goes in memory; columns past the pitch: no.
  const auto store = [&](int row, int v, const float4& sum) {
    const int column = first_column + 4 * v;
    if (column >= o.pitch) return;
    __stcg(reinterpret_cast<float4*>(o.partial + (group * r.tokens + first_token + row) * o.pitch +
                                     column),
           sum);
  };
  for (int i = thread; i < tokens * vectors; i += threads) {
    const int row = i / vectors, v = i % vectors;
    float* const at = shared + row * stride + 4 * v;
    float4 of[warps];
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      of[w] = *reinterpret_cast<const float4*>(at + w * Shape::floats);
    }
#pragma unroll
    for (int w = 1; w < warps; ++w) add(of[0], of[w]);
    if (o.meeting != nullptr) {
      const int column = first_column + 4 * v;
      if (column >= o.pitch) continue;
      uint4* const to = o.meeting + ((group * tokens + row) * o.pitch + column) / 2;
      send(to, of[0].x, of[0].y, launch);
      send(to + 1, of[0].z, of[0].w, launch);
    } else if (o.ranks == 1 && o.partial != nullptr) {
      store(row, v, of[0]);
    } else {
      *reinterpret_cast<float4*>(at) = of[0];  // nobody else's
    }
  }
  // This rank's tokens of the tile.
  const int share = (tokens + o.ranks - 1) / o.ranks;
  const int first_row = min(rank * share, tokens);
  const int rows = min(share, tokens - first_row);
  // Whole rows lie beyond the sums that other blocks still read, over those of warps 1 to 7.
  float* whole = shared + Shape::floats;
  int whole_stride = stride;
  if (o.ranks > 1) {
    cluster_barrier();
    for (int i = thread; i < rows * vectors; i += threads) {
      const int row = i / vectors, v = i % vectors;
      const float* const from = shared + (first_row + row) * stride + 4 * v;
      float4 of[most_ranks];
#pragma unroll
      for (int p = 0; p < most_ranks; ++p) {
        if (p < o.ranks) of[p] = cuda_engine::load_of_rank(from, static_cast<unsigned>(p));
      }
#pragma unroll
      for (int p = 1; p < most_ranks; ++p) {
        if (p < o.ranks) add(of[0], of[p]);
      }
      if (o.partial != nullptr) {
        store(first_row + row, v, of[0]);
      } else {
        *reinterpret_cast<float4*>(whole + row * stride + 4 * v) = of[0];
      }
    }
    __syncwarp();
    cuda_engine::cluster_arrive();
  } else if (o.partial == nullptr && o.meeting == nullptr) {
    whole = shared;
  }
  bool routes = rows > 0;
  if (o.meeting != nullptr) {
    routes = blockIdx.x == gridDim.x - 1;
    whole_stride = o.pitch + 4;
    if (routes) {
      __syncthreads();  // the warps' sums have been read
      const int pairs = o.pitch / 2, all = tokens * pairs;
      for (int i = thread; i < all; i += threads) {
        uint4 of[most_groups];
        bool there = false;
        while (!there) {
#pragma unroll
          for (int j = 0; j < most_groups; ++j) {
            if (j < o.groups) of[j] = receive(o.meeting + j * all + i);
          }
          there = true;
#pragma unroll
          for (int j = 0; j < most_groups; ++j) {
            if (j < o.groups) there = there && of[j].y == launch && of[j].w == launch;
          }
        }
        float2 sum = make_float2(__uint_as_float(of[0].x), __uint_as_float(of[0].z));
#pragma unroll
        for (int j = 1; j < most_groups; ++j) {
          if (j >= o.groups) continue;
          sum.x += __uint_as_float(of[j].x);
          sum.y += __uint_as_float(of[j].z);
        }
        const int row = i / pairs;
        *reinterpret_cast<float2*>(whole + row * whole_stride + 2 * (i - row * pairs)) = sum;
      }
    }
  }
  if (o.partial != nullptr && rows > 0) {
    __syncthreads();  // what the block wrote is before its arrival
    if (thread == 0) {
      std::uint32_t* const ticket = o.tickets + rank;
      const std::uint32_t blocks = gridDim.x / static_cast<unsigned>(o.ranks);
      last = cuda_engine::add_in_order(ticket) == blocks - 1;
      if (last) *ticket = 0;
    }
    __syncthreads();
    routes = last;
    whole_stride = o.pitch + 4;
    if (routes) {
      const int each = o.pitch / 4;
      for (int i = thread; i < rows * each; i += threads) {
        const int row = i / each, v = i % each;
        const auto* const from = reinterpret_cast<const float4*>(
            o.partial + (first_token + first_row + row) * o.pitch + 4 * v);
        float4 of[most_groups];
#pragma unroll
        for (int j = 0; j < most_groups; ++j) {
          if (j < o.groups) of[j] = __ldcg(from + j * r.tokens * each);
        }
#pragma unroll
        for (int j = 1; j < most_groups; ++j) {
          if (j < o.groups) add(of[0], of[j]);
        }
        *reinterpret_cast<float4*>(whole + row * whole_stride + 4 * v) = of[0];
      }
    }
  }
  if (routes) {  // the same for the whole block
    __syncthreads();
    // All blocks have sent: each had read the number before.
    if (o.meeting != nullptr && thread == 0) *o.launches = launch;
    constexpr int most = Tile<NT, MT>::columns == 64 ? 64 : 512;
    const std::int64_t first = first_token + first_row;
    if (!route_few_rows_plain<most>(r, whole, whole_stride, first, rows, warp, warps, plain[warp],
                                    lane) &&
        !route_shared_rows_fast<most, true>(route.get(), whole, whole_stride, first, rows, warp,
                                            warps, scratch, lane)) {
      route_shared_rows<512>(route.get(), whole, whole_stride, first, rows, warp, warps, lane);
    }
  }
  if (o.ranks > 1) cuda_engine::cluster_wait();
  if (o.ordered && routes) {
    __syncthreads();
    ordering::run_sort_tail(tail, 0);
  }
}

template <int NT, int MT>
void launch_few(const cuda_engine::Gpu& gpu, const DeviceRoute& r, Operands o,
                const OrderCall* ordered) {
  using Shape = Tile<NT, MT>;
  const auto column_tiles =
      static_cast<unsigned>((r.rule.columns + Shape::columns - 1) / Shape::columns);
  const auto token_tiles = static_cast<unsigned>((r.tokens + Shape::tokens - 1) / Shape::tokens);
  const int share = (Shape::tokens + o.ranks - 1) / o.ranks;
  const int floats = std::max(warps * Shape::floats, Shape::floats + share * (o.pitch + 4));
  std::size_t bytes = static_cast<std::size_t>(floats) * 4;
  ordering::SortTail tail;
  if (ordered != nullptr) {
    // Blocks with tokens of their own: see `rows` of the kernel.
    const auto that_route = [&](std::int64_t tokens) {
      const std::int64_t each = (tokens + o.ranks - 1) / o.ranks;
      return static_cast<unsigned>((tokens + each - 1) / each);
    };
    const std::int64_t of_last = r.tokens - (token_tiles - 1) * std::int64_t{Shape::tokens};
    o.ordered = true;
    tail = ordering::sort_tail(gpu, *ordered, 1, threads,
                               (token_tiles - 1) * that_route(Shape::tokens) + that_route(of_last));
    bytes = std::max(bytes, tail.job.plan.shared_bytes());
  }
  cuda_engine::launch("route: router", gpu,
                      {.grid = {column_tiles * static_cast<unsigned>(o.parts), token_tiles, 1},
                       .block = {threads, 1, 1},
                       .shared = bytes,
                       .cluster = static_cast<unsigned>(o.ranks)},
                      few<NT, MT>, r, o, tail);
}

}  // namespace

void router_few(const cuda_engine::Gpu& gpu, DeviceRoute r, const WholeOperands& operands,
                const RouterPlan& plan, float* workspace, const OrderCall* ordered) {
  if (r.quick) fit_per_lane(r, shared_per_lane(512));  // of all columns that it may have
  Operands o{.of = operands, .parts = plan.parts, .ranks = plan.ranks};
  o.groups = plan.parts / plan.ranks;
  o.pitch = (r.rule.columns + 3) / 4 * 4;
  const bool whole_rows = o.groups == 1 && r.rule.columns <= plan.columns;
  if (!whole_rows && plan.ranks == 1) {
    o.meeting = reinterpret_cast<uint4*>(gpu.tickets + cuda_engine::router_meeting);
    o.launches = gpu.tickets + cuda_engine::router_launches;
  } else if (!whole_rows) {
    o.partial = workspace;
    o.tickets = gpu.tickets + cuda_engine::router_tickets;
  }
  if (o.meeting != nullptr &&
      (router_one(gpu, r, operands, ordered) || router_flat(gpu, r, operands, plan, ordered))) {
    return;
  }
  if (whole_rows && ordered == nullptr && router_rows(gpu, r, operands, plan)) return;
  if (plan.columns == 64) return launch_few<1, 4>(gpu, r, o, ordered);
  if (plan.rows == 8) return launch_few<1, 1>(gpu, r, o, ordered);
  launch_few<2, 1>(gpu, r, o, ordered);
}

}  // namespace shunt::routing
