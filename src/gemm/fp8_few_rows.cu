// Grouped GEMM of fp8 for groups of few rows on Hopper: streams the weights of the groups hit once,
// at the speed of memory, and rounds rows to fp8 on the way where they are not yet. Weights are
// wgmma's A, rows ("tokens") its B; rows may be gathered.
//
// A cluster of `split` blocks (1, 2, 4) takes tiles of 128 rows of weights by up to `tokens` rows
// of a group, tile numbers cluster, cluster + clusters, ..; each of its blocks has a part of k, in
// steps of 128 through a ring of stages as deep as shared memory holds. 13 warps:
//   warps 0-3   the tokens, each warp every fourth step: 16 lanes a row, 8 numbers each, read one
//               such step ahead, rounded (the 16 find their 128 numbers' scale) and written
//               swizzled; rows that are fp8 already are moved, with their scales, asynchronously
//               where they lie at multiples of 16 bytes. What is behind a group's last row stays
//               what it was: nobody reads its sums
//   warps 4-11  two warpgroups with wgmma: each has 64 rows of weights, all tokens. After each step
//               its sums leave the tensor cores: sums += products * (scale of row * of token).
//               Scales of whole rows come with a tile's first step and are multiplied at its end
//   warp 12     one thread orders bulk copies: 16 KB of weights a step, and the step's scales; at
//               last, of what comes next into the L2
//   Where groups are older than the grid before this one, only warps 0-3 wait for that.
//   made        named barrier 4: warps 4-7 have made the barriers
//   listed      named barrier 2: warps 4-11 have listed the groups, while the others found their
//               first tile by themselves
//   full[s]     stage s is there: the ordering thread, its bytes, and the warp with tokens: the two
//               lanes that write scales (arrivals of all 32 cost up to 16 %), or each lane's copies
//   empty[s]    stage s may be overwritten: 8 arrivals, of each warp that multiplies
//   there, used the tile's sums lie in shared memory, have been read: as in few_rows.cuh, where
//               they do not leave from registers (few_end.cuh)
//
// With tiles of up to 16 rows two blocks share a multiprocessor, half of the shared memory each:
// one goes on while the other ends a tile, and of a layer's second product weights are on their way
// before the first one has ended. Registers go from those that multiply to those that round.
//
// Bytes: weights of the groups hit; in flight 150 to 190 KB a multiprocessor. Time predicted on an
// H200: 4 us + bytes / 4.5 TB/s: G16 M8 N2048 K5120 41 us, N5120 K1024 23, G128 M1 N2048 K5120 302,
// N5120 K1024 153. A step takes 300 clocks of the tensor cores' latency and 80 of sums, less than
// the 800 that memory leaves a multiprocessor when all stream. Measured: 42, 25, 296, 153.
#include "cuda/launch.hpp"
#include "gemm/fetch_next.cuh"
#include "gemm/few_barriers.cuh"
#include "gemm/few_end.cuh"
#include "gemm/few_walk.cuh"
#include "gemm/fp8_mma.cuh"
#include "gemm/fp8_rounding.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/row_pieces.cuh"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

// How rows come. To be rounded: from 32 bits; from 16, in whole pieces of eight numbers at
// multiples of 16 bytes, unweighted; from 16 bits or fp8 anywhere. Or fp8 that is copied.
enum class Rows { wide, narrow, anywhere, pieces };

template <int tokens_>
struct FewTile {
  static constexpr int tokens = tokens_;
  static constexpr int rows = 128;  // of weights
  static constexpr int step = 128;  // along k
  static constexpr int threads = 416;
  // Pairs of rows that a warp has in registers at once, of 16 or of 32 bits.
  static constexpr int pairs = tokens <= 16 ? 4 : 8;
  static constexpr int wide_pairs = 4;
  static constexpr int weight_bytes = rows * step, stage_bytes = weight_bytes + tokens * step;
  static constexpr int scales = 4 + tokens;  // floats of a stage: weights', tokens'
  static constexpr int pitch = rows + 4;     // floats from one token's sums to the next
  static constexpr int sum_bytes = tokens * pitch * 4;
  static constexpr int together = tokens <= 16 ? 2 : 1;  // blocks of a multiprocessor
  static constexpr int most_bytes = (together == 2 ? 112 : 226) * 1024;  // of shared memory
  using List = TileList<tokens, 1>;
  static constexpr int stages = (most_bytes - 1024 - sum_bytes - List::bytes(most_listed_groups)) /
                                (stage_bytes + 4 * scales);
  static constexpr int shared_bytes(int groups, bool pairs) {
    return 1024 + stages * (stage_bytes + 4 * scales) + sum_bytes + List::bytes(groups) +
           (pairs ? FewWalk::bytes(groups) : 0);
  }
  static_assert(shared_bytes(most_chained_groups, true) <= most_bytes);
};

#if defined(SHUNT_SM_90A)

// Eight numbers of a row as they lie in memory.
template <Rows rows>
struct Eight {
  static constexpr bool wide = rows == Rows::wide;
  std::uint32_t word[wide ? 8 : 4];

  // Numbers k .. k + 7 of the row at `row`; zeros past `end`.
  __device__ __forceinline__ void load(const char* row, bool fp8, std::int64_t k, std::int64_t end,
                                       bool aligned) {
    constexpr int words = wide ? 8 : 4;
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = 0;
    if (k >= end) return;
    if constexpr (rows == Rows::narrow) {
      const uint4 a = __ldg(reinterpret_cast<const uint4*>(row + 2 * k));
      word[0] = a.x, word[1] = a.y, word[2] = a.z, word[3] = a.w;
      return;
    }
    if (aligned && k + 8 <= end) {
      if (!wide && fp8) {
        const uint2 a = __ldg(reinterpret_cast<const uint2*>(row + k));
        word[0] = a.x, word[1] = a.y;
        return;
      }
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        const uint4 a = __ldg(reinterpret_cast<const uint4*>(row + (wide ? 4 : 2) * k) + i / 4);
        word[i] = a.x, word[i + 1] = a.y, word[i + 2] = a.z, word[i + 3] = a.w;
      }
      return;
    }
    const int count = static_cast<int>(min(std::int64_t{8}, end - k));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count) continue;
      if constexpr (wide) {
        word[i] = reinterpret_cast<const std::uint32_t*>(row)[k + i];
      } else if (fp8) {
        word[i / 4] |= std::uint32_t{reinterpret_cast<const std::uint8_t*>(row)[k + i]}
                       << (8 * (i % 4));
      } else {
        word[i / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(row)[k + i]}
                       << (16 * (i % 2));
      }
    }
  }
  __device__ __forceinline__ void values(bool bf16, float weight, float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (wide) {
        x[i] = __uint_as_float(word[i]);
      } else {
        const auto half = static_cast<std::uint16_t>(word[i / 2] >> (16 * (i % 2)));
        x[i] = bf16 ? bf16_to_f32(half) : f16_to_f32(half);
      }
      x[i] = __fmul_rn(weight, x[i]);
    }
  }
};

__device__ __forceinline__ void store_pair(std::uint32_t address, std::uint32_t a,
                                           std::uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

#endif

// What a layer asks for most: no k shared out, a scale for a block (or of rows that are fp8 already
// one each, and one a row of the weights), results from registers without a bias.
bool is_usual(const PackedArgs& args, int split) {
  return split == 1 && (args.block_scales || args.pieces) && args.finish.bias == nullptr &&
         ends_in_registers(args.finish);
}

// by_row: of a form that is not `any`, which of the two.
template <class S, Rows rows, FewForm form = FewForm::any, bool by_row = false>
__global__ void __launch_bounds__(S::threads, S::together)
    few_rows(const __grid_constant__ PackedArgs args, const __grid_constant__ FewChain chain,
             int given_split) {
#if defined(SHUNT_SM_90A)
  constexpr bool usual = form != FewForm::any;
  const int split = usual ? 1 : given_split;
  static_assert(!by_row || usual && rows == Rows::pieces);
  const bool block_scales = usual ? !by_row : args.block_scales;
  constexpr bool wide = rows == Rows::wide;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages], there, used;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  unsigned char* const stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  auto* const scales = reinterpret_cast<float*>(stages + S::stages * S::stage_bytes);
  float* const sums = scales + S::stages * S::scales;
  make_few_barriers(full, empty, there, used, rows == Rows::pieces ? 1 + 32 : 1 + 2, split, warp,
                    lane);
  // Only in a real cluster: in one block the two halves are compiled to one barrier of its threads.
  if (split > 1) cluster_arrive();
  const bool early = args.early;  // weights and groups are older than the grid before this one
  if (!early) {
    wait_for_predecessor();
    let_successor_start();
  }
  unsigned char* const listed_at = reinterpret_cast<unsigned char*>(sums) + S::sum_bytes;
  const FewWalk walk = FewWalk::of<form>(
      args, args.sum_weight, chain, listed_at + S::List::bytes(args.groups), thread, S::threads);
  typename S::List list(listed_at, walk.groups, args.groups, args.columns);

  const int rank = static_cast<int>(cluster_rank());
  const int split_bits = 31 - __clz(split);  // a power of two, and divisions are slow
  const int clusters = static_cast<int>(gridDim.x) >> split_bits;
  const int begin = static_cast<int>(std::int64_t{args.steps} * rank >> split_bits);
  const int end = static_cast<int>(std::int64_t{args.steps} * (rank + 1) >> split_bits);
  int tile = static_cast<int>(blockIdx.x) >> split_bits;
  int stage = 0;
  unsigned parity = 0;
  bool again = false;  // the ring has been round
  const auto next = [&] {
    if (++stage == S::stages) stage = 0, parity ^= 1, again = true;
  };
  // For warps that do not multiply: their first tile before the groups are listed.
  GroupTile at;
  bool more = false, listed = false;
  const auto find_listed = [&] {
    if (!listed) named_barrier(2, 256 + 160);  // once each of five warps
    listed = true;
    if (tile >= list.tiles()) return false;
    at = list.find(tile);
    return true;
  };
  const auto go_on = [&] {
    __syncwarp();
    tile += clusters;
    more = find_listed();
  };
  if (warp < 4 || warp == 12) {
    at = S::List::find_unlisted(walk.groups, args.groups, args.columns, tile);
    named_barrier(4, 256 + 160);  // this block's barriers are there
    more = at.group >= 0 || find_listed();
    if (early && warp < 4) {  // what these copy is younger
      wait_for_predecessor();
      let_successor_start();
    }
  }
  if (warp == 12) {
    for (; more; go_on()) {
      if (lane == 0) {
        const char* const group = args.tiles + at.group * args.group_bytes;
        const std::int64_t first = std::int64_t{at.column} * args.steps;
        for (int i = begin; i < end; ++i) {
          if (again) mbarrier_wait(&empty[stage], parity ^ 1);
          mbarrier_arrive_expect(&full[stage], S::weight_bytes + (block_scales ? 16 : 0));
          copy_bytes_once(stages + stage * S::stage_bytes, group + (first + i) * S::weight_bytes,
                          S::weight_bytes, &full[stage]);
          if (block_scales) {
            copy_bytes(scales + stage * S::scales, group + args.scales_at + (first + i) * 16, 16,
                       &full[stage]);
          }
          next();
        }
      }
    }
    fetch_next(chain, list, args.columns, min(list.tiles(), clusters) * split,
               S::stages * S::weight_bytes, lane);
    if (split > 1) cluster_wait();
  } else if (rows == Rows::pieces && warp < 4) {
    if constexpr (S::together == 2) more_registers<104>();
    // Numbers 16 part .. 16 part + 15 of rows line + 4 c of a step, and the scale of row `lane`.
    const int line = lane / 8, part = lane % 8;
    const std::uint32_t ring =
        shared_address(stages) + S::weight_bytes + static_cast<std::uint32_t>(line * 128);
    RowPieces<S::tokens / 4, 4> pieces;
    int number = 0;  // of this block's steps, all tiles: the tile's first
    for (; more; number += end - begin, go_on()) {
      constexpr int halves = S::tokens > 32 ? 2 : 1;
      PackedArgs gathered = args;
      gathered.permutation = walk.permutation;
      const auto source = [&](int token) {
        return source_of(gathered, std::int64_t{at.row} + token);
      };
      pieces.begin(args.source_row_bytes, at.count - line,
                   [&](int c) { return source(line + 4 * c); });
      const float* of_row[halves];
      int scale_bytes[halves];
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        const int from = lane + 32 * h < at.count ? source(lane + 32 * h) : -1;
        scale_bytes[h] = from < 0 ? 0 : 4;
        of_row[h] = args.row_scales + max(from, 0) * args.row_scale_stride;
      }
      for (int i = begin + ((warp - number) & 3); i < end; i += 4) {
        const unsigned step = static_cast<unsigned>(number + i - begin);
        const int slot = static_cast<int>(step % S::stages);
        const unsigned round = step / S::stages;
        if (round > 0) mbarrier_wait(&empty[slot], (round & 1) ^ 1);
        const std::int64_t k = std::int64_t{i} * S::step + 16 * part;
        const int bytes = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{16}, args.k - k)));
        const std::uint32_t to = ring + static_cast<std::uint32_t>(slot * S::stage_bytes);
        pieces.copy(args.source + (bytes > 0 ? k : 0), bytes, [&](int c) {
          return to + static_cast<std::uint32_t>(c * 512 + (part ^ (line + 4 * c) % 8) * 16);
        });
        if (block_scales || by_row && i == begin) {
          const std::uint32_t scale_at = shared_address(scales + slot * S::scales + 4 + lane);
#pragma unroll
          for (int h = 0; h < halves; ++h) {
            if (lane + 32 * h >= S::tokens) continue;
            cp_async_4(scale_at + static_cast<std::uint32_t>(128 * h),
                       scale_bytes[h] > 0 ? of_row[h] + i * args.row_scale_step : args.row_scales,
                       scale_bytes[h]);
          }
        }
        mbarrier_arrive_after_copies(&full[slot]);
      }
    }
    if (split > 1) cluster_wait();
  } else if (warp < 4) {
    if constexpr (S::together == 2) more_registers<104>();
    // Numbers 8 part .. 8 part + 7 of rows 2 c + half of a step.
    constexpr int pairs = wide ? S::wide_pairs : S::pairs, chunks = S::tokens / 2 / pairs;
    const int half = lane / 16, part = lane % 16;
    const std::uint32_t ring = shared_address(stages) + S::weight_bytes +
                               static_cast<std::uint32_t>(half * 128 + part % 2 * 8);
    const std::uint32_t piece = static_cast<std::uint32_t>(part / 2 ^ half) * 16;
    const bool fp8 = rows == Rows::anywhere && args.source_dtype == DType::f8_e4m3;
    const bool bf16 = args.source_dtype == DType::bf16, scaled = fp8 && block_scales;
    int number = 0;  // of this block's steps, all tiles: the tile's first
    for (; more; number += end - begin, go_on()) {
      // Lane l: which row of the source tokens l and l + 32 are; -1: zeros.
      int source[S::tokens > 32 ? 2 : 1];
      float weight[S::tokens > 32 ? 2 : 1];
#pragma unroll
      for (int h = 0; h < (S::tokens > 32 ? 2 : 1); ++h) {
        const int token = 32 * h + lane;
        source[h] = -1;
        weight[h] = 1;
        if (token >= at.count) continue;
        std::int64_t row = at.row + token;
        if (rows != Rows::narrow && args.row_weight != nullptr) weight[h] = args.row_weight[row];
        if (walk.permutation != nullptr) {
          const std::int32_t pair = walk.permutation[row];
          row = pair < 0 ? -1 : pair / args.slots;
        }
        if (row < args.source_rows) source[h] = static_cast<int>(row);
      }
      Eight<rows> now[pairs] = {}, later[pairs] = {};
      float given_now[pairs] = {}, given_later[pairs] = {};  // scales of rows that are fp8
      const auto load = [&](Eight<rows>(&eights)[pairs], float(&given)[pairs], int i, int chunk) {
#pragma unroll
        for (int c = 0; c < pairs; ++c) {
          const int token = 2 * (chunk * pairs + c);
          if (token >= at.count) continue;
          int row = __shfl_sync(0xffffffffu, source[0], (token + half) % 32);
          if constexpr (S::tokens > 32) {
            const int high = __shfl_sync(0xffffffffu, source[1], (token + half) % 32);
            if (token >= 32) row = high;
          }
          eights[c].load(args.source + max(row, 0) * args.source_row_bytes, fp8,
                         std::int64_t{i} * S::step + 8 * part, row < 0 ? 0 : args.k, args.aligned);
          given[c] = 1;
          if (scaled && part == 0 && row >= 0) {
            given[c] =
                __ldg(args.row_scales + row * args.row_scale_stride + i * args.row_scale_step);
          }
        }
      };
      int i = begin + ((warp - number) & 3);
      if (i < end) load(now, given_now, i, 0);
      for (; i < end; i += 4) {
        const unsigned step = static_cast<unsigned>(number + i - begin);
        const int slot = static_cast<int>(step % S::stages);
        const unsigned round = step / S::stages;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const bool last = chunk + 1 == chunks || 2 * (chunk + 1) * pairs >= at.count;
          if (!last) {
            load(later, given_later, i, chunk + 1);
          } else if (i + 4 < end) {
            load(later, given_later, i + 4, 0);
          }
          // n pairs from number `first` of the chunk, those behind the group's last row too.
          const auto move = [&]<int first, int n>() {
            std::uint32_t q[n][2];
            float scale[n];
            if (fp8) {
#pragma unroll
              for (int c = 0; c < n; ++c) {
                q[c][0] = now[first + c].word[0], q[c][1] = now[first + c].word[1];
                scale[c] = given_now[first + c];
              }
            } else if constexpr (rows == Rows::narrow) {
              std::uint32_t x[n][4];
#pragma unroll
              for (int c = 0; c < n; ++c) {
#pragma unroll
                for (int w = 0; w < 4; ++w) x[c][w] = now[first + c].word[w];
              }
              bf16 ? quantise<true, n>(x, q, scale) : quantise<false, n>(x, q, scale);
            } else {
              float x[n][8];
#pragma unroll
              for (int c = 0; c < n; ++c) {
                float of_row = 1;
                if (args.row_weight != nullptr) {
                  const int token = 2 * (chunk * pairs + first + c);
                  of_row = __shfl_sync(0xffffffffu, weight[0], (token + half) % 32);
                  if constexpr (S::tokens > 32) {
                    const float high = __shfl_sync(0xffffffffu, weight[1], (token + half) % 32);
                    if (token >= 32) of_row = high;
                  }
                }
                now[first + c].values(bf16, of_row, x[c]);
              }
              quantise<n>(x, q, scale);
            }
            if (first == 0 && chunk == 0 && round > 0) {
              mbarrier_wait(&empty[slot], (round & 1) ^ 1);
            }
#pragma unroll
            for (int c = 0; c < n; ++c) {
              const int token = 2 * (chunk * pairs + first + c);
              store_pair(ring + static_cast<std::uint32_t>(slot * S::stage_bytes + token * 128) +
                             (piece ^ static_cast<std::uint32_t>(token % 8 * 16)),
                         q[c][0], q[c][1]);
              if (part == 0) scales[slot * S::scales + 4 + token + half] = scale[c];
            }
          };
          const int left = at.count - 2 * chunk * pairs;
          if (left <= 2) {
            move.template operator()<0, 1>();
          } else {
            move.template operator()<0, 4>();
            if constexpr (pairs > 4) {
              if (left > 8) move.template operator()<4, 4>();
            }
          }
#pragma unroll
          for (int c = 0; c < pairs; ++c) {
            now[c] = later[c];
            given_now[c] = given_later[c];
          }
          if (last) break;
        }
        fence_for_async();
        __syncwarp();
        if (part == 0) mbarrier_arrive(&full[slot]);
      }
    }
    if (split > 1) cluster_wait();
  } else {
    if constexpr (S::together == 2) fewer_registers<56>();
    if (rows == Rows::pieces && !usual && !block_scales) {  // these warps alone read them
      for (int i = thread - 128; i < S::stages * S::scales; i += 256) scales[i] = 1;
    }
    named_arrive(4, 256 + 160);
    list.build(walk.groups, thread - 128, 256, 3);
    named_arrive(2, 256 + 160);
    const int tiles = list.tiles();
    if (split > 1) cluster_wait();  // the other blocks' barriers are there
    const int group = warp / 4 - 1;
    const std::uint32_t base = shared_address(stages);
    const std::uint32_t a_base = base + static_cast<std::uint32_t>(group * 64 * 128);
    const std::uint32_t b_base = base + S::weight_bytes;
    const std::uint32_t zero = unknown_zero();
    unsigned turn = 0;  // of `there` and `used`
    bool first = true;
    const bool direct = usual || split == 1 && block_scales && ends_in_registers(args.finish);
    const bool to_bf16 = args.finish.out_dtype == DType::bf16;
    for (; tile < tiles; tile += clusters, turn ^= 1, first = false) {
      const GroupTile at = list.find(tile);
      float sum_of[S::tokens / 2];
#pragma unroll
      for (int i = 0; i < S::tokens / 2; ++i) sum_of[i] = 0;
      float2 token[S::tokens / 8];  // their scales
      float weight_scales[2];       // of this thread's two rows of weights
      if constexpr (by_row) {
        const float* const of_rows =
            reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes +
                                           args.scales_at) +
            at.column * S::rows + 64 * group + warp % 4 * 16 + lane / 4;
        weight_scales[0] = __ldg(of_rows), weight_scales[1] = __ldg(of_rows + 8);
      }
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        mbarrier_wait(&full[stage], parity);
        if (rows == Rows::pieces) fence_for_async();  // the tokens came by generic copies
        const auto offset = static_cast<std::uint32_t>(stage * S::stage_bytes);
        float d[S::tokens / 2];
        wgmma_fence();
        step_e4m3<S::tokens>(d, wgmma_descriptor(a_base + offset),
                             wgmma_descriptor(b_base + offset));
        wgmma_commit();
        const float* const here = scales + stage * S::scales;
        const float gate = block_scales ? here[0] : 1, up = block_scales ? here[1] : 1;
        if (!by_row || i == begin) {
#pragma unroll
          for (int j = 0; j < S::tokens / 8; ++j) {
            token[j] = *reinterpret_cast<const float2*>(here + 4 + 8 * j + 2 * (lane % 4));
          }
        }
        wgmma_wait<0>();
        __syncwarp();
        std::uint32_t loaded = __float_as_uint(gate) | __float_as_uint(up);
#pragma unroll
        for (const float2& two : token) loaded |= __float_as_uint(two.x);
        const std::uint32_t read = once_loaded(shared_address(&empty[stage]), loaded, zero);
        if (lane == 0) arrive_at(read);
        if constexpr (by_row) {
#pragma unroll
          for (int i = 0; i < S::tokens / 2; ++i) sum_of[i] = __fadd_rn(sum_of[i], d[i]);
        }
#pragma unroll
        for (int j = 0; j < (by_row ? 0 : S::tokens / 8); ++j) {
          sum_of[4 * j] = __fmaf_rn(d[4 * j], __fmul_rn(token[j].x, gate), sum_of[4 * j]);
          sum_of[4 * j + 1] =
              __fmaf_rn(d[4 * j + 1], __fmul_rn(token[j].y, gate), sum_of[4 * j + 1]);
          sum_of[4 * j + 2] = __fmaf_rn(d[4 * j + 2], __fmul_rn(token[j].x, up), sum_of[4 * j + 2]);
          sum_of[4 * j + 3] = __fmaf_rn(d[4 * j + 3], __fmul_rn(token[j].y, up), sum_of[4 * j + 3]);
        }
        if (++stage == S::stages) stage = 0, parity ^= 1;
      }

      if constexpr (by_row) {
#pragma unroll
        for (int i = 0; i < S::tokens / 2; ++i) {
          const float of_token = i % 2 == 0 ? token[i / 4].x : token[i / 4].y;
          sum_of[i] = __fmul_rn(sum_of[i], __fmul_rn(of_token, weight_scales[i / 2 % 2]));
        }
      }
      if (!usual && walk.weights != nullptr) {
        weigh_sums<S::tokens>(walk.weights + at.row, at.count, sum_of, lane);
      }
      if (direct) {
        const std::int64_t weight_row =
            std::int64_t{at.column} * S::rows + 64 * group + warp % 4 * 16;
        if (to_bf16) {
          finish_in_registers<S::tokens, true, !usual>(args.finish, at.group, at.row, at.count,
                                                       weight_row, sum_of, lane);
        } else {
          finish_in_registers<S::tokens, false, !usual>(args.finish, at.group, at.row, at.count,
                                                        weight_row, sum_of, lane);
        }
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
          mine[(i / 4 * 8 + i % 2) * S::pitch + i / 2 % 2 * 8] = sum_of[i];
        }
        __syncwarp();
        if (split == 1) {
          named_barrier(1, 256);
        } else {
          if (lane < split) mbarrier_arrive_at(&there, static_cast<unsigned>(lane));
          mbarrier_wait_cluster(&there, turn);
        }
        const float* const row_scales =
            reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes +
                                           args.scales_at + std::int64_t{at.column} * S::rows * 4);
        const auto sum = [&](int token, int row) {
          const float* const here = sums + token * S::pitch + row;
          float all = *here;
          if (split > 1) {
            float part[4];
#pragma unroll
            for (int p = 0; p < 4; ++p) {
              part[p] = p < split ? float_of_rank(here, static_cast<unsigned>(p)) : 0;
            }
            all = part[0];
#pragma unroll
            for (int p = 1; p < 4; ++p) {
              if (p < split) all += part[p];
            }
          }
          if (block_scales) return all;
          std::int64_t from = at.row + token;
          if (walk.permutation != nullptr) from = walk.permutation[from] / args.slots;
          from = min(max(from, std::int64_t{0}), args.source_rows - 1);
          return __fmul_rn(
              all, __fmul_rn(args.row_scales[from * args.row_scale_stride], row_scales[row]));
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

template <class S>
bool launch_few(const Gpu& gpu, const PackedPlan& plan, PackedArgs args, FewChain chain) {
  chain.at_once = gpu.multiprocessors * S::together;
  args.columns = args.row_tiles;
  const FewForm form = few_form(is_usual(args, plan.split), false, args.sum_weight, chain);
  auto* const of_pieces = form != FewForm::plain ? few_rows<S, Rows::pieces>
                          : args.block_scales    ? few_rows<S, Rows::pieces, FewForm::plain>
                                                 : few_rows<S, Rows::pieces, FewForm::plain, true>;
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(S::threads),
          .shared = static_cast<std::size_t>(S::shared_bytes(args.groups, chain.ids != nullptr)),
          .cluster = static_cast<unsigned>(plan.split)},
         args.source_dtype == DType::f32       ? few_rows<S, Rows::wide>
         : args.pieces                         ? of_pieces
         : args.source_dtype == DType::f8_e4m3 ? few_rows<S, Rows::anywhere>
         : args.aligned && args.k % 8 == 0 && args.row_weight == nullptr
             ? (form == FewForm::plain   ? few_rows<S, Rows::narrow, FewForm::plain>
                : form == FewForm::pairs ? few_rows<S, Rows::narrow, form_of_pairs<S>>
                                         : few_rows<S, Rows::narrow>)
             : few_rows<S, Rows::anywhere>,
         args, chain, plan.split);
  return true;
}

}  // namespace

bool fp8_few_rows(const Gpu& gpu, const PackedPlan& plan, PackedArgs args, const FewChain& chain) {
  switch (plan.tile_tokens) {
    case 8:
      return launch_few<FewTile<8>>(gpu, plan, args, chain);
    case 16:
      return launch_few<FewTile<16>>(gpu, plan, args, chain);
    case 32:
      return launch_few<FewTile<32>>(gpu, plan, args, chain);
    default:
      return launch_few<FewTile<64>>(gpu, plan, args, chain);
  }
}

}  // namespace shunt::cuda_engine
