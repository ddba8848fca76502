// Grouped GEMM for few pairs on Hopper: one pass over the weights of the groups hit by many small
// warps, mostly all of them on the GPU at once. For a layer of one token or few, where a launch's
// start, a deep ring's first bytes and a tile's end take longer than the bytes.
//
// A warp has 16 rows of a group's weights and a part of k: up to 8 warps share out the steps of a
// tile. It copies its weights by itself, P::depth steps under way in slots of its own, so that it
// waits for none of the others before the end. Weights are A of mma.sync, rows ("tokens") its B, up
// to eight. A block
//   1. orders the pairs for itself by votes, as few_walk.cuh does, and finds its group: the n-th
//      that is hit. A group that a caller's ids name more often than there are tokens counts as
//      several, of at most as many rows
//   2. brings the group's rows into shared memory, as they are or rounded: one token's, which all
//      groups share, before it waits for the ids; else each warp its own steps of them, unless
//      others have the same
//   3. starts its weights. Where ids are older than the grid before this one, this comes first and
//      only rows wait: the second product's weights are on their way while the first one's blocks
//      end, as far as these leave room. It starts when the first one has its ids or, where each of
//      that one's warps has many steps or there are few warps, has ordered most of its weights
//   4. multiplies, step after step
//   5. adds its warps' sums in the order of k, finishes them as finish.cuh says
// Where a product adds up one token's rows (pair_sum.cuh) a block has one tile of all groups hit, a
// set of warps each, with a row of its own. Blocks of a second product ask for as much shared
// memory as leaves no multiprocessor more than its share of them (share_bytes()).
//
// Bytes: weights of the groups hit once, rows once a block. Time predicted on an H200: 1.3 us +
// bytes / 4.6 TB/s, and where a product before it is waited for 1.5 us behind that one's end.
// Measured, and what was tried: docs/notes/cuda-layer.md.
#pragma once

#include <algorithm>

#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "gemm/few_end.cuh"
#include "gemm/few_walk.cuh"
#include "gemm/pair_stream.hpp"
#include "gemm/pair_sum.cuh"
#include "gemm/row_pieces.cuh"

namespace shunt::cuda_engine {

namespace {

// Of shared memory, for a group's rows.
__host__ __device__ constexpr int staged_bytes(const PairArgs& args) {
  return (args.tokens * args.pitch + 127) / 128 * 128;
}
// And for those of all groups that a block has.
__host__ __device__ constexpr int all_staged_bytes(const PairArgs& args) {
  return staged_bytes(args) * (args.sum.out != nullptr ? args.sets : 1);
}
// Before what its warps have.
template <class P>
__host__ __device__ constexpr int front_bytes(const PairArgs& args) {
  return all_staged_bytes(args) + P::book_bytes;
}
// For a warp's slots and its sums.
template <class P>
constexpr int warp_bytes(int ring_bytes) {
  return ring_bytes + 512 * P::blocks;
}
// A block's: rows, what its warps have, and one token's results.
template <class P>
constexpr int block_bytes(const PairArgs& args, int parts) {
  return front_bytes<P>(args) + parts * args.sets * warp_bytes<P>(args.ring_bytes) +
         (args.sum.out != nullptr ? 4 * args.sets * P::rows : 0);
}
inline constexpr int most_pair_threads = 512;

#if defined(SHUNT_SM_90A)

// 16 bytes of weights, which leave the L2 first: what else is there, code too, the next layer reads
// again. `to` must be no sum with what ptxas (13.0) knows to be the same in all lanes: of an
// address that is partly in a uniform register, and a policy, it makes an illegal instruction.
__device__ __forceinline__ void copy_once_16(std::uint32_t to, const void* from) {
  // What createpolicy.fractional.L2::evict_first gives for 1.0; made there it is in each lane.
  constexpr std::uint64_t evict_first = 0x12f0000000000000;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(evict_first)
               : "memory");
}
// 16 bytes a lane, whole pieces of `bytes` in all, to shared memory as they lie: `to` and `from`
// are the lane's.
template <int bytes>
__device__ __forceinline__ void copy_by_lanes(std::uint32_t to, const char* from, int lane) {
#pragma unroll
  for (int at = 0; at < bytes; at += 512) {
    if (bytes - at >= 512 || 16 * lane < bytes - at) {
      copy_once_16(to + static_cast<std::uint32_t>(at), from + at);
    }
  }
}

// A group's rows: `count` of the order from `row` on, those of the pairs `of`.
struct StreamedRows {
  unsigned of;
  int row, count;
  // Which pair row t of the group is.
  __device__ __forceinline__ int pair(int t) const {
    unsigned left = of;
#pragma unroll 1
    for (int i = 0; i < t; ++i) left &= left - 1;
    return __ffs(static_cast<int>(left)) - 1;
  }
  // Where it lies in the source.
  __device__ __forceinline__ const char* source(const PairArgs& args, int t) const {
    auto from = static_cast<unsigned>(row + t);
    if (args.slots > 0) from = static_cast<unsigned>(pair(t)) * args.slots_inverse >> 16;
    return args.source + from * args.source_row_bytes;
  }
};

// A lane's pair of ids that a caller gives: those of its group from it on, how many are before it,
// and whether a block begins with it. Out of line, so that what others fetch has none of it.
struct GivenPair {
  unsigned id, like;
  int earlier;
  bool first;
};
__device__ __noinline__ GivenPair given_pair(const PairArgs& args, int lane) {
  const auto none = static_cast<unsigned>(args.groups);
  GivenPair pair{.id = none};
  if (lane < args.pairs) pair.id = group_of_pair(args.ids, args.given, lane, none);
  const unsigned same = __match_any_sync(0xffffffffu, pair.id), before = (1u << lane) - 1;
  pair.like = same & ~before;
  pair.earlier = __popc(same & before);
  pair.first = pair.id < none && pair.earlier % args.tokens == 0;
  return pair;
}

// Which steps along k of a group's rows are brought to shared memory, and by which of how many
// threads.
struct Staging {
  int begin, end, thread, threads;
};

// Rows of 16-bit numbers as they are, zeros behind k up to a step's `numbers`. By copies that are
// waited for.
__device__ __forceinline__ void stage_as_they_are(const PairArgs& args, const StreamedRows& rows,
                                                  std::uint32_t to, int numbers,
                                                  const Staging& by) {
  const int inside = static_cast<int>(args.k) / 8;
#pragma unroll 1
  for (int t = 0; t < rows.count; ++t) {
    const char* const from = rows.source(args, t);
#pragma unroll 1
    for (int piece = by.begin * (numbers / 8) + by.thread; piece < by.end * (numbers / 8);
         piece += by.threads) {
      cp_async_16(to + static_cast<std::uint32_t>(t * args.pitch + 16 * piece),
                  from + (piece < inside ? 16 * piece : 0), piece < inside ? 16 : 0);
    }
  }
}

// The only row of a group by loads, which wait for no weights that the warp has ordered before.
__device__ __forceinline__ void load_only_row(const PairArgs& args, const StreamedRows& rows,
                                              unsigned char* to, int numbers, const Staging& by) {
  if (rows.count == 0) return;
  const char* const from = rows.source(args, 0);
  const int inside = static_cast<int>(args.k) / 8;
#pragma unroll 1
  for (int piece = by.begin * (numbers / 8) + by.thread; piece < by.end * (numbers / 8);
       piece += by.threads) {
    uint4 word = {0, 0, 0, 0};
    if (piece < inside) word = __ldcg(reinterpret_cast<const uint4*>(from + 16 * piece));
    *reinterpret_cast<uint4*>(to + 16 * piece) = word;
  }
}

// What becomes of a warp's sums where finish_in_registers() does not serve: 16 rows of weights from
// `first` on, by `count` rows from `row` on.
__device__ __noinline__ void finish_lane(const Finish& f, int group, std::int64_t row, int count,
                                         std::int64_t first, float d0, float d1, float d2, float d3,
                                         int lane) {
  const float d[4] = {d0, d1, d2, d3};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = 2 * (lane % 4) + i % 2;
    if (token >= count || (f.paired && i >= 2)) continue;
    const std::int64_t column = (f.paired ? first / 2 : first + i / 2 * 8) + lane / 4;
    if (column >= f.out_columns) continue;
    float value = d[i];
    if (f.bias != nullptr) value = __fadd_rn(value, bias_of(f, group, column));
    if (f.paired) {
      float up = d[(i + 2) % 4];
      if (f.bias != nullptr) up = __fadd_rn(up, bias_of(f, group, f.out_columns + column));
      value = activated_pair(f, value, up);
    } else if (f.activates) {
      value = activated(f.rule, 0.0f, value);
    }
    store_element(f.out, f.out_dtype, (row + token) * f.out_stride + column, value);
  }
}

#endif

// How a product ends: by any rule; as most layers' do, 16 bits like the operands in registers,
// without more, with a bias, or of rows that are weighed; or added up, one token's rows: then it is
// a second product, early, of rows in place. Alone: of one pair.
enum class PairEnd { any, plain, biased, weighed, summed, alone };
__host__ __device__ constexpr bool adds_up(PairEnd how) {
  return how == PairEnd::summed || how == PairEnd::alone;
}

// P: the operands. bf16: of that type, else f16; rows: of weights, a warp's, 16 * blocks; depth:
// steps that a warp has under way, slot_bytes each; book_bytes: of shared memory, for what
// write_book() writes, where any; rounds: rows are rounded on their way, one that is older in two
// parts (Ahead); loads_only_row: `alone` is a form of its own, of step_numbers a step along k;
// stage(), copy() and multiply(), and value(): the sums as mma.sync leaves them.
template <class P, PairEnd how>
__global__ void __launch_bounds__(adds_up(how) ? most_pair_threads : 256, adds_up(how) ? 1 : 3)
    pair_stream(const __grid_constant__ PairArgs args) {
#if defined(SHUNT_SM_90A)
  constexpr bool summed = adds_up(how), alone = how == PairEnd::alone;
  // A sum is always early; said only where registers ask for it, for nvfp4 and int4 lost 4 to 6 %
  // of a layer of one token by it.
  const bool early = (summed && P::rounds) || args.early;
  extern __shared__ __align__(128) unsigned char shared[];
  const auto lane = static_cast<int>(threadIdx.x), parts = static_cast<int>(blockDim.y);
  // The same in all lanes of a warp, and known so.
  const int part = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.y), 0);
  const int set = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.z), 0);
  const int warp = set * parts + part, thread = 32 * warp + lane, threads = 32 * parts * args.sets;
  // One token's row is the same for all.
  const bool staged = !early && args.rows_older && args.tokens == 1 && args.slots > 0;
  [[maybe_unused]] typename P::Ahead ahead;
  if (staged) {
    if constexpr (P::rounds) {
      ahead.begin(args, args.source, shared, {0, args.steps, thread, threads});
    } else {
      P::stage(args, {.of = 1, .row = 0, .count = 1}, shared, {0, args.steps, thread, threads});
    }
  }
  if (!early) {
    wait_for_predecessor();
    if (args.next_left < 0) let_successor_start();
  }
  const auto none = static_cast<unsigned>(args.groups);
  unsigned id = none;
  if (lane < args.pairs) id = min(none, static_cast<unsigned>(__ldcg(args.ids + lane)));
  // The first pair of each group that is hit, and of these the one that this block is for.
  const unsigned before = (1u << lane) - 1;
  unsigned like = args.tokens > 1 ? __match_any_sync(0xffffffffu, id) : 1u << lane;
  bool first_of_group = id < none && (like & before) == 0;
  int earlier = 0;  // pairs of the group
  if (!args.given.distinct) {
    const GivenPair given = given_pair(args, lane);
    id = given.id, like = given.like, earlier = given.earlier, first_of_group = given.first;
  }
  const unsigned firsts = __ballot_sync(0xffffffffu, first_of_group);
  const int number = summed ? set : static_cast<int>(blockIdx.y);
  const unsigned mine =
      __ballot_sync(0xffffffffu, first_of_group && __popc(firsts & before) == number);
  const bool writes = args.inverse != nullptr && blockIdx.x == 0 && warp == 0;
  if (writes && number == 0 && id >= none && lane < args.pairs) args.inverse[lane] = -1;
  float weight = 1;
  constexpr bool may_weigh = how == PairEnd::any || how == PairEnd::weighed;
  const float* const weights = summed ? args.sum.weights : may_weigh ? args.weights : nullptr;
  if (weights != nullptr && lane < args.pairs) weight = __ldcg(weights + lane);
  if (mine == 0 && !summed) {
    if (early) {
      wait_for_predecessor();
      let_successor_start();
    }
    return;
  }
  const bool there = mine != 0;
  const int pair = max(__ffs(static_cast<int>(mine)) - 1, 0);
  const int group = there ? __shfl_sync(0xffffffffu, static_cast<int>(id), pair) : 0;
  StreamedRows rows;
  rows.of = __shfl_sync(0xffffffffu, like, pair);
  rows.row = __popc(__ballot_sync(0xffffffffu, id < static_cast<unsigned>(group))) +
             __shfl_sync(0xffffffffu, earlier, pair);
  rows.count = there ? min(__popc(rows.of), args.tokens) : 0;
  if (writes && there && (rows.of >> lane & 1) != 0)
    args.inverse[lane] = rows.row + __popc(rows.of & before);
  const int begin = part * args.each + min(part, args.more);
  const int steps = args.each + (part < args.more ? 1 : 0);
  const int tile = static_cast<int>(blockIdx.x);
  const int first = (summed ? tile : tile * args.sets + set) * P::rows;  // of weights
  const bool some = first < args.group_rows && there;
  const int end = some ? begin + steps : begin;

  // Its rows, and who brings them: the block, or the warps of a set.
  unsigned char* const staged_at = shared + (summed ? set * staged_bytes(args) : 0);
  const int stager = summed ? thread - set * 32 * parts : thread;
  const int stagers = summed ? 32 * parts : threads;
  unsigned char* const ring = shared + front_bytes<P>(args) + warp * args.ring_bytes;
  const std::uint32_t ring_at = shared_address(ring);
  // Where the lane copies to, by products with a 1 that the compiler cannot know: copy_once_16().
  const std::uint32_t one = 1 + threadIdx.x / 32;
  const std::uint32_t copied_to = ring_at * one + static_cast<std::uint32_t>(16 * lane);
  P operands(args, group, first, begin, lane);
  // Where no other warp has the same steps of them each brings its own, and waits for no other.
  const bool own = !staged && P::book_bytes == 0 && (summed || args.sets == 1);
  const Staging staging =
      own ? Staging{begin, end, lane, 32} : Staging{0, args.steps, stager, stagers};
  // Copies of rows that are there go before those of weights; rows that pass through registers
  // behind them.
  if (!P::rounds && !early && !staged) P::stage(args, rows, staged_at, staging);
  cp_async_commit();
#pragma unroll
  for (int i = 0; i < P::depth; ++i) {
    if (begin + i < end) operands.copy(copied_to + static_cast<std::uint32_t>(i * P::slot_bytes));
    cp_async_commit();
  }
  // The step at which few enough are left to order for the next product's weights.
  const int next_at = args.next_left < 0 ? end : end - args.next_left - P::depth - 1;
  if (next_at < begin) let_successor_start();
  if constexpr (P::rounds) {
    if (staged) ahead.end(args);
  }
  if constexpr (P::book_bytes > 0) {  // while the first weights are on their way
    operands.write_book(shared + all_staged_bytes(args), thread, threads);
  }
  if (part == 0 && some) operands.load_factors(args, first);
  if (early) {
    wait_for_predecessor();
    let_successor_start();
    if constexpr (alone) {
      load_only_row(args, rows, staged_at, P::step_numbers, staging);
    } else {
      P::stage(args, rows, staged_at, staging);
    }
  } else if (P::rounds && !staged) {
    P::stage(args, rows, staged_at, staging);
  }
  if (early && !P::rounds && !alone) {
    cp_async_commit();
    cp_async_wait<0>();
  } else {
    cp_async_wait<P::depth>();
  }
  if (own) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  operands.begin(args, staged_at, rows.count, lane);
  int slot = 0;
#pragma unroll 1
  for (int at = begin; at < end; ++at) {
    cp_async_wait<P::depth - 1>();
    __syncwarp();
    operands.multiply(ring + slot, ring_at + static_cast<std::uint32_t>(slot), at);
    __syncwarp();
    if (at + P::depth < end) operands.copy(static_cast<std::uint32_t>(slot) * one + copied_to);
    if (at == next_at) let_successor_start();
    cp_async_commit();
    slot = slot + P::slot_bytes == P::depth * P::slot_bytes ? 0 : slot + P::slot_bytes;
  }
  float d[P::blocks][4];
#pragma unroll
  for (int b = 0; b < P::blocks; ++b) operands.value(b, d[b]);
  unsigned char* const behind = shared + front_bytes<P>(args) + parts * args.sets * args.ring_bytes;
  if (parts > 1) {
    auto* const sums = reinterpret_cast<float4*>(behind) + lane;
    const auto at = [&](int w, int b) { return (w * P::blocks + b) * 32; };
    if (part > 0) {
#pragma unroll
      for (int b = 0; b < P::blocks; ++b) {
        sums[at(warp, b)] = make_float4(d[b][0], d[b][1], d[b][2], d[b][3]);
      }
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll 1
    for (int p = 1; p < parts; ++p) {
#pragma unroll
      for (int b = 0; b < P::blocks; ++b) {
        const float4 other = sums[at(warp + p, b)];
        d[b][0] += other.x, d[b][1] += other.y, d[b][2] += other.z, d[b][3] += other.w;
      }
    }
  }
  const Finish& f = args.finish;
  if (summed) {
    auto* const box = reinterpret_cast<float*>(behind + 512 * P::blocks * parts * args.sets);
#pragma unroll
    for (int b = 0; b < P::blocks; ++b) {
      if (!there) break;
      operands.scale(args, b, d[b]);
      put_rounded<P::rows>(f, box, group, first, b, number, d[b], lane);
    }
    named_barrier(1, 32 * args.sets);
    if (set == 0) add_up<P::rows>(args.sum, f, box, first, firsts, weight, lane);
    return;
  }
  if (!some) return;
  float by[2] = {1, 1};  // the rows that this lane has sums of
  if (may_weigh && weights != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      by[i] = __shfl_sync(0xffffffffu, weight, rows.pair(min(2 * (lane % 4) + i, rows.count - 1)));
    }
  }
#pragma unroll
  for (int b = 0; b < P::blocks; ++b) {
    operands.scale(args, b, d[b]);
    if (may_weigh && weights != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[b][i] = __fmul_rn(d[b][i], by[i % 2]);
    }
    const int from = first + 16 * b;
    if constexpr (how == PairEnd::any) {
      finish_lane(f, group, rows.row, rows.count, from, d[b][0], d[b][1], d[b][2], d[b][3], lane);
    } else {
      finish_in_registers<8, P::bf16, how == PairEnd::biased>(f, group, rows.row, rows.count, from,
                                                              d[b], lane);
    }
  }
#endif
}

// What a block may be for: groups, and further parts of those that ids name again and again.
inline int most_groups_hit(const PairArgs& args) {
  const int more = args.given.distinct ? 0 : args.pairs / args.tokens;
  return std::min(args.pairs, args.groups + more);
}

// The launcher's of args, for rows in so many parts of k.
template <class P>
PairArgs cut(PairArgs args, int parts, int sets) {
  args.each = args.steps / parts;
  args.more = args.steps % parts;
  args.sets = sets;
  // A block that adds up has no more slots than steps, so that it starts sooner.
  args.ring_bytes = P::slot_bytes * (args.sum.out != nullptr
                                         ? std::min(P::depth, args.each + (args.more > 0 ? 1 : 0))
                                         : P::depth);
  const auto slots = static_cast<unsigned>(args.slots);
  if (slots > 0) args.slots_inverse = (65535U + slots) / slots;
  return args;
}

template <class P, PairEnd how>
void launch_pair_stream(const Gpu& gpu, const PairArgs& args, int parts, dim3 grid) {
  prefer_shared_memory(pair_stream<P, how>);
  int bytes = block_bytes<P>(args, parts);
  if (args.early && shares_blocks(gpu, args)) {
    bytes = std::max(
        bytes, share_bytes(std::int64_t{grid.x} * grid.y, gpu.multiprocessors, gpu.shared_bytes));
  }
  launch("grouped_gemm", gpu,
         {.grid = grid,
          .block = dim3(32, static_cast<unsigned>(parts), static_cast<unsigned>(args.sets)),
          .shared = static_cast<std::size_t>(bytes)},
         pair_stream<P, how>, args);
}

// One token's rows added up, with as many parts as there is room for and so many warps of a
// multiprocessor. False: they do not fit, or their blocks are so large that they begin only when
// those of the product before have ended, which costs more than a launch that combines (measured:
// docs/notes/cuda-layer.md).
template <class P>
bool launch_summed(const Gpu& gpu, const PairArgs& args, int warps) {
  constexpr int most_bytes = 88 * 1024;
  const int tiles = (args.group_rows + P::rows - 1) / P::rows;
  const int blocks = (tiles + gpu.multiprocessors - 1) / gpu.multiprocessors;  // at once
  int parts = 8;
  const auto fits = [&] {
    return parts <= args.steps && 32 * parts * args.pairs <= most_pair_threads &&
           blocks * parts * args.pairs <= warps;
  };
  while (parts > 0 && !fits()) parts /= 2;
  if (parts == 0) return false;
  const PairArgs summed = cut<P>(args, parts, args.pairs);
  const int bytes = block_bytes<P>(summed, parts) + own_shared_bytes;
  if (bytes > most_bytes || blocks * bytes > gpu.shared_bytes) return false;
  *args.sum.heard = true;
  constexpr PairEnd of_one = P::loads_only_row ? PairEnd::alone : PairEnd::summed;
  const auto kernel =
      args.pairs == 1 ? launch_pair_stream<P, of_one> : launch_pair_stream<P, PairEnd::summed>;
  kernel(gpu, summed, parts, dim3(static_cast<unsigned>(tiles)));
  return true;
}

// Of P<depth>, with depths for 16 warps and for 24 (0: none), and for one token's first product of
// PairLimits::of_one warps, or, from logits, of 16 where there is no such limit (0: as others).
template <template <int> class P, int deep, int shallow, int one = 0>
bool launch_pair_stream(const Gpu& gpu, PairArgs args, const PairLimits& limits) {
  const int tiles = (args.group_rows + P<deep>::rows - 1) / P<deep>::rows;
  constexpr int slot = P<deep>::slot_bytes;
  args.pitch = P<deep>::pitch(args.steps);
  const PairPlan plan = plan_pairs({.tiles = tiles,
                                    .steps = args.steps,
                                    .groups_hit = groups_hit(args.groups, args.pairs, args.tokens),
                                    .most_hit = std::min(args.pairs, args.groups),
                                    .tokens = args.tokens,
                                    .waits = !args.early,
                                    .beside = args.beside,
                                    .row_bytes = staged_bytes(args) + P<deep>::book_bytes,
                                    .warp_bytes = warp_bytes<P<deep>>(deep * slot),
                                    .more_warp_bytes = warp_bytes<P<deep>>(shallow * slot),
                                    .one_warp_bytes = warp_bytes<P<deep>>(one * slot)},
                                   limits, gpu.multiprocessors, gpu.shared_bytes);
  if (plan.parts == 0) return false;
  const auto sums = [&](int warps) {
    return args.sum.out != nullptr && launch_summed<P<deep>>(gpu, args, warps);
  };
  // Where eight warps do not fit, by 16, as in other formats.
  if (sums(std::min(16, plan.warps)) || (plan.warps < 16 && sums(16))) return true;
  args.sum = {};
  const auto go = [&]<class Of>() {
    const Finish& f = args.finish;
    const bool in_registers =
        ends_in_registers(f) && f.out_dtype == (Of::bf16 ? DType::bf16 : DType::f16);
    const bool biased = f.bias != nullptr, weighed = args.weights != nullptr;
    const auto kernel = !in_registers || (biased && weighed) ? launch_pair_stream<Of, PairEnd::any>
                        : biased  ? launch_pair_stream<Of, PairEnd::biased>
                        : weighed ? launch_pair_stream<Of, PairEnd::weighed>
                                  : launch_pair_stream<Of, PairEnd::plain>;
    PairArgs of = cut<Of>(args, plan.parts, plan.sets);
    of.next_left = next_left(gpu, of, plan, limits, Of::depth);
    kernel(gpu, of, plan.parts,
           dim3(static_cast<unsigned>((tiles + plan.sets - 1) / plan.sets),
                static_cast<unsigned>(most_groups_hit(args))));
  };
  if constexpr (one > 0) {
    const bool few = limits.of_one > 0;
    if (args.tokens == 1 && !args.early && !args.beside && (few || args.from_logits) &&
        plan.warps == (few ? limits.of_one : 16)) {
      return go.template operator()<P<one>>(), true;
    }
  }
  if constexpr (shallow > 0) {
    if (plan.warps > 16) return go.template operator()<P<shallow>>(), true;
  }
  go.template operator()<P<deep>>();
  return true;
}

}  // namespace

}  // namespace shunt::cuda_engine
