// order: (token, slot) pairs sorted by expert, stably: within an expert by token, then by slot.
// gather: rows of hidden states in that order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/quantise.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// L local experts: [first_expert, first_expert + local_experts), renumbered from 0, or those that
// expert_map maps to 0 .. L-1 (then first_expert is 0). Pairs of other experts, and ids < 0 or
// >= experts, are skipped.
struct OrderSpec {
  int experts = 0;  // ids run over [0, experts); shared slots included; 1 .. 65536
  int slots = 0;    // S, ids a token; 1 .. 128
  int first_expert = 0;
  int local_experts = -1;  // L; -1: all from first_expert on, or as many as `experts` with a map
  bool expert_map = false;

  // Padded-tile form: every expert's rows are padded to a multiple of `tile`. 0: compact form only.
  int tile = 0;
  std::int32_t sentinel = -1;         // token id of a padding row; -1 stands for T
  bool tile_for_empty_expert = true;  // an expert without tokens still gets one tile

  bool operator==(const OrderSpec&) const = default;
  int locals() const { return local_experts < 0 ? experts - first_expert : local_experts; }
};

// Compact JSON with every field, and its reverse. from_json refuses an unknown key, a missing
// `experts` or `slots`, and any value that is not legal, by name.
std::string to_json(const OrderSpec& spec);
OrderSpec order_spec_from_json(const std::string& json);

struct OrderInputs {
  Tensor ids{};           // [T, S] i32, dense
  Tensor weights{};       // [T, S] f32, dense; required by the outputs that carry weights
  Tensor expert_map{};    // [experts] i32: local index in [0, L) or -1; iff spec.expert_map
  Tensor valid_tokens{};  // [1] i32, optional: tokens at or past it are skipped
};

// Any subset, at least one. All dense, apart from the inputs. N = T * S, P =
// padded_rows_capacity(spec, T); both must be below 2^31.
struct OrderOutputs {
  // compact: R = offsets[L] rows
  Tensor offsets{};      // [L + 1] i32: rows [offsets[e], offsets[e+1]) belong to local expert e
  Tensor permutation{};  // [N] i32: pair index token * S + slot of each row; R are written
  Tensor inverse{};      // [T, S] i32: row of each pair, -1 where it was skipped
  Tensor weights{};      // [N] f32: weight of each row; R are written
  // padded tiles (moe-sorting); padding rows, and all past the last tile, hold the sentinel and
  // weight 0; unused tiles hold -1
  Tensor sorted_token_ids{};        // [P] i32: token of each row
  Tensor sorted_weights{};          // [P] f32
  Tensor sorted_expert_ids{};       // [P / tile] i32: local expert of each tile
  Tensor num_tokens_post_padded{};  // [1] i32: rows, padding included
  Tensor num_sorted_tiles{};        // [1] i32: that / tile
  Tensor padded_inverse{};          // [T, S] i32: padded row of each pair, or -1
  Tensor zeroed{};                  // any dense tensor, set to 0 in the same pass
};

// Rows that the padded form can need for T tokens, whatever the ids; a multiple of tile (0 when
// tile is 0). Some ids need exactly as many. Throws Error for an illegal spec or T.
std::int64_t padded_rows_capacity(const OrderSpec& spec, std::int64_t tokens);

Support supports(const OrderSpec& spec, Device device);
// Independent of the tokens on the CPU: T = 0 gives enough for any T.
std::size_t order_workspace_bytes(const Context& context, const OrderSpec& spec,
                                  std::int64_t tokens);
// T = 0 is legal. Duplicate ids in a row are kept, each a pair of its own. The result does not
// depend on the number of threads. Throws Error for a spec that supports() refuses, a missing,
// superfluous or misshapen tensor, a sentinel that is a token, a workspace too small, and (CPU) an
// expert_map out of range.
void order(const Context& context, const OrderSpec& spec, const OrderInputs& in,
           const OrderOutputs& out, Workspace workspace);

// The last three fields: a QuantiseSpec (quantise.hpp).
struct GatherSpec {
  int slots = 0;                 // S of the order
  bool scale_by_weight = false;  // rows are multiplied by their weight, in f32
  Quantise quantise = Quantise::none;
  float scale_upper_bound = 0;  // of amax; 0: none; finite
  bool power_of_two_scales = false;
  QuantiseSpec rounding() const { return {quantise, scale_upper_bound, power_of_two_scales}; }
  bool operator==(const GatherSpec&) const = default;
};
std::string to_json(const GatherSpec& spec);
GatherSpec gather_spec_from_json(const std::string& json);

struct GatherInputs {
  Tensor hidden{};       // [T, H] f32 | bf16 | f16, rows may be strided
  Tensor permutation{};  // [N] i32 of order; rows past the count are left alone
  Tensor rows{};         // [1] i32: R (offsets[L])
  Tensor weights{};      // [N] f32 in row order; iff scale_by_weight
  // [T, S] i32 of the same order, optional: with it a GPU reads every token's row once, whatever S.
  Tensor inverse{};
};

Support supports(const GatherSpec& spec, Device device);
// rows [N, H] f32 | bf16 | f16, may be strided: hidden[permutation / S], rounded to nearest even;
// f16 saturates. With quantise: rows are f8_e4m3, and scales is f32 [N], or [N, ceil(H / 128)],
// with any strides. rows and hidden do not overlap. No workspace. Throws Error for bad shapes, and
// (CPU) a count or a permutation out of range; a GPU leaves such rows alone.
void gather(const Context& context, const GatherSpec& spec, const GatherInputs& in, Tensor rows,
            Tensor scales = {});

}  // namespace shunt
