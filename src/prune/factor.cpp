#include "prune/factor.hpp"

#include <cmath>

namespace shunt {

std::vector<double> inverse_factor(const std::vector<double>& a, std::int64_t k, double damping) {
  const auto size = static_cast<std::size_t>(k);
  double trace = 0;
  for (std::size_t i = 0; i < size; ++i) trace += a[i * size + i];
  const double added = damping * trace / static_cast<double>(k);

  // Row j of `v` holds column j of V: V^T, lower, so that all inner loops run along a row.
  std::vector<double> v = a;
  for (std::size_t i = 0; i < size; ++i) v[i * size + i] += added;
  for (std::size_t j = size; j-- > 0;) {
    double* const row = v.data() + j * size;
    if (!(row[j] > 0) || !std::isfinite(row[j])) return {};
    const double root = std::sqrt(row[j]);
    for (std::size_t i = 0; i <= j; ++i) row[i] /= root;
    for (std::size_t i = 0; i < j; ++i) {
      double* const other = v.data() + i * size;
      for (std::size_t c = 0; c <= i; ++c) other[c] -= row[i] * row[c];
    }
  }

  // V U = I, from the last row up.
  std::vector<double> u(size * size, 0.0);
  for (std::size_t i = size; i-- > 0;) {
    double* const row = u.data() + i * size;
    row[i] = 1;
    for (std::size_t j = i + 1; j < size; ++j) {
      const double factor = v[j * size + i];
      if (factor == 0) continue;
      const double* const below = u.data() + j * size;
      for (std::size_t c = j; c < size; ++c) row[c] -= factor * below[c];
    }
    const double pivot = v[i * size + i];
    for (std::size_t c = i; c < size; ++c) row[c] /= pivot;
  }
  return u;
}

}  // namespace shunt
