// Grouped GEMM of packed weights for groups of some twenty to two hundred rows on Hopper. Weights
// are wgmma's A, decoded into registers (wgmma.sp's where they are sparse), rows ("tokens") its B
// in shared memory; rows may be gathered, of another dtype, or weighted.
//
// Packed weights are few bytes: with 128 rows of them, as the other kernels have, what crosses from
// the L2 is tokens for the most part. A block takes tiles of 256 rows of weights, two tiles of the
// layout, by up to `tokens` rows of a group (64, 128 or 160): tile numbers blockIdx.x, blockIdx.x +
// gridDim.x, .. Where tokens lie in order, a cluster of two blocks takes 512 rows of weights and
// shares them: tile numbers are a cluster's then. k goes by in steps of 128, a stage each. Three
// warpgroups:
//   0          copies: one thread orders the weights' bulk copies, scales and all. The first tile
//              it finds by itself, while the others list the groups. Tokens that lie in order it
//              orders by a tensor map, all at once, of a step half of k for both blocks; others all
//              threads copy in pieces of 16 bytes, asynchronously where they are as they must be,
//              else through registers. What is behind a group's last row is whatever there was:
//              nobody reads its sums
//   1, 2       128 rows of weights each, all tokens: while the tensor cores multiply 64 rows by 32
//              of k (64 of sparse weights) the next are decoded into other registers. A tile
//              multiplies as many tokens as the least of a few widths holds
//   full[s]    stage s is there: bytes, one arrival, and 128 threads' copies where tokens are not
//              mapped
//   empty[s]   stage s may be overwritten, in both blocks: the 8 warps of each that multiply
//   barrier 1, 2: a warpgroup's own at a tile's end; 3: the copying one's, around its list of rows
// What is computed, and in which order, is as in fragment_many_rows.cuh. A tile's end hides behind
// the ring as far as memory is what is waited for.
//
// Bytes: packed weights once a tile, tokens once a 256 rows of weights, shared 512. Time on an
// H200: a step of 256 x 128 nvfp4 by 32 tokens is 26 KB, shared 22, at 18 bytes a clock 1450 clocks
// or 1220; a warp issues 310 instructions for it, two warps a scheduler, which takes some 1400.
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
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int tokens_>
struct MiddleFragments {
  using L = L_;
  static constexpr int tokens = tokens_;
  static constexpr int wide = 2;                       // tiles of the layout, a warpgroup's each
  static constexpr int blocks = 2;                     // of 64 rows of weights, a warpgroup's
  static constexpr int box = 16, maps = tokens / box;  // a bulk copy brings box, 2 box, .. tokens
  static constexpr int boxes = tokens == 128 ? 1 : 2;  // for results, of a warpgroup
  static constexpr int copying = 128, threads = copying + 128 * wide;
  static constexpr int weight_bytes = L::parts.bytes, token_bytes = tokens * 256;
  static constexpr int stage_bytes = (token_bytes + wide * weight_bytes + 1023) / 1024 * 1024;
  static constexpr int least_registers = tokens == 160 ? 40 : 56;  // of a thread that copies
  static constexpr int most_registers = tokens == 160 ? 232 : 224;
  // A loop for each width that is multiplied, where registers do: faster than one loop of
  // wgmma_group(), by 7 % where all tiles are as wide as can be.
  static constexpr bool loops = tokens == 64 || (tokens == 128 && !L::sparse);
  static constexpr int least = !loops ? tokens : tokens == 64 ? 16 : 96;
  static constexpr int more = tokens == 64 ? 16 : 32;
  static constexpr int floats = (tokens + 63) / 64 * 32;  // of sums, as TileFinish wants them
  using List = TileList<8, tokens / 8>;
  static constexpr int most_bytes = 227 * 1024 - 256;  // of shared memory, beside the barriers
  static constexpr int other_bytes = 1024 + wide * boxes * 8192 + L::Book::bytes + 8 * tokens;
  static constexpr int stages =
      (most_bytes - other_bytes - List::bytes(most_listed_groups)) / stage_bytes;
  static constexpr int shared_bytes(int groups) {
    return other_bytes + stages * stage_bytes + List::bytes(groups);
  }
  static_assert(stages >= 2 && tokens % 32 == 0);
};

#if defined(SHUNT_SM_90A)

// The compiler otherwise works it out anew in every step.
__device__ __forceinline__ std::uint32_t kept_address(std::uint32_t shared) {
  return static_cast<std::uint32_t>(kept(static_cast<int>(shared)));
}

// What a warp knows of the stages: addresses in shared memory of the first one's.
template <class Book>
struct StagesOfWarp {
  const unsigned char* weights;  // of the tile of the layout that it has rows of
  std::uint32_t tokens, full;
  std::uint32_t empty;  // those of the block that this lane tells, where it tells one
  int warp;             // of the warpgroup
  int lane;
  bool silent;  // tells none
  bool mapped;  // tokens come by bulk copies
  Book book;

  // Of copies other than bulk ones.
  __device__ __forceinline__ void fence_copies() const {
    asm volatile(
        "{\n.reg .pred bulk;\nsetp.ne.s32 bulk, %0, 0;\n"
        "@!bulk fence.proxy.async.shared::cta;\n}" ::"r"(static_cast<int>(mapped))
        : "memory");
  }
  // What all lanes have read: wgmma was waited for since. Predicated inside, for a branch here
  // would have the compiler make every wgmma wait for the one before.
  __device__ __forceinline__ void free(std::uint32_t stage, int not_yet = 0) const {
    asm volatile(
        "{\n.reg .pred tells;\nsetp.eq.s32 tells, %1, 0;\n"
        "@tells mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n}" ::"r"(empty +
                                                                                       8 * stage),
        "r"(static_cast<int>(silent) | not_yet)
        : "memory");
  }
};

// The products of a tile: n tokens, or as many as hold `count` where a group of products may be of
// several widths. d is 0.
template <int n, class S>
__device__ __forceinline__ void multiply_steps(float (&d)[S::blocks][S::floats],
                                               const StagesOfWarp<typename S::L::Book>& at,
                                               StageRing<S::stages>& ring, int steps, int count) {
  using L = typename S::L;
  constexpr bool scaled = L::codes == Codes::fp8_block;
  float part[scaled ? S::blocks : 1][scaled ? S::floats : 1];
  if constexpr (scaled) {
#pragma unroll
    for (auto& block : part) {
#pragma unroll
      for (float& p : block) p = 0;
    }
  }
  std::uint32_t a[2][8];
  std::uint32_t before = 0;  // the last step's stage
  int first = 1;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const auto stage = static_cast<std::uint32_t>(ring.stage);
    wait_at(at.full + 8 * stage, ring.parity);
    at.fence_copies();
    const unsigned char* const tile = at.weights + ring.stage * S::stage_bytes;
    L mine[S::blocks];
#pragma unroll
    for (int m = 0; m < S::blocks; ++m) {
      mine[m].book = at.book;
      mine[m].load_scales(tile, at.warp + 4 * m, at.lane);
    }
    // Where registers allow it all of a step's at once: loads do not pass what is waited for below.
    // What is looked up is a turn early too, and its codes one more.
    constexpr int turns = L::pairs * S::blocks;
    constexpr bool early = L::looks_up && S::tokens <= 128;
    constexpr int ahead = S::tokens == 64 && !eight_bits(L::codes) ? turns : early ? 2 : 0;
    std::uint32_t words[turns][L::code_words], numbers[2][early ? 8 : 1];
    const auto load_codes = [&](int turn) {
      L::load_codes(tile, at.warp + 4 * (turn % S::blocks), turn / S::blocks, at.lane, words[turn]);
    };
#pragma unroll
    for (int turn = 0; turn < ahead; ++turn) load_codes(turn);
    if constexpr (early) mine[0].look_up(words[0], numbers[0]);
    const std::uint32_t tokens = at.tokens + stage * S::stage_bytes;
#pragma unroll
    for (int pair = 0; pair < L::pairs; ++pair) {
      const std::uint64_t b =
          L::sparse ? wgmma_descriptor(tokens + pair * S::tokens * 128)
                    : wgmma_descriptor(tokens + pair / 2 * S::tokens * 128) + pair % 2 * 4;
#pragma unroll
      for (int m = 0; m < S::blocks; ++m) {
        const int turn = pair * S::blocks + m;
        if (turn + ahead < turns) load_codes(turn + ahead);
        if constexpr (early) {
          const int next = turn + 1;
          if (next < turns) mine[next % S::blocks].look_up(words[next], numbers[next % 2]);
        }
        wgmma_wait<1>();  // what reads these registers is over
        if (turn == 1) at.free(before, first);
        std::uint32_t(&now)[8] = a[turn % 2];
        if constexpr (early) {
          mine[m].round_scaled(numbers[turn % 2], pair, now);
        } else {
          mine[m].template decode<true>(words[turn], pair, now);
        }
        auto& sums = either<scaled>(part, d)[m];
        std::uint32_t positions = 0;
        if constexpr (L::sparse) positions = L::positions(tile, at.warp + 4 * m, pair, at.lane);
        const std::uint64_t b_next = b + (L::sparse ? 4 : 2);
        if constexpr (!S::loops) {
          wgmma_group<n, L::bf16, L::sparse>(sums, now, b, b_next, positions, count);
        } else {
          wgmma_fence();
          if constexpr (L::sparse) {
            wgmma_sparse<n, L::bf16, 0>(sums, now, b, positions);
            wgmma_sparse<n, L::bf16, 1>(sums, now + 4, b_next, positions);
          } else {
            wgmma_registers<n, L::bf16>(sums, now, b);
            wgmma_registers<n, L::bf16>(sums, now + 4, b_next);
          }
          wgmma_commit();
        }
      }
    }
    if constexpr (scaled) {
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < S::blocks; ++m) {
        const float low = mine[m].scale(0, 0), high = mine[m].scale(0, 1);
#pragma unroll
        for (int j = 0; j < n / 2; ++j) {
          d[m][j] = __fmaf_rn(part[m][j], j / 2 % 2 == 0 ? low : high, d[m][j]);
          part[m][j] = 0;
        }
      }
    }
    before = stage, first = 0;
    ring.next();
  }
  wgmma_wait<0>();
  at.free(before);
}

#endif

// usual: rows are copied as they are, and results are plain.
template <class S, bool usual>
__global__ void __launch_bounds__(S::threads, 1)
    middle_fragments(const __grid_constant__ FragmentArgs args,
                     const __grid_constant__ RowMaps<S::maps> tokens,
                     const __grid_constant__ CUtensorMap out, bool mapped, int sharing) {
#if defined(SHUNT_SM_90A)
  using L = typename S::L;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  unsigned char* const stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const outgoing = stages + S::stages * S::stage_bytes;
  unsigned char* const behind = outgoing + S::wide * S::boxes * box_bytes;
  const typename L::Book book = book_at<L>(behind, lane);
  auto* const sources = reinterpret_cast<int*>(behind + L::Book::bytes);
  auto* const scales = reinterpret_cast<float*>(sources + S::tokens);
  // By a thread of each warpgroup: lanes would take turns.
  if (warp % 4 == 0 && lane == 0) {
    if (warp == 0) {
      if (usual || args.finish.plain || args.finish.situ) prefetch_tensor_map(&out);
    }
#pragma unroll
    for (int s = 0; s < S::stages; ++s) {
      if (s % (1 + S::wide) != warp / 4) continue;
      mbarrier_init(&full[s], mapped ? 1 : 1 + S::copying);
      mbarrier_init(&empty[s], static_cast<unsigned>(4 * S::wide * sharing));
    }
    mbarrier_init_fence();
  }
  if (mapped && warp == 1 && lane < S::maps) prefetch_tensor_map(&tokens.of[lane]);
  __syncthreads();
  if (sharing > 1) cluster_arrive();
  const int columns = (args.columns + sharing * S::wide - 1) / (sharing * S::wide);
  const int rank = sharing > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = static_cast<int>(blockIdx.x) / sharing;
  const int stride = static_cast<int>(gridDim.x) / sharing;
  // Of the layout, the first that this block has of a tile: the last block of a group may have
  // none.
  const auto column_of = [&](const GroupTile& at) {
    return S::wide * (sharing * at.column + rank);
  };
  // Bulk copies of a tile's tokens.
  const auto boxes_of = [&](const GroupTile& at) {
    return mapped ? (at.count + S::box - 1) / S::box : 0;
  };
  // By one thread: weights of step i of a tile. The last tile of a group may have fewer of the
  // layout's. The bytes of tokens that come later are expected here too.
  const auto copy_weights = [&](const GroupTile& at, int i, int stage) {
    const int there = max(0, min(S::wide, args.columns - column_of(at)));
    mbarrier_arrive_expect(
        &full[stage], static_cast<unsigned>(there * S::weight_bytes + boxes_of(at) * S::box * 256));
    const std::int64_t column = std::int64_t{args.steps} * S::weight_bytes;
    const char* const from = args.tiles + at.group * args.group_bytes + column_of(at) * column +
                             std::int64_t{i} * S::weight_bytes;
    unsigned char* const to = stages + stage * S::stage_bytes + S::token_bytes;
#pragma unroll
    for (int w = 0; w < S::wide; ++w) {
      if (w < there) {
        copy_bytes_once(to + w * S::weight_bytes, from + w * column, S::weight_bytes, &full[stage]);
      }
    }
  };
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  typename S::List list(scales + S::tokens, args.walk, args.groups, columns);
  StageRing<S::stages> ring;
  if (warp < 4) {
    bool listed = false;
    int tile = first;
    GroupTile at = S::List::find_unlisted(args.walk, args.groups, columns, tile);
    const auto find_listed = [&] {
      if (!listed) named_barrier(S::wide + 3, S::threads);  // once each warp
      listed = true;
      if (tile >= list.tiles()) return false;
      at = list.find(tile);
      return true;
    };
    int ahead = 0;  // weights of the first tile's steps before are under way
    if (at.group >= 0) {
      ahead = min(args.steps, S::stages);
      if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) copy_weights(at, i, i);
      }
      __syncwarp();
    }
    fewer_registers<S::least_registers>();
    bool more = at.group >= 0 || find_listed();
    if (early) {
      wait_for_predecessor();
      let_successor_start();
    }
    if (sharing > 1) cluster_wait();  // the other block's barriers are there
    if (mapped) {
      if (warp == 0) {
        while (more) {
          if (lane == 0) {
            const CUtensorMap* const map = &tokens.of[boxes_of(at) - 1];
#pragma unroll 1
            for (int i = 0; i < args.steps; ++i) {
              mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
              if (i >= ahead) copy_weights(at, i, ring.stage);
              unsigned char* const to = stages + ring.stage * S::stage_bytes;
              if (sharing > 1) {
                copy_box_to_ranks(to + rank * (S::token_bytes / 2), map, &full[ring.stage],
                                  128 * i + 64 * rank, at.row, 3);
              } else {
                copy_box(to, map, &full[ring.stage], 128 * i, at.row);
                copy_box(to + S::token_bytes / 2, map, &full[ring.stage], 128 * i + 64, at.row);
              }
              ring.next();
            }
          }
          __syncwarp();
          ahead = 0, tile += stride;
          more = find_listed();
        }
      }
      if (!listed) find_listed();
    } else {
      ListedRows<L::bf16, S::tokens, S::copying, usual> rows(thread, sources, scales);
      while (more) {
        named_barrier(S::wide + 1, S::copying);  // the list of the tile before has been read
        list_rows<S::tokens, S::copying, usual>(args, at.row, at.count, thread, sources, scales);
        named_barrier(S::wide + 1, S::copying);
        rows.begin(args, at.count);
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          if (thread == 0 && i >= ahead) copy_weights(at, i, ring.stage);
          const std::uint32_t to = shared_address(stages + ring.stage * S::stage_bytes);
          rows.copy(args, to, std::int64_t{i} * 128);
          rows.copy(args, to + S::token_bytes / 2, std::int64_t{i} * 128 + 64);
          if (usual || args.direct) {
            mbarrier_arrive_after_copies(&full[ring.stage]);
          } else {
            mbarrier_arrive(&full[ring.stage]);
          }
          ring.next();
        }
        ahead = 0, tile += stride;
        more = find_listed();
      }
    }
  } else {
    // Theirs alone, so that copies need not wait; a barrier of the list's is behind it.
    write_book<L>(behind, thread - S::copying, 128 * S::wide);
    list.build(args.walk, thread - S::copying, 128 * S::wide, S::wide + 2);
    named_arrive(S::wide + 3, S::threads);
    more_registers<S::most_registers>();
    if (sharing > 1) cluster_wait();
    const int tiles = list.tiles();
    // Read anew: else it is kept in memory from before registers were given away.
    int again;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(again));
    const int lane = again % 32, warp = __shfl_sync(0xffffffffu, again / 32, 0);
    const int group = warp / 4 - 1, quarter = warp % 4;
    StagesOfWarp<typename L::Book> stages_of{
        .weights = nullptr,
        .tokens = shared_address(stages),
        .full = kept_address(shared_address(full)),
        .empty =
            kept_address(address_of_rank(empty, static_cast<unsigned>(min(lane, sharing - 1)))),
        .warp = quarter,
        .lane = lane,
        .silent = lane >= sharing,
        .mapped = mapped,
        .book = book};
    Boxes box{.memory = outgoing + group * S::boxes * box_bytes,
              .count = S::boxes,
              .map = &out,
              .barrier = 1 + group};
    for (int tile = first; tile < tiles; tile += stride) {
      const GroupTile at = list.find(tile);
      // Where there are no weights left its warps multiply the first ones, for nothing.
      const bool there = column_of(at) + group < args.columns;
      const int which = there ? group : 0;
      const int column = min(column_of(at) + which, args.columns - 1);
      stages_of.weights = stages + S::token_bytes + which * S::weight_bytes;
      // Asked for before they are needed where registers allow it: they come from memory.
      constexpr bool ahead = S::tokens == 64;
      float low[S::blocks], high[S::blocks];
      const auto load_factors = [&] {
        const float* const factors =
            reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes +
                                           args.factors_at + std::int64_t{column} * 512) +
            16 * quarter + lane / 4;
#pragma unroll
        for (int m = 0; m < S::blocks; ++m) {
          low[m] = __ldg(factors + 64 * m), high[m] = __ldg(factors + 64 * m + 8);
        }
      };
      if constexpr (ahead) load_factors();
      float d[S::blocks][S::floats];
#pragma unroll
      for (auto& block : d) {
#pragma unroll
        for (float& sum : block) sum = 0;
      }
      const auto with = [&]<int n>() {
        multiply_steps<n, S>(d, stages_of, ring, args.steps, at.count);
      };
      with_width<S::least, S::more, S::tokens>(at.count, with);
      if constexpr (!ahead) load_factors();
#pragma unroll
      for (int m = 0; m < S::blocks; ++m) {
#pragma unroll
        for (int i = 0; i < S::tokens / 2; ++i) {
          const float factor = i / 2 % 2 == 0 ? low[m] : high[m];
          d[m][i] = __fmul_rn(d[m][i], __fmul_rn(factor, args.unscale));
        }
      }
      using T = std::conditional_t<L::bf16, __nv_bfloat16, __half>;
      constexpr TileEnd end = usual ? TileEnd::plain : TileEnd::any;
      TileFinish<T, S::blocks, S::floats, end, true>(
          args.finish, at.group, at.row, there ? at.count : 0, std::int64_t{column} * 128, box)
          .write(d);
    }
    if (thread % 128 == 0) wait_for_boxes_written();
  }
  __syncwarp();
  // No block leaves while the other copies into it or arrives at its barriers.
  if (sharing > 1) cluster_barrier();
#endif
}

template <class S>
void launch_middle(const Gpu& gpu, const PackedPlan& plan, FragmentArgs args) {
  CUtensorMap out{};
  map_results(out, args.finish, S::L::bf16, args.walk.rows);
  // Rows that lie in order come by a tensor map, to two blocks at once where both have weights.
  RowMaps<S::maps> tokens{};
  const bool mapped = args.direct && args.permutation == nullptr &&
                      map_rows(tokens, args.source, S::L::bf16, args.source_rows, args.k,
                               args.source_row_bytes / 2, S::box);
  const int sharing = mapped && blocks_share(args.columns, args.steps) ? 2 : 1;
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(std::max(plan.blocks / sharing, 1) * sharing)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups)),
          .cluster = static_cast<unsigned>(sharing)},
         args.direct && args.finish.plain ? middle_fragments<S, true> : middle_fragments<S, false>,
         args, tokens, out, mapped, sharing);
}

template <class L>
void launch_middle_rows(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args) {
  if constexpr (L::codes == Codes::fp8_block) {  // which has sums twice
    launch_middle<MiddleFragments<L, 64>>(gpu, plan, args);
  } else {
    if constexpr (!eight_bits(L::codes)) {  // two stages would be all
      if (plan.tile_tokens > 128) return launch_middle<MiddleFragments<L, 160>>(gpu, plan, args);
    }
    (plan.tile_tokens == 64 ? launch_middle<MiddleFragments<L, 64>>
                            : launch_middle<MiddleFragments<L, 128>>)(gpu, plan, args);
  }
}

}  // namespace

}  // namespace shunt::cuda_engine
