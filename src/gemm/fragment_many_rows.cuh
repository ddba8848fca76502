// Grouped GEMM of packed weights for groups of many rows on Hopper. Weights are wgmma's A, decoded
// into registers (wgmma.sp's where they are sparse), rows ("tokens") its B in shared memory; rows
// may be gathered, of another dtype, or weighted.
//
// A block takes tiles of 128 rows of weights by up to `tokens` rows of a group (192, 256; 128): its
// own number's, then each time the next one that is left (tile_claims.cuh), whose number lies
// beside the stage of its first step; a stage without a step says that there is none. k goes by in
// steps of 128, each two halves of tokens: 64 numbers of every row, a stage. A step's weights lie
// in a slot of their own and come with its first half; there are so many slots that one is free
// when that half's stage is. Where tokens lie in order, a cluster of two blocks takes 256 rows of
// weights and shares them: tile numbers are a cluster's then, and block 0 claims them. Three
// warpgroups:
//   0          shared: one thread orders bulk copies, of the tokens, in steps of 16, half for both
//              blocks. Else all copy tokens in pieces of 16 bytes, asynchronously where they are as
//              they must be, else through registers. The first thread orders the weights' bulk
//              copies and claims tiles
//   1, 2       64 rows of weights each, all tokens: while the tensor cores multiply 32 of k (64 of
//              sparse weights) the next are decoded into other registers. A tile multiplies as many
//              tokens as the least of a few widths holds (wgmma_group())
//   full[s]    stage s is there: bytes, one arrival, and 128 threads' copies where tokens are not
//              shared
//   empty[s]   stage s may be overwritten, in both blocks: 8 arrivals a block, of each warp that
//              multiplies
//   barrier 1, 2: a warpgroup's own at a tile's end; 3: the copying one's, around its list of rows
// int4's codes are multiplied with their scales and rounded; e4m3 with a scale for 128 x 128 leaves
// the tensor cores every step. Everything else is exact in A. At a tile's end sums get their row's
// factor and leave as finish.cuh says.
//
// Bytes: packed weights once a tile, from the L2 where tiles share them; tokens once a 128 rows of
// weights, shared 256. Time predicted on an H200: a step of 256 tokens takes 2048 clocks of the
// tensor cores and some 100 to 200 besides; its copies are 74 KB, at 18 bytes a clock from the L2
// 4100 clocks, and shared 41 KB, 2300: 85 % of the bf16 kernel's speed.
#pragma once

#include <algorithm>

#include "cuda/launch.hpp"
#include "cuda/stage_ring.cuh"
#include "gemm/finish.cuh"
#include "gemm/fragment_book.cuh"
#include "gemm/fragment_lane.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/fragment_results.hpp"
#include "gemm/fragment_rows.cuh"
#include "gemm/fragment_wgmma.cuh"
#include "gemm/tile_claims.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int tokens_>
struct ManyFragments {
  using L = L_;
  static constexpr int tokens = tokens_;
  static constexpr int rows = 128;  // of weights
  static constexpr int threads = 384, copying = 128;
  static constexpr int weight_bytes = L::parts.bytes;
  static constexpr int slot_bytes = (weight_bytes + 127) / 128 * 128;
  static constexpr int stage_bytes = tokens * 128;
  static constexpr int box = 8, maps = tokens / 2 / box;  // tokens of a copy: box, 2 box, ..
  using List = TileList<64, tokens / 64>;
  static constexpr int most_bytes = 226 * 1024;
  // Of a tile: where each token comes from, and times what.
  static constexpr int table_bytes = 8 * tokens;
  static constexpr int boxes = tokens >= 192 ? 1 : 2;
  static constexpr int other_bytes = 1024 + 2 * boxes * 8192 + L::Book::bytes + table_bytes;

 private:
  static constexpr int slots_for(int stages) { return (stages + 2) / 2; }
  static constexpr int most_stages() {
    int stages = 1;
    while (stages < 16 && (stages + 1) * stage_bytes + slots_for(stages + 1) * slot_bytes <=
                              most_bytes - other_bytes - List::bytes(most_listed_groups)) {
      ++stages;
    }
    return stages;
  }

 public:
  static constexpr int stages = most_stages(), slots = slots_for(stages);
  static constexpr int shared_bytes(int groups) {
    return other_bytes + stages * stage_bytes + slots * slot_bytes + List::bytes(groups);
  }
};

#if defined(SHUNT_SM_90A)

// What the two warpgroups know of the block's memory.
template <class S>
struct Memory {
  unsigned char *stages, *slots;
  std::uint64_t* full;
  std::uint32_t empty;  // those of the block that this lane tells, where it tells one
  int tells;
  typename S::L::Book book;

  // What all lanes have read: wgmma was waited for since. Predicated inside, for a branch here
  // would have the compiler make every wgmma wait for the one before.
  __device__ __forceinline__ void free(int stage) const {
    asm volatile(
        "{\n.reg .pred tells;\nsetp.ne.b32 tells, %1, 0;\n"
        "@tells mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n}" ::"r"(
            empty + static_cast<std::uint32_t>(8 * stage)),
        "r"(tells)
        : "memory");
  }
};

// The products of a tile: of as many tokens as hold `count`. d is 0.
template <class S>
__device__ __forceinline__ void multiply_tile(float (&d)[S::tokens / 2], const Memory<S>& memory,
                                              StageRing<S::stages>& ring, int& slot, int steps,
                                              int group, int warp, int lane, int count) {
  using L = typename S::L;
  constexpr bool scaled = L::codes == Codes::fp8_block;
  // Pairs of fragments in half a step.
  constexpr int each = L::pairs / 2;
  const int block = 4 * group + warp;
  const std::uint32_t tokens_at = shared_address(memory.stages);
  float part[scaled ? S::tokens / 2 : 1];
  if constexpr (scaled) {
#pragma unroll
    for (float& p : part) p = 0;
  }
  std::uint32_t a[2][8];
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const unsigned char* const tile = memory.slots + slot * S::slot_bytes;
    if (++slot == S::slots) slot = 0;
    L mine;
    mine.book = memory.book;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mbarrier_wait(&memory.full[ring.stage], ring.parity);
      fence_for_async();  // the tokens came by generic copies
      if (half == 0) mine.load_scales(tile, block, lane);
      const std::uint64_t b =
          wgmma_descriptor(tokens_at + static_cast<std::uint32_t>(ring.stage * S::stage_bytes));
#pragma unroll
      for (int p = 0; p < each; ++p) {
        const int pair = half * each + p;
        std::uint32_t numbers[8];
        if constexpr (L::looks_up) {
          std::uint32_t words[L::code_words];
          L::load_codes(tile, block, pair, lane, words);
          mine.look_up(words, numbers);
        }
        wgmma_wait<1>();  // what reads these registers is over
        if (p == each - 1) {
          // The last stage but each: all of it has been read.
          constexpr int behind = L::sparse ? 2 : 1;
          if (i > 0 || half >= behind) memory.free(ring.before(behind));
        }
        std::uint32_t(&now)[8] = a[pair % 2];
        if constexpr (L::looks_up) {
          mine.round_scaled(numbers, pair, now);
        } else {
          mine.template decode<true>(tile, block, pair, lane, now);
        }
        auto& sums = either<scaled>(part, d);
        std::uint32_t positions = 0;
        if constexpr (L::sparse) positions = L::positions(tile, block, pair, lane);
        const std::uint64_t at = b + 4 * p;
        wgmma_group<S::tokens, L::bf16, L::sparse>(sums, now, at, at + (L::sparse ? 4 : 2),
                                                   positions, count);
      }
      ring.next();
    }
    if constexpr (scaled) {
      wgmma_wait<0>();
      const float low = mine.scale(0, 0), high = mine.scale(0, 1);
#pragma unroll
      for (int j = 0; j < S::tokens / 2; ++j) {
        d[j] = __fmaf_rn(part[j], j / 2 % 2 == 0 ? low : high, d[j]);
        part[j] = 0;
      }
    }
  }
  wgmma_wait<0>();
  if constexpr (L::sparse) memory.free(ring.before(2));
  memory.free(ring.before(1));
}

#endif

// usual: rows are copied as they are, and results are plain.
template <class S, bool usual>
__global__ void __launch_bounds__(S::threads, 1)
    many_fragments(const __grid_constant__ FragmentArgs args,
                   const __grid_constant__ RowMaps<S::maps> tokens,
                   const __grid_constant__ CUtensorMap out, int sharing) {
#if defined(SHUNT_SM_90A)
  using L = typename S::L;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages];
  __shared__ __align__(8) ToldTiles<TileClaims::kept> told;
  static_assert(S::stages < TileClaims::kept);
  __shared__ int next_tile;           // where tokens are not shared: for those that copy
  __shared__ int tile_of[S::stages];  // where a tile's first step lies: its number
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  unsigned char* const stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const outgoing = stages + S::stages * S::stage_bytes;
  unsigned char* const slots = outgoing + 2 * S::boxes * box_bytes;
  unsigned char* const behind = slots + S::slots * S::slot_bytes;
  const typename L::Book book = book_at<L>(behind, lane);
  write_book<L>(behind, thread, S::threads);
  auto* const sources = reinterpret_cast<int*>(behind + L::Book::bytes);
  auto* const scales = reinterpret_cast<float*>(sources + S::tokens);
  if (thread == 0) {
    if (usual || args.finish.plain || args.finish.situ) prefetch_tensor_map(&out);
    for (int s = 0; s < S::stages; ++s) {
      mbarrier_init(&full[s], sharing > 1 ? 1 : 1 + S::copying);
      mbarrier_init(&empty[s], static_cast<unsigned>(8 * sharing));
    }
    mbarrier_init_fence();
    told.init();
  }
  if (sharing > 1 && thread >= 32 && thread < 32 + S::maps) {
    prefetch_tensor_map(&tokens.of[thread - 32]);
  }
  wait_for_predecessor();
  let_successor_start();
  typename S::List list(scales + S::tokens, args.walk, args.groups,
                        (args.columns + sharing - 1) / sharing);
  list.build(args.walk);
  cluster_barrier();  // the other block's barriers are there
  const int tiles = list.tiles();
  const int rank = static_cast<int>(cluster_rank());
  const int clusters = static_cast<int>(gridDim.x) / sharing;
  const int first = static_cast<int>(blockIdx.x) / sharing;
  // The last block of a cluster may have no weights: it multiplies its neighbour's, for nothing.
  const auto column_of = [&](const GroupTile& at) { return sharing * at.column + rank; };
  StageRing<S::stages> ring;
  int slot = 0;
  if (warp < 4) {
    fewer_registers<56>();
    bool again = false;  // the ring has been round
    const auto weights_of = [&](const GroupTile& at) {
      return args.tiles + at.group * args.group_bytes +
             std::int64_t{min(column_of(at), args.columns - 1)} * args.steps * S::weight_bytes;
    };
    const auto copy_weights = [&](const char* weights, int step) {
      copy_bytes(slots + slot * S::slot_bytes, weights + std::int64_t{step} * S::weight_bytes,
                 S::weight_bytes, &full[ring.stage]);
      if (++slot == S::slots) slot = 0;
    };
    const int claim_at = rank == 0 ? max(2 * args.steps - 4, 0) : 2 * args.steps;
    int tile = first;
    unsigned claimed = 0;  // before this cluster's next tile
    // By warp 0, which has had `before` tiles and ordered the last one's steps: `tile` is the next.
    const auto take_claimed = [&](unsigned before) {
      if (lane == 0) {
        if (sharing > 1 && rank == 0) told.tell(claimed, before);
        if (rank > 0) claimed = told.hear(before);
        if (rank == 0) end_counting(args.counter, claimed, tiles);
      }
      tile = clusters + static_cast<int>(__shfl_sync(0xffffffffu, claimed, 0));
    };
    if (sharing > 1) {
      if (warp == 0) {
        for (unsigned before = 1; tile < tiles; ++before) {
          const GroupTile at = list.find(tile);
          if (lane == 0) {
            const char* const weights = weights_of(at);
            const int share = (at.count + 15) / 16 * S::box;  // of tokens, a block's
            const CUtensorMap* const map = &tokens.of[share / S::box - 1];
#pragma unroll 1
            for (int i = 0; i < 2 * args.steps; ++i) {
              if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
              if (i == 0) tile_of[ring.stage] = tile;
              if (i == claim_at) claimed = atomicAdd(args.counter, 1U);
              mbarrier_arrive_expect(
                  &full[ring.stage],
                  static_cast<unsigned>(2 * share * 128 + (i % 2 == 0 ? S::weight_bytes : 0)));
              if (i % 2 == 0) copy_weights(weights, i / 2);
              copy_box_to_ranks(stages + ring.stage * S::stage_bytes + share * rank * 128, map,
                                &full[ring.stage], 64 * i, at.row + share * rank, 3);
              ring.next();
              if (ring.stage == 0) again = true;
            }
          }
          __syncwarp();
          take_claimed(before);
        }
        if (lane == 0) {  // a stage without a step: there is no other tile
          if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          tile_of[ring.stage] = tile;
          mbarrier_arrive(&full[ring.stage]);
        }
      }
    } else {
      ListedRows<L::bf16, S::tokens, S::copying, usual> rows(thread, sources, scales);
      while (tile < tiles) {
        const GroupTile at = list.find(tile);
        const char* const weights = weights_of(at);
        list_rows<S::tokens, S::copying, usual>(args, at.row, at.count, thread, sources, scales);
        named_barrier(3, S::copying);
        rows.begin(args, at.count);
#pragma unroll 1
        for (int i = 0; i < 2 * args.steps; ++i) {
          if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          if (thread == 0) {
            if (i == 0) tile_of[ring.stage] = tile;
            if (i == claim_at) claimed = atomicAdd(args.counter, 1U);
            if (i % 2 == 0) {
              mbarrier_arrive_expect(&full[ring.stage], S::weight_bytes);
              copy_weights(weights, i / 2);
            } else {
              mbarrier_arrive(&full[ring.stage]);
            }
          }
          rows.copy(args, shared_address(stages + ring.stage * S::stage_bytes),
                    std::int64_t{i} * 64);
          if (usual || args.direct) {
            mbarrier_arrive_after_copies(&full[ring.stage]);
          } else {
            mbarrier_arrive(&full[ring.stage]);
          }
          ring.next();
          if (ring.stage == 0) again = true;
        }
        if (warp == 0) {
          take_claimed(0);
          if (lane == 0) next_tile = tile;
        }
        named_barrier(3, S::copying);  // the list of this tile's rows has been read
        tile = next_tile;
      }
      if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
      if (thread == 0) {  // a stage without a step, as above
        tile_of[ring.stage] = tile;
        mbarrier_arrive(&full[ring.stage]);
      }
      mbarrier_arrive(&full[ring.stage]);
    }
  } else {
    more_registers<224>();
    const int group = warp / 4 - 1, quarter = warp % 4;
    const Memory<S> memory{stages,
                           slots,
                           full,
                           address_of_rank(empty, static_cast<unsigned>(min(lane, sharing - 1))),
                           lane < sharing ? 1 : 0,
                           book};
    Boxes box{.memory = outgoing + group * S::boxes * box_bytes,
              .count = S::boxes,
              .map = &out,
              .barrier = 1 + group};
    const auto next_number = [&] {
      mbarrier_wait(&full[ring.stage], ring.parity);
      return __shfl_sync(0xffffffffu, tile_of[ring.stage], 0);
    };
    for (int tile = next_number(); tile < tiles; tile = next_number()) {
      const GroupTile at = list.find(tile);
      const int column = min(column_of(at), args.columns - 1);
      const int count = column_of(at) < args.columns ? at.count : 0;  // that is stored
      float d[1][S::tokens / 2];
#pragma unroll
      for (int i = 0; i < S::tokens / 2; ++i) d[0][i] = 0;
      multiply_tile(d[0], memory, ring, slot, args.steps, group, quarter, lane, at.count);
      const int row = 64 * group + 16 * quarter + lane / 4;
      const float* const factors =
          reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes +
                                         args.factors_at + std::int64_t{column} * S::rows * 4) +
          row;
      const float low = __fmul_rn(__ldg(factors), args.unscale);
      const float high = __fmul_rn(__ldg(factors + 8), args.unscale);
#pragma unroll
      for (int i = 0; i < S::tokens / 2; ++i) {
        d[0][i] = __fmul_rn(d[0][i], i / 2 % 2 == 0 ? low : high);
      }
      using T = std::conditional_t<L::bf16, __nv_bfloat16, __half>;
      constexpr TileEnd end = usual ? TileEnd::plain : TileEnd::any;
      TileFinish<T, 1, S::tokens / 2, end, true>(args.finish, at.group, at.row, count,
                                                 std::int64_t{column} * S::rows + 64 * group, box)
          .write(d);
    }
    if (thread % 128 == 0) wait_for_boxes_written();
  }
  __syncwarp();
  cluster_barrier();  // no block leaves while the other copies into it or arrives at its barriers
#endif
}

template <class S>
void launch_many(const Gpu& gpu, const PackedPlan& plan, FragmentArgs args) {
  static_assert(S::stages >= 3 && 2 * S::slots > S::stages);
  CUtensorMap out{};
  map_results(out, args.finish, S::L::bf16, args.walk.rows);
  RowMaps<S::maps> tokens{};
  // Rows that lie in order come by tensor maps.
  const bool shared = args.direct && args.permutation == nullptr && args.columns > 1 &&
                      map_rows(tokens, args.source, S::L::bf16, args.source_rows, args.k,
                               args.source_row_bytes / 2, S::box);
  const int sharing = shared ? 2 : 1;
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(std::max(plan.blocks / sharing, 1) * sharing)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups)),
          .cluster = static_cast<unsigned>(sharing)},
         args.direct && args.finish.plain ? many_fragments<S, true> : many_fragments<S, false>,
         args, tokens, out, sharing);
}

template <class L>
void launch_many_rows(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args) {
  switch (plan.tile_tokens) {
    case 192:
      if constexpr (L::codes != Codes::fp8_block) {  // which has sums twice
        return launch_many<ManyFragments<L, 192>>(gpu, plan, args);
      }
      [[fallthrough]];
    default:
      if constexpr (L::codes == Codes::fp8_block) {
        return launch_many<ManyFragments<L, 128>>(gpu, plan, args);
      } else {
        return launch_many<ManyFragments<L, 256>>(gpu, plan, args);
      }
  }
}

}  // namespace

}  // namespace shunt::cuda_engine
