// Packed weights into the layout of fragment_layout.hpp, and back: on the host.
#pragma once

#include <vector>

#include "gemm/fragment_layout.hpp"
#include "shunt/gemm.hpp"

namespace shunt::cuda_engine {

// One group from its matrix, or its two where the layout is paired (of one order, where that is
// ordered); group_bytes at `to`, aligned to 4. False: a scale or a code is NaN or infinite.
bool lay_out(const FragmentLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
             char* to);
// The weights of row `row` (gate's before up's) of a group at `from`: to[k]. What a kernel computes
// with, before it rounds a scaled int4.
void read_row(const FragmentLayout& layout, const char* from, std::int64_t row, double* to);

FragmentLayout fragments_of(const PreparedWeights& weights);

// All groups onto the device: waits, and takes memory of the host for one. Which one had to be
// refused; gate.size(): none.
std::size_t write_fragments(const Context& context, const FragmentLayout& layout,
                            const std::vector<PackedMatrix>& gate,
                            const std::vector<PackedMatrix>* up, void* to);
// The weights of one group, rounded once, into out [n, k] on the device; waits.
void read_fragments(const Context& context, const FragmentLayout& layout, const void* from,
                    const Tensor& out);

}  // namespace shunt::cuda_engine
