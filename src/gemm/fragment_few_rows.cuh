// Grouped GEMM of packed weights for groups of few rows on Hopper: streams the codes and scales of
// the groups hit once, at the speed of memory, and makes operands of them in registers. Weights are
// A of mma.m16n8k16 (mma.sp.m16n8k32 where they are sparse), rows ("tokens") its B; rows may be
// gathered, of another dtype, or weighted.
//
// A cluster of `split` blocks (1, 2, 4) takes tiles of 128 rows of weights by up to `tokens` rows
// of a group, tile numbers cluster, cluster + clusters, ..; each of its blocks has a part of k, in
// steps of 128 through a ring of stages as deep as shared memory holds. 20 warps:
//   warp 0      one thread orders bulk copies: a tile of the layout a step, 7 to 16 KB, scales and
//               all; those of the first tile before the groups are listed
//   warps 1-3   the tokens' rows, each every third step: in pieces of 16 bytes, asynchronously
//               where they are as they must be, else through registers; zeros behind k. What is
//               behind a group's last row stays what it was: nobody reads its sums
//   warps 4-19  two teams of eight: one has the even steps of the block's part, one the odd. A warp
//               has 16 rows of weights and all tokens
//   full[s]     stage s is there: the ordering thread and the bytes, and a warp's copies
//   empty[s]    stage s may be overwritten: 8 arrivals, of the team that has it
//   there       all of the cluster's sums of the tile lie in shared memory: 16 warps x split; a
//               barrier of the 16 warps where the cluster is one block
//   used        they have been read: likewise
// At a tile's end the sums are added in the order of blocks, in each the even steps' before the odd
// ones', times the row's factor, and finished as finish.cuh says. A result's sum runs over k in an
// order that the split alone decides. The last cluster barrier: no block leaves while others read
// its sums.
//
// Bytes: packed weights of the groups hit; in flight 170 to 190 KB a multiprocessor. Time predicted
// on an H200: 4 us + bytes / 4.5 TB/s. A multiprocessor gets 18 bytes a clock: a step of nvfp4
// takes 500 clocks; what its four schedulers issue for it is counted in docs/notes/cuda-w4.md.
#pragma once

#include "cuda/launch.hpp"
#include "gemm/finish.cuh"
#include "gemm/fragment_lane.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/fragment_rows.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int tokens_>
struct FewFragments {
  using L = L_;
  static constexpr int tokens = tokens_;
  static constexpr int rows = 128;  // of weights
  static constexpr int threads = 640, copiers = 3, team = 8, warps = 16;
  static constexpr int weight_bytes = L::parts.bytes, token_bytes = tokens * 256;
  static constexpr int stage_bytes = (weight_bytes + token_bytes + 127) / 128 * 128;
  static constexpr int pitch = rows + 4;             // floats from one token's sums to the next
  static constexpr int sum_floats = tokens * pitch;  // of one team
  static constexpr int most_bytes = 226 * 1024;      // of shared memory
  using List = TileList<tokens, 1>;
  static constexpr int stages =
      (most_bytes - 128 - 8 * sum_floats - List::bytes(most_listed_groups)) / stage_bytes;
  static constexpr int shared_bytes(int groups) {
    return 128 + stages * stage_bytes + 8 * sum_floats + List::bytes(groups);
  }
};

#if defined(SHUNT_SM_90A)

// d += a b: m16n8k16, of four registers from `a`.
template <bool bf16>
__device__ __forceinline__ void mma_of(float (&d)[4], const std::uint32_t* a, std::uint32_t b0,
                                       std::uint32_t b1) {
  const std::uint32_t four[4] = {a[0], a[1], a[2], a[3]};
  if constexpr (bf16) {
    mma_16816(__nv_bfloat16(), d, four, b0, b1);
  } else {
    mma_16816(__half(), d, four, b0, b1);
  }
}
// m16n8k32, two of every four of a kept; `selector`: which pair of threads' positions.
template <bool bf16, int selector>
__device__ __forceinline__ void mma_sparse(float (&d)[4], const std::uint32_t* a,
                                           const std::uint32_t (&b)[4], std::uint32_t positions) {
#define SHUNT_MMA_SPARSE(type)                                                                  \
  asm volatile(                                                                                 \
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type               \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, "    \
      "%13;"                                                                                    \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), \
        "r"(positions), "n"(selector))
  if constexpr (bf16) {
    SHUNT_MMA_SPARSE("bf16");
  } else {
    SHUNT_MMA_SPARSE("f16");
  }
#undef SHUNT_MMA_SPARSE
}

// The sums of a warp: 16 rows of weights by all tokens.
template <class S>
struct WarpSums {
  using L = typename S::L;
  static constexpr int eights = S::tokens / 8;
  float sum[L::scaled_sums ? 1 : 2][eights][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& set : sum) {
#pragma unroll
      for (auto& eight : set) eight[0] = eight[1] = eight[2] = eight[3] = 0;
    }
  }
  __device__ __forceinline__ float of(int eight, int e) const {
    if constexpr (L::scaled_sums) {
      return sum[0][eight][e];
    } else {
      return sum[0][eight][e] + sum[1][eight][e];
    }
  }
  // One step. `tokens`: this lane's address for ldmatrix of the first eight tokens' first 32 of k.
  __device__ __forceinline__ void add(const unsigned char* tile, std::uint32_t tokens, int block,
                                      int lane) {
    L mine;
    mine.load_scales(tile, block, lane);
    const auto token_words = [&](std::uint32_t(&b)[4], int eight, int part) {
      ldmatrix_x4(b, (tokens ^ static_cast<std::uint32_t>(part % 2 * 64)) +
                         static_cast<std::uint32_t>(part / 2 * S::tokens * 128 + eight * 1024));
    };
    if constexpr (L::sparse) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        std::uint32_t a[8];
        mine.template decode<false>(tile, block, pair, lane, a);
        const std::uint32_t positions = L::positions(tile, block, pair, lane);
#pragma unroll
        for (int j = 0; j < eights; ++j) {
          std::uint32_t b[4];
          token_words(b, j, 2 * pair);
          mma_sparse<L::bf16, 0>(sum[0][j], a, b, positions);
          token_words(b, j, 2 * pair + 1);
          mma_sparse<L::bf16, 1>(sum[1][j], a + 4, b, positions);
        }
      }
    } else if constexpr (!L::scaled_sums) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        std::uint32_t a[8];
        mine.template decode<false>(tile, block, pair, lane, a);
#pragma unroll
        for (int j = 0; j < eights; ++j) {
          std::uint32_t b[4];
          token_words(b, j, pair);
          mma_of<L::bf16>(sum[0][j], a, b[0], b[1]);
          mma_of<L::bf16>(sum[1][j], a + 4, b[2], b[3]);
        }
      }
    } else {
      // Fragments whose sums have one scale.
      constexpr int each = L::codes == Codes::fp8_block ? 8 : 8 / L::groups;
      float part[eights][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        std::uint32_t a[8];
        mine.template decode<false>(tile, block, pair, lane, a);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          const int fragment = 2 * pair + f;
          if (fragment % each == 0) {
#pragma unroll
            for (auto& eight : part) eight[0] = eight[1] = eight[2] = eight[3] = 0;
          }
#pragma unroll
          for (int j = 0; j < eights; ++j) {
            std::uint32_t b[4];
            token_words(b, j, pair);  // once: the compiler sees that they are the same
            mma_of<L::bf16>(part[j], a + 4 * f, b[2 * f], b[2 * f + 1]);
          }
          if (fragment % each == each - 1) {
            const float low = mine.scale(fragment / each, 0), high = mine.scale(fragment / each, 1);
#pragma unroll
            for (int j = 0; j < eights; ++j) {
              sum[0][j][0] = __fmaf_rn(part[j][0], low, sum[0][j][0]);
              sum[0][j][1] = __fmaf_rn(part[j][1], low, sum[0][j][1]);
              sum[0][j][2] = __fmaf_rn(part[j][2], high, sum[0][j][2]);
              sum[0][j][3] = __fmaf_rn(part[j][3], high, sum[0][j][3]);
            }
          }
        }
      }
    }
  }
};

// A place in the ring.
template <int stages>
struct RingPlace {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void go(int steps) {
    stage += steps % stages;
    parity ^= static_cast<unsigned>(steps / stages) & 1;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
};

#endif

template <class S>
__global__ void __launch_bounds__(S::threads, 1)
    few_fragments(const __grid_constant__ FragmentArgs args, int split) {
#if defined(SHUNT_SM_90A)
  using L = typename S::L;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages], there, used;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  unsigned char* const stages = shared + (128 - shared_address(shared) % 128) % 128;
  auto* const sums = reinterpret_cast<float*>(stages + S::stages * S::stage_bytes);
  if (thread == 0) {
    for (int s = 0; s < S::stages; ++s) {
      mbarrier_init(&full[s], 1 + 32);
      mbarrier_init(&empty[s], S::team);
    }
    mbarrier_init(&there, static_cast<unsigned>(S::warps * split));
    mbarrier_init(&used, static_cast<unsigned>(S::warps * split));
    mbarrier_init_fence();
  }
  const int rank = static_cast<int>(cluster_rank());
  const int clusters = static_cast<int>(gridDim.x) / split;
  const int begin = static_cast<int>(std::int64_t{args.steps} * rank / split);
  const int end = static_cast<int>(std::int64_t{args.steps} * (rank + 1) / split);
  int tile = static_cast<int>(blockIdx.x) / split;
  int stage = 0;
  unsigned parity = 0;
  bool again = false;  // the ring has been round
  const auto next = [&] {
    if (++stage == S::stages) stage = 0, parity ^= 1, again = true;
  };
  // By one thread: weights of steps [from, to) of a tile.
  const auto copy_weights = [&](const GroupTile& at, int from, int to) {
    const char* const tiles = args.tiles + at.group * args.group_bytes +
                              std::int64_t{at.column} * args.steps * S::weight_bytes;
#pragma unroll 1
    for (int i = from; i < to; ++i) {
      if (again) mbarrier_wait(&empty[stage], parity ^ 1);
      mbarrier_arrive_expect(&full[stage], S::weight_bytes);
      copy_bytes_once(stages + stage * S::stage_bytes + S::token_bytes,
                      tiles + std::int64_t{i} * S::weight_bytes, S::weight_bytes, &full[stage]);
      next();
    }
  };
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  int copied = begin;  // of the first tile's steps, before there is a list
  if (warp == 0) {
    const GroupTile at = S::List::find_unlisted(args.walk, args.groups, args.columns, tile);
    if (at.group >= 0) {
      copied = min(end, begin + S::stages);
      if (lane == 0) copy_weights(at, begin, copied);
    }
    __syncwarp();
  }
  typename S::List list(reinterpret_cast<unsigned char*>(sums + 2 * S::sum_floats), args.walk,
                        args.groups, args.columns);
  list.build(args.walk);
  cluster_barrier();  // the other blocks' barriers are there
  const int tiles = list.tiles();
  if (warp < 4) {
    if (warp == 0) {
      for (; tile < tiles; tile += clusters) {
        const GroupTile at = list.find(tile);
        if (lane == 0) copy_weights(at, copied, end);
        __syncwarp();
        copied = begin;
      }
    } else {
      if (early) {
        wait_for_predecessor();
        let_successor_start();
      }
      StepRows<L::bf16, S::tokens> rows(lane);
      RingPlace<S::stages> place;
      place.go(warp - 1);
      int i = begin + warp - 1;  // this warp's next step of the tile
      bool first = true;         // round the ring
      for (; tile < tiles; tile += clusters, i -= end - begin) {
        if (i >= end) continue;
        const GroupTile at = list.find(tile);
        rows.begin(args, at.row, at.count);
#pragma unroll 1
        for (; i < end; i += S::copiers) {
          if (!first) mbarrier_wait(&empty[place.stage], place.parity ^ 1);
          rows.copy(args, shared_address(stages + place.stage * S::stage_bytes), i);
          if (args.direct) {
            mbarrier_arrive_after_copies(&full[place.stage]);
          } else {
            mbarrier_arrive(&full[place.stage]);
          }
          const int before = place.stage;
          place.go(S::copiers);
          first = first && place.stage > before;
        }
      }
    }
  } else {
    const int team = warp / 4 >= 3 ? 1 : 0, block = (warp - 4) % 8;
    const std::uint32_t tokens_at =
        shared_address(stages) +
        static_cast<std::uint32_t>(lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16);
    RingPlace<S::stages> first_place;  // of the tile's first step
    unsigned turn = 0;                 // of `there` and `used`
    bool first = true;
    for (; tile < tiles; tile += clusters, turn ^= 1, first = false) {
      const GroupTile at = list.find(tile);
      WarpSums<S> sum;
      sum.clear();
      RingPlace<S::stages> place = first_place;
      place.go(team);
#pragma unroll 1
      for (int i = begin + team; i < end; i += 2) {
        mbarrier_wait(&full[place.stage], place.parity);
        const int offset = place.stage * S::stage_bytes;
        sum.add(stages + offset + S::token_bytes, tokens_at + static_cast<std::uint32_t>(offset),
                block, lane);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&empty[place.stage]);
        place.go(2);
      }
      first_place.go(end - begin);

      if (!first) {
        split == 1 ? named_barrier(1, 512) : mbarrier_wait_cluster(&used, turn ^ 1);
      }
      float* const mine =
          sums + team * S::sum_floats + 2 * (lane % 4) * S::pitch + 16 * block + lane / 4;
#pragma unroll
      for (int j = 0; j < S::tokens / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          mine[(8 * j + e % 2) * S::pitch + e / 2 * 8] = sum.of(j, e);
        }
      }
      __syncwarp();
      if (split == 1) {
        named_barrier(1, 512);
      } else {
        if (lane < split) mbarrier_arrive_at(&there, static_cast<unsigned>(lane));
        mbarrier_wait_cluster(&there, turn);
      }
      const float* const factors = reinterpret_cast<const float*>(
          args.tiles + at.group * args.group_bytes + args.factors_at + at.column * S::rows * 4);
      const auto whole = [&](int token, int row) {
        const float* const here = sums + token * S::pitch + row;
        float all = here[0] + here[S::sum_floats];
        if (split > 1) {
          float part[4];
#pragma unroll
          for (int p = 0; p < 4; ++p) {
            part[p] = p < split ? float_of_rank(here, static_cast<unsigned>(p)) +
                                      float_of_rank(here + S::sum_floats, static_cast<unsigned>(p))
                                : 0;
          }
          all = part[0];
#pragma unroll
          for (int p = 1; p < 4; ++p) {
            if (p < split) all += part[p];
          }
        }
        return __fmul_rn(__fmul_rn(all, args.unscale), __ldg(factors + row));
      };
      finish_sums<S::rows>(args.finish, at.group, at.row, at.count,
                           std::int64_t{at.column} * S::rows, whole, thread - 128 + 512 * rank,
                           512 * split);
      __syncwarp();
      if (split > 1 && lane < split) mbarrier_arrive_at(&used, static_cast<unsigned>(lane));
    }
  }
  __syncwarp();
  cluster_barrier();
#endif
}

template <class S>
void launch_few(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args) {
  static_assert(S::stages >= 3);
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups)),
          .cluster = static_cast<unsigned>(plan.split)},
         few_fragments<S>, args, plan.split);
}

template <class L>
void launch_few_rows(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args) {
  switch (plan.tile_tokens) {
    case 8:
      return launch_few<FewFragments<L, 8>>(gpu, plan, args);
    case 16:
      return launch_few<FewFragments<L, 16>>(gpu, plan, args);
    default:
      return launch_few<FewFragments<L, 32>>(gpu, plan, args);
  }
}

}  // namespace

}  // namespace shunt::cuda_engine
