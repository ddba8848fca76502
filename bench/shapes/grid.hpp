// The routing stages' shapes that docs/performance.md reports: `shunt bench STAGE --grid`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shunt/layer.hpp"

namespace shunt::bench {

// How rows of groups lie: one group after the other by offsets; masked, with room for twice the
// most that a group has; dense, for groups of equal size.
enum class Walk { offsets, masked, dense };

// Where a layer's call begins: with its router, with given logits, or with given ids and weights.
enum class RoutingFrom { hidden, logits, ids };

// One case of one of the stages around the experts' GEMMs.
struct StageShape {
  std::string stage;  // route (from hidden states), gate (from logits), order, shuffle (gate and
                      // order), gather, combine, combine_shuffling, split_shuffling, scatter_add,
                      // chain (route, order, gather, combine), gemm, indexed, activate, layer
  RouteSpec route;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  DType dtype = DType::bf16;      // of hidden states and router weights, of logits, or of rows
  int tile = 0;                   // order: of the padded form; 0: the compact one
  int ranks = 0;                  // the shuffles and scatter_add: of the expert-parallel group
  bool dependent_launch = false;  // chain: kernels start while their predecessors end
  // gemm: [tokens x slots, hidden] times [experts, columns, hidden]; rows as routing spreads them,
  // or so many in each group.
  std::int64_t columns = 0;
  std::int64_t group_rows = 0;
  // indexed: the same columns; a row of hidden for each token, or for each pair, as down has them.
  bool row_a_pair = false;
  std::shared_ptr<const LayerSpec> layer;  // layer, activate
  // gemm, indexed (not rows), layer, activate (rows alone): of the experts, and what their rows are
  // rounded to.
  FormatSpec format{};
  FormatSpec shared_format{};  // layer: of the shared expert
  RowFormat rows = RowFormat::as_dtype;
  bool fast_accumulation = false;          // gemm, layer: of rows fp8_token
  Walk walk = Walk::offsets;               // gemm
  RoutingFrom from = RoutingFrom::hidden;  // layer
  std::int64_t valid = 0;                  // layer: so many of its tokens are; 0: all, and not said
};

const std::vector<StageShape>& routing_grid();
// Those of the grouped GEMM: `shunt bench gemm --grid`.
const std::vector<StageShape>& gemm_grid();
// The k best logits, weighed by a softmax over these.
RouteSpec softmax_of_top(int experts, int top_k);
// DeepSeek-V3's: sigmoid scores, selected with a bias within the best groups, renormalised.
RouteSpec biased_groups(int experts, int top_k, Groups groups);

}  // namespace shunt::bench
