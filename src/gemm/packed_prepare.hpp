// Packed weights into the layout of packed_layout.hpp, and back: on the host.
#pragma once

#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "gemm/packed_layout.hpp"
#include "shunt/format.hpp"
#include "shunt/gemm.hpp"

namespace shunt::cuda_engine {

// One group from its matrix, or its two where the layout is paired; group_bytes at `to`.
void lay_out(const PackedLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
             char* to);
// Weight (row, at) of a group at `from`, gate's rows before up's: exact.
float weight_of(const PackedLayout& layout, const char* from, std::int64_t row, std::int64_t at);

// Formats that are multiplied on a GPU, and with which rows.
inline bool computed(Format format, RowFormat rows) {
  if (rows == RowFormat::fp8_block) return format == Format::fp8_block;
  if (rows == RowFormat::nvfp4) return format == Format::nvfp4 || format == Format::sparse_nvfp4;
  if (rows != RowFormat::fp8_token) return false;
  return format == Format::fp8_channel || format == Format::fp8_tensor;
}
// Whether sums may stay in the tensor cores, for a spec whose fields `owner` names.
inline Support fast_accumulation_fits(std::string_view owner, RowFormat rows,
                                      bool batch_invariant) {
  if (rows != RowFormat::fp8_token) {
    return refuse("{}fast_accumulation is true with rows {}: must be false, or rows fp8_token",
                  owner, to_string(rows));
  }
  if (batch_invariant) {
    return refuse("{}fast_accumulation is true with batch_invariant: must be one of the two",
                  owner);
  }
  return {};
}
PackedLayout layout_of(const PreparedWeights& weights);

// All groups onto the device: waits, and takes memory of the host for one.
void write_packed(const Context& context, const PackedLayout& layout,
                  const std::vector<PackedMatrix>& gate, const std::vector<PackedMatrix>* up,
                  void* to);
// The exact weights of one group, rounded once, into out [n, k] on the device; waits.
void read_packed(const Context& context, const PackedLayout& layout, const void* from,
                 const Tensor& out);

}  // namespace shunt::cuda_engine
