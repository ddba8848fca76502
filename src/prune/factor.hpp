// The factor of an inverse, by which optimal brain surgery goes through columns left to right.
#pragma once

#include <cstdint>
#include <vector>

namespace shunt {

// U [k, k], upper triangular, with U^T U = (A + damping * mean(diag A) * I)^-1. A's lower triangle
// is read. Empty when the sum is not positive definite.
//
// With A = V V^T, V upper, U is V^-1: a Cholesky from the last column to the first, and the inverse
// of a triangle. About k^3 operations, in double.
std::vector<double> inverse_factor(const std::vector<double>& a, std::int64_t k, double damping);

}  // namespace shunt
