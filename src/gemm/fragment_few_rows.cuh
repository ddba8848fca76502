// Grouped GEMM of packed weights for groups of few rows on Hopper: streams the codes and scales of
// the groups hit once, at the speed of memory, and makes operands of them in registers. Weights are
// A of mma.m16n8k16 (mma.sp.m16n8k32 where they are sparse), rows ("tokens") its B; rows may be
// gathered, of another dtype, or weighted.
//
// 20 warps are four teams, each with a ring of stages of its own and tiles of its own: 128 rows of
// weights by up to `tokens` rows of a group. The end of one team's tile is hidden behind the steps
// of the others. Where tiles are few, `share` teams (1, 2, 4) of a block take a tile together, and
// `split` blocks of a cluster, each a part of k: tile numbers are theirs, set, set + sets, .. k
// goes by in steps of 128, a stage each.
//   warps 0-3   a team's copies each: one thread orders bulk copies, a tile of the layout a step, 7
//               to 16 KB, scales and all. Their first tile they find by themselves, while warps
//               4-19 make the barriers (made: named barrier 1) and list the groups (listed: named
//               barrier 2). All lanes copy the tokens' rows in
//               pieces of 16 bytes, asynchronously where they are as they must be, else through
//               registers; zeros behind k. What is behind a group's last row stays what it was:
//               nobody reads its sums
//   warps 4-19  four of a team. A warp has 32 rows of weights, so that what it reads of the tokens
//               serves twice, by all tokens; it multiplies as many eights of tokens as there are
//   full[s]     stage s is there: the ordering thread and the bytes, and a warp's copies
//   empty[s]    stage s may be overwritten: the lanes of four warps
//   there       of a warp and those that have other parts of k of the same weights and tokens:
//               their sums of eight tokens lie in shared memory
//   used        they have been read
// Nothing else is waited for: a warp ends a tile alone, or with its partners. Sums of parts of k
// are added in their order, times the row's factor and the token's weight where it has one, and
// finished as finish.cuh says. A result's sum runs over k in an order that split times share alone
// decides. The last cluster barrier: no block leaves while others read its sums.
//
// Bytes: packed weights of the groups hit; in flight 130 to 190 KB a multiprocessor. Time predicted
// on an H200: 4 us + bytes / 4.5 TB/s. A multiprocessor gets 18 bytes a clock: a step of nvfp4
// takes 500 clocks; what its four schedulers issue for it is counted in docs/notes/cuda-w4.md.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/stage_ring.cuh"
#include "gemm/fetch_next.cuh"
#include "gemm/few_walk.cuh"
#include "gemm/finish.cuh"
#include "gemm/fragment_book.cuh"
#include "gemm/fragment_product.hpp"
#include "gemm/fragment_rows.cuh"
#include "gemm/fragment_teams.hpp"
#include "gemm/fragment_warp.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int tokens_>
struct FewFragments {
  using L = L_;
  static constexpr int tokens = tokens_;
  static constexpr int blocks = 2, rows = 16 * blocks;  // of weights, a warp's
  static constexpr int team = 4, teams = few_teams, warps = team * teams,
                       threads = 32 * (warps + teams);
  static constexpr int weight_bytes = L::parts.bytes, token_bytes = tokens * 256;
  static constexpr int stage_bytes = (weight_bytes + token_bytes + 127) / 128 * 128;
  static constexpr int pitch = rows + 4;               // floats from one token's sums to the next
  static constexpr int sum_floats = 8 * pitch + rows;  // of a warp: those of 8 tokens, and factors
  static constexpr int most_bytes = 226 * 1024;        // of shared memory
  // Of 32 of k of eight tokens, from this lane's address for the first ones.
  static SHUNT_BOTH std::uint32_t words_at(std::uint32_t first, int eight, int part) {
    return (first ^ static_cast<std::uint32_t>(part % 2 * 64)) +
           static_cast<std::uint32_t>(part / 2 * tokens * 128 + eight * 1024);
  }
  using List = TileList<tokens, 1>;
  static constexpr int stages =  // of a team
      (most_bytes - 128 - L::Book::bytes - 4 * warps * sum_floats -
       List::bytes(most_listed_groups)) /
      stage_bytes / teams;
  static constexpr int shared_bytes(int groups, bool pairs) {
    return 128 + teams * stages * stage_bytes + L::Book::bytes + 4 * warps * sum_floats +
           List::bytes(groups) + (pairs ? FewWalk::bytes(groups) : 0);
  }
  static_assert(shared_bytes(most_chained_groups, true) <= most_bytes);
  static_assert(stages >= 2 && team * rows == 128 && (tokens == 8 || tokens == 24));
};

// Whether results are written four at once.
SHUNT_BOTH inline bool writes_fours(const Finish& f, bool bf16) {
  return (f.plain || f.situ) && has_simple_bias(f) &&
         f.out_dtype == (bf16 ? DType::bf16 : DType::f16) && f.out_stride % 4 == 0 &&
         f.out_columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(f.out) % 8 == 0;
}

#if defined(SHUNT_SM_90A)

// A warp's end of a tile: what it and its partners, the warps that have the same weights and tokens
// of other parts of k, do with their sums.
template <class S, FewForm form>
struct WarpEnd {
  static constexpr bool bf16 = S::L::bf16, usual = form != FewForm::any;
  const Finish& f;
  float* mine;  // the sums of 8 tokens, and behind them the rows' factors
  int split, share, share_bits, part;
  std::uint64_t *there, *used;  // the partners'
  bool vectors;                 // four results at once: with `usual` always
  const float* weights;         // of the order's rows, or null: with `usual` always
  unsigned turns = 0;

  // Of a token, the sums of n rows from `row` on by all parts of k, times the rows' factors.
  template <int n>
  __device__ __forceinline__ void load(int token, int row, float (&x)[n]) const {
    const float* const own = mine + token * S::pitch + row;
    if (split * share == 1) {
      read(x, own);
    } else {
      const float* const first = own - (part & (share - 1)) * S::team * S::sum_floats;
#pragma unroll 1
      for (int p = 0; p < split * share; ++p) {
        const float* const at = first + (p & (share - 1)) * S::team * S::sum_floats;
        float y[n];
        if (split == 1) {
          read(y, at);
        } else {
#pragma unroll
          for (int i = 0; i < n; ++i) {
            y[i] = float_of_rank(at + i, static_cast<unsigned>(p >> share_bits));
          }
        }
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] = p == 0 ? y[i] : x[i] + y[i];
      }
    }
    float factors[n];
    read(factors, mine + 8 * S::pitch + row);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = __fmul_rn(x[i], factors[i]);
  }

  // The same, times the weight of row `row_of_order`.
  template <int n>
  __device__ __forceinline__ void load(int token, int row, std::int64_t row_of_order,
                                       float (&x)[n]) const {
    load(token, row, x);
    if (!usual && weights != nullptr) {
#pragma unroll
      for (float& sum : x) sum = __fmul_rn(sum, weights[row_of_order]);
    }
  }

  // `count` tokens, up to 8, from row `row` of out, weights from row `first` of the group's.
  __device__ __forceinline__ void write(int group, std::int64_t row, int count, std::int64_t first,
                                        int lane) const {
    const int begin = lane + 32 * part, stride = 32 * split * share;
    static_assert(S::rows == 32);
    if (usual || vectors) {
      const int shift = f.paired ? 2 : 3;  // of a token's fours
#pragma unroll 1
      for (int i = begin; i < count << shift; i += stride) {
        const int token = i >> shift, o = (i & ((1 << shift) - 1)) * 4;
        const std::int64_t column = (f.paired ? first / 2 : first) + o;
        if (column >= f.out_columns) continue;
        const auto add_bias = [&](float(&to)[4], std::int64_t from) {
          if (form == FewForm::plain || (form != FewForm::biased && f.bias == nullptr)) return;
          const float* const bias =
              static_cast<const float*>(f.bias) + group * f.bias_group_stride + from;
#pragma unroll
          for (int e = 0; e < 4; ++e) to[e] = __fadd_rn(to[e], __ldg(bias + e));
        };
        float x[4];
        load(token, f.paired ? o / 8 * 16 + o % 8 : o, row + token, x);
        add_bias(x, column);
        if (f.paired) {
          float up[4];
          load(token, o / 8 * 16 + o % 8 + 8, row + token, up);
          add_bias(up, f.out_columns + column);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[e] =
                usual || f.plain ? fast_silu(f.rule, x[e], up[e]) : fast_situ(f.rule, x[e], up[e]);
          }
        }
        *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(f.out) +
                                  (row + token) * f.out_stride + column) =
            make_uint2(pack<bf16>(x[0], x[1]), pack<bf16>(x[2], x[3]));
      }
      return;
    }
    const int shift = f.paired ? 4 : 5;  // of a token's results
#pragma unroll 1
    for (int i = begin; i < count << shift; i += stride) {
      const int token = i >> shift, o = i & ((1 << shift) - 1);
      const std::int64_t column = (f.paired ? first / 2 : first) + o;
      if (column >= f.out_columns) continue;
      float x[1];
      load(token, f.paired ? o / 8 * 16 + o % 8 : o, row + token, x);
      if (f.bias != nullptr) x[0] = __fadd_rn(x[0], bias_of(f, group, column));
      if (f.paired) {
        float up[1];
        load(token, o / 8 * 16 + o % 8 + 8, row + token, up);
        if (f.bias != nullptr) {
          up[0] = __fadd_rn(up[0], bias_of(f, group, f.out_columns + column));
        }
        x[0] = activated_pair(f, x[0], up[0]);
      } else if (f.activates) {
        x[0] = activated(f.rule, 0.0f, x[0]);
      }
      store_element(f.out, f.out_dtype, (row + token) * f.out_stride + column, x[0]);
    }
  }

  // Before the sums are overwritten; when they are written; when they have been read.
  __device__ __forceinline__ void wait_used() const { wait(used, turns % 2 ^ 1); }
  __device__ __forceinline__ void meet(int lane) const {
    __syncwarp();
    tell(there, lane);
    wait(there, turns % 2);
  }
  __device__ __forceinline__ void leave(int lane) {
    __syncwarp();
    tell(used, lane);
    ++turns;
  }

 private:
  __device__ __forceinline__ void wait(std::uint64_t* barrier, unsigned parity) const {
    if (split > 1) {
      mbarrier_wait_cluster(barrier, parity);
    } else if (share > 1) {
      mbarrier_wait(barrier, parity);
    }
  }
  __device__ __forceinline__ void tell(std::uint64_t* barrier, int lane) const {
    if (split > 1) {
      if (lane < split) mbarrier_arrive_at(barrier, static_cast<unsigned>(lane));
    } else if (share > 1) {
      mbarrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ static void read(float (&x)[1], const float* from) { x[0] = *from; }
  __device__ __forceinline__ static void read(float (&x)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }
};

#endif

// What a layer asks for most: rows that are as they must be, results in fours.
bool is_usual(const FragmentArgs& args, bool bf16) {
  return args.direct && args.finish.plain && writes_fours(args.finish, bf16);
}

template <class S, FewForm form>
__global__ void __launch_bounds__(S::threads, 1)
    few_fragments(const __grid_constant__ FragmentArgs args, const __grid_constant__ FewChain chain,
                  int split, int share) {
#if defined(SHUNT_SM_90A)
  constexpr bool usual = form != FewForm::any;
  using L = typename S::L;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::teams * S::stages], empty[S::teams * S::stages];
  __shared__ std::uint64_t there[S::warps], used[S::warps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  unsigned char* const stages = shared + (128 - shared_address(shared) % 128) % 128;
  unsigned char* const behind = stages + S::teams * S::stages * S::stage_bytes;
  const typename L::Book book = book_at<L>(behind, lane);
  auto* const sums = reinterpret_cast<float*>(behind + L::Book::bytes);
  const bool copies = warp < S::teams;
  const int team = copies ? warp : (warp - S::teams) / S::team;
  const int rank = static_cast<int>(cluster_rank());
  const int part = rank * share + (team & (share - 1));  // of k
  // Powers of two: a division takes as long as a trip to shared memory, or more.
  const int split_bits = 31 - __clz(split), share_bits = 31 - __clz(share);
  const auto steps_before = [&](int p) {
    return static_cast<int>(std::int64_t{args.steps} * p >> (split_bits + share_bits));
  };
  const int begin = steps_before(part), end = steps_before(part + 1);
  const int clusters = static_cast<int>(gridDim.x) >> split_bits;
  const int first = (static_cast<int>(blockIdx.x) >> split_bits) + (team >> share_bits) * clusters;
  const int stride = (S::teams >> share_bits) * clusters;
  std::uint64_t *const filled = full + team * S::stages, *const free = empty + team * S::stages;
  unsigned char* const ring = stages + team * S::stages * S::stage_bytes;
  // By one thread: weights of step i of a tile.
  const auto copy_weights = [&](const GroupTile& at, int i, int stage) {
    mbarrier_arrive_expect(&filled[stage], S::weight_bytes);
    copy_bytes_once(ring + stage * S::stage_bytes + S::token_bytes,
                    args.tiles + at.group * args.group_bytes +
                        (std::int64_t{at.column} * args.steps + i) * S::weight_bytes,
                    S::weight_bytes, &filled[stage]);
  };
  // Barriers are made by four threads at once, whose warps have time, one of each team: the
  // instruction takes uniform addresses, so that lanes would take turns.
  if (!copies && lane == 0 && (warp - S::teams) % S::team == 0) {
#pragma unroll
    for (int s = 0; s < S::stages; ++s) {
      mbarrier_init(&filled[s], 1 + 32);
      mbarrier_init(&free[s], 32 * S::team);  // all lanes: tools do not follow one for its warp
    }
    const auto arrivals = static_cast<unsigned>(split == 1 ? 32 * share : split * share);
#pragma unroll
    for (int w = 0; w < S::team; ++w) {
      mbarrier_init(&there[team * S::team + w], arrivals);
      mbarrier_init(&used[team * S::team + w], arrivals);
    }
    mbarrier_init_fence();
  }
  __syncwarp();
  // Only in a real cluster: in one block the two halves are compiled to one barrier of its threads.
  if (split > 1) cluster_arrive();
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  unsigned char* const listed_at =
      reinterpret_cast<unsigned char*>(sums + S::warps * S::sum_floats);
  const FewWalk walk = FewWalk::of<form>(
      args, args.sum_scale, chain, listed_at + S::List::bytes(args.groups), thread, S::threads);
  typename S::List list(listed_at, walk.groups, args.groups, args.columns);
  StageRing<S::stages> place;
  if (copies) {
    FragmentArgs gathered = args;
    gathered.permutation = walk.permutation;
    bool listed = false;
    int tile = first;
    GroupTile at = S::List::find_unlisted(walk.groups, args.groups, args.columns, tile);
    named_barrier(1, S::threads);  // this block's barriers are there
    const auto find_listed = [&] {
      if (!listed) named_barrier(2, S::threads);  // once each of four warps
      listed = true;
      if (tile >= list.tiles()) return false;
      at = list.find(tile);
      return true;
    };
    int ahead = begin;  // weights of the first tile's steps before are under way
    if (at.group >= 0) {
      ahead = min(end, begin + S::stages);
      if (lane == 0) {
#pragma unroll 1
        for (int i = begin; i < ahead; ++i) copy_weights(at, i, i - begin);
      }
      __syncwarp();
    }
    if constexpr (S::tokens > 8) fewer_registers<56>();
    bool more = at.group >= 0 || find_listed();
    if (early) {
      wait_for_predecessor();
      let_successor_start();
    }
    StepRows<L::bf16, S::tokens, usual> rows(lane);
    while (more) {
      rows.begin(gathered, at.row, at.count);
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        mbarrier_wait(&free[place.stage], place.parity ^ 1);
        if (lane == 0 && i >= ahead) copy_weights(at, i, place.stage);
        __syncwarp();
        rows.copy(gathered, shared_address(ring + place.stage * S::stage_bytes), i);
        if (usual || args.direct) {
          mbarrier_arrive_after_copies(&filled[place.stage]);
        } else {
          mbarrier_arrive(&filled[place.stage]);
        }
        place.next();
      }
      ahead = begin;
      tile += stride;
      more = find_listed();
    }
    if (warp == 0) {
      fetch_next(chain, list, args.columns, min(list.tiles(), clusters) * split,
                 S::teams * S::stages * S::weight_bytes, lane);
    }
    if (split > 1) cluster_wait();
  } else {
    named_arrive(1, S::threads);  // first: registers come from warps that wait for this
    if constexpr (S::tokens > 8) more_registers<104>();
    // Theirs alone, so that copies need not wait; a barrier of the list's is behind it.
    write_book<L>(behind, thread - 32 * S::teams, 32 * S::warps);
    list.build(walk.groups, thread - 32 * S::teams, 32 * S::warps, 3);
    named_arrive(2, S::threads);
    const int tiles = list.tiles();
    if (split > 1) cluster_wait();  // the other blocks' barriers are there
    const int worker = warp - S::teams, member = worker % S::team, block = member * S::blocks;
    const int leader = (team & -share) * S::team + member;
    const std::uint32_t tokens_at =
        shared_address(ring) +
        static_cast<std::uint32_t>(lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16);
    const unsigned char* const weights = ring + S::token_bytes;
    const std::uint32_t zero = unknown_zero();
    const std::uint32_t filled_at = shared_address(filled), free_at = shared_address(free);
    const Finish& f = args.finish;
    WarpEnd<S, form> finish{.f = f,
                            .mine = sums + worker * S::sum_floats,
                            .split = split,
                            .share = share,
                            .share_bits = share_bits,
                            .part = part,
                            .there = &there[leader],
                            .used = &used[leader],
                            .vectors = writes_fours(f, L::bf16),
                            .weights = walk.weights};
    for (int tile = first; tile < tiles; tile += stride) {
      const GroupTile at = list.find(tile);
      const float factor = __ldg(reinterpret_cast<const float*>(
                                     args.tiles + at.group * args.group_bytes + args.factors_at) +
                                 at.column * 128 + block * 16 + lane % S::rows);
      WarpSums<S, S::blocks> sum;
      sum.book = book;
      sum.clear();
      const auto multiply = [&]<int some>() {
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          const auto barrier = static_cast<std::uint32_t>(8 * place.stage);
          wait_at(filled_at + barrier, place.parity);
          const int offset = place.stage * S::stage_bytes;
          const unsigned char* const tile_at = weights + offset;
          const std::uint32_t loaded =
              sum.template add<some>(tile_at, tile_at, tile_at,
                                     tokens_at + static_cast<std::uint32_t>(offset), block, lane);
          arrive_at(once_loaded(free_at + barrier, loaded, zero));
          place.next();
        }
      };
      // As many products as the tile has eights of tokens.
      if (S::tokens == 8 || at.count <= 8) {
        multiply.template operator()<1>();
      } else if constexpr (S::tokens == 24) {
        at.count <= 16 ? multiply.template operator()<2>() : multiply.template operator()<3>();
      }
      if (lane < S::rows) finish.mine[8 * S::pitch + lane] = __fmul_rn(factor, args.unscale);
#pragma unroll 1
      for (int j = 0; 8 * j < at.count; ++j) {
        finish.wait_used();
#pragma unroll
        for (int n = 0; n < S::tokens / 8; ++n) {
          if (n != j) continue;  // registers have no index
#pragma unroll
          for (int b = 0; b < S::blocks; ++b) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              finish.mine[(2 * (lane % 4) + e % 2) * S::pitch + 16 * b + e / 2 * 8 + lane / 4] =
                  sum.of(n, e, b);
            }
          }
        }
        finish.meet(lane);
        finish.write(at.group, std::int64_t{at.row} + 8 * j, min(8, at.count - 8 * j),
                     std::int64_t{at.column} * 128 + block * 16, lane);
        finish.leave(lane);
      }
    }
  }
  __syncwarp();
  cluster_barrier();
#endif
}

template <class S>
void launch_few(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args, FewChain chain) {
  chain.at_once = gpu.multiprocessors;
  const int share = teams_of_tile(plan);
  const auto kernel = [&] {
    switch (
        few_form(is_usual(args, S::L::bf16), args.finish.bias != nullptr, args.sum_scale, chain)) {
      case FewForm::plain:
        return few_fragments<S, FewForm::plain>;
      case FewForm::biased:
        return few_fragments<S, FewForm::biased>;
      case FewForm::pairs:
        return few_fragments<S, form_of_pairs<S>>;
      default:
        return few_fragments<S, FewForm::any>;
    }
  }();
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups, chain.ids != nullptr)),
          .cluster = static_cast<unsigned>(plan.split / share)},
         kernel, args, chain, plan.split / share, share);
}

template <class L>
void launch_few_rows(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args,
                     const FewChain& chain) {
  (plan.tile_tokens == 8 ? launch_few<FewFragments<L, 8>>
                         : launch_few<FewFragments<L, 24>>)(gpu, plan, args, chain);
}

}  // namespace

}  // namespace shunt::cuda_engine
