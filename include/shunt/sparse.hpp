// The layout of other 2:4 sparse FP4 kernels, k-major: read and written.
#pragma once

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"

namespace shunt {

// A matrix w[N, K] of which two of every four along K are kept, all tensors dense and with N
// contiguous, K a multiple of 16:
//   w[n, 4 g + i] = e2m1 * e4m3 scale[k / 16, n] * global_scale
struct KMajorSparse {
  Tensor comp{};   // u8 [K / 4, N]: the value at the first position in the low nibble
  Tensor meta{};   // u8 [K / 8, N]: of two groups of four, bits 1:0, 3:2 and 5:4, 7:6: where
  Tensor scale{};  // u8 or f8_e4m3 [K / 16, N]
  float global_scale = 1;  // multiplies
};

// As a PackedMatrix of sparse_nvfp4, in `memory` (packed_bytes of it, on the host), its positions
// ascending whatever their order was. Throws Error{invalid_argument} naming the tensor that does
// not fit the others, and for two positions that are one. A scale for 8 of k, which some such
// layouts have, is not read: no tensor core takes it beside 2:4.
PackedMatrix from_k_major(const KMajorSparse& matrix, Workspace memory);
// The inverse, into tensors of those shapes. Throws Error{invalid_argument} unless the matrix is
// sparse_nvfp4 and its k a multiple of 16.
void to_k_major(const PackedMatrix& matrix, KMajorSparse& out);

}  // namespace shunt
