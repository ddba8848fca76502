// The shuffles and the padded scatter-add, plain: what every engine is checked against.
#pragma once

#include "shunt/shuffle.hpp"

namespace shunt {

// Take what the operations take, check nothing; sums in double.
void combine_shuffling_reference(const ShuffleSpec& spec, Tensor tokens, Tensor token_counts,
                                 Tensor rows, Tensor counts);
void split_shuffling_reference(const ShuffleSpec& spec, Tensor rows, Tensor token_counts,
                               Tensor tokens);
void scatter_add_padded_reference(const ScatterAddSpec& spec, const ScatterAddInputs& in,
                                  Tensor out);

}  // namespace shunt
