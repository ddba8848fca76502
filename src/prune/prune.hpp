// Pruning to 2:4: of every four neighbours along K at most two stay, as sparse tensor cores want
// it, Blackwell's of 4-bit weights in aligned pairs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "prune/statistics.hpp"
#include "shunt/context.hpp"

namespace shunt {

enum class PruneMethod : std::int32_t {
  magnitude = 0,  // keeps the largest |w|
  wanda = 1,      // keeps the largest |w| * |x_k|, x_k the column of inputs that w multiplies
  obs = 2,        // keeps the largest w^2 / [H^-1]_kk, and lets later columns make up for the rest
};
std::string to_string(PruneMethod method);
// Throws Error{invalid_argument} naming the text and the methods that there are.
PruneMethod prune_method_from_string(const std::string& text);

enum class PrunePattern : std::int32_t {
  two_of_four = 0,  // any two of k = 0..3, 4..7, ..: "2:4"
  pairs = 1,        // one of the pairs 0..1 and 2..3, ..: "2:4-pairs"
};
std::string to_string(PrunePattern pattern);
// Throws Error{invalid_argument} naming the text and the patterns that there are.
PrunePattern prune_pattern_from_string(const std::string& text);

struct PruneSpec {
  PruneMethod method = PruneMethod::magnitude;
  PrunePattern pattern = PrunePattern::two_of_four;
  double damping = 0.01;  // obs: this share of H's mean diagonal is added to its diagonal
  bool operator==(const PruneSpec&) const = default;
};

// The codes that pruned weights are going to have, so that obs lets later columns make up for
// rounding too, as GPTQ does: e2m1 times an e4m3 for 16 columns times `global`. In pairs both
// scales of 32 columns are the same.
struct PruneRounding {
  float global = 1;
  std::vector<std::uint8_t> scales{};  // made: [n, ceil(k / 16)] e4m3
};

// Zeroes in place all but two of every four of w [n, k] f32, dense: of groups k = 0..3, 4..7, ..,
// of which K may cut the last short. Of equal scores that of the larger |w| stays, of equal ones
// the lower k. In pairs, the scores of magnitude and wanda are sums of squares over a pair.
//
// wanda: M. Sun et al., A Simple and Effective Pruning Approach for Large Language Models.
// obs: E. Frantar, D. Alistarh, SparseGPT. With H = X^T X + damping, columns go from left to right;
// at the first of a group the two of least w_k^2 / [H_F^-1]_kk are chosen in each row, F being the
// columns from k on, and when column k is zeroed all w_F -= w_k [H_F^-1]_k,F / [H_F^-1]_kk. In
// pairs, that of least w_P^T ([H_F^-1]_PP)^-1 w_P is chosen, F from the pair P on.
// Everything in double; the same for any number of threads. With `rounding` (obs alone; elsewhere
// its scales stay empty) what stays is rounded when its column is reached, and w_k in the formula
// is what that changed; a block's scale is fitted to the weights that would stay as it is reached,
// so that w holds code * scale * global exactly, in f32 rounded once.
//
// Throws Error{invalid_argument} for wanda and obs without statistics of K columns (obs: with their
// products), and for weights that are not finite. Statistics of no rows at all say nothing: then,
// where wanda has norms that are all 0 or one that is not finite, and where H is not positive
// definite for all its damping, magnitude is what is done. Returns the method that was.
PruneMethod prune_2_of_4(const Context& context, const PruneSpec& spec, float* w, std::int64_t n,
                         std::int64_t k, const InputStatistics* statistics = nullptr,
                         PruneRounding* rounding = nullptr);

}  // namespace shunt
