// Grouped GEMM for groups of many rows on Hopper, 16 bits, f32 sums: weights are wgmma's A, rows
// ("tokens") its B, so that the ragged side is the one that instructions cut in steps of 64.
//
// A cluster of two blocks takes tiles of 2 x 128 blocks rows of weights by up to `tokens` rows of a
// group, tile numbers cluster, cluster + clusters, ..; each block has one half of the weights and
// all of the tokens. k goes by in steps of 64 through a ring of stages. 12 warps:
//   warp 0      one thread orders bulk copies: the block's weights (tiles of the prepared layout,
//   or
//               a box of a tensor), and of each 64 tokens 32 for both blocks of the cluster; what
//               lies beyond the edges comes as zeros, what lies behind the group's end is another
//               group's and is not stored
//   warps 1-3   nothing
//   warps 4-11  two warpgroups with wgmma: each has 64 blocks rows of weights, all tokens
//   full[s]     stage s is there: 1 arrival, the ordering thread's, and the bytes of both blocks
//   empty[s]    stage s may be overwritten in both blocks: 16 arrivals, of each warp that
//               multiplies in either block, one step later than its products were started
// All blocks of a cluster walk the same tiles and steps. The tile's end: finish.cuh, by each
// warpgroup for itself, while copies for the next tile are under way. The last cluster barrier: no
// block leaves while the other copies into it or arrives at its barriers.
//
// Bytes a step and block from L2: 32 KB (16 of weights, 16 of tokens; blocks = 1, tokens = 256) or
// 40 KB (32 and 8; blocks = 2, tokens = 128), for 4.2 MFLOP. Time predicted on an H200, the larger
// of operations / 690 TFLOP/s (power) over the share of tiles in the last round, and weights /
// 4.6 TB/s, plus 3 us: G16 M1024 N2048 K5120 515 us, N5120 K1024 265, G128 M128 N2048 K5120 680,
// N5120 K1024 370.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/finish.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int tile_bytes = 128 * 64 * 2;  // of the prepared layout

template <int blocks_, int tokens_>
struct ManyTile {
  static constexpr int blocks = blocks_, tokens = tokens_, cluster = 2;
  static constexpr int box = 64 / cluster;   // tokens of a copy
  static constexpr int rows = 128 * blocks;  // of weights, a block's
  static constexpr int step = 64;            // along k
  static constexpr int threads = 384;
  static constexpr int weight_bytes = rows * step * 2, token_bytes = tokens * step * 2;
  static constexpr int stage_bytes = weight_bytes + token_bytes;
  static constexpr int stages = 4;
  static constexpr int shared_bytes(int groups) {
    return 1024 + stages * stage_bytes + 2 * turn_bytes_ + 4 * (3 * groups + 1);
  }
  static constexpr int turn_bytes_ = 64 * 144;
};

#if defined(SHUNT_SM_90A)

template <int stages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The products of a tile of n tokens.
template <int n, class S, class T>
__device__ __forceinline__ void multiply_steps(float (&d)[S::blocks][S::tokens / 2], int steps,
                                               std::uint32_t a_base, std::uint32_t b_base,
                                               std::uint64_t* full, std::uint64_t* empty,
                                               Ring<S::stages>& ring, unsigned lane) {
#pragma unroll
  for (int b = 0; b < S::blocks; ++b) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) d[b][i] = 0;
  }
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(&full[ring.stage], ring.parity);
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
              const __grid_constant__ CUtensorMap tokens) {
#if defined(SHUNT_SM_90A)
  static_assert(S::turn_bytes_ == turn_bytes);
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // The same offset in both blocks.
  unsigned char* const stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const turns = stages + S::stages * S::stage_bytes;
  if (thread == 0) {
    if (args.tiles == nullptr) prefetch_tensor_map(&weights);
    prefetch_tensor_map(&tokens);
    for (int s = 0; s < S::stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 8 * S::cluster);
    }
    mbarrier_init_fence();
  }
  wait_for_predecessor();
  let_successor_start();
  TileList<64, S::tokens / 64> list(turns + 2 * turn_bytes, args.groups, args.columns);
  list.build(args.offsets, args.valid, args.rows);
  cluster_barrier();  // the other block's barriers are there

  const int rank = static_cast<int>(cluster_rank());
  const int clusters = static_cast<int>(gridDim.x) / S::cluster, tiles = list.tiles();
  int tile = static_cast<int>(blockIdx.x) / S::cluster;
  if (warp < 4) {
    fewer_registers<56>();  // with the others' all that the block has
    if (warp == 0) {
      Ring<S::stages> ring;
      unsigned round = 0;
      for (; tile < tiles; tile += clusters) {
        const GroupTile at = list.find(tile);
        if (lane == 0) {
          const int units = (at.count + 63) / 64;
          const int weight_row =
              at.group * args.group_rows + (S::cluster * at.column + rank) * S::rows;
          const int first = at.row + S::box * rank;
          const int tile_at = (S::cluster * at.column + rank) * S::blocks;
          const int here = min(S::blocks, max(args.row_tiles - tile_at, 0));
          const std::int64_t apart = std::int64_t{args.steps} * tile_bytes;
          const char* const tiles = args.tiles + at.group * args.group_bytes + tile_at * apart;
          const bool tiled = args.tiles != nullptr;
          const int bytes = (tiled ? here * tile_bytes : S::weight_bytes) + units * 64 * 128;
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            const int s = ring.stage;
            if (round > 0) mbarrier_wait(&empty[s], ring.parity ^ 1);
            unsigned char* const stage = stages + s * S::stage_bytes;
            mbarrier_arrive_expect(&full[s], static_cast<unsigned>(bytes));
            if (tiled) {
              const char* const from = tiles + std::int64_t{i} * tile_bytes;
#pragma unroll 1
              for (int b = 0; b < here; ++b) {
                copy_bytes(stage + b * tile_bytes, from + b * apart, tile_bytes, &full[s]);
              }
            } else {
              copy_box(stage, &weights, &full[s], S::step * i, weight_row);
            }
#pragma unroll 1
            for (int u = 0; u < units; ++u) {
              unsigned char* const to = stage + S::weight_bytes + (64 * u + S::box * rank) * 128;
              copy_box_to_ranks(to, &tokens, &full[s], S::step * i, first + 64 * u, 3);
            }
            ring.next();
            if (ring.stage == 0) round = 1;
          }
        }
        __syncwarp();
      }
    }
  } else {
    more_registers<224>();
    const int group = warp / 4 - 1;  // of the warps that multiply
    const std::uint32_t base = shared_address(stages);
    const std::uint32_t a_base = base + static_cast<std::uint32_t>(group * S::blocks * 64 * 128);
    const std::uint32_t b_base = base + S::weight_bytes;
    Ring<S::stages> ring;
    float d[S::blocks][S::tokens / 2];
    for (; tile < tiles; tile += clusters) {
      const GroupTile at = list.find(tile);
      const auto with = [&]<int n>() {
        multiply_steps<n, S, T>(d, args.steps, a_base, b_base, full, empty, ring,
                                static_cast<unsigned>(lane));
      };
      if (at.count <= 64) {
        with.template operator()<64>();
      } else if (at.count <= 128) {
        with.template operator()<128>();
      } else if constexpr (S::tokens > 128) {
        if (at.count <= 192) {
          with.template operator()<192>();
        } else {
          with.template operator()<256>();
        }
      }
#pragma unroll
      for (int b = 0; b < S::blocks; ++b) {
        const std::int64_t first =
            std::int64_t{S::cluster * at.column + rank} * S::rows + (group * S::blocks + b) * 64;
        BlockFinish<S::tokens / 2>(args.finish, at.group, at.row, at.count, first,
                                   turns + group * turn_bytes, 1 + group)
            .write(d[b]);
      }
    }
  }
  __syncwarp();
  cluster_barrier();
#endif
}

template <class T, class S>
bool launch_many(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p, HopperArgs args,
                 bool bf16) {
  args.columns = (args.group_rows + S::cluster * S::rows - 1) / (S::cluster * S::rows);
  CUtensorMap weights{}, tokens;
  if ((args.tiles == nullptr &&
       !map_rows(weights, p.matrices.data, bf16, std::int64_t{p.groups} * args.group_rows,
                 p.layout.k, p.matrices.strides[1], S::rows)) ||
      !map_rows(tokens, p.rows.data, bf16, p.rows.shape[0], p.layout.k, p.rows.strides[0],
                S::box)) {
    return false;
  }
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups)),
          .cluster = S::cluster},
         many_rows<T, S>, args, weights, tokens);
  return true;
}

template <class T>
bool launch_many_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                      const HopperArgs& args, bool bf16) {
  if (plan.tile_tokens == 256) {
    return launch_many<T, ManyTile<1, 256>>(gpu, plan, product, args, bf16);
  }
  return launch_many<T, ManyTile<2, 128>>(gpu, plan, product, args, bf16);
}

}  // namespace

}  // namespace shunt::cuda_engine
