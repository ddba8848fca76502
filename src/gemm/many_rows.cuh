// Grouped GEMM for groups of many rows on Hopper, 16 bits, f32 sums: weights are wgmma's A, rows
// ("tokens") its B, so that the ragged side is the one that instructions cut, here in steps of 16.
//
// A cluster of two blocks takes tiles of up to `tokens` rows of a group by two blocks' rows of
// weights, one tile a round, as TileClaims hands them out; each block has one half of the weights
// and all of the tokens. k goes by in steps of 64 through a ring of stages. 12 warps:
//   warp 0      orders bulk copies, by one lane: the block's weights (tiles of the prepared layout,
//               or a box of a tensor), and of the tokens, in steps of 16, half for both blocks of
//               the cluster;
//               what lies beyond the edges comes as zeros, what lies behind the group's end is
//               another group's and is not stored.
//               Where groups are older than the grid before this one, only it waits for that:
//               whatever is stored comes of what it copied
//   warp 1      claims and finds the next tile while the last steps of one are ordered: finding
//               takes a thousand clocks; and the rows that a permutation picks for it
//   warps 2, 3  where a permutation picks the tokens, which then come without warp 0: copy this
//               block's half of them, and pass it on to the other block (shared_gather.cuh)
//   warps 4-11  two warpgroups with wgmma. Together: both have the same tile, 64 `blocks` rows of
//               weights each, and all tokens. In turn: each has every other tile, so that the end
//               of one passes while the other's products run
//   full[s]     stage s is there, and before a tile's first step which tile it is: 1 arrival, the
//               ordering thread's, and the bytes of both blocks. One more stage, without bytes,
//               says that there is no other tile
//   turn        named barriers 3 and 4, in turn only: the last of a warpgroup's stages was there,
//               and the other one may go on to its own
//   found, read named barriers 5 to 8: of warps 0 and 1, for tiles of even and odd rounds
//   empty[s]    stage s may be overwritten in both blocks: an arrival of each warp of either block
//               that multiplies it, one step later than its products were started
// All blocks of a cluster walk the same tiles and steps. The tile's end: finish.cuh, by each
// warpgroup for itself, while copies for the next tile are under way. The last cluster barrier: no
// block leaves while the other copies into it or arrives at its barriers. Where rows have places
// (row_places.hpp: a token's only row goes to the layer's output), warps store them there, times
// their weights, instead of a box in order.
//
// Bytes a step and block from L2, for 4.2 MFLOP: 32 KB (128 weights x 256 tokens, together), 40 KB
// (256 x 128, together), 37 KB (128 x 192, in turn). Time predicted on an H200: the larger of
// operations / 690 TFLOP/s (power) over the share of tiles in the last round, and weights / 4.6
// TB/s, plus 3 us, and together 1500 clocks a tile: G16 M1024 N2048 K5120 515 us, N5120 K1024 265,
// G128 M128 N2048 K5120 680, N5120 K1024 370. Measured: docs/notes/cuda-gemm.md.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/stage_ring.cuh"
#include "cuda/tensor_map.hpp"
#include "cuda/warp_copies.cuh"
#include "gemm/finish.cuh"
#include "gemm/shared_gather.cuh"
#include "gemm/store_map.hpp"
#include "gemm/tile_claims.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int tile_bytes = 128 * 64 * 2;  // of the prepared layout

template <int blocks_, int tokens_, bool in_turn_, bool gathers_, bool places_>
struct ManyTile {
  static constexpr int blocks = blocks_, tokens = tokens_, cluster = 2;
  static constexpr bool in_turn = in_turn_;
  static constexpr bool gathers = gathers_;  // tokens as a permutation picks them
  static constexpr bool places = places_;    // results go to the rows' places
  // A block's share of a tile's tokens comes by one copy, of a multiple of so many tokens, each
  // with a map of its own.
  static constexpr int box = 16 / cluster, maps = gathers ? 1 : tokens / 16;
  static constexpr int rows = (in_turn ? 64 : 128) * blocks;  // of weights, a block's
  static constexpr int tiles = rows / 128;                    // of the prepared layout
  static constexpr int step = 64;                             // along k
  static constexpr int threads = 384;
  static constexpr int few_registers = !in_turn ? 56 : gathers ? 40 : 24;
  static constexpr int more_registers = !in_turn ? 224 : gathers ? 232 : 240;
  static constexpr int multiplying = in_turn ? 4 : 8;  // warps that read a stage
  static constexpr int weight_bytes = rows * step * 2, token_bytes = tokens * step * 2;
  static constexpr int stage_bytes = weight_bytes + token_bytes;
  static constexpr int stages = 192 * 1024 / stage_bytes + (tokens == 192);
  // Everything lies in dynamic memory, which then begins at a multiple of 1024.
  static constexpr int source_count = gathers ? tokens / 2 : 0;  // a tile's, of a block
  static_assert(sizeof(GroupTile) == 16);
  static constexpr int claim_bytes = 136;  // TileClaims
  // full, empty, tiles of stages, found and their rows, claims, over
  static constexpr int barrier_bytes = 32 * (stages + 1) + 8 * source_count + claim_bytes + 8;
  __host__ __device__ static constexpr int boxes(int groups) {
    constexpr int most = 227 * 1024;
    return bytes_with(2, 0) > most || bytes_with(2, groups) > most ? 1 : 2;
  }
  static constexpr int shared_bytes(int groups) { return bytes_with(boxes(groups), groups); }
  using List = TileList<16, tokens / 16>;

 private:
  __host__ __device__ static constexpr int bytes_with(int boxes, int groups) {
    return stages * stage_bytes + 2 * boxes * box_bytes_ + barrier_bytes + List::bytes(groups);
  }
  static constexpr int box_bytes_ = 64 * 128;
};

#if defined(SHUNT_SM_90A)

// The products of a tile of n tokens. `next`: the barrier at which the other warpgroup waits for
// its turn, where it does. d is 0.
template <int n, class S, class T>
__device__ __forceinline__ void multiply_steps(float (&d)[S::blocks][S::tokens / 2], int steps,
                                               std::uint32_t a_base, std::uint32_t b_base,
                                               std::uint64_t* full, std::uint64_t* empty,
                                               StageRing<S::stages>& ring, unsigned lane,
                                               int next) {
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(&full[ring.stage], ring.parity);
    // The steps that are still to be multiplied leave the other one the time to get ready.
    if (next != 0 && i == steps - 1) named_arrive(next, 256);
    const auto at = static_cast<std::uint32_t>(ring.stage * S::stage_bytes);
    const std::uint64_t a = wgmma_descriptor(a_base + at), b = wgmma_descriptor(b_base + at);
    wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < S::step / 16; ++k) {
#pragma unroll
      for (unsigned block = 0; block < S::blocks; ++block) {
        wgmma_n<n>(T{}, d[block], a + 512 * block + 2 * k, b + 2 * k);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the step before has been read
    if (i > 0 && lane < S::cluster) mbarrier_free_at(&empty[before], lane);
    before = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  if (lane < S::cluster) mbarrier_free_at(&empty[before], lane);
}

#endif

template <class T, class S>
__global__ void __launch_bounds__(S::threads, 1)
    many_rows(const __grid_constant__ HopperArgs args, const __grid_constant__ CUtensorMap weights,
              const __grid_constant__ RowMaps<S::maps> tokens,
              const __grid_constant__ CUtensorMap out) {
#if defined(SHUNT_SM_90A)
  extern __shared__ __align__(1024) unsigned char stages[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the same in all lanes, and known so
  const int boxes = S::boxes(args.groups);
  unsigned char* const outgoing = stages + S::stages * S::stage_bytes;
  auto* const tile_of = reinterpret_cast<GroupTile*>(outgoing + 2 * boxes * box_bytes);
  GroupTile* const found = tile_of + S::stages;
  auto* const full = reinterpret_cast<std::uint64_t*>(found + 2);
  std::uint64_t* const empty = full + S::stages;
  auto* const claims = reinterpret_cast<TileClaims*>(empty + S::stages);
  static_assert(sizeof(TileClaims) == S::claim_bytes && S::stages < TileClaims::kept - 1);
  // In turn: no tile is left, for the warpgroup that has the next round.
  auto* const over = reinterpret_cast<int*>(claims + 1);
  auto* const sources = reinterpret_cast<std::uint32_t*>(over + 2);  // of tiles found
  if (thread == 0) {
    claims->init();
    *over = 0;
    if (args.tiles == nullptr) prefetch_tensor_map(&weights);
    if (args.finish.plain && !S::places) prefetch_tensor_map(&out);
    for (int s = 0; s < S::stages; ++s) {
      mbarrier_init(&full[s], S::gathers ? 3 : 1);
      mbarrier_init(&empty[s], S::multiplying * S::cluster);
    }
    mbarrier_init_fence();
  }
  if (!S::gathers && thread >= 32 && thread < 32 + S::maps) {
    prefetch_tensor_map(&tokens.of[thread - 32]);
  }
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  typename S::List list(sources + 2 * S::source_count, args.walk, args.groups, args.columns);
  list.build(args.walk, thread, S::threads, 0);
  cluster_barrier();  // the other block's barriers are there

  const int rank = uniform(static_cast<int>(cluster_rank()));
  constexpr int copying = S::gathers ? 128 : 64;  // threads that a tile found concerns
  if (warp < 4) {
    fewer_registers<S::few_registers>();  // with the others' all that the block has
    if (warp == 0) {
      if (early) {
        wait_for_predecessor();
        let_successor_start();
      }
      const std::uint32_t stages_at = shared_address(stages), full_at = shared_address(full),
                          empty_at = shared_address(empty);
      StageRing<S::stages> ring;
      bool again = false;  // the ring has been round
      for (int round = 0;; ++round) {
        const int parity = round % 2;
        named_barrier(5 + parity, copying);
        GroupTile at = found[parity];
        at.group = uniform(at.group), at.column = uniform(at.column);
        at.row = uniform(at.row), at.count = uniform(at.count);
        if (at.group < 0) {
          if (lane == 0) {
            if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
            tile_of[ring.stage] = at;
            mbarrier_arrive(&full[ring.stage]);
          }
          break;
        }
        named_arrive(7 + parity, copying);
        const int share = (at.count + 15) / 16 * S::box;  // of tokens, a block's
        const CUtensorMap* const map = &tokens.of[S::gathers ? 0 : share / S::box - 1];
        const int first = at.row + share * rank;
        const int part = S::cluster * at.column + rank;
        const int here = min(S::tiles, max(args.row_tiles - part * S::tiles, 0));
        const std::int64_t apart = std::int64_t{args.steps} * tile_bytes;
        const bool tiled = args.tiles != nullptr;
        const std::uint64_t policy = weights_policy(at.alone);
        const char* from =
            tiled ? args.tiles + at.group * args.group_bytes + part * S::tiles * apart : nullptr;
        const int weight_row = at.group * args.group_rows + part * S::rows;
        const auto bytes = static_cast<unsigned>((tiled ? here * tile_bytes : S::weight_bytes) +
                                                 (S::gathers ? 1 : S::cluster) * share * 128);
        if (again) wait_at(empty_at + static_cast<std::uint32_t>(8 * ring.stage), ring.parity ^ 1);
        if (lane == 0) tile_of[ring.stage] = at;
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          const int s = uniform(ring.stage);
          const auto stage = stages_at + static_cast<std::uint32_t>(s * S::stage_bytes);
          const auto barrier = full_at + static_cast<std::uint32_t>(8 * s);
          if (again) wait_at(empty_at + static_cast<std::uint32_t>(8 * s), ring.parity ^ 1);
          claims->at_step(lane == 0, i, args.steps);
          arrive_expect_if(lane == 0, barrier, bytes);
          if (tiled) {
#pragma unroll 1
            for (int b = 0; b < here; ++b) {
              copy_bytes_if(lane == 0, stage + static_cast<std::uint32_t>(b * tile_bytes),
                            from + b * apart, tile_bytes, barrier, policy);
            }
            from += tile_bytes;
          } else {
            copy_box_if(lane == 0, stage, &weights, barrier, S::step * i, weight_row);
          }
          if (!S::gathers) {
            copy_box_to_ranks_if(
                lane == 0, stage + static_cast<std::uint32_t>(S::weight_bytes + share * rank * 128),
                map, barrier, S::step * i, first, 3);
          }
          ring.next();
          if (ring.stage == 0) again = true;
        }
      }
    } else if (warp == 1) {
      if (S::gathers && early) wait_for_predecessor();
      const int clusters = static_cast<int>(gridDim.x) / S::cluster, tiles = list.tiles();
      int tile = static_cast<int>(blockIdx.x) / S::cluster;
      for (int round = 0;; ++round) {
        const int parity = round % 2;
        GroupTile at{.group = -1};
        if (tile < tiles) at = list.find(tile);
        if (round >= 2) named_barrier(7 + parity, copying);
        if (lane == 0) found[parity] = at;
        if (S::gathers) {
          find_sources(args, sources + parity * S::source_count, at.row, at.count, rank, lane);
        }
        __syncwarp();
        named_arrive(5 + parity, copying);
        if (at.group < 0) {
          if (round > 0) named_barrier(8 - parity, copying);  // the last tile's
          break;
        }
        if (lane == 0) {
          tile =
              claims->next(args.counter, tiles, clusters, rank, static_cast<unsigned>(round) + 1);
        }
        tile = uniform(tile);
      }
    } else if (S::gathers) {
      if (early) wait_for_predecessor();
      SharedGather<S::tokens / 16> gather(shared_address(stages) + S::weight_bytes, rank, warp - 2,
                                          lane);
      // Steps are passed on when `behind` more have been ordered, of this tile or the next.
      constexpr int behind = S::stages - 3;
      const bool carried = args.steps >= behind;
      StageRing<S::stages> ring, landed;
      int owed = 0;  // steps of the tile before
      bool again = false;
      const auto pass_on = [&](bool of_tile_before) {
        const int s = landed.stage;
        gather.pass_on(static_cast<std::uint32_t>(s * S::stage_bytes), of_tile_before, &full[s],
                       lane);
        landed.next();
      };
      const auto pass_on_owed = [&] {
        cp_async_wait<0>();
        for (int i = 0; i < min(behind, args.steps); ++i) pass_on(false);
        owed = 0;
      };
      for (int round = 0;; ++round) {
        const int parity = round % 2;
        named_barrier(5 + parity, copying);
        if (found[parity].group < 0) {
          if (owed > 0) pass_on_owed();
          if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          if (lane == 0) mbarrier_arrive(&full[ring.stage]);
          break;
        }
        gather.begin(sources + parity * S::source_count, found[parity].count);
        named_arrive(7 + parity, copying);
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          const int s = ring.stage;
          if (again) mbarrier_wait(&empty[s], ring.parity ^ 1);
          gather.order(args, static_cast<std::uint32_t>(s * S::stage_bytes),
                       std::int64_t{2 * S::step} * i);
          if (i + owed >= behind) {
            cp_async_wait<behind>();
            pass_on(i < behind);
          }
          ring.next();
          if (ring.stage == 0) again = true;
        }
        owed = behind;
        if (!carried) pass_on_owed();
      }
    }
  } else {
    more_registers<S::more_registers>();
    const int group = warp / 4 - 1;  // of the warps that multiply
    const int block = S::in_turn ? 0 : group * S::blocks;
    const std::uint32_t base = shared_address(stages);
    const std::uint32_t a_base = base + static_cast<std::uint32_t>(block * 64 * 128);
    const std::uint32_t b_base = base + S::weight_bytes;
    Boxes box{.memory = outgoing + group * boxes * box_bytes,
              .count = boxes,
              .map = &out,
              .barrier = 1 + group};
    StageRing<S::stages> ring;
    if (S::in_turn && group == 1) ring.skip(args.steps);
    int round = S::in_turn ? group : 0, next = 0;
    // This warpgroup's next tile, when its first step is there. Group -1: there is none.
    const auto take = [&]() -> GroupTile {
      if (S::in_turn) {
        // Not before the other's stages were full: a barrier tells only one phase from the next.
        if (round > 0) named_barrier(3 + round % 2, 256);
        next = 3 + (round + 1) % 2;
        round += 2;
        if (*over != 0) return {.group = -1};
      }
      mbarrier_wait(&full[ring.stage], ring.parity);
      const GroupTile at = tile_of[ring.stage];
      if (S::in_turn && at.group < 0) {
        *over = 1;
        named_arrive(next, 256);
      }
      return at;
    };
    for (GroupTile at = take(); at.group >= 0; at = take()) {
      float d[S::blocks][S::tokens / 2];
#pragma unroll
      for (int b = 0; b < S::blocks; ++b) {
#pragma unroll
        for (int i = 0; i < S::tokens / 2; ++i) d[b][i] = 0;
      }
      const auto with = [&]<int n>() {
        multiply_steps<n, S, T>(d, args.steps, a_base, b_base, full, empty, ring,
                                static_cast<unsigned>(lane), next);
      };
      with_width<32, 16, S::tokens>(at.count, with);
      if (S::in_turn) ring.skip(args.steps);
      const std::int64_t first = std::int64_t{S::cluster * at.column + rank} * S::rows + block * 64;
      constexpr TileEnd end = S::places ? TileEnd::places : TileEnd::any;
      TileFinish<T, S::blocks, S::tokens / 2, end>(args.finish, at.group, at.row, at.count, first,
                                                   box)
          .write(d);
    }
    if (thread % 128 == 0) wait_for_boxes_written();
  }
  __syncwarp();
  cluster_barrier();
#endif
}

template <class T, class S>
bool launch_many(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p, HopperArgs args,
                 bool bf16) {
  if (S::gathers && args.source_rows * args.source_row_bytes / 16 >= most_pieces) return false;
  args.columns = (args.group_rows + S::cluster * S::rows - 1) / (S::cluster * S::rows);
  CUtensorMap weights{}, out{};
  RowMaps<S::maps> tokens{};
  if ((args.tiles == nullptr &&
       !map_rows(weights, p.matrices.data, bf16, std::int64_t{p.groups} * args.group_rows,
                 p.layout.k, p.matrices.strides[1], S::rows)) ||
      (!S::gathers && !map_rows(tokens, p.rows.data, bf16, p.rows.shape[0], p.layout.k,
                                p.rows.strides[0], S::box)) ||
      (args.finish.plain && !S::places &&
       !map_row_ends(out, p.out.data, p.out.dtype == DType::bf16, p.out.shape[0],
                     args.finish.out_columns, p.out.strides[0], p.layout.paired ? 32 : 64, 64))) {
    return false;
  }
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups)),
          .cluster = S::cluster},
         many_rows<T, S>, args, weights, tokens, out);
  return true;
}

template <class T, bool gathers, bool places>
bool launch_many_tiles(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                       const HopperArgs& args, bool bf16) {
  switch (plan.tile_tokens) {
    case 256:
      return launch_many<T, ManyTile<1, 256, false, gathers, places>>(gpu, plan, product, args,
                                                                      bf16);
    case 192:
      return launch_many<T, ManyTile<2, 192, true, gathers, places>>(gpu, plan, product, args,
                                                                     bf16);
    default:
      return launch_many<T, ManyTile<2, 128, false, gathers, places>>(gpu, plan, product, args,
                                                                      bf16);
  }
}

template <class T>
bool launch_many_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                      const HopperArgs& args, bool bf16) {
  if (args.finish.places.rows != nullptr) {  // of a layer's second product: none picks its rows
    return args.permutation == nullptr && args.finish.plain &&
           launch_many_tiles<T, false, true>(gpu, plan, product, args, bf16);
  }
  return args.permutation != nullptr
             ? launch_many_tiles<T, true, false>(gpu, plan, product, args, bf16)
             : launch_many_tiles<T, false, false>(gpu, plan, product, args, bf16);
}

}  // namespace

}  // namespace shunt::cuda_engine
