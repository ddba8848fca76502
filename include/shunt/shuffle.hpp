// Rows that come from, or go to, the ranks of an expert-parallel group: reordered between the order
// of ranks, in which an all-to-all exchanges them, and the order of experts, in which a grouped
// GEMM takes them; and added back to their tokens.
//
// EP ranks, E experts, n[r, e] rows of rank r for expert e. Sizes stay on the device: padding costs
// memory and network, never a copy or a sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Rank order: row i of pair (r, e) is row base(r) + sum over e' < e of n[r, e'] + i, with
//   base(r) = sum over r' < r, all e of n[r', e], or with `padded` r * T / EP: every rank has T /
//   EP rows, of which the first sum over e of n[r, e] are in use.
// Expert order, of the experts [first_expert, end_expert) alone: row i of pair (r, e) is row
//   sum over e' < e, all r of n[r, e'] + sum over r' < r of n[r', e] + i.
struct ShuffleSpec {
  int ranks = 0;         // EP, 1 .. 4096
  int experts = 0;       // E, 1 .. 65536; ranks * experts at most 2^20
  int first_expert = 0;  // of those that are moved
  int end_expert = -1;   // past the last; -1: experts
  bool padded = false;
  bool zero_fill = false;  // split_shuffling: rows that get nothing are set to 0, not left alone
  bool operator==(const ShuffleSpec&) const = default;
  int end() const { return end_expert < 0 ? experts : end_expert; }
};
// Compact JSON with every field, and its reverse, which refuses unknown keys and illegal values.
std::string to_json(const ShuffleSpec& spec);
ShuffleSpec shuffle_spec_from_json(const std::string& json);

Support supports(const ShuffleSpec& spec, Device device);
// Of either shuffle.
std::size_t shuffle_workspace_bytes(const Context& context, const ShuffleSpec& spec);

// From rank order to expert order, of received rows.
//   tokens        [T, D] of any dtype of whole bytes, rank order; rows may be strided. padded: EP
//                 divides T
//   token_counts  [EP, E] i32, dense: n
//   rows          [T, D] of the same dtype, expert order; rows past the last are left alone
//   counts        [L + 1] i32, dense, optional: rows of each of the L = end - first experts, then
//                 of all of them
// tokens and rows do not overlap; zero_fill must be false, and some expert be moved. Throws Error
// for bad shapes, a workspace too small, and (CPU) a negative count or more rows than there is room
// for; a GPU takes a negative count as 0 and leaves out rows that have no room.
void combine_shuffling(const Context& context, const ShuffleSpec& spec, Tensor tokens,
                       Tensor token_counts, Tensor rows, Tensor counts, Workspace workspace);
// The inverse: from rows in expert order to tokens in rank order, the form of the next all-to-all.
// Same shapes. Rows of rank order that none of the experts has are left alone, or set to 0.
void split_shuffling(const Context& context, const ShuffleSpec& spec, Tensor rows,
                     Tensor token_counts, Tensor tokens, Workspace workspace);

// Between the two ways of saying how many rows each of L experts has: counts, which ranks exchange
// and combine_shuffling() gives, and offsets, which order() gives and grouped_gemm() takes. Both on
// the context's device, dense i32, apart from each other: offsets [L + 1], counts [L], or [L + 1]
// with the sum of all behind them, which is written and not read. L at most 65536. Throw Error for
// bad shapes, and (CPU) for a negative count, a sum of 2^31 or more, offsets that descend or do not
// begin with 0; a GPU takes a negative count as 0, and what is more than 2^31 - 1 as that.
void offsets_from_counts(const Context& context, Tensor counts, Tensor offsets);
void counts_from_offsets(const Context& context, Tensor offsets, Tensor counts);

// Results that came back from every rank, added to their tokens. The positions p = 0 .. P-1 are the
// (token, expert) pairs in the order of experts; rank r computed those of its E / EP experts, and
// sent them at the same positions of its padded block:
//   out[t] = [out[t]] + sum over p = 0 .. P-1, in this order, with token_indices[p] = t of
//            rows[rank(p), p];   P = sum of token_counts, rank(p) = expert(p) / (E / EP)
// The sum runs in f32 from 0 and takes the old out[t] last; it has the same bits in any run, and no
// atomics. A token without a pair gets 0, or what it had.
struct ScatterAddSpec {
  bool accumulate = true;  // out is added to; false: overwritten
  bool operator==(const ScatterAddSpec&) const = default;
};
std::string to_json(const ScatterAddSpec& spec);
ScatterAddSpec scatter_add_spec_from_json(const std::string& json);

struct ScatterAddInputs {
  Tensor rows{};           // [EP, K, D] f32 | bf16 | f16, the last stride 1; EP at most 4096
  Tensor token_counts{};   // [E] i32, dense; EP divides E
  Tensor token_indices{};  // [K] i32, dense; -1: the position is skipped
};

Support supports(const ScatterAddSpec& spec, Device device);
// Bytes for up to T tokens and K positions; T below 2^31 - 1, K below 2^31.
std::size_t scatter_add_workspace_bytes(const Context& context, const ScatterAddSpec& spec,
                                        std::int64_t tokens, std::int64_t positions);
// out [T, D] f32 | bf16 | f16, rows may be strided, apart from those of `rows`; f16 saturates.
// Throws Error for bad shapes, a workspace too small, and (CPU) a negative count, a sum of them
// past K or a token that is none; a GPU takes a negative count as 0, stops at K and skips the
// position.
void scatter_add_padded(const Context& context, const ScatterAddSpec& spec,
                        const ScatterAddInputs& in, Tensor out, Workspace workspace);

}  // namespace shunt
