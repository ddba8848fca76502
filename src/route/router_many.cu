// Router for many tokens on Hopper: hidden states [T, H] times router weights [C, H], then the
// whole of routing, one launch. x and W of one 16-bit type, rows at multiples of 16 bytes; any H.
//
// A block computes 128 tokens x up to 256 columns, 64 x up to 512, or 32 or 16 x up to 128, over
// one of `parts` cuts of H, in steps of 64. 9 warps:
//   warp 8     one thread of it orders bulk tensor copies of x and W into a ring of stages, rows of
//              128 bytes swizzled; what lies beyond T, C and H comes as zeros
//   warps 0-7  two warpgroups with wgmma; with 128 tokens each has 64 of them and all columns, with
//              64 each has all of them and half of the columns; with fewer W is the first
//              operand, and each has half of its rows
//   full[s]    the bytes of stage s are there: 1 arrival, that of the copying thread
//   empty[s]   stage s may be overwritten: 8 arrivals of each block that reads what this one
//   copies,
//              from each warp that multiplies, one step later than its products were started
// A cluster is the blocks of one or two tiles of tokens, `ranks` each. Those of two tiles that need
// the same rows of W copy half of them each, to both. When the products are done, sums lie in their
// block's shared memory; a cluster barrier later rank p reads its share of the rows, p-th of
// `ranks` pieces, from all ranks, adds them up in the order of the ranks and routes them, 8 warps
// several rows each. No block leaves while others read its sums. A cluster past the valid count
// only clears its rows. Few tokens and a long H: several clusters and column tiles share out a tile
// of tokens; owners' sums meet in memory, and the last to arrive adds up and routes. Who is last
// does not show. More than 512 columns: rows of raw logits go to memory, 256 columns a block, and
// the gate follows.
//
// Bytes and times: router_plan.cpp, which chooses by them.
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
constexpr int most_groups = 16;

struct Layout {
  int hidden = 0;
  int steps = 0;  // of a part, of which the first `longer` have one more
  int longer = 0;
  int ranks = 1;             // that share out H in a cluster
  int pair = 1;              // tiles of tokens in a cluster
  int groups = 1;            // of ranks: those meet in memory
  bool bf16 = false;         // or f16
  float* logits = nullptr;   // [T, C]: raw sums go there and nothing is routed; or null
  float* partial = nullptr;  // [groups, T, pitch], where sums meet
  int pitch = 0;
  std::uint32_t* tickets = nullptr;  // [tiles of tokens * ranks]

  __host__ __device__ int share(int rows) const { return (rows + ranks - 1) / ranks; }
};

// `meets`: blocks meet in memory, and `columns` are not all of a row.
template <int rows_, int columns_, bool meets_>
struct Shape {
  static constexpr int rows = rows_, columns = columns_;
  static constexpr bool meets = meets_;
  static constexpr int routed = meets ? 512 : columns;  // columns that a row may have
  // W is the first operand: its 64 rows a product by all tokens, `tall` such a warpgroup.
  static constexpr bool turned = rows < 64;
  static constexpr int tall = turned ? columns / 128 : 1;
  // Columns of a product's sums: of W, or tokens where turned.
  static constexpr int each = turned ? rows : rows == 128 ? columns : columns / 2;
  static constexpr int x_bytes = rows * step * 2, w_bytes = columns * step * 2;
  static constexpr int stage_bytes = x_bytes + w_bytes;
  static constexpr int fit = 216 * 1024 / stage_bytes;
  static constexpr int stages = fit < 8 ? fit : 8;
  // Floats of a row of sums; 8 more: stores of two floats by 8 rows x 4 lanes hit no bank twice.
  static constexpr int stride = columns + (turned ? 4 : 8);
  static constexpr int sum_floats = rows * stride;
  // Then lie the rows that a rank routes, and what some rules need.
  static constexpr int whole_stride = meets ? 512 + 8 : stride;
  __host__ __device__ static constexpr int whole_floats(const Layout& o) {
    return o.ranks > 1 || meets ? o.share(rows) * whole_stride : 0;
  }
  static int bytes(const Layout& o) {
    const int after = 4 * (sum_floats + whole_floats(o)) + fast_bytes;
    return 1024 + (stages * stage_bytes > after ? stages * stage_bytes : after);
  }
  static constexpr int fast_bytes = multiplying * static_cast<int>(sizeof(FastSharedScratch));
};

// Where a block stands in its cluster.
struct Place {
  int member;      // which of the cluster's tiles of tokens
  int rank;        // of the blocks of that tile
  int first_rank;  // rank 0 of the tile, in the cluster
};

#if defined(SHUNT_SM_90A)

// By one thread: keeps the ring full.
template <class S>
__device__ __forceinline__ void copy(const CUtensorMap& x, const CUtensorMap& w,
                                     unsigned char* stages, std::uint64_t* full,
                                     std::uint64_t* empty, const Layout& o, const Place& place,
                                     int first_step, int steps, int first_token, int first_column) {
  const int w_rows = S::columns / o.pair, w_at = place.member * w_rows;
  const auto w_ranks = static_cast<std::uint16_t>(1U << place.rank | 1U << (o.ranks + place.rank));
  int s = 0;
  unsigned round = 0;
  for (int i = 0; i < steps; ++i) {
    if (round > 0) cuda_engine::mbarrier_wait(&empty[s], (round - 1) & 1);
    unsigned char* const stage = stages + s * S::stage_bytes;
    unsigned char* const to_w = stage + S::x_bytes + w_at * step * 2;
    const int h = (first_step + i) * step;
    cuda_engine::mbarrier_arrive_expect(&full[s], S::stage_bytes);
    cuda_engine::copy_box(stage, &x, &full[s], h, first_token);
    if (o.pair > 1) {
      cuda_engine::copy_box_to_ranks(to_w, &w, &full[s], h, first_column + w_at, w_ranks);
    } else {
      // A box has up to 256 rows.
#pragma unroll
      for (int c = 0; c < S::columns; c += 256) {
        cuda_engine::copy_box(to_w + c * step * 2, &w, &full[s], h, first_column + c);
      }
    }
    if (++s == S::stages) s = 0, ++round;
  }
}

// By 8 warps. `release`: of a lane below `releases`, where empty[0] of a block lies whose copies
// this one reads.
template <class S, class T>
__device__ __forceinline__ void multiply(float (&sums)[S::tall][S::each / 2],
                                         const unsigned char* stages, std::uint64_t* full,
                                         std::uint32_t release, bool releases, int steps,
                                         int warp) {
  const int group = warp / 4;
  const std::uint32_t base = cuda_engine::shared_address(stages);
  const std::uint32_t a_base = S::turned ? base + S::x_bytes + group * S::columns / 2 * 128
                                         : base + (S::rows == 128 ? group * 64 * 128 : 0);
  const std::uint32_t b_base =
      S::turned ? base : base + S::x_bytes + (S::rows == 128 ? 0 : group * S::each * 128);
#pragma unroll
  for (int m = 0; m < S::tall; ++m) {
#pragma unroll
    for (int j = 0; j < S::each / 2; ++j) sums[m][j] = 0;
  }
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
#pragma unroll
      for (int m = 0; m < S::tall; ++m) {
        cuda_engine::wgmma(T{}, sums[m], a + 2 * k + m * (64 * 128 / 16), b + 2 * k);
      }
    }
    cuda_engine::wgmma_commit();
    cuda_engine::wgmma_wait<1>();  // the step before has been read
    if (i > 0 && releases) {
      cuda_engine::mbarrier_free_at(release + static_cast<std::uint32_t>(before) * 8);
    }
    before = s;
    if (++s == S::stages) s = 0, parity ^= 1;
  }
  cuda_engine::wgmma_wait<0>();
}

// A warp's sums to its block's shared memory.
template <class S>
__device__ __forceinline__ void store_sums(const float (&sums)[S::tall][S::each / 2], float* mine,
                                           int warp, int lane) {
  const int group = warp / 4;
  if constexpr (S::turned) {
    float* const to =
        mine + 2 * (lane & 3) * S::stride + group * (S::columns / 2) + warp % 4 * 16 + (lane >> 2);
#pragma unroll
    for (int m = 0; m < S::tall; ++m) {
#pragma unroll
      for (int j = 0; j < S::each / 8; ++j) {
        float* const at = to + 8 * j * S::stride + 64 * m;
        at[0] = sums[m][4 * j];
        at[S::stride] = sums[m][4 * j + 1];
        at[8] = sums[m][4 * j + 2];
        at[S::stride + 8] = sums[m][4 * j + 3];
      }
    }
    return;
  }
  const int row = (S::rows == 128 ? group * 64 : 0) + warp % 4 * 16 + (lane >> 2);
  const int column = (S::rows == 128 ? 0 : group * S::each) + 2 * (lane & 3);
  float* const to = mine + row * S::stride + column;
#pragma unroll
  for (int j = 0; j < S::each / 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sums[0][4 * j], sums[0][4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * S::stride + 8 * j) =
        make_float2(sums[0][4 * j + 2], sums[0][4 * j + 3]);
  }
}

// Four columns of an owner's row, added up over ranks. `from`: where they lie in any block.
__device__ __forceinline__ float4 sum_of_ranks(const float* from, const Place& place, int ranks) {
  float4 sum = cuda_engine::load_of_rank(from, static_cast<unsigned>(place.first_rank));
  for (int p = 1; p < ranks; ++p) {
    const float4 v = cuda_engine::load_of_rank(from, static_cast<unsigned>(place.first_rank + p));
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

// A lane's runs of a row, added up over ranks and left at `whole`, too. F: a FastShape.
template <class F>
__device__ __forceinline__ void load_runs(const float* mine, float* whole, const Place& place,
                                          int ranks, int q, float (&v)[F::held]) {
  static_assert(F::width == 32);
  if (ranks == 1) {
    struct alignas(4 * F::run) Run {
      float of[F::run];
    };
#pragma unroll
    for (int b = 0; b < F::blocks; ++b) {
      const Run run = *reinterpret_cast<const Run*>(mine + 32 * b + q * F::run);
#pragma unroll
      for (int j = 0; j < F::run; ++j) v[b * F::run + j] = run.of[j];
    }
    return;
  }
  const auto sum_of = [&]<int P>() {
    // Loads of all ranks side by side: in each other's wake all blocks would crowd around one.
    std::uint32_t from[P];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      from[p] = cuda_engine::address_of_rank(mine + q * F::run,
                                             static_cast<unsigned>(place.first_rank + p));
    }
#pragma unroll
    for (int b = 0; b < F::blocks; ++b) {
      float of[P][F::run];
#pragma unroll
      for (int p = 0; p < P; ++p) {
        cuda_engine::load_at(from[p] + static_cast<std::uint32_t>(128 * b), of[p]);
      }
#pragma unroll
      for (int j = 0; j < F::run; ++j) {
        float sum = of[0][j];
#pragma unroll
        for (int p = 1; p < P; ++p) sum += of[p][j];
        v[b * F::run + j] = sum;
      }
    }
  };
  switch (ranks) {
    case 2:
      sum_of.template operator()<2>();
      break;
    case 3:
      sum_of.template operator()<3>();
      break;
    case 4:
      sum_of.template operator()<4>();
      break;
    default:
      sum_of.template operator()<8>();
      break;
  }
#pragma unroll
  for (int n = 0; n < F::held; ++n) whole[F::expert(n, q)] = v[n];
}

__device__ __forceinline__ void barrier_of_multiplying() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * multiplying) : "memory");
}

// What ends a block: its sums, and what the routing of rows needs.
struct Ending {
  const float* mine;  // a row's sums are at the same place in every rank
  float* whole;       // of this rank's rows, for them to be complete
  FastSharedScratch* fast;
  PlainScratch* plain;
  const DeviceRoute& shared_r;
  Place place;
  std::int64_t first;           // token of this rank's first row
  int first_row, rows, tokens;  // its rows in the tile, how many, how many of them are tokens
  int warp, lane;
};

// Complete rows, a stride apart, by any rule.
template <int most, bool few>
__device__ __forceinline__ void route_whole_rows(const Ending& end, const float* whole,
                                                 int stride) {
  if (!route_shared_rows_fast<most, few>(end.shared_r, whole, stride, end.first, end.rows, end.warp,
                                         multiplying, end.fast, end.lane)) {
    route_shared_rows<most>(end.shared_r, whole, stride, end.first, end.rows, end.warp, multiplying,
                            end.lane);
  }
}

// Routes a rank's rows. Ends with this thread's arrival at the last barrier of the cluster.
template <class S>
__device__ __forceinline__ void finish(const DeviceRoute& r, const Layout& o, const Ending& end) {
  const float* const mine = end.mine + end.first_row * S::stride;
  const float* const whole = o.ranks > 1 ? end.whole : mine;
  if (r.plain_best != 0) {
    // The others may leave once every warp has read its last rows.
    constexpr int lanes = S::turned ? 16 : 8, each = 32 / lanes;  // rows of a warp
    const int of_warp = end.rows - each * end.warp;
    int left = of_warp > 0 ? (of_warp + each * multiplying - 1) / (each * multiplying) : 0;
    if (o.ranks > 1 && left == 0) cuda_engine::cluster_arrive();
    const auto go = [&]<int best>() {
      using F = FastShape<lanes, best, S::columns / 32, Ranked::logit>;
      static_assert(F::tokens == each);
      route_shared_rows_plain<F>(
          r,
          [&](int row, int q, float(&v)[F::held]) {
            load_runs<F>(mine + row * S::stride, end.whole + row * S::stride, end.place, o.ranks, q,
                         v);
            if (o.ranks > 1 && --left == 0) cuda_engine::cluster_arrive();
          },
          whole, S::stride, end.first, end.rows, end.warp, multiplying, end.plain[end.warp],
          end.lane);
    };
    r.plain_best == 4 ? go.template operator()<4>() : go.template operator()<8>();
    __syncwarp();
    if (o.ranks == 1 && o.pair > 1) cuda_engine::cluster_arrive();
    return;
  }
  if (o.ranks > 1) {
    constexpr int vectors = S::columns / 4;
    for (int i = 32 * end.warp + end.lane; i < end.rows * vectors; i += 32 * multiplying) {
      const int at = i / vectors * S::stride + 4 * (i % vectors);
      *reinterpret_cast<float4*>(end.whole + at) = sum_of_ranks(mine + at, end.place, o.ranks);
    }
    barrier_of_multiplying();
  }
  route_whole_rows<S::routed, false>(end, whole, S::stride);
  __syncwarp();
  if (o.ranks * o.pair > 1) cuda_engine::cluster_arrive();
}

// Raw logits of an owner's rows.
template <class S>
__device__ __forceinline__ void store_logits(const DeviceRoute& r, const Layout& o,
                                             const Ending& end, int first_column) {
  const int columns = min(r.rule.columns - first_column, S::columns);
  for (int i = end.warp; i < end.tokens; i += multiplying) {
    float* const to = o.logits + (end.first + i) * r.rule.columns + first_column;
    for (int c = 4 * end.lane; c < columns; c += 128) {
      const float4 sum =
          sum_of_ranks(end.mine + (end.first_row + i) * S::stride + c, end.place, o.ranks);
      to[c] = sum.x;
      if (c + 1 < columns) to[c + 1] = sum.y;
      if (c + 2 < columns) to[c + 2] = sum.z;
      if (c + 3 < columns) to[c + 3] = sum.w;
    }
  }
}

// Sums of an owner's rows meet in memory; the last owner of these rows routes them.
template <class S>
__device__ __forceinline__ void meet(const DeviceRoute& r, const Layout& o, const Ending& end,
                                     int first_column, std::uint32_t* ticket, bool& last) {
  const int thread = 32 * end.warp + end.lane;
  constexpr int vectors = S::columns / 4;
  for (int i = thread; i < end.tokens * vectors; i += 32 * multiplying) {
    const int row = i / vectors, column = 4 * (i % vectors);
    if (first_column + column >= o.pitch) continue;
    const float4 sum =
        sum_of_ranks(end.mine + (end.first_row + row) * S::stride + column, end.place, o.ranks);
    float* const to =
        o.partial + (blockIdx.z * r.tokens + end.first + row) * o.pitch + first_column + column;
    __stcg(reinterpret_cast<float4*>(to), sum);
  }
  barrier_of_multiplying();  // what the block wrote is before its arrival
  if (thread == 0) {
    last = cuda_engine::add_in_order(ticket) == gridDim.y * gridDim.z - 1;
    if (last) *ticket = 0;
  }
  barrier_of_multiplying();
  if (!last) return;
  const int each = o.pitch / 4;
  for (int i = thread; i < end.tokens * each; i += 32 * multiplying) {
    const int row = i / each, v = i % each;
    const auto* const from =
        reinterpret_cast<const float4*>(o.partial + (end.first + row) * o.pitch + 4 * v);
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
    *reinterpret_cast<float4*>(end.whole + row * S::whole_stride + 4 * v) = of[0];
  }
  barrier_of_multiplying();
  if (!route_few_rows_plain<S::routed>(r, end.whole, S::whole_stride, end.first, end.rows, end.warp,
                                       multiplying, end.plain[end.warp], end.lane)) {
    route_whole_rows<S::routed, true>(end, end.whole, S::whole_stride);
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
  __shared__ PlainScratch plain[multiplying];
  __shared__ SharedRoute route;
  __shared__ bool last;
  const int thread = cuda_engine::kept(static_cast<int>(threadIdx.x));
  const int lane = cuda_engine::kept(thread & 31), warp = cuda_engine::kept(thread >> 5);
  // The same offset in each block.
  unsigned char* const stages = shared + (1024 - cuda_engine::shared_address(shared) % 1024) % 1024;
  const int cluster = o.ranks * o.pair, in_cluster = static_cast<int>(cuda_engine::cluster_rank());
  const int member = in_cluster >= o.ranks ? 1 : 0;
  const Place place{member, in_cluster - member * o.ranks, member * o.ranks};
  const std::int64_t first_of_cluster =
      std::int64_t{cuda_engine::cluster_index()} * o.pair * S::rows;
  const std::int64_t first = first_of_cluster + place.member * S::rows;
  const int first_column = static_cast<int>(blockIdx.y) * S::columns;
  const int part = static_cast<int>(blockIdx.z) * o.ranks + place.rank;
  const int begin = part * o.steps + min(part, o.longer);
  const int end = begin + o.steps + (part < o.longer ? 1 : 0);
  // The copying thread makes the barriers, and goes on before the others know of them.
  if (warp == multiplying) {
    if (lane == 0) {
      cuda_engine::prefetch_tensor_map(&x);
      cuda_engine::prefetch_tensor_map(&w);
      for (int s = 0; s < S::stages; ++s) {
        cuda_engine::mbarrier_init(&full[s], 1);
        cuda_engine::mbarrier_init(&empty[s], static_cast<unsigned>(multiplying * o.pair));
      }
      cuda_engine::mbarrier_init_fence();
    }
    __syncwarp();
    asm volatile("bar.arrive 2, %0;" ::"n"(threads) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(threads) : "memory");
  }
  if (o.pair > 1) cuda_engine::cluster_barrier();  // the other's barriers are there
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();

  const int share = o.share(S::rows), first_row = min(place.rank * share, S::rows);
  const int rows = min(share, S::rows - first_row);
  const std::int64_t valid = valid_tokens(r);
  if (valid <= first_of_cluster) {  // so it is for the whole cluster
    const bool clears = o.logits == nullptr && blockIdx.y == 0 && blockIdx.z == 0;
    if (clears) clear_rows(r, first + first_row, rows, warp, multiplying + 1, lane);
    return;
  }
  if (warp == multiplying) {
    if (lane == 0) {
      copy<S>(x, w, stages, full, empty, o, place, begin, end - begin, static_cast<int>(first),
              first_column);
    }
    __syncwarp();
    if (o.ranks > 1) cuda_engine::cluster_barrier();
    if (cluster > 1) cuda_engine::cluster_barrier();
    return;
  }
  if (thread == 32 && r.plain_best == 0) route.fill(r);
  auto* const mine = reinterpret_cast<float*>(stages);
  {
    // Lane 0 releases to its own block, lane 1 to the other tile's.
    const int to = lane == 0 ? in_cluster : (1 - place.member) * o.ranks + place.rank;
    const bool releases = lane < o.pair;
    const std::uint32_t release =
        cuda_engine::address_of_rank(empty, static_cast<unsigned>(releases ? to : in_cluster));
    float sums[S::tall][S::each / 2];
    if (o.bf16) {
      multiply<S, __nv_bfloat16>(sums, stages, full, release, releases, end - begin, warp);
    } else {
      multiply<S, __half>(sums, stages, full, release, releases, end - begin, warp);
    }
    barrier_of_multiplying();  // every copy has landed and been read: sums may lie there
    store_sums<S>(sums, mine, warp, lane);
  }
  if (o.ranks > 1) {
    __syncwarp();
    cuda_engine::cluster_barrier();
  } else {
    barrier_of_multiplying();
  }
  float* const whole = mine + S::sum_floats;
  const Ending ending{.mine = mine,
                      .whole = whole,
                      .fast = reinterpret_cast<FastSharedScratch*>(whole + S::whole_floats(o)),
                      .plain = plain,
                      .shared_r = route.get(),
                      .place = place,
                      .first = first + first_row,
                      .first_row = first_row,
                      .rows = rows,
                      .tokens = static_cast<int>(
                          min(max(valid - first - first_row, std::int64_t{0}), std::int64_t{rows})),
                      .warp = warp,
                      .lane = lane};
  if constexpr (S::meets) {
    if (ending.tokens > 0) {
      // A ticket for each rank of each tile.
      meet<S>(r, o, ending, first_column, o.tickets + blockIdx.x, last);
    } else if (blockIdx.y == 0 && blockIdx.z == 0) {
      clear_rows(r, ending.first, rows, warp, multiplying, lane);
    }
    __syncwarp();
    if (cluster > 1) cuda_engine::cluster_arrive();
  } else if (o.logits != nullptr) {
    store_logits<S>(r, o, ending, first_column);
    __syncwarp();
    if (cluster > 1) cuda_engine::cluster_arrive();
  } else {
    finish<S>(r, o, ending);
  }
  __syncwarp();
  if (cluster > 1) cuda_engine::cluster_wait();  // nobody reads what leaves
#endif
}

template <int rows, int columns, bool meets = false>
bool launch_many(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const Layout& o) {
  using S = Shape<rows, columns, meets>;
  static_assert(S::each % 8 == 0 && S::stages >= 2);
  CUtensorMap x, w;
  const bool mapped = cuda_engine::map_rows(x, operands.x, operands.bf16, r.tokens, o.hidden,
                                            operands.x_stride, rows) &&
                      cuda_engine::map_rows(w, operands.w, operands.bf16, r.rule.columns, o.hidden,
                                            operands.w_stride, std::min(256, columns / o.pair));
  if (!mapped) return false;
  const std::int64_t tokens_of_cluster = std::int64_t{rows} * o.pair;
  const auto clusters =
      static_cast<unsigned>((r.tokens + tokens_of_cluster - 1) / tokens_of_cluster);
  const auto cluster = static_cast<unsigned>(o.ranks * o.pair);
  const cuda_engine::Shape shape{
      .grid = {clusters * cluster, static_cast<unsigned>((r.rule.columns + columns - 1) / columns),
               static_cast<unsigned>(o.groups)},
      .block = {threads, 1, 1},
      .shared = static_cast<std::size_t>(S::bytes(o)),
      .cluster = cluster};
  cuda_engine::launch("route: router", gpu, shape, many<S>, r, x, w, o);
  return true;
}

}  // namespace

bool router_many(const cuda_engine::Gpu& gpu, DeviceRoute r, const WholeOperands& operands,
                 const RouterPlan& plan, float* memory) {
  if (!SHUNT_BUILT_FOR_SM_90A) return false;
  const int steps = (operands.hidden + step - 1) / step;
  Layout o{.hidden = operands.hidden,
           .steps = steps / plan.parts,
           .longer = steps % plan.parts,
           .ranks = plan.ranks,
           .pair = plan.pair,
           .groups = plan.parts / plan.ranks,
           .bf16 = operands.bf16};

  if (plan.meets) {
    if (r.quick) fit_per_lane(r, shared_per_lane(512));
    o.partial = memory;
    o.pitch = (r.rule.columns + 3) / 4 * 4;
    o.tickets = gpu.tickets + cuda_engine::router_tickets;
    return launch_many<64, 64, true>(gpu, r, operands, o);
  }
  if (r.rule.columns > 512) o.logits = memory;
  const bool few_rows = plan.rows == 64;
  switch (plan.columns) {
    case 64:
      return few_rows ? launch_many<64, 64>(gpu, r, operands, o)
                      : launch_many<128, 64>(gpu, r, operands, o);
    case 128:
      if (plan.rows == 16) return launch_many<16, 128>(gpu, r, operands, o);
      if (plan.rows == 32) return launch_many<32, 128>(gpu, r, operands, o);
      return few_rows ? launch_many<64, 128>(gpu, r, operands, o)
                      : launch_many<128, 128>(gpu, r, operands, o);
    case 256:
      return few_rows ? launch_many<64, 256>(gpu, r, operands, o)
                      : launch_many<128, 256>(gpu, r, operands, o);
    default:
      return launch_many<64, 512>(gpu, r, operands, o);
  }
}

}  // namespace shunt::routing
