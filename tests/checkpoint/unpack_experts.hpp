// Packed experts made plain, for the references.
#pragma once

#include <vector>

#include "shunt/format.hpp"
#include "shunt/layer.hpp"

namespace shunt::test {

// Plain f32 copies of packed experts, in `memory`.
inline void unpack_experts(ExpertWeights& weights, std::vector<std::vector<float>>& memory) {
  const auto all = [&](std::vector<PackedMatrix>& from, std::vector<Tensor>& to) {
    for (const PackedMatrix& m : from) {
      memory.emplace_back(static_cast<std::size_t>(m.n * m.k));
      to.push_back(view(memory.back().data(), {m.n, m.k}));
      unpack(m, to.back());
    }
    from.clear();
  };
  all(weights.packed_gate, weights.gate);
  all(weights.packed_up, weights.up);
  all(weights.packed_down, weights.down);
}

}  // namespace shunt::test
