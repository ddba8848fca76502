// Grouped GEMM of fp8 for groups of many rows on Hopper: rows ("tokens") are wgmma's A, weights its
// B, so that a thread has whole rows: a scale of a row is one number, and the results of a row that
// are rounded to fp8 together lie in four threads.
//
// A block multiplies up to 128 tokens by 256 rows of weights, a cluster of two takes tiles of one
// of two forms, in the order of TallFirst, as TileClaims hands them out: tall, up to 256 tokens,
// 128 for each block, by the same weights; low, up to 128 tokens, the same for both, by 512 rows of
// weights. What the blocks share comes by multicast, a half from each. k goes by in steps
// of 128 through a ring of slots of 48 KB: two boxes of 64 tokens, then 256 rows of weights. 12
// warps:
//   warp 0      one thread orders copies (tokens by a tensor map: what lies behind the group's end
//               comes as zeros, which are multiplied for less power than another group's rows)
//   warp 1      the step's scales; or, where they are a row's and a column's, a tile's
//   warp 2      16 bits as they are, in order: one thread orders the stores of a tile's results
//   warp 3      claims and finds the next tile while the last steps of one are ordered
//   warps 4-11  two warpgroups: 64 tokens each by 128 of the weights, then by the other 128; of 64
//               tokens and fewer, each by 128 of the weights. Products of a step leave the tensor
//               cores for the sums, times their scales, while the other warpgroup multiplies
//   full[s]     slot s is there: an arrival and its bytes, of both blocks' copies, and 32 more
//               where there are scales
//   empty[s]    what slot s had may be overwritten in both blocks: 16 arrivals
//   found, left a tile has been found, has been read by all warps that want it
//   scaled, rescaled   (by_row) a tile's scales are there, 32 arrivals; have been read, 8
//   staged      a tile's results lie in shared memory: 8 arrivals
//   stored      and have been read from there
// The tile's end: scales a row and a column where those are the format's, bias, activation, and out
// in f32, 16 bits, or fp8 with a scale for 128 columns of a row; each warp turns its 16 rows in
// shared memory. Ends of a layer's products have kernels of their own, for their code alone fits
// the instruction cache: 16 bits as they are, by bulk stores of boxes of 64 rows, which leave from
// where the last step's operands lay (what that had is freed by warp 2) while products of the next
// tile run; the same to the rows' places (row_places.hpp), by the warps that have them; pairs that
// become fp8; and pairs in 16 bits. Each but those in fp8 has two, for scales of blocks and for
// those of rows and columns, which step by step are only added up; and a third, but for rows'
// places, for the latter with sums that stay in the tensor cores (fast): products of 256 weights at
// once, which read a slot's rows once, 80 KB a step in all, and give it up a step later. The 128
// columns of pairs that share a scale are the block's; where warpgroups have halves of them, they
// exchange magnitudes. The last cluster barrier: no block leaves while the other writes into it.
//
// Bytes a step and block from L2, for 8.4 MFLOP: 32 KB of a tall tile, 40 of a low one. Shared
// memory is written 48 KB and read 96: 1152 clocks at 128 bytes a clock, and the tensor cores need
// 1024. A warpgroup's chain is 256 clocks of products and some 190 of sums, twice, of which the
// other hides a half: nothing else should be in it, so operands and the next slot's barrier are
// looked up while products run, in uniform registers. (A branch by lanes around a bulk store,
// before or after a loop, makes the compiler give these up.) Measured: docs/notes/cuda-fp8.md.
#include <cmath>
#include <type_traits>

#include "cuda/fp8.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/fp8_finish.cuh"
#include "gemm/fp8_mma.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/store_map.hpp"
#include "gemm/tall_first.cuh"
#include "gemm/tile_claims.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int cluster = 2;
constexpr int teams = 2, halves_most = 2;  // of warps that multiply; 128 rows of weights of a block
constexpr int threads = 128 * (1 + teams), finishers = 4 * teams;
constexpr int step = 128;             // along k
constexpr int step_pairs = step / 2;  // columns of a tensor map of rows: two numbers each
constexpr int box = 64;               // tokens of a copy
constexpr int block_tokens = teams * box;
constexpr int box_bytes8 = box * step, half_bytes = 128 * step;
constexpr int stage_bytes = box * 128;  // 64 tokens' results of 64 columns of 16 bits
constexpr int slot_bytes = teams * box_bytes8 + halves_most * half_bytes;
constexpr int slots_most = 4;                                // steps under way
constexpr int slot_scales = block_tokens + 2 * halves_most;  // floats: tokens', and halves' pairs
constexpr int tiles_ahead = 4;                               // tiles that have been found
using Tiles = TallFirst<block_tokens>;

// Blocks'; or a row's and a column's, with sums that leave the tensor cores every 128 products, or
// that stay there (GroupedGemmSpec::fast_accumulation).
enum class Scales { of_blocks, of_rows, of_rows_fast };

// Shared memory: the ring, where warps' results leave, scales, tiles.
template <End end, Scales kind>
struct Room {
  static constexpr bool by_row = kind != Scales::of_blocks;
  // A box of 16 x 128 bytes, or 16 lines.
  static constexpr int turn = end == End::plain16 ? 2 * stage_bytes / finishers : 16 * pitch;
  // Where scales are a row's and a column's: a tile's, and those of the next one.
  static constexpr int tile_scales = block_tokens + 128 * halves_most;
  __host__ __device__ static constexpr int scales(int slots) {
    return by_row ? 2 * tile_scales : slots * slot_scales;
  }
  static int bytes(int slots, int groups) {
    return 1024 + slots * slot_bytes + scales(slots) * 4 + finishers * turn + Tiles::bytes(groups);
  }
  static int slots(int groups, int most_bytes) {
    return bytes(slots_most, groups) + 2048 <= most_bytes ? slots_most : slots_most - 1;
  }
};

// What a block has of a tile.
struct Share {
  bool tall;
  int group, row, count;  // tokens
  int tile, halves;       // of the prepared layout: the first, and how many of two there are

  __device__ __forceinline__ Share(const GroupTile& at, int rank, int row_tiles)
      : tall(at.count > block_tokens),
        group(at.group),
        row(at.row + (tall ? rank * block_tokens : 0)),
        count(tall ? min(block_tokens, at.count - rank * block_tokens) : at.count),
        tile(2 * (tall ? at.column : cluster * at.column + rank)),
        halves(min(halves_most, max(row_tiles - tile, 0))) {}
  __device__ __forceinline__ int boxes() const { return (count + box - 1) / box; }
};

#if defined(SHUNT_SM_90A)

// Keeps x, instead of working it out again wherever it is read.
__device__ __forceinline__ std::uint32_t once(std::uint32_t x) {
  asm volatile("mov.u32 %0, %0;" : "+r"(x));
  return x;
}
// Whether the phase of this parity has ended, for all that can be said at once.
__device__ __forceinline__ bool is_there(std::uint32_t barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Bytes that lie one after the other, to the same place of both blocks; they count at the barrier
// at `barrier`'s place there.
__device__ __forceinline__ void copy_bytes_to_both(void* to, const void* from, unsigned bytes,
                                                   std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(std::uint16_t{3})
      : "memory");
}
// By the lower half of a descriptor: wgmma_descriptor().
__device__ __forceinline__ std::uint64_t whole(std::uint32_t lower) {
  return std::uint64_t{0x40000040} << 32 | lower;
}
// d = the products of a step.
__device__ __forceinline__ void multiply_step(float (&d)[64], std::uint32_t a, std::uint32_t b) {
  wgmma_e4m3<128, 0>(d, whole(a), whole(b));
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3<128, 1>(d, whole(a + 2 * k), whole(b + 2 * k));
}
// acc += the products of a step, by one half of the weights or both.
template <int halves>
__device__ __forceinline__ void add_step(float (&acc)[2][64], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    if constexpr (halves == 2) {
      wgmma_e4m3<256, 1>(reinterpret_cast<float(&)[128]>(acc), whole(a + 2 * k), whole(b + 2 * k));
    } else {
      wgmma_e4m3<128, 1>(acc[0], whole(a + 2 * k), whole(b + 2 * k));
    }
  }
}

#endif

// End::any looks for itself of what kind scales are, as it runs.
template <End end, Scales kind>
__global__ void __launch_bounds__(threads, 1)
    many_rows(const __grid_constant__ PackedArgs args, int slots,
              const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap results) {
#if defined(SHUNT_SM_90A)
  constexpr bool by_row = kind != Scales::of_blocks;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[slots_most], empty[slots_most], found[tiles_ahead],
      left[tiles_ahead];
  __shared__ std::uint64_t staged, stored, scaled[2], rescaled[2];
  __shared__ __align__(8) TileClaims claims;
  __shared__ int4 found_tile[tiles_ahead];  // group (-1: no more), row, count, column
  __shared__ float met[2][teams][box];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  // The same offset in both blocks.
  unsigned char* const ring = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const turns = ring + slots * slot_bytes;
  unsigned char* const scales_at = turns + finishers * Room<end, kind>::turn;
  auto* const scales = reinterpret_cast<float*>(scales_at);
  constexpr int tile_scales = Room<end, kind>::tile_scales;
  static_assert(slots_most < TileClaims::kept - 1);
  static_assert(!by_row || (end != End::any && end != End::pairs8));
  const bool block_scales = end == End::any ? args.block_scales : !by_row;
  if (end == End::any && !block_scales) {
    for (int i = thread; i < slots * slot_scales; i += threads) scales[i] = 1;
  }
  if (thread == 0) {
    prefetch_tensor_map(&tokens);
    for (int s = 0; s < slots; ++s) {
      mbarrier_init(&full[s], block_scales ? 1 + 32 : 1);
      mbarrier_init(&empty[s], finishers * cluster);
    }
    for (int t = 0; t < tiles_ahead; ++t) {
      mbarrier_init(&found[t], 1);
      mbarrier_init(&left[t], (end == End::plain16 ? 3 : 2) + finishers);
    }
    claims.init();
    mbarrier_init(&staged, finishers);
    mbarrier_init(&stored, 1);
    for (int t = 0; t < 2; ++t) {
      mbarrier_init(&scaled[t], 32);
      mbarrier_init(&rescaled[t], finishers);
    }
    mbarrier_init_fence();
  }
  wait_for_predecessor();
  let_successor_start();
  Tiles list(scales_at + Room<end, kind>::scales(slots) * 4, args.walk, args.groups, args.columns);
  list.build();
  cluster_barrier();  // the other block's barriers are there

  const int rank = static_cast<int>(cluster_rank());
  int slot = 0;
  unsigned parity = 0;
  bool again = false;  // the ring has been round
  const auto next_slot = [&] {
    if (++slot == slots) slot = 0, parity ^= 1, again = true;
  };
  // plain16: where 64 columns of 64 tokens' results leave: of the last step's slot, or behind.
  const auto stage_of = [&](int which, int of_box, int column) {
    const int n = of_box * (2 * halves_most) + column;
    constexpr int inside = slot_bytes / stage_bytes;
    return n < inside ? ring + which * slot_bytes + n * stage_bytes
                      : turns + (n - inside) * stage_bytes;
  };
  // Tiles one after the other, as warp 3 finds them.
  int place = 0;
  unsigned place_parity = 0;
  GroupTile at;
  const auto next_tile = [&] {
    mbarrier_wait(&found[place], place_parity);
    int4 tile = make_int4(0, 0, 0, 0);
    if (lane == 0) {
      tile = found_tile[place];
      mbarrier_arrive(&left[place]);
    }
    if (++place == tiles_ahead) place = 0, place_parity ^= 1;
    at.group = __shfl_sync(0xffffffffu, tile.x, 0);
    at.row = __shfl_sync(0xffffffffu, tile.y, 0);
    at.count = __shfl_sync(0xffffffffu, tile.z, 0);
    at.column = __shfl_sync(0xffffffffu, tile.w, 0);
    return at.group >= 0;
  };
  if (warp < 4) {
    fewer_registers<40>();
    if (warp == 0) {
      while (next_tile()) {
        if (lane == 0) {
          const Share mine(at, rank, args.row_tiles);
          const int boxes = mine.boxes();
          const std::int64_t apart = std::int64_t{args.steps} * half_bytes;
          // A tall tile's weights are both blocks', a half from each; a low one's tokens.
          const int first = mine.tall ? rank : 0, end_half = mine.tall ? rank + 1 : halves_most;
          const char* weights =
              args.tiles + mine.group * args.group_bytes + (mine.tile + first) * apart;
          const auto bytes = static_cast<unsigned>(boxes * box_bytes8 + mine.halves * half_bytes);
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            if (again) mbarrier_wait(&empty[slot], parity ^ 1);
            claims.at_step(true, i, args.steps);
            unsigned char* const to = ring + slot * slot_bytes;
            mbarrier_arrive_expect(&full[slot], bytes);
#pragma unroll 1
            for (int b = mine.tall ? 0 : rank; b < boxes; b += mine.tall ? 1 : cluster) {
              const int count = min(box, mine.count - box * b);
              const int beyond = mine.row + box * b + count;
              unsigned char* const at_box = to + b * box_bytes8;
              if (mine.tall) {
                copy_box(at_box, &tokens, &full[slot], step_pairs * i, box - count, beyond);
              } else {
                copy_box_to_ranks(at_box, &tokens, &full[slot], step_pairs * i, box - count, beyond,
                                  3);
              }
            }
            const char* from = weights;
#pragma unroll 1
            for (int h = first; h < min(end_half, mine.halves); ++h) {
              unsigned char* const half = to + teams * box_bytes8 + h * half_bytes;
              if (mine.tall) {
                copy_bytes_to_both(half, from, half_bytes, &full[slot]);
              } else {
                copy_bytes(half, from, half_bytes, &full[slot]);
              }
              from += apart;
            }
            weights += half_bytes;
            next_slot();
          }
        }
        __syncwarp();
      }
    } else if (warp == 3) {
      const int clusters = static_cast<int>(gridDim.x) / cluster, tiles = list.tiles();
      int tile = static_cast<int>(blockIdx.x) / cluster;
      bool round = false;
      for (unsigned nth = 1;; ++nth) {
        GroupTile next{.group = -1};
        if (tile < tiles) next = list.find(tile);
        if (lane == 0) {
          if (round) mbarrier_wait(&left[place], place_parity ^ 1);
          found_tile[place] = make_int4(next.group, next.row, next.count, next.column);
          mbarrier_arrive(&found[place]);
        }
        __syncwarp();
        if (++place == tiles_ahead) place = 0, place_parity ^= 1, round = true;
        if (next.group < 0) break;
        if (lane == 0) tile = claims.next(args.counter, tiles, clusters, rank, nth);
        tile = uniform(tile);
      }
    } else if (warp == 2) {
      unsigned staged_parity = 0;
      while (end == End::plain16 && next_tile()) {
        const Share mine(at, rank, args.row_tiles);
        slot = (slot + args.steps - 1) % slots;
        if (mine.halves > 0) {
          mbarrier_wait(&staged, staged_parity);
          staged_parity ^= 1;
          if (lane == 0) {
#pragma unroll 1
            for (int b = 0; b < mine.boxes(); ++b) {
              const int count = min(box, mine.count - box * b), row = mine.row + box * b + count;
#pragma unroll 1
              for (int c = 0; c < 2 * mine.halves; ++c) {
                const int column = 128 * mine.tile + 64 * c;
                if (column >= args.finish.out_columns) break;
                put_box(&results, shared_address(stage_of(slot, b, c)), column, box - count, row);
              }
            }
            commit_boxes();
            wait_for_boxes_read<0>();
            mbarrier_arrive(&stored);
          }
          __syncwarp();
          // For the warps that multiplied.
          const int holders = mine.count > box || mine.halves == 2 ? finishers : finishers / teams;
          if (lane < cluster * finishers && lane % finishers < holders) {
            mbarrier_free_at(&empty[slot], static_cast<unsigned>(lane / finishers));
          }
        }
        if (++slot == slots) slot = 0;
      }
      if (end == End::plain16 && lane == 0) wait_for_boxes_written();
    } else if (warp == 1) {
      constexpr int rows = block_tokens / 32;  // of a lane: lane, lane + 32, ..
      const auto last = static_cast<int>(args.walk.rows) - 1;
      const std::int64_t along = args.row_scale_step;
      unsigned turn = 0;  // of tiles; by_row
      while (next_tile()) {
        if (!by_row && !block_scales) continue;
        const Share mine(at, rank, args.row_tiles);
        if constexpr (by_row) {
          float row[rows], column[4 * halves_most];
          const float* const of_columns =
              reinterpret_cast<const float*>(args.tiles + mine.group * args.group_bytes +
                                             args.scales_at) +
              128 * mine.tile + lane;
#pragma unroll
          for (int r = 0; r < rows; ++r) {
            row[r] = __ldg(args.row_scales +
                           min(mine.row + lane + 32 * r, last) * args.row_scale_stride);
          }
#pragma unroll
          for (int c = 0; c < 4 * halves_most; ++c) {
            column[c] = c / 4 < mine.halves ? __ldg(of_columns + 32 * c) : 0;
          }
          if (turn > 1) mbarrier_wait(&rescaled[turn & 1], turn / 2 & 1 ^ 1);
          float* const to = scales + (turn & 1) * tile_scales + lane;
#pragma unroll
          for (int r = 0; r < rows; ++r) to[32 * r] = row[r];
#pragma unroll
          for (int c = 0; c < 4 * halves_most; ++c) to[block_tokens + 32 * c] = column[c];
          mbarrier_arrive(&scaled[turn & 1]);
          ++turn;
          continue;
        }
        const float* of_rows[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          of_rows[r] =
              args.row_scales + min(mine.row + lane + 32 * r, last) * args.row_scale_stride;
        }
        // And lanes 0 to 3 gate's and up's of either half.
        const int tile = min(mine.tile + lane / 2 % 2, args.row_tiles - 1);
        const float* of_weights = reinterpret_cast<const float*>(
                                      args.tiles + mine.group * args.group_bytes + args.scales_at) +
                                  std::int64_t{tile} * args.steps * 4 + lane % 2;
        // Two steps ahead: what comes from memory takes longer than one.
        float row[2][rows], weight[2];
        const auto load = [&](int to) {
#pragma unroll
          for (int r = 0; r < rows; ++r) {
            row[to][r] = __ldg(of_rows[r]);
            of_rows[r] += along;
          }
          weight[to] = __ldg(of_weights);
          of_weights += 4;
        };
        load(0);
        if (args.steps > 1) load(1);
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          if (again) mbarrier_wait(&empty[slot], parity ^ 1);
          float* const to = scales + slot * slot_scales;
#pragma unroll
          for (int r = 0; r < rows; ++r) to[lane + 32 * r] = row[0][r];
          if (lane < 2 * halves_most) to[block_tokens + lane] = weight[0];
          mbarrier_arrive(&full[slot]);
#pragma unroll
          for (int r = 0; r < rows; ++r) row[0][r] = row[1][r];
          weight[0] = weight[1];
          if (i + 2 < args.steps) load(1);
          next_slot();
        }
      }
    }
  } else {
    more_registers<232>();
    const int team = warp / 4 - 1;
    const std::uint32_t full_at = once(shared_address(full));
    const std::uint32_t empty_at =
        once(address_of_rank(empty, static_cast<unsigned>(lane % cluster)));
    const std::uint32_t ring_at =
        once(static_cast<std::uint32_t>(wgmma_descriptor(shared_address(ring))));
    constexpr std::uint32_t weights_at = teams * box_bytes8 / 16, half_at = half_bytes / 16;
    const int line = warp % 4 * 16;  // of 64 tokens, the warp's first
    unsigned char* const turn = turns + (warp - 4) * Room<end, kind>::turn;
    const WarpFinish finish(args, turn, lane);
    const auto leave = [&](int which, bool really = true) {
      __syncwarp();  // all lanes have read their scales
      if (lane < cluster && really) mbarrier_free_at(empty_at + 8 * static_cast<unsigned>(which));
    };
    bool before = false;  // plain16: tiles have been stored
    unsigned stored_parity = 0;
    const auto wait_for_store = [&] {
      if (before) mbarrier_wait(&stored, stored_parity ^ 1);
    };
    const auto store = [&] {  // by warp 2, once all have come here
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&staged);
      before = true, stored_parity ^= 1;
    };
    int turns_met = 0;
    unsigned scale_turn = 0;
    // by_row: this tile's scales, which nobody else changes until they are given up.
    const auto scales_here = [&] {
      mbarrier_wait(&scaled[scale_turn & 1], scale_turn / 2 & 1);
      return scales + (scale_turn & 1) * tile_scales;
    };
    const auto give_up_scales = [&] {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&rescaled[scale_turn & 1]);
      ++scale_turn;
    };
    while (next_tile()) {
      const Share share(at, rank, args.row_tiles);
      const bool both = share.count > box;  // warpgroups have 64 tokens each, and all weights
      const int first_half = both ? 0 : team;
      const int mine = both ? share.halves : min(1, share.halves - team);
      if (mine <= 0) {  // nothing of this tile
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          wait_at(full_at + 8 * static_cast<unsigned>(slot), parity);
          leave(slot);
          next_slot();
        }
        if (end == End::plain16 && share.halves > 0) {
          wait_for_store();
          store();
        }
        if constexpr (by_row) {
          scales_here();
          give_up_scales();
        }
        continue;
      }

      const int my_box = both ? team : 0;
      float acc[2][64];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0;
      const float* const of_row = scales + box * my_box + line + lane / 4;
      const float* const of_weights = scales + block_tokens + 2 * first_half;
      const std::uint32_t to_a = uniform(static_cast<std::uint32_t>(my_box * (box_bytes8 / 16)));
      const std::uint32_t to_b =
          uniform(weights_at + static_cast<std::uint32_t>(first_half) * half_at);
      const auto multiply = [&](auto of) {
        constexpr int count = decltype(of)::value;
        // Of the next step: its operands, and whether it is there.
        // Uniform: or descriptors are computed in every lane, some 25 instructions a product.
        const auto find_operands = [&] {
          return uniform(ring_at + static_cast<std::uint32_t>(slot * (slot_bytes / 16)));
        };
        std::uint32_t from = find_operands();
        bool ready = false;
        if constexpr (kind == Scales::of_rows_fast) {
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            const int last = (slot == 0 ? slots : slot) - 1;
            if (!ready) wait_at(full_at + 8 * static_cast<unsigned>(slot), parity);
            wgmma_fence();
            add_step<count>(acc, from + to_a, from + to_b);
            wgmma_commit();
            next_slot();
            from = find_operands();
            ready = __all_sync(0xffffffffu,
                               is_there(full_at + 8 * static_cast<unsigned>(slot), parity)) != 0;
            wgmma_wait<1>();  // the step before has been read
            leave(last, i > 0);
          }
          wgmma_wait<0>();
          leave((slot == 0 ? slots : slot) - 1, end != End::plain16);
        } else {
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            const int now = slot;
            if (!ready) wait_at(full_at + 8 * static_cast<unsigned>(now), parity);
            const std::uint32_t a = from + to_a, b = from + to_b;
            float d[64];
            wgmma_fence();
            multiply_step(d, a, b);
            wgmma_commit();
            float s[2][2][2];  // of halves, of rows lane / 4 and 8 further, of gate and of up
            const auto add = [&](int p) {
#pragma unroll
              for (int e = 0; e < 64; ++e) {
                acc[p][e] = by_row ? __fadd_rn(acc[p][e], d[e])
                                   : __fmaf_rn(d[e], s[p][e / 2 % 2][e / 4 % 2], acc[p][e]);
              }
            };
#pragma unroll
            for (int p = 0; p < (by_row ? 0 : count); ++p) {
              const float2 weights =
                  *reinterpret_cast<const float2*>(of_weights + now * slot_scales + 2 * p);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float row = of_row[now * slot_scales + 8 * r];
                s[p][r][0] = __fmul_rn(row, weights.x), s[p][r][1] = __fmul_rn(row, weights.y);
              }
            }
            if (count == 2) {
              wgmma_wait<0>();
              add(0);
              wgmma_fence();
              multiply_step(d, a, b + half_at);
              wgmma_commit();
            }
            next_slot();
            from = find_operands();
            ready = __all_sync(0xffffffffu,
                               is_there(full_at + 8 * static_cast<unsigned>(slot), parity)) != 0;
            wgmma_wait<0>();
            leave(now, end != End::plain16 || i + 1 < args.steps);
            add(count - 1);
          }
        }
      };
      if (mine == 2) {
        multiply(std::integral_constant<int, 2>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }

      const auto where_of = [&](int p) {
        const int first = box * my_box + line;
        return Where{.group = share.group,
                     .row = share.row + first,
                     .count = share.count - first,
                     .first = std::int64_t{128} * (share.tile + first_half + p)};
      };
      const bool paired = end == End::pairs8 || (end == End::any && args.finish.paired);
      const bool fp8 = end == End::pairs8 || (end == End::any && args.out_scales != nullptr);
      float most[2][2] = {{0, 0}, {0, 0}};
      const int last_slot = (slot == 0 ? slots : slot) - 1;
      if constexpr (end == End::plain16) {
        // The last step's slot has been read by all, and what lies behind the ring has been stored.
        if (both || share.halves == 2) named_barrier(1, 128 * teams);
        wait_for_store();
      }
      const float* tile_rows = nullptr;
      if constexpr (by_row) tile_rows = scales_here();
      // A constant number: or else sums would have addresses, and lie in memory.
      const auto finish_part = [&](auto number) {
        constexpr int p = decltype(number)::value;
        if (p >= mine) return;
        const Where where = where_of(p);
        if constexpr (by_row) {
          finish.scale(acc[p], tile_rows + box * my_box + line,
                       tile_rows + block_tokens + 128 * (first_half + p));
        } else if constexpr (end == End::any) {
          finish.scale(acc[p], where);
        }
        if constexpr (end == End::plain16) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const std::uint32_t to =
                shared_address(stage_of(last_slot, my_box, 2 * (first_half + p) + h)) +
                static_cast<std::uint32_t>(line * 128);
            args.finish.out_dtype == DType::bf16 ? finish.put_16<true>(acc[p], h, to)
                                                 : finish.put_16<false>(acc[p], h, to);
          }
        } else if constexpr (end == End::places16) {
          if (where.count > 0) {
            args.finish.out_dtype == DType::bf16 ? finish.write_places<true>(acc[p], where)
                                                 : finish.write_places<false>(acc[p], where);
          }
        } else if constexpr (end == End::pairs16) {
          finish.template activate<end>(acc[p], where);
          args.finish.out_dtype == DType::bf16
              ? finish.template write_pairs16<true>(acc[p], where)
              : finish.template write_pairs16<false>(acc[p], where);
        } else {
          finish.template activate<end>(acc[p], where);
          if (!fp8) {
            paired ? finish.write<64>(acc[p], where) : finish.write<128>(acc[p], where);
          } else if (!paired) {
            finish.round<128>(acc[p], args.between, where, most[p]);
            finish.write_fp8<128>(acc[p], where, most[p], true);
          } else {
            finish.round<64>(acc[p], args.between, where, most[p]);
          }
        }
      };
      finish_part(std::integral_constant<int, 0>{});
      finish_part(std::integral_constant<int, 1>{});
      if constexpr (by_row) give_up_scales();
      if constexpr (end == End::plain16) {
        fence_for_async();
        store();
      } else if (fp8 && paired) {
        // A row's 128 columns of pairs are 256 rows of weights.
        float all[2] = {fmaxf(most[0][0], most[1][0]), fmaxf(most[0][1], most[1][1])};
        if (!both && share.halves == 2) {
          // At even and odd times to places of their own.
          float(&there)[teams][box] = met[turns_met & 1];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (lane % 4 == 0) there[team][line + lane / 4 + 8 * r] = all[r];
          }
          named_barrier(1, 128 * teams);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            all[r] = fmaxf(all[r], there[team ^ 1][line + lane / 4 + 8 * r]);
          }
          ++turns_met;
        }
        if constexpr (end == End::pairs8) {
          mine == 2 ? finish.write_pairs8<2>(acc, where_of(0), all, true)
                    : finish.write_pairs8<1>(acc, where_of(0), all, first_half == 0);
        } else {
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            if (p < mine) finish.write_fp8<64>(acc[p], where_of(p), all, first_half + p == 0);
          }
        }
      }
    }
  }
  __syncwarp();
  cluster_barrier();
#endif
}

End end_of(const PackedArgs& args, const Tensor& out) {
  const Finish& f = args.finish;
  const std::int64_t bytes = bits(f.out_dtype) / 8;
  const bool aligned = reinterpret_cast<std::uintptr_t>(f.out) % 16 == 0 &&
                       (out.shape[0] == 1 || (f.out_stride > 0 && f.out_stride * bytes % 16 == 0));
  if (f.bias != nullptr || !aligned) return End::any;
  if (bytes == 2 && !f.paired && !f.activates) {
    return f.places.rows != nullptr ? End::places16 : End::plain16;
  }
  const bool pairs = f.paired && f.plain && f.rule.limit == INFINITY;
  if (bytes == 1 && pairs && args.block_scales && f.out_columns % 16 == 0) return End::pairs8;
  if (bytes == 2 && pairs && f.out_columns % 8 == 0) return End::pairs16;
  return End::any;
}

}  // namespace

bool fp8_many_rows(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p,
                   PackedArgs args) {
  args.columns = (args.row_tiles + halves_most - 1) / halves_most;
  CUtensorMap tokens, results{};
  // Bytes in twos: a box of 64 elements of 16 bits is one of 128 bytes.
  if (!map_row_ends(tokens, p.rows.data, true, p.rows.shape[0], (args.k + 1) / 2,
                    args.source_row_bytes / 2, 64, box)) {
    return false;
  }
  const End end = end_of(args, p.out);
  if (args.finish.places.rows != nullptr && end != End::places16) return false;
  if (end == End::plain16 && !map_row_ends(results, p.out.data, true, p.out.shape[0],
                                           p.out.shape[1], p.out.strides[0], 64, box)) {
    return false;
  }
  const auto start = [&](auto kernel, auto room) {
    const int slots = room.slots(args.groups, gpu.shared_bytes);
    launch("grouped_gemm", gpu,
           {.grid = dim3(static_cast<unsigned>(plan.blocks)),
            .block = dim3(threads),
            .shared = static_cast<std::size_t>(room.bytes(slots, args.groups)),
            .cluster = cluster},
           kernel, args, slots, tokens, results);
  };
  const auto start_end = [&](auto of) {
    constexpr End end = decltype(of)::value;
    const auto start_kind = [&](auto of_kind) {
      constexpr Scales kind = decltype(of_kind)::value;
      start(many_rows<end, kind>, Room<end, kind>{});
    };
    if constexpr (end != End::any && end != End::pairs8) {
      if constexpr (end != End::places16) {
        if (!args.block_scales && p.fast_accumulation) {
          return start_kind(std::integral_constant<Scales, Scales::of_rows_fast>{});
        }
      }
      if (!args.block_scales) return start_kind(std::integral_constant<Scales, Scales::of_rows>{});
    }
    start_kind(std::integral_constant<Scales, Scales::of_blocks>{});
  };
  switch (end) {
    case End::plain16:
      start_end(std::integral_constant<End, End::plain16>{});
      break;
    case End::places16:
      start_end(std::integral_constant<End, End::places16>{});
      break;
    case End::pairs8:
      start_end(std::integral_constant<End, End::pairs8>{});
      break;
    case End::pairs16:
      start_end(std::integral_constant<End, End::pairs16>{});
      break;
    case End::any:
      start_end(std::integral_constant<End, End::any>{});
      break;
  }
  return true;
}

}  // namespace shunt::cuda_engine
