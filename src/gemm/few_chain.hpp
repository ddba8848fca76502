// What a layer tells the kernels for few rows beside a product itself: its pairs where they are so
// few that each block orders them by itself, which weights are read next, and what becomes of one
// token's rows.
#pragma once

#include <cstdint>

#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Tokens are at most a tile's rows: where a token's ids are different ones, no group has more.
inline constexpr int most_chained_pairs = 32, most_chained_tokens = 8, most_chained_groups = 512;

// Weights that the next product reads: tiles of 128 rows by all of k, one behind the other.
struct NextWeights {
  const char* tiles = nullptr;  // null: nothing is known
  std::int64_t group_bytes = 0;
  int columns = 0, tile_bytes = 0;
};

// One token's rows, of 16 bits, added up as combine() adds them: the sum over pairs of
// weights[pair] times the pair's row, in the order of pairs, and the residual.
struct PairSum {
  void* out = nullptr;  // [columns of the product]; null: rows are left as they are
  DType out_dtype = DType::f32;
  const void* residual = nullptr;  // [columns]; null: none
  DType residual_dtype = DType::f32;
  const float* weights = nullptr;       // [pairs], as old as the ids; null: all 1
  const std::int32_t* valid = nullptr;  // [1], as old; unless null: 0 and the token's sum is 0
  bool* heard = nullptr;  // of the host, with out: becomes true where the kernel enqueued adds up
};
inline constexpr int most_summed_pairs = 8;  // sets of warps in a block

// What is to know of ids that the layer's router did not choose; as old as they are.
struct GivenIds {
  const std::int32_t* map = nullptr;  // [mapped]: each id's group; null: an id is its group
  int mapped = 0;
  const std::int32_t* valid = nullptr;  // [1]: tokens, further ones have no group; null: all
  int slots = 1;                        // pairs of a token
  bool distinct = true;  // a token's ids are different ones: no group has more rows than tokens
};

struct FewChain {
  // Not null: pair p is one of group ids[p], or of none where there is no such group. They stand
  // for offsets and, where the product has one, for the permutation.
  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;  // with ids, of rows that are weighed: [pairs], as old as ids
  GivenIds given;
  int pairs = 0;
  int tokens = 0;            // of the pairs
  bool rows_older = false;   // than the grid before this one: what the product reads rows from
  bool beside = false;       // other products run beside it, on another stream
  bool from_logits = false;  // the layer's ids are chosen from logits: no router's product before
  std::int32_t* inverse = nullptr;  // with ids, unless null: is written, each pair's row or -1
  NextWeights next;
  PairSum sum;      // of a product with ids and one token, whose pairs are of different groups
  int at_once = 0;  // blocks that the GPU holds; the launcher of a kernel fills it in
};

// Whether a product may be one with ids, as far as sizes go.
template <class Product>
bool few_enough(const Product& p) {
  return p.prepared != nullptr && p.groups <= most_chained_groups &&
         p.out.shape[0] <= most_chained_pairs;
}

}  // namespace shunt::cuda_engine
