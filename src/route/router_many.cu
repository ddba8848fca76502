// Router for many tokens on Hopper: hidden states [T, H] times router weights [C, H], then the
// whole of routing, one launch. x and W of one 16-bit type, rows at multiples of 16 bytes; any H.
//
// A block computes 128 tokens (or 64) x up to 256 columns over one of `parts` cuts of H, in steps
// of 64. 9 warps:
//   warp 8     one thread of it orders bulk tensor copies of x and W into a ring of stages, rows of
//              128 bytes swizzled; what lies beyond T, C and H comes as zeros
//   warps 0-7  two warpgroups with wgmma; with 128 tokens each has 64 of them and all columns, with
//              64 each has all of them and half of the columns
//   full[s]    the bytes of stage s are there: 1 arrival, that of the copying thread
//   empty[s]   stage s may be overwritten: 8 arrivals of each block that reads what this one
//   copies,
//              from each warp that multiplies, one step later than its products were started
// A cluster is the blocks of one or two tiles of tokens: of each tile `parts`, times two halves of
// 256 columns where C is more than 256. Blocks that need the same rows of x or W copy a share each,
// to all of them. When the products are done every block sends each row of its sums to the block
// that owns it: owner p of the R of a tile has the rows [p rows / R, (p + 1) rows / R). A cluster
// barrier later an owner adds its rows up, parts in their order, and routes them, 8 warps several
// rows each. Where sums arrive is either room of its own, or the stages, which another barrier
// frees. A cluster past the valid count only clears its rows.
// Few tokens and a long H: several clusters and column tiles share out a tile of tokens; owners'
// sums meet in memory, and the last to arrive adds up and routes. Who is last does not show.
// More than 512 columns: rows of raw logits go to memory, 256 columns a block, and the gate
// follows.
//
// Bytes: x and W through the L2 once for the blocks that share them. Time predicted on an H200: 2
// us until the first product, the larger of 2 T C H / 790 TFLOP/s and L2 bytes / 5.5 TB/s, 0.3 for
// each cluster barrier, 0.2 to 1 for sending, 0.4 to 2 for routing: 4096 x 256 x 7168 27 us (21 of
// them bytes); 8192 x 512 x 2048 27; 4096 x 128 x 2048 8; 2048 x 128 x 1024 5; 64 x 256 x 7168 5.
#include "cuda/hopper.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "route/cuda.hpp"
#include "route/fast_shared_rows.cuh"
#include "route/plain_shared_rows.cuh"

#ifndef SHUNT_BUILT_FOR_SM_90A
#define SHUNT_BUILT_FOR_SM_90A 0
#endif

namespace shunt::routing {

namespace {

constexpr int multiplying = 8;  // warps
constexpr int threads = 32 * (multiplying + 1);
constexpr int step = 64;  // elements along H

struct Layout {
  int hidden = 0;
  int parts = 1;             // of H, in a cluster
  int pair = 1;              // tiles of tokens in a cluster
  int groups = 1;            // of H, each cut into parts again: those meet in memory
  bool bf16 = false;         // or f16
  float* logits = nullptr;   // [T, C]: raw sums go there and nothing is routed; or null
  float* partial = nullptr;  // [groups, T, pitch], where sums meet
  int pitch = 0;
  std::uint32_t* tickets = nullptr;  // [tiles of tokens * parts]
};

// `tile`: 64, 128, 256 or 512 columns of a whole row. `meets`: its blocks meet in memory.
template <int rows_, int tile_, bool meets_>
struct Shape {
  static constexpr int rows = rows_, tile = tile_;
  static constexpr bool meets = meets_;
  static constexpr int routed = meets ? 512 : tile;        // columns that a row may have
  static constexpr int columns = tile < 256 ? tile : 256;  // of a block
  static constexpr int halves = tile / columns;
  static constexpr int each = rows == 128 ? columns : columns / 2;  // columns of a warpgroup
  static constexpr int x_bytes = rows * step * 2, w_bytes = columns * step * 2;
  static constexpr int stage_bytes = x_bytes + w_bytes;
  // Sums that arrive, [parts][rows of an owner][stride]; 8 floats more than a row: stores of two
  // floats by 8 rows x 4 lanes hit no bank twice.
  static constexpr int stride = tile + 8;
  static constexpr int sum_bytes = rows / halves * stride * 4;
  static constexpr int room = 210 * 1024;
  static constexpr bool overlaid = sum_bytes + 4 * stage_bytes > room;  // on the stages
  static constexpr int fit = (overlaid ? room : room - sum_bytes) / stage_bytes;
  static constexpr int stages = fit < 8 ? fit : 8;
  static constexpr int ring_bytes = stages * stage_bytes;
  static constexpr int bytes = 1024 + (overlaid ? (ring_bytes > sum_bytes ? ring_bytes : sum_bytes)
                                                : ring_bytes + sum_bytes);
};

// Where a block stands in its cluster.
struct Place {
  int member;  // which of the cluster's tiles of tokens
  int rank;    // of the blocks of that tile: half * parts + part
  int part, half;
  int first_rank;  // rank 0 of the tile, in the cluster

  template <class S>
  __device__ static __forceinline__ Place of(const Layout& o, int in_cluster) {
    const int ranks = o.parts * S::halves;
    Place p{};
    p.member = in_cluster / ranks;
    p.rank = in_cluster % ranks;
    p.part = p.rank % o.parts;
    p.half = p.rank / o.parts;
    p.first_rank = p.member * ranks;
    return p;
  }
};

#if defined(SHUNT_SM_90A)

// By one thread: keeps the ring full.
template <class S>
__device__ __forceinline__ void copy(const CUtensorMap& x, const CUtensorMap& w,
                                     unsigned char* stages, std::uint64_t* full,
                                     std::uint64_t* empty, const Layout& o, const Place& place,
                                     int first_step, int steps, int first_token, int first_column) {
  const int ranks = o.parts * S::halves;
  const int x_rows = S::rows / S::halves, w_rows = S::columns / o.pair;
  const int x_at = place.half * x_rows, w_at = place.member * w_rows;
  std::uint16_t x_ranks = 0, w_ranks = 0;
  for (int h = 0; h < S::halves; ++h) {
    x_ranks |= static_cast<std::uint16_t>(1U << (place.first_rank + h * o.parts + place.part));
  }
  for (int m = 0; m < o.pair; ++m) {
    w_ranks |= static_cast<std::uint16_t>(1U << (m * ranks + place.rank));
  }
  int s = 0;
  unsigned round = 0;
  for (int i = 0; i < steps; ++i) {
    if (round > 0) cuda_engine::mbarrier_wait(&empty[s], (round - 1) & 1);
    unsigned char* const stage = stages + s * S::stage_bytes;
    const int h = (first_step + i) * step;
    cuda_engine::mbarrier_arrive_expect(&full[s], S::stage_bytes);
    unsigned char* const to_x = stage + x_at * step * 2;
    unsigned char* const to_w = stage + S::x_bytes + w_at * step * 2;
    if (S::halves > 1) {
      cuda_engine::copy_box_to_ranks(to_x, &x, &full[s], h, first_token + x_at, x_ranks);
    } else {
      cuda_engine::copy_box(to_x, &x, &full[s], h, first_token);
    }
    if (o.pair > 1) {
      cuda_engine::copy_box_to_ranks(to_w, &w, &full[s], h, first_column + w_at, w_ranks);
    } else {
      cuda_engine::copy_box(to_w, &w, &full[s], h, first_column);
    }
    if (++s == S::stages) s = 0, ++round;
  }
}

// By 8 warps. `release`: of a lane below `releases`, where empty[0] of a block lies whose copies
// this one reads.
template <class S, class T>
__device__ __forceinline__ void multiply(float (&sums)[S::each / 2], const unsigned char* stages,
                                         std::uint64_t* full, std::uint32_t release, bool releases,
                                         int steps, int warp) {
  const int group = warp / 4;
  const std::uint32_t base = cuda_engine::shared_address(stages);
  const std::uint32_t a_base = base + (S::rows == 128 ? group * 64 * 128 : 0);
  const std::uint32_t b_base = base + S::x_bytes + (S::rows == 128 ? 0 : group * S::each * 128);
#pragma unroll
  for (int j = 0; j < S::each / 2; ++j) sums[j] = 0;
  int s = 0, before = 0;
  unsigned parity = 0;
  for (int i = 0; i < steps; ++i) {
    cuda_engine::mbarrier_wait(&full[s], parity);
    const auto stage = static_cast<std::uint32_t>(s * S::stage_bytes);
    const std::uint64_t a = cuda_engine::wgmma_descriptor(a_base + stage);
    const std::uint64_t b = cuda_engine::wgmma_descriptor(b_base + stage);
    cuda_engine::wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < step / 16; ++k) {
      cuda_engine::wgmma(T{}, sums, a + 2 * k, b + 2 * k);
    }
    cuda_engine::wgmma_commit();
    cuda_engine::wgmma_wait<1>();  // the step before has been read
    if (i > 0 && releases) {
      cuda_engine::mbarrier_arrive_at(release + static_cast<std::uint32_t>(before) * 8);
    }
    before = s;
    if (++s == S::stages) s = 0, parity ^= 1;
  }
  cuda_engine::wgmma_wait<0>();
}

// Every row of a warp's sums to its owner.
template <class S>
__device__ __forceinline__ void send(const float (&sums)[S::each / 2], const float* arrived,
                                     const Place& place, int share, int warp, int lane) {
  const int group = warp / 4;
  const int column =
      place.half * S::columns + (S::rows == 128 ? 0 : group * S::each) + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (S::rows == 128 ? group * 64 : 0) + warp % 4 * 16 + (lane >> 2) + 8 * i;
    const std::uint32_t to = cuda_engine::address_of_rank(
        arrived + (place.part * share + row % share) * S::stride + column,
        static_cast<unsigned>(place.first_rank + row / share));
#pragma unroll
    for (int j = 0; j < S::each / 8; ++j) {
      cuda_engine::store_at(to + static_cast<std::uint32_t>(32 * j), sums[4 * j + 2 * i],
                            sums[4 * j + 2 * i + 1]);
    }
  }
}

// Four columns of an owner's row, added up over parts.
template <class S>
__device__ __forceinline__ float4 sum_of_parts(const float* arrived, int parts, int share, int row,
                                               int column) {
  const float* from = arrived + row * S::stride + column;
  float4 sum = *reinterpret_cast<const float4*>(from);
  for (int p = 1; p < parts; ++p) {
    from += share * S::stride;
    const float4 v = *reinterpret_cast<const float4*>(from);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

// Adds up where parts are several: a run of a lane's columns of an owner's row, back to its place.
template <class S, class F>
__device__ __forceinline__ void load_runs(float* arrived, int parts, int share, int row, int q,
                                          float (&v)[F::held]) {
  struct alignas(4 * F::run) Run {
    float of[F::run];
  };
#pragma unroll
  for (int b = 0; b < F::blocks; ++b) {
    float* const at = arrived + row * S::stride + 32 * b + q * F::run;
    Run sum = *reinterpret_cast<const Run*>(at);
    if (parts > 1) {
      for (int p = 1; p < parts; ++p) {
        const Run more = *reinterpret_cast<const Run*>(at + p * share * S::stride);
#pragma unroll
        for (int j = 0; j < F::run; ++j) sum.of[j] += more.of[j];
      }
      *reinterpret_cast<Run*>(at) = sum;
    }
#pragma unroll
    for (int j = 0; j < F::run; ++j) v[b * F::run + j] = sum.of[j];
  }
}

__device__ __forceinline__ void barrier_of_multiplying() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * multiplying) : "memory");
}

// What the routing of rows needs.
struct Ending {
  FastSharedScratch* fast;
  PlainScratch* plain;
  const DeviceRoute& shared_r;
  int warp, lane;
};
// `share` complete rows at `rows`, a stride apart, from token `first` on, by any rule.
template <int most, bool few>
__device__ __forceinline__ void route_whole_rows(const Ending& end, const float* rows, int stride,
                                                 std::int64_t first, int share) {
  if (!route_shared_rows_fast<most, few>(end.shared_r, rows, stride, first, share, end.warp,
                                         multiplying, end.fast, end.lane)) {
    route_shared_rows<most>(end.shared_r, rows, stride, first, share, end.warp, multiplying,
                            end.lane);
  }
}

// An owner's rows, once all sums have arrived.
template <class S>
__device__ __forceinline__ void finish(const DeviceRoute& r, const Layout& o, const Ending& end,
                                       float* arrived, std::int64_t first, int share) {
  if (r.plain_best != 0) {
    constexpr int lanes = S::tile == 512 ? 16 : 8;
    const auto go = [&]<int best>() {
      using F = FastShape<lanes, best, S::tile / 32, Ranked::logit>;
      route_shared_rows_plain<F, S::routed>(
          r, end.shared_r,
          [&](int row, int q, float(&v)[F::held]) {
            load_runs<S, F>(arrived, o.parts, share, row, q, v);
          },
          arrived, S::stride, first, share, end.warp, multiplying, end.plain[end.warp], end.lane);
    };
    r.plain_best == 4 ? go.template operator()<4>() : go.template operator()<8>();
    return;
  }
  if (o.parts > 1) {
    constexpr int vectors = S::tile / 4;
    for (int i = 32 * end.warp + end.lane; i < share * vectors; i += 32 * multiplying) {
      const int row = i / vectors, column = 4 * (i % vectors);
      *reinterpret_cast<float4*>(arrived + row * S::stride + column) =
          sum_of_parts<S>(arrived, o.parts, share, row, column);
    }
    barrier_of_multiplying();
  }
  route_whole_rows<S::routed, false>(end, arrived, S::stride, first, share);
}

// Raw logits of an owner's rows, `tokens` of them.
template <class S>
__device__ __forceinline__ void store_logits(const DeviceRoute& r, const Layout& o,
                                             const Ending& end, const float* arrived,
                                             std::int64_t first, int first_column, int share,
                                             int tokens) {
  const int columns = min(r.rule.columns - first_column, S::columns);
  for (int i = end.warp; i < tokens; i += multiplying) {
    float* const to = o.logits + (first + i) * r.rule.columns + first_column;
    for (int c = end.lane; c < columns; c += 32) {
      float sum = arrived[i * S::stride + c];
      for (int p = 1; p < o.parts; ++p) sum += arrived[(p * share + i) * S::stride + c];
      to[c] = sum;
    }
  }
}

// Adds 1 and returns what was there; orders what this block wrote before and reads after.
__device__ __forceinline__ std::uint32_t arrive(std::uint32_t* ticket) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(ticket)
               : "memory");
  return before;
}

// Sums of an owner's rows meet in memory; the last owner of these rows routes them.
template <class S>
__device__ __forceinline__ void meet(const DeviceRoute& r, const Layout& o, const Ending& end,
                                     float* arrived, std::int64_t first, int first_column,
                                     int share, int tokens, std::uint32_t* ticket, bool& last) {
  const int thread = 32 * end.warp + end.lane;
  constexpr int vectors = S::tile / 4;
  for (int i = thread; i < tokens * vectors; i += 32 * multiplying) {
    const int row = i / vectors, column = 4 * (i % vectors);
    if (first_column + column >= o.pitch) continue;
    const float4 sum = sum_of_parts<S>(arrived, o.parts, share, row, column);
    __stcg(reinterpret_cast<float4*>(o.partial + (blockIdx.z * r.tokens + first + row) * o.pitch +
                                     first_column + column),
           sum);
  }
  barrier_of_multiplying();  // what the block wrote is before its arrival
  if (thread == 0) {
    last = arrive(ticket) == gridDim.y * gridDim.z - 1;
    if (last) *ticket = 0;
  }
  barrier_of_multiplying();
  if (!last) return;
  // All sums have been read: rows go there.
  const int each = o.pitch / 4, stride = o.pitch + 4;
  for (int i = thread; i < tokens * each; i += 32 * multiplying) {
    const int row = i / each, v = i % each;
    const auto* const from =
        reinterpret_cast<const float4*>(o.partial + (first + row) * o.pitch + 4 * v);
    constexpr int most_groups = 4;
    float4 of[most_groups];
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      if (g < o.groups) of[g] = __ldcg(from + g * r.tokens * each);
    }
#pragma unroll
    for (int g = 1; g < most_groups; ++g) {
      if (g >= o.groups) continue;
      of[0].x += of[g].x;
      of[0].y += of[g].y;
      of[0].z += of[g].z;
      of[0].w += of[g].w;
    }
    *reinterpret_cast<float4*>(arrived + row * stride + 4 * v) = of[0];
  }
  barrier_of_multiplying();
  if (!route_few_rows_plain<S::routed, S::routed>(r, end.shared_r, arrived, stride, first, share,
                                                  end.warp, multiplying, end.plain[end.warp],
                                                  end.lane)) {
    route_whole_rows<S::routed, true>(end, arrived, stride, first, share);
  }
}

#endif

template <class S>
__global__ void __launch_bounds__(threads, 1)
    many(const __grid_constant__ DeviceRoute r, const __grid_constant__ CUtensorMap x,
         const __grid_constant__ CUtensorMap w, const __grid_constant__ Layout o) {
#if defined(SHUNT_SM_90A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages];
  __shared__ FastSharedScratch fast[multiplying];
  __shared__ PlainScratch plain[multiplying];
  __shared__ SharedRoute route;
  __shared__ bool last;
  const int thread = cuda_engine::kept(static_cast<int>(threadIdx.x));
  const int lane = cuda_engine::kept(thread & 31), warp = cuda_engine::kept(thread >> 5);
  // The same offset in each block.
  unsigned char* const stages = shared + (1024 - cuda_engine::shared_address(shared) % 1024) % 1024;
  auto* const arrived = reinterpret_cast<float*>(stages + (S::overlaid ? 0 : S::ring_bytes));
  const int ranks = o.parts * S::halves,
            in_cluster = static_cast<int>(blockIdx.x) % (ranks * o.pair);
  const Place place = Place::of<S>(o, in_cluster);
  const int sources = S::halves + o.pair - 1;  // blocks whose copies a block reads
  if (thread == 0) {
    cuda_engine::prefetch_tensor_map(&x);
    cuda_engine::prefetch_tensor_map(&w);
    for (int s = 0; s < S::stages; ++s) {
      cuda_engine::mbarrier_init(&full[s], 1);
      cuda_engine::mbarrier_init(&empty[s], static_cast<unsigned>(multiplying * sources));
    }
    cuda_engine::mbarrier_init_fence();
  }
  route.fill(r, thread, threads);
  __syncthreads();
  cuda_engine::cluster_arrive();  // its barriers are there, and so is its room for sums
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();

  const std::int64_t first_of_cluster =
      std::int64_t{static_cast<int>(blockIdx.x) / (ranks * o.pair)} * o.pair * S::rows;
  const std::int64_t first = first_of_cluster + place.member * S::rows;
  const int share = S::rows / ranks, first_row = place.rank * share;
  const std::int64_t valid = valid_tokens(r);
  cuda_engine::cluster_wait();
  if (valid <= first_of_cluster) {  // so it is for the whole cluster
    const bool clears = o.logits == nullptr && blockIdx.y == 0 && blockIdx.z == 0;
    if (clears) clear_rows(r, first + first_row, share, warp, multiplying + 1, lane);
    return;
  }
  const int first_column = (static_cast<int>(blockIdx.y) * S::halves + place.half) * S::columns;
  const int all_steps = (o.hidden + step - 1) / step, all_parts = o.parts * o.groups;
  const int part = static_cast<int>(blockIdx.z) * o.parts + place.part;
  const int begin = all_steps * part / all_parts, end = all_steps * (part + 1) / all_parts;
  if (warp == multiplying) {
    if (lane == 0) {
      copy<S>(x, w, stages, full, empty, o, place, begin, end - begin, static_cast<int>(first),
              first_column);
    }
    __syncwarp();
    if (S::overlaid) cuda_engine::cluster_barrier();
    cuda_engine::cluster_barrier();
    return;
  }
  {
    // Lane 0 releases to its own block, 1 to that of the other half, the next to the other tile's.
    const bool releases = lane < sources;
    int to = in_cluster;
    if (S::halves > 1 && lane == 1) to = place.first_rank + (1 - place.half) * o.parts + place.part;
    if (o.pair > 1 && lane == S::halves) to = (1 - place.member) * ranks + place.rank;
    const std::uint32_t release = cuda_engine::address_of_rank(empty, static_cast<unsigned>(to));
    float sums[S::each / 2];
    if (o.bf16) {
      multiply<S, __nv_bfloat16>(sums, stages, full, release, releases, end - begin, warp);
    } else {
      multiply<S, __half>(sums, stages, full, release, releases, end - begin, warp);
    }
    __syncwarp();
    if (S::overlaid) cuda_engine::cluster_barrier();  // all copies have landed and been read
    send<S>(sums, arrived, place, share, warp, lane);
  }
  __syncwarp();
  cuda_engine::cluster_barrier();
  const Ending ending{fast, plain, route.get(), warp, lane};
  const auto tokens =
      static_cast<int>(min(max(valid - first - first_row, std::int64_t{0}), std::int64_t{share}));
  if constexpr (S::meets) {
    const std::uint32_t tile = blockIdx.x / static_cast<unsigned>(ranks);
    if (tokens == 0) {
      if (blockIdx.y == 0 && blockIdx.z == 0) {
        clear_rows(r, first + first_row, share, warp, multiplying, lane);
      }
      return;
    }
    meet<S>(r, o, ending, arrived, first + first_row, first_column, share, tokens,
            o.tickets + tile * static_cast<unsigned>(ranks) + static_cast<unsigned>(place.rank),
            last);
  } else if (o.logits != nullptr) {
    store_logits<S>(r, o, ending, arrived, first + first_row, first_column, share, tokens);
  } else {
    finish<S>(r, o, ending, arrived, first + first_row, share);
  }
#endif
}

template <int rows, int tile, bool meets = false>
bool launch_many(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, const Layout& o) {
  using S = Shape<rows, tile, meets>;
  static_assert(S::each % 8 == 0 && S::stages >= 2);
  CUtensorMap x, w;
  const bool mapped = cuda_engine::map_rows(x, operands.x, operands.bf16, r.tokens, o.hidden,
                                            operands.x_stride, rows / S::halves) &&
                      cuda_engine::map_rows(w, operands.w, operands.bf16, r.rule.columns, o.hidden,
                                            operands.w_stride, S::columns / o.pair);
  if (!mapped) return false;
  const std::int64_t tokens_of_cluster = std::int64_t{rows} * o.pair;
  const auto clusters =
      static_cast<unsigned>((r.tokens + tokens_of_cluster - 1) / tokens_of_cluster);
  const auto cluster = static_cast<unsigned>(o.parts * S::halves * o.pair);
  const int width = S::columns * S::halves;
  const bool whole_rows = o.logits == nullptr && !meets;
  const auto columns = static_cast<unsigned>(whole_rows ? 1 : (r.rule.columns + width - 1) / width);
  const cuda_engine::Shape shape{
      .grid = {clusters * cluster, columns, static_cast<unsigned>(o.groups)},
      .block = {threads, 1, 1},
      .shared = std::size_t{S::bytes},
      .cluster = cluster};
  cuda_engine::launch("route: router", gpu, shape, many<S>, r, x, w, o);
  return true;
}

template <int rows>
bool launch_rows(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, const Layout& o) {
  if (plan.columns == 64) return launch_many<rows, 64>(gpu, r, operands, plan, o);
  if (plan.columns == 128) return launch_many<rows, 128>(gpu, r, operands, plan, o);
  if (plan.columns == 256) return launch_many<rows, 256>(gpu, r, operands, plan, o);
  return launch_many<rows, 512>(gpu, r, operands, plan, o);
}

}  // namespace

bool router_many(const cuda_engine::Gpu& gpu, DeviceRoute r, const WholeOperands& operands,
                 const RouterPlan& plan, float* memory) {
  if (!SHUNT_BUILT_FOR_SM_90A) return false;
  Layout o{.hidden = operands.hidden,
           .parts = plan.ranks,
           .pair = plan.pair,
           .groups = plan.parts / plan.ranks,
           .bf16 = operands.bf16};
  if (plan.meets) {
    if (r.quick) fit_per_lane(r, shared_per_lane(512));
    o.partial = memory;
    o.pitch = (r.rule.columns + 3) / 4 * 4;
    o.tickets = gpu.tickets + cuda_engine::router_tickets;
    return launch_many<64, 64, true>(gpu, r, operands, plan, o);
  }
  if (r.rule.columns > 512) o.logits = memory;
  return plan.rows == 64 ? launch_rows<64>(gpu, r, operands, plan, o)
                         : launch_rows<128>(gpu, r, operands, plan, o);
}

}  // namespace shunt::routing
