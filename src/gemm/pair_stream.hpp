// Products of few pairs, whose ids are known before the rows are (few_chain.hpp): what their kernel
// takes. On Hopper, prepared weights of any format.
#pragma once

#include <cstdint>

#include "gemm/few_chain.hpp"
#include "gemm/fragment_layout.hpp"
#include "gemm/hopper_product.hpp"

namespace shunt::cuda_engine {

// By value.
struct PairArgs {
  const std::int32_t* ids = nullptr;  // as FewChain
  int pairs = 0, groups = 0;
  const float* weights = nullptr;  // as FewChain
  std::int32_t* inverse = nullptr;
  GivenIds given;
  int tokens = 0;
  // Weights: tiles of 128 rows, `steps` of them along k; scales or factors behind a group's tiles.
  const char* tiles = nullptr;
  std::int64_t group_bytes = 0, scales_at = 0;
  int group_rows = 0, steps = 0;
  float unscale = 1;
  // Row r of the order comes from row pair / slots of the source, with 0 from row r.
  const char* source = nullptr;
  std::int64_t source_row_bytes = 0, k = 0;
  DType source_dtype = DType::bf16;
  int slots = 0;
  bool early = false;        // weights and ids are older than the grid before this one
  bool rows_older = false;   // the source is
  bool beside = false;       // as FewChain
  bool from_logits = false;  // likewise
  Finish finish;
  PairSum sum;
  // The launcher's: the first `more` of the warps that share out k have `each` + 1 steps; sets of
  // such warps in a block; bytes of a row in shared memory and of a warp's slots; 65536 / slots,
  // up.
  int each = 1, more = 0, sets = 1, pitch = 0, ring_bytes = 0;
  unsigned slots_inverse = 0;
  // A block lets the next product start when a warp has so many steps left to order; less than 0:
  // at once.
  int next_left = -1;
};

// From any of the kernels' arguments for the same product.
template <class Args, class Layout>
PairArgs pair_args(const Args& args, const Layout& layout, const FewChain& chain) {
  return {.ids = chain.ids,
          .pairs = chain.pairs,
          .groups = args.groups,
          .weights = chain.weights,
          .inverse = chain.inverse,
          .given = chain.given,
          .tokens = chain.tokens,
          .tiles = args.tiles,
          .group_bytes = args.group_bytes,
          .group_rows = static_cast<int>(layout.rows()),
          .steps = args.steps,
          .source = args.source,
          .source_row_bytes = args.source_row_bytes,
          .k = layout.k,
          .slots = args.permutation != nullptr ? args.slots : 0,
          .early = args.early,
          .rows_older = chain.rows_older,
          .beside = chain.beside,
          .from_logits = chain.from_logits,
          .finish = args.finish,
          .sum = chain.sum};
}

// Whether a block has room for a group's rows of k numbers.
constexpr bool rows_fit(std::int64_t tokens, std::int64_t k) {
  constexpr std::int64_t most_bytes = std::int64_t{48} * 1024;
  return k % 8 == 0 && tokens * (k + 256) * 2 <= most_bytes;
}
constexpr bool pairs_stream(const FewChain& chain, std::int64_t k) {
  return chain.ids != nullptr && chain.tokens > 0 && rows_fit(chain.tokens, k);
}

// How a grid is cut: `parts` warps share out the steps of a tile, a block has `sets` of them, and a
// multiprocessor `warps`, 8 (PairLimits::of_one), 16 or 24: what each has under way depends on it.
struct PairPlan {
  int parts = 0, sets = 1, warps = 0;  // parts 0: another kernel is faster
};
struct PairLimits {
  int least;                  // of parts
  int most;                   // of warps
  int longest;                // steps of a warp, beyond which more warps are faster
  int most_parts = 8;         // a power of two
  int longest_of_more = 24;   // steps that one of 24 warps has at most
  int longest_of_early = 16;  // and one of 16, of some tokens' rows that wait for nothing else
  int most_late = 24;         // of warps, where the next product may start late (next_left)
  int block_warps = 4;        // a block has as many, or one set of more
  // Warps of a multiprocessor that one token's products have at most, so that the second one's
  // blocks find room beside the first one's, whose blocks are one of a multiprocessor and order
  // all but `left_of_one` steps before these come. 0: as those of more tokens.
  int of_one = 0, left_of_one = 8;
  bool fills = false;  // only where there are blocks for three quarters of the multiprocessors
  // A first product of some tokens that does not fit at once, or only in parts that are too long,
  // has blocks of eight warps nevertheless, where they fill the GPU so. As `of_one`, whatever the
  // limits above say.
  bool in_rounds = false;
};
// What is cut. Tiles are of as many rows of weights as a warp takes; bytes are of shared memory.
struct PairSizes {
  int tiles, steps;   // of a group
  double groups_hit;  // where routing is uniform
  int most_hit = 1;
  int tokens = 1;
  bool waits = false;   // for the ids, before any weights: a layer's first product
  bool beside = false;  // as FewChain
  int row_bytes = 0;    // a block's, before those of its warps
  int warp_bytes = 0, more_warp_bytes = 0;  // a warp's, of 16 and of 24 on a multiprocessor
  int one_warp_bytes = 0;                   // and of one token's first product, of `of_one`
};
// Of a block's shared memory, the GPU's own.
inline constexpr int own_shared_bytes = 1024;
PairPlan plan_pairs(const PairSizes& sizes, const PairLimits& limits, int multiprocessors,
                    std::int64_t shared_bytes);
// What a block of an early product asks of shared memory at least, so that no multiprocessor holds
// more than its share of `blocks`, all of a grid: they come one by one as those of the product
// before end, and whichever has room first would take the most of them. 0 where a share is one
// block.
int share_bytes(std::int64_t blocks, int multiprocessors, std::int64_t shared_bytes);
// Whether an early product's blocks are so shared out. Only dependent launches overlap; layers of
// one token and of two lost by it where other products run beside (docs/notes/cuda-layer.md, "Even
// shares of down's blocks").
bool shares_blocks(const Gpu& gpu, const PairArgs& args);
// PairArgs::next_left of a product. First ones let the next start late where each warp, of
// args.each steps along k and `depth` of them under way, has as many left to order, or where there
// are as few as PairLimits::of_one.
int next_left(const Gpu& gpu, const PairArgs& args, const PairPlan& plan, const PairLimits& limits,
              int depth);
// Whether a product likely is one pass, by what plan_pairs() weighs for 16 warps but for the room
// in shared memory and for shorter parts of some second products: `rows` of a group's weights in
// tiles of 16, all of `steps` along k.
bool in_one_pass(std::int64_t rows, std::int64_t steps, double groups_hit, int multiprocessors);
// What such a product of a layer is predicted to take, in microseconds, for so many bytes of
// weights.
double one_pass_us(double bytes, const GpuFigures& gpu);
// Groups that so many pairs of different tokens hit where routing is uniform.
double groups_hit(int groups, int pairs, int tokens);

// False: another kernel is faster; nothing was enqueued.
using PairStream = bool(const Gpu& gpu, const PairArgs& args);
PairStream pair_stream_bf16, pair_stream_f16, pair_stream_fp8;
using FragmentPairStream = bool(const Gpu& gpu, const FragmentLayout& layout, const PairArgs& args);
FragmentPairStream pair_stream_dense3, pair_stream_fp4, pair_stream_int4, pair_stream_wide;

}  // namespace shunt::cuda_engine
