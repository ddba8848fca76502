// Grouped GEMM of packed weights and 16-bit rows on GPUs that have no kernel of their own for it
// (A100, Ada, ..): codes become operands of mma.sync in registers, since compute capability 8.0.
//
// A block of four warps computes tiles of 128 rows of weights by up to `tokens` rows of a group,
// one after the other; tile_search.cuh says where a tile lies. k goes by in steps of 128, a ring of
// them in shared memory: a tile of the layout, scales and all, is one long read, copied
// asynchronously in pieces of 16 bytes, and so are rows that are as they must be; others pass
// through registers. The one barrier of a step means: every thread's part of this step has landed,
// and the one before has been read, so that its part of the ring may be written.
//
// A warp has 32 rows of weights by all tokens (fragment_warp.cuh), and what the kernel for few rows
// computes: scales of int4, dense3 and fp8_block multiply the sums of their groups. A sum runs over
// k from first to last, whatever the tile: a row's bits depend on itself and its weights alone. A
// warp's sums go through its own part of the ring's last stage to finish_eight.cuh, eight tokens at
// a time; the other stages fill with the next tile meanwhile.
//
// Bytes: codes of the groups hit once from memory and, within L2, once a tile of tokens; rows once
// a tile of weights. Shared memory: 99 KB at most, what 8.6 and 8.9 give a block.
#pragma once

#include <algorithm>

#include "cuda/launch.hpp"
#include "gemm/finish_eight.cuh"
#include "gemm/fragment_book.cuh"
#include "gemm/fragment_product.hpp"
#include "gemm/fragment_rows.cuh"
#include "gemm/fragment_warp.cuh"
#include "gemm/mma_fragment_tiles.hpp"
#include "gemm/tile_search.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int tokens_>
struct FragmentTiles {
  using L = L_;
  static constexpr int tokens = tokens_;
  static constexpr int blocks = 2, rows = 16 * blocks;  // of weights, a warp's
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int weight_bytes = L::parts.bytes, token_bytes = tokens * 256;
  static constexpr int stage_bytes = (weight_bytes + token_bytes + 127) / 128 * 128;
  static constexpr int stages = mma_fragment_stages(stage_bytes, L::Book::bytes);
  static constexpr int shared_bytes = stages * stage_bytes + L::Book::bytes;
  static constexpr int pitch = rows + 4;  // floats from one token's sums to the next
  static constexpr bool few = tokens == mma_fragment_tokens(false, false);
  // Of 32 of k of eight tokens, from this lane's address for the first ones.
  static SHUNT_BOTH std::uint32_t words_at(std::uint32_t first, int eight, int part) {
    return (first ^ static_cast<std::uint32_t>(part % 2 * 64)) +
           static_cast<std::uint32_t>(part / 2 * tokens * 128 + eight * 1024);
  }
  static_assert(warps * rows == FragmentLayout::tile_rows && stages >= 2);
  static_assert(warps * 8 * pitch * int{sizeof(float)} <= stage_bytes);
};

#if defined(__CUDA_ARCH__)

// The end of a tile of a warp, whose rows of weights begin at `first` of the group's: through
// `shared`, one stage's bytes.
template <class S>
__device__ __forceinline__ void write_fragment_tile(const FragmentArgs& args,
                                                    const TileSearch::Tile& at,
                                                    const WarpSums<S, S::blocks>& sums,
                                                    std::int64_t first, unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const box =
      reinterpret_cast<float*>(shared) + static_cast<int>(threadIdx.x) / 32 * 8 * S::pitch;
  const auto* const factors =
      reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes + args.factors_at) +
      first;
  float factor[S::blocks][2];
#pragma unroll
  for (int b = 0; b < S::blocks; ++b) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      factor[b][upper] = __fmul_rn(__ldg(factors + 16 * b + 8 * upper + lane / 4), args.unscale);
    }
  }
  const Finish& f = args.finish;
  const int halves = f.paired ? 2 : 1;  // of a column: gate and up, eight of each in turn
  const int shift = 3 - halves;         // of a token's eights
  static_assert(S::rows == 32);
#pragma unroll 1
  for (int eight = 0; eight < S::tokens / 8; ++eight) {
    const std::int64_t first_row = at.row + 8 * eight;
    if (first_row >= at.end) return;
#pragma unroll
    for (int n = 0; n < S::tokens / 8; ++n) {
      if (n != eight) continue;  // sums are registers
#pragma unroll
      for (int b = 0; b < S::blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          box[(2 * (lane % 4) + e % 2) * S::pitch + 16 * b + e / 2 * 8 + lane / 4] =
              __fmul_rn(sums.of(n, e, b), factor[b][e / 2]);
        }
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 8 << shift; i += 32) {
      const int token = i >> shift, o = 8 * (i & ((1 << shift) - 1));
      const std::int64_t row = first_row + token, column = first / halves + o;
      if (row >= at.end || column >= f.out_columns) continue;
      finish_eight<S::L::bf16>(f, args.sum_scale, at.group, row, column,
                               box + token * S::pitch + o * halves);
    }
    __syncwarp();
  }
}

#endif

template <class S>
__global__ void __launch_bounds__(S::threads, mma_fragment_blocks(S::tokens))
    multiply_fragment_tiles(const __grid_constant__ FragmentArgs args) {
#if defined(__CUDA_ARCH__)
  using L = typename S::L;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int sources[S::tokens];
  __shared__ float scales[S::tokens];
  wait_for_predecessor();
  let_successor_start();

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int block = thread / 32 * S::blocks;  // of 16 rows, the warp's first
  unsigned char* const book_memory = shared + S::stages * S::stage_bytes;
  const typename L::Book book = book_at<L>(book_memory, lane);
  write_book<L>(book_memory, thread, S::threads);  // the first tile's barriers are behind it
  const std::uint32_t ring = shared_address(shared);
  const std::uint32_t tokens_at =
      ring + static_cast<std::uint32_t>(lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16);

  ListedRows<L::bf16, S::tokens, S::threads> rows(thread, sources, scales);
  const char* weights = nullptr;  // a tile's, from this thread's first piece on
  const auto copy_step = [&](int step, int stage) {
    const std::uint32_t to = ring + static_cast<std::uint32_t>(stage * S::stage_bytes);
    const std::int64_t k = std::int64_t{step} * 128;
    rows.copy(args, to, k);
    rows.copy(args, to + S::tokens * 128, k + 64);
    const char* const from = weights + std::int64_t{step} * S::weight_bytes;
#pragma unroll
    for (int i = 0; i < S::weight_bytes; i += 16 * S::threads) {
      if (i + 16 * thread >= S::weight_bytes) continue;
      cp_async_16(to + static_cast<std::uint32_t>(S::token_bytes + i + 16 * thread), from + i);
    }
  };
  // Nobody may still read what was listed.
  const auto start = [&](const TileSearch::Tile& at) {
    const int count = static_cast<int>(min(at.end - at.row, std::int64_t{S::tokens}));
    list_rows<S::tokens, S::threads>(args, static_cast<int>(at.row), count, thread, sources,
                                     scales);
    __syncthreads();
    rows.begin(args, count);
    weights = args.tiles + at.group * args.group_bytes + at.column * args.steps * S::weight_bytes +
              16 * thread;
#pragma unroll 1
    for (int s = 0; s < S::stages - 1; ++s) {
      if (s < args.steps) copy_step(s, s);
      cp_async_commit();  // an empty group too: the count of groups is that of steps
    }
  };

  TileSearch search(args.walk, args.groups, S::tokens, args.columns);
  std::int64_t number = blockIdx.x;
  TileSearch::Tile at = search.find(number);
  if (at.group < 0) return;
  start(at);
  while (true) {
    WarpSums<S, S::blocks> sums;
    sums.book = book;
    sums.clear();
    const auto multiply = [&]<int some>() {
      int stage = 0, free_stage = S::stages - 1;
#pragma unroll 1
      for (int s = 0; s < args.steps; ++s) {
        cp_async_wait<S::stages - 2>();
        __syncthreads();
        if (s + S::stages - 1 < args.steps) copy_step(s + S::stages - 1, free_stage);
        cp_async_commit();
        const int offset = stage * S::stage_bytes;
        const unsigned char* const tile = shared + offset + S::token_bytes;
        sums.template add<some>(tile, tile, tile, tokens_at + static_cast<std::uint32_t>(offset),
                                block, lane);
        free_stage = stage;
        stage = stage + 1 == S::stages ? 0 : stage + 1;
      }
    };
    // Of tiles of few rows, half of them where there are no more; in large ones that gained
    // nothing.
    if constexpr (S::few) {
      at.end - at.row <= S::tokens / 2 ? multiply.template operator()<S::tokens / 16>()
                                       : multiply.template operator()<S::tokens / 8>();
    } else {
      multiply.template operator()<S::tokens / 8>();
    }
    cp_async_wait<0>();
    __syncthreads();
    // The next tile's first steps arrive while this one is written by way of the last stage.
    number += gridDim.x;
    const TileSearch::Tile next = search.find(number);
    if (next.group >= 0) start(next);
    write_fragment_tile<S>(args, at, sums, at.column * FragmentLayout::tile_rows + 16 * block,
                           shared + (S::stages - 1) * S::stage_bytes);
    if (next.group < 0) return;
    at = next;
  }
#endif
}

template <class L>
void launch_mma_fragments(const Gpu& gpu, const PackedPlan& plan, const FragmentArgs& args) {
  const auto go = [&]<class S>(std::type_identity<S>) {
    launch("grouped_gemm", gpu,
           {.grid = dim3(static_cast<unsigned>(plan.blocks)),
            .block = dim3(S::threads),
            .shared = S::shared_bytes},
           multiply_fragment_tiles<S>, args);
  };
  constexpr bool looked_up = L::codes == Codes::dense3;
  constexpr int few = mma_fragment_tokens(false, looked_up),
                many = mma_fragment_tokens(true, looked_up);
  plan.tile_tokens == few ? go(std::type_identity<FragmentTiles<L, few>>())
                          : go(std::type_identity<FragmentTiles<L, many>>());
}

}  // namespace

}  // namespace shunt::cuda_engine
