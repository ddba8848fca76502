// NVFP4 as Blackwell multiplies sparse weights: kept in aligned pairs, one scale for 32 of k.
#pragma once

#include <cstdint>

#include "shunt/format.hpp"

namespace shunt {

// Rounds values [n, k] f32 as pack() does, but with one e4m3 for 32 of k (in both of the format's
// scales for 16): to nvfp4, as rows for sparse weights are; or to sparse_nvfp4 of which every four
// along k keep the aligned pair of the larger sum of squares, of equal ones the first, and to which
// the scale is fitted. What comes is a matrix of that format like any other. `memory`:
// packed_bytes({format}, n, k) on the host.
PackedMatrix pack_in_pairs(Format format, const float* values, std::int64_t n, std::int64_t k,
                           Workspace memory, float global_amax = 0);

}  // namespace shunt
