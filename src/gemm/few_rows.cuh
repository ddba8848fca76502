// Grouped GEMM for groups of few rows on Hopper, 16 bits, f32 sums: streams the weights of the
// groups hit once, at the speed of memory. Weights are wgmma's A, rows ("tokens") its B; rows may
// be gathered.
//
// A cluster of `split` blocks (1 to 8) takes tiles of 128 rows of weights by up to `tokens` rows of
// a group, tile numbers cluster, cluster + clusters, ..; each of its blocks has a part of k, in
// steps of 64 through a ring of stages as deep as shared memory holds. 12 warps:
//   warp 0      one thread orders bulk copies of the weights, 16 KB a step: a tile of the prepared
//               layout, or a box of a tensor; at last, of what comes next into the L2
//   warps 2, 3  copy the tokens' rows in pieces of 16 bytes, zeros for what is not there. Where
//               groups are older than the grid before this one, only they wait for that: everything
//               that others do but copying weights comes after a copy of theirs
//   warps 4-11  list the groups, while the others find their first tile by themselves; then two
//               warpgroups with wgmma: each has 64 rows of weights, all tokens
//   full[s]     stage s is there: the ordering thread and the bytes, and 64 threads' copies
//   empty[s]    stage s may be overwritten: 8 arrivals, of each warp that multiplies
//   made        named barrier 4: warps 4-7 have made the barriers, while warps 0, 2 and 3 found
//               their first tile
//   listed      named barrier 2: the list is there for warps 0, 2 and 3
//   there       all of the cluster's sums of the tile lie in shared memory: 8 warps x split; a
//               barrier of the 8 warps where the cluster is one block
//   used        they have been read: likewise
// Where rows are weighed, sums are, each block's. At a tile's end the sums of all blocks of the
// cluster are added in the order of k, each block doing its share of the results, and finished as
// finish.cuh says; in one block, from registers where few_end.cuh can. A result's sum runs over k
// in an order that the split alone decides. The last cluster barrier: no block leaves while others
// read its sums.
//
// Bytes: weights of the groups hit; in flight 150 to 200 KB a multiprocessor. Time predicted on an
// H200: 3 us + bytes / 4.5 TB/s: G16 M8 N2048 K5120 78 us, N5120 K1024 40.5; G128 M1 N2048 K5120
// 600, N5120 K1024 301. Measured: 80, 44.5, 583, 297. Split in two: 3 us more.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/fetch_next.cuh"
#include "gemm/few_barriers.cuh"
#include "gemm/few_end.cuh"
#include "gemm/few_walk.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

template <int tokens_>
struct FewTile {
  static constexpr int tokens = tokens_;
  static constexpr int rows = 128;  // of weights
  static constexpr int step = 64;   // along k
  static constexpr int threads = 384, copying = 64;
  static constexpr int weight_bytes = rows * step * 2, token_bytes = tokens * step * 2;
  static constexpr int stage_bytes = weight_bytes + token_bytes;
  static constexpr int pitch = rows + 4;  // floats from one token's sums to the next
  static constexpr int sum_bytes = tokens * pitch * 4;
  static constexpr int most_bytes = 226 * 1024;  // of shared memory
  using List = TileList<tokens, 1>;
  static constexpr int stages =
      (most_bytes - 1024 - sum_bytes - List::bytes(most_listed_groups)) / stage_bytes;
  static constexpr int shared_bytes(int groups, bool pairs) {
    return 1024 + stages * stage_bytes + sum_bytes + List::bytes(groups) +
           (pairs ? FewWalk::bytes(groups) : 0);
  }
  static_assert(shared_bytes(most_chained_groups, true) <= most_bytes);
};

#if defined(SHUNT_SM_90A)

#endif

// What a layer asks for most: no k shared out, results from registers without a bias.
inline bool is_usual(const HopperArgs& args, int split, bool bf16) {
  return split == 1 && args.tiles != nullptr &&
         args.finish.out_dtype == (bf16 ? DType::bf16 : DType::f16) &&
         args.finish.bias == nullptr && ends_in_registers(args.finish);
}

template <class T, class S, FewForm form>
__global__ void __launch_bounds__(S::threads, 1)
    few_rows(const __grid_constant__ HopperArgs args, const __grid_constant__ FewChain chain,
             const __grid_constant__ CUtensorMap weights, int given_split) {
#if defined(SHUNT_SM_90A)
  constexpr bool usual = form != FewForm::any;
  const int split = usual ? 1 : given_split;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages], there, used;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the same in all lanes, and known so
  unsigned char* const stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  auto* const sums = reinterpret_cast<float*>(stages + S::stages * S::stage_bytes);
  if (!usual && thread == 32 && args.tiles == nullptr) prefetch_tensor_map(&weights);
  make_few_barriers(full, empty, there, used, 1 + S::copying, split, warp, lane);
  const int rank = static_cast<int>(cluster_rank());
  const int split_bits = 31 - __clz(split);  // a power of two, and divisions are slow
  const int clusters = static_cast<int>(gridDim.x) >> split_bits;
  const int begin = args.steps * rank >> split_bits, end = args.steps * (rank + 1) >> split_bits;
  int tile = static_cast<int>(blockIdx.x) >> split_bits;
  int stage = 0;
  unsigned parity = 0;
  bool again = false;  // the ring has been round
  const auto next = [&] {
    if (++stage == S::stages) stage = 0, parity ^= 1, again = true;
  };
  // By one thread.
  const auto copy_weights = [&](const GroupTile& at) {
    const int weight_row = at.group * args.group_rows + at.column * S::rows;
    const char* const tiles = args.tiles + at.group * args.group_bytes +
                              std::int64_t{at.column} * args.steps * S::weight_bytes;
    const std::uint64_t policy = weights_policy(at.alone);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      if (again) mbarrier_wait(&empty[stage], parity ^ 1);
      mbarrier_arrive_expect(&full[stage], S::weight_bytes);
      unsigned char* const stage_at = stages + stage * S::stage_bytes;
      if (usual || args.tiles != nullptr) {
        copy_bytes(stage_at, tiles + std::int64_t{i} * S::weight_bytes, S::weight_bytes,
                   &full[stage], policy);
      } else {
        copy_box(stage_at, &weights, &full[stage], S::step * i, weight_row);
      }
      next();
    }
  };
  // Only in a real cluster: in one block the two halves are compiled to one barrier of its threads.
  if (split > 1) cluster_arrive();
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  unsigned char* const listed_at = reinterpret_cast<unsigned char*>(sums) + S::sum_bytes;
  const FewWalk walk = FewWalk::of<form>(
      args, args.row_scale, chain, listed_at + S::List::bytes(args.groups), thread, S::threads);
  typename S::List list(listed_at, walk.groups, args.groups, args.columns);
  if (warp < 4) {
    GroupTile at;
    bool listed = false;
    const auto find_listed = [&] {
      if (!listed) named_barrier(2, 256 + 96);  // once each of three warps
      listed = true;
      if (tile >= list.tiles()) return false;
      at = list.find(tile);
      return true;
    };
    bool more = false;
    if (warp != 1) {
      at = S::List::find_unlisted(walk.groups, args.groups, args.columns, tile);
      named_barrier(4, 256 + 96);  // this block's barriers are there
      more = at.group >= 0 || find_listed();
    }
    const auto go_on = [&] {
      __syncwarp();
      tile += clusters;
      more = find_listed();
    };
    if (warp == 0) {
      for (; more; go_on()) {
        if (lane == 0) copy_weights(at);
      }
      fetch_next(chain, list, args.columns, min(list.tiles(), clusters) * split,
                 S::stages * S::weight_bytes, lane);
    } else if (warp >= 2) {
      if (early) {
        wait_for_predecessor();
        let_successor_start();
      }
      // Piece `part` of rows line + 8 c of a step, swizzled as wgmma wants them.
      const int line = (thread - 64) / 8, part = thread % 8;
      const std::uint32_t to = shared_address(stages) + S::weight_bytes +
                               static_cast<std::uint32_t>(line * 128 + (part ^ line) * 16);
      for (; more; go_on()) {
        const char* from[S::tokens / 8];  // null: zeros
#pragma unroll
        for (int c = 0; c < S::tokens / 8; ++c) {
          from[c] = nullptr;
          if (line + 8 * c < at.count) {
            std::int64_t row = at.row + line + 8 * c;
            if (walk.permutation != nullptr) {
              const std::int32_t pair = walk.permutation[row];
              row = pair < 0 ? -1 : pair / args.slots;
            }
            if (row >= 0 && row < args.source_rows) {
              from[c] = args.source + row * args.source_row_bytes + 16 * part;
            }
          }
        }
        for (int i = begin; i < end; ++i) {
          if (again) mbarrier_wait(&empty[stage], parity ^ 1);
          const std::int64_t k = std::int64_t{i} * (S::step * 2);
          const bool inside = k + 16 * part < args.k_bytes;
#pragma unroll
          for (int c = 0; c < S::tokens / 8; ++c) {
            const bool some = inside && from[c] != nullptr;
            cp_async_16(to + static_cast<std::uint32_t>(stage * S::stage_bytes + c * 1024),
                        some ? from[c] + k : args.source, some ? 16 : 0);
          }
          mbarrier_arrive_after_copies(&full[stage]);
          next();
        }
      }
    }
    if (split > 1) cluster_wait();
  } else {
    named_arrive(4, 256 + 96);
    list.build(walk.groups, thread - 128, 256, 3);
    named_arrive(2, 256 + 96);
    const int tiles = list.tiles();
    if (split > 1) cluster_wait();  // the other blocks' barriers are there
    const int group = warp / 4 - 1;
    const std::uint32_t base = shared_address(stages);
    const std::uint32_t a_base = base + static_cast<std::uint32_t>(group * 64 * 128);
    const std::uint32_t b_base = base + S::weight_bytes;
    unsigned turn = 0;  // of `there` and `used`
    bool first = true;
    constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
    const bool direct = usual || split == 1 &&
                                     args.finish.out_dtype == (bf16 ? DType::bf16 : DType::f16) &&
                                     ends_in_registers(args.finish);
    for (; tile < tiles; tile += clusters, turn ^= 1, first = false) {
      const GroupTile at = list.find(tile);
      float d[S::tokens / 2];
#pragma unroll
      for (int i = 0; i < S::tokens / 2; ++i) d[i] = 0;
      int before = 0;
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        mbarrier_wait(&full[stage], parity);
        fence_for_async();  // the tokens came by generic copies
        const auto offset = static_cast<std::uint32_t>(stage * S::stage_bytes);
        const std::uint64_t a = wgmma_descriptor(a_base + offset);
        const std::uint64_t b = wgmma_descriptor(b_base + offset);
        wgmma_fence();
#pragma unroll
        for (unsigned k = 0; k < S::step / 16; ++k) {
          wgmma_n<S::tokens>(T{}, d, a + 2 * k, b + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > begin && lane == 0) mbarrier_arrive(&empty[before]);
        before = stage;
        if (++stage == S::stages) stage = 0, parity ^= 1;
      }
      wgmma_wait<0>();
      if (begin < end && lane == 0) mbarrier_arrive(&empty[before]);

      if (!usual && walk.weights != nullptr) {
        weigh_sums<S::tokens>(walk.weights + at.row, at.count, d, lane);
      }
      if (direct) {
        finish_in_registers<S::tokens, bf16, !usual>(
            args.finish, at.group, at.row, at.count,
            std::int64_t{at.column} * S::rows + 64 * group + warp % 4 * 16, d, lane);
        continue;
      }
      if constexpr (!usual) {
        if (!first) {
          split == 1 ? named_barrier(1, 256) : mbarrier_wait_cluster(&used, turn ^ 1);
        }
        float* const mine =
            sums + 2 * (lane % 4) * S::pitch + 64 * group + warp % 4 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < S::tokens / 2; ++i) {
          mine[(i / 4 * 8 + i % 2) * S::pitch + i / 2 % 2 * 8] = d[i];
        }
        __syncwarp();
        if (split == 1) {
          named_barrier(1, 256);
        } else {
          if (lane < split) mbarrier_arrive_at(&there, static_cast<unsigned>(lane));
          mbarrier_wait_cluster(&there, turn);
        }
        const auto sum = [&](int token, int row) {
          const float* const here = sums + token * S::pitch + row;
          if (split == 1) return *here;
          float part[8];
#pragma unroll
          for (int p = 0; p < 8; ++p) {
            part[p] = p < split ? float_of_rank(here, static_cast<unsigned>(p)) : 0;
          }
          float all = part[0];
#pragma unroll
          for (int p = 1; p < 8; ++p) {
            if (p < split) all += part[p];
          }
          return all;
        };
        finish_sums<S::rows>(args.finish, at.group, at.row, at.count,
                             std::int64_t{at.column} * S::rows, sum, thread - 128 + 256 * rank,
                             256 * split);
        __syncwarp();
        if (split > 1 && lane < split) mbarrier_arrive_at(&used, static_cast<unsigned>(lane));
      }
    }
  }
  __syncwarp();
  if (!usual) cluster_barrier();
#endif
}

template <class T, class S>
bool launch_few(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p, HopperArgs args,
                FewChain chain, bool bf16) {
  chain.at_once = gpu.multiprocessors;
  args.columns = (args.group_rows + S::rows - 1) / S::rows;
  CUtensorMap weights{};
  if (args.tiles == nullptr &&
      !map_rows(weights, p.matrices.data, bf16, std::int64_t{p.groups} * args.group_rows,
                p.layout.k, p.matrices.strides[1], S::rows)) {
    return false;
  }
  const FewForm form = few_form(is_usual(args, plan.split, bf16), false, args.row_scale, chain);
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups, chain.ids != nullptr)),
          .cluster = static_cast<unsigned>(plan.split)},
         form == FewForm::plain   ? few_rows<T, S, FewForm::plain>
         : form == FewForm::pairs ? few_rows<T, S, form_of_pairs<S>>
                                  : few_rows<T, S, FewForm::any>,
         args, chain, weights, plan.split);
  return true;
}

template <class T>
bool launch_few_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                     const HopperArgs& args, const FewChain& chain, bool bf16) {
  switch (plan.tile_tokens) {
    case 8:
      return launch_few<T, FewTile<8>>(gpu, plan, product, args, chain, bf16);
    case 16:
      return launch_few<T, FewTile<16>>(gpu, plan, product, args, chain, bf16);
    case 32:
      return launch_few<T, FewTile<32>>(gpu, plan, product, args, chain, bf16);
    default:
      return launch_few<T, FewTile<64>>(gpu, plan, product, args, chain, bf16);
  }
}

}  // namespace

}  // namespace shunt::cuda_engine
