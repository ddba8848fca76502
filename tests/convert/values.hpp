// The numbers of vectors and matrices, plain or packed, for tests of conversions.
#pragma once

#include <cstdint>
#include <vector>

#include "core/convert.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

inline std::vector<float> values_of(const Tensor& m) {
  const bool matrix = m.rank > 1;
  const std::int64_t columns = matrix ? m.shape[1] : 1, step = matrix ? m.strides[1] : 0;
  std::vector<float> values;
  for (std::int64_t n = 0; n < m.shape[0]; ++n) {
    for (std::int64_t k = 0; k < columns; ++k) {
      values.push_back(load_f32(m.data, m.dtype, n * m.strides[0] + k * step));
    }
  }
  return values;
}

inline std::vector<float> values_of(const PackedMatrix& m) {
  std::vector<float> values(static_cast<std::size_t>(m.n * m.k));
  unpack(m, view(values.data(), {m.n, m.k}));
  return values;
}

// Of matrix e of one list or the other.
inline std::vector<float> values_of(const std::vector<Tensor>& plain,
                                    const std::vector<PackedMatrix>& packed, std::size_t e) {
  return packed.empty() ? values_of(plain[e]) : values_of(packed[e]);
}

}  // namespace shunt::test
