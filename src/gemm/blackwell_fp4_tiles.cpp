#include "gemm/blackwell_fp4_tiles.hpp"

#include <algorithm>
#include <cstring>

namespace shunt::cuda_engine {

void lay_out_fp4_tiles(const Fp4Tiles& layout, const PackedMatrix& gate, const PackedMatrix* up,
                       char* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.group_bytes()));
  const RowLayout order = layout.order();
  const float globals[2] = {gate.global_scale, up != nullptr ? up->global_scale : 1.0F};
  std::memcpy(to + layout.globals_at(), globals, sizeof globals);
  for (std::int64_t row = 0; row < layout.rows(); ++row) {
    const std::int64_t source = order.source(row);
    if (source < 0) continue;
    const bool second = layout.paired && source >= layout.n / 2;
    const PackedMatrix& m = second ? *up : gate;
    const std::int64_t within = second ? source - layout.n / 2 : source;
    const auto* const codes = m.values.as<const std::uint8_t>() + within * m.values.strides[0];
    const auto* const scales = m.scales.as<const std::uint8_t>() + within * m.scales.strides[0];
    const auto line = static_cast<int>(row % Fp4Tiles::tile_rows);
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      char* const tile =
          to + (row / Fp4Tiles::tile_rows * layout.steps() + step) * Fp4Tiles::tile_bytes;
      const std::int64_t first = step * Fp4Tiles::tile_k;
      const auto count = static_cast<int>(std::min(layout.k - first, Fp4Tiles::tile_k));
      for (int k = 0; k < count; k += 2) {
        const int both = codes[(first + k) / 2] & (k + 1 < count ? 0xff : 0x0f);
        tile[fp4_code_at(line, k)] = static_cast<char>(both);
      }
      for (int k = 0; k < count; k += 16) {
        tile[Fp4Tiles::code_bytes + fp4_scale_at(line, k, 1)] =
            static_cast<char>(scales[(first + k) / 16]);
      }
    }
  }
}

}  // namespace shunt::cuda_engine
