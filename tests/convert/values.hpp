// The numbers of vectors and matrices, plain or packed, for tests of conversions.
#pragma once

#include <cstdint>
#include <vector>

#include "core/convert.hpp"
#include "shunt/checkpoint.hpp"
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

// Every matrix of layer 0: gate, up, down of each expert.
inline std::vector<std::vector<float>> all_values(const Checkpoint& checkpoint) {
  const ExpertWeights w = checkpoint.weights(0).experts;
  std::vector<std::vector<float>> result;
  for (std::size_t e = 0; e < std::max(w.up.size(), w.packed_up.size()); ++e) {
    result.push_back(values_of(w.gate, w.packed_gate, e));
    result.push_back(values_of(w.up, w.packed_up, e));
    result.push_back(values_of(w.down, w.packed_down, e));
  }
  return result;
}

}  // namespace shunt::test
