#include "gemm/blackwell_fp4.hpp"

#include <cstring>

namespace shunt::cuda_engine {

void lay_out_fp4(const Fp4Layout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                 char* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.group_bytes()));
  const RowLayout order = layout.order();
  const float globals[2] = {gate.global_scale, up != nullptr ? up->global_scale : 1.0F};
  std::memcpy(to + layout.globals_at(), globals, sizeof globals);
  // A row of the layout: its codes and its scales, or nothing.
  struct Row {
    const std::uint8_t *codes, *scales;
  };
  const auto row_of = [&](std::int64_t at) -> Row {
    const std::int64_t row = at < layout.rows() ? order.source(at) : -1;
    if (row < 0) return {};
    const bool second = layout.paired && row >= layout.n / 2;
    const PackedMatrix& m = second ? *up : gate;
    const std::int64_t within = second ? row - layout.n / 2 : row;
    return {m.values.as<const std::uint8_t>() + within * m.values.strides[0],
            m.scales.as<const std::uint8_t>() + within * m.scales.strides[0]};
  };
  for (std::int64_t f = 0; f < layout.fragments(); ++f) {
    const std::int64_t first = f / layout.steps() * Fp4Layout::fragment_rows;
    const std::int64_t k = f % layout.steps() * Fp4Layout::fragment_k;
    Row rows[Fp4Layout::fragment_rows];
    for (int i = 0; i < Fp4Layout::fragment_rows; ++i) rows[i] = row_of(first + i);
    for (int byte = 0; byte < Fp4Layout::fragment_bytes; ++byte) {
      int both = 0;
      for (int nibble = 0; nibble < 2; ++nibble) {
        const Fp4Place place = fp4_weight_place(byte / 16, byte % 16 / 4, byte % 4 * 2 + nibble);
        const Row& row = rows[place.row];
        const std::int64_t at = k + place.k;
        if (row.codes == nullptr || at >= layout.k) continue;
        both |= (row.codes[at / 2] >> at % 2 * 4 & 15) << 4 * nibble;
      }
      to[f * Fp4Layout::fragment_bytes + byte] = static_cast<char>(both);
    }
    for (int byte = 0; byte < 64; ++byte) {
      const Row& row = rows[byte / 4];
      const std::int64_t group = k / 16 + byte % 4;
      if (row.scales == nullptr || group * 16 >= layout.k) continue;
      to[layout.scales_at() + f * 64 + byte] = static_cast<char>(row.scales[group]);
    }
  }
}

}  // namespace shunt::cuda_engine
