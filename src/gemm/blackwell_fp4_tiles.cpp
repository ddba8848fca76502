#include "gemm/blackwell_fp4_tiles.hpp"

#include <algorithm>
#include <cstring>

#include "gemm/fp4_stored.hpp"

namespace shunt::cuda_engine {

void lay_out_fp4_tiles(const Fp4Tiles& layout, const PackedMatrix& gate, const PackedMatrix* up,
                       char* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.group_bytes()));
  const RowLayout order = layout.order();
  const float globals[2] = {gate.global_scale, up != nullptr ? up->global_scale : 1.0F};
  std::memcpy(to + layout.globals_at(), globals, sizeof globals);
  // Positions everywhere, also where nothing is: two different pairs of each eight.
  for (std::int64_t tile = 0; layout.sparse && tile < layout.columns() * layout.steps(); ++tile) {
    std::memset(to + tile * layout.tile_bytes() + layout.code_bytes(), 0 | 1 << 2 | 1 << 6,
                static_cast<std::size_t>(layout.scales_in_tile() - layout.code_bytes()));
  }
  for (std::int64_t row = 0; row < layout.rows(); ++row) {
    const std::int64_t source = order.source(row);
    if (source < 0) continue;
    const bool second = layout.paired && source >= layout.n / 2;
    const PackedMatrix& m = second ? *up : gate;
    const std::int64_t within = second ? source - layout.n / 2 : source;
    const Fp4Row from(m, within);
    const auto line = static_cast<int>(row % Fp4Tiles::tile_rows);
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      char* const tile =
          to + (row / Fp4Tiles::tile_rows * layout.steps() + step) * layout.tile_bytes();
      const std::int64_t first = step * Fp4Tiles::tile_k;
      const auto count = static_cast<int>(std::min(layout.k - first, Fp4Tiles::tile_k));
      for (int k = 0; !layout.sparse && k < count; k += 2) {
        const int both = from.codes[(first + k) / 2] & (k + 1 < count ? 0xff : 0x0f);
        tile[fp4_code_at(line, k)] = static_cast<char>(both);
      }
      for (int k = 0; layout.sparse && k < count; k += 8) {
        const KeptPairs kept = kept_pairs(eight_of(from, first + k, layout.k));
        const auto& [a, b, c, d] = kept.codes;
        tile[fp4_kept_at(line, k / 2)] = static_cast<char>(a | b << 4);
        tile[fp4_kept_at(line, k / 2 + 2)] = static_cast<char>(c | d << 4);
        const int eight = line * 16 + k / 16;
        char& positions = tile[layout.code_bytes() + eight];
        const int shift = k / 8 % 2 * 4;
        positions = static_cast<char>((positions & ~(15 << shift)) | kept.positions << shift);
      }
      const int scaled = layout.scaled_k();
      for (int k = 0; k < count; k += scaled) {
        tile[layout.scales_in_tile() + fp4_scale_at(line, k, 1, scaled)] =
            static_cast<char>(layout.sparse ? scale_of_32(from, first + k, layout.k)
                                            : int{from.scales[(first + k) / 16]});
      }
    }
  }
}

void read_fp4_tiles_row(const Fp4Tiles& layout, const char* from, std::int64_t row, double* to) {
  const Fp4Stored stored(layout, row);
  float global;
  std::memcpy(&global, from + layout.globals_at() + (stored.second ? 4 : 0), sizeof global);
  const auto line = static_cast<int>(stored.row % Fp4Tiles::tile_rows);
  for (std::int64_t at = 0; at < layout.k; ++at) {
    const char* const tile =
        from + (stored.row / Fp4Tiles::tile_rows * layout.steps() + at / Fp4Tiles::tile_k) *
                   layout.tile_bytes();
    const auto k = static_cast<int>(at % Fp4Tiles::tile_k);
    int code = 0;
    if (!layout.sparse) {
      code = tile[fp4_code_at(line, k)] >> k % 2 * 4 & 15;
    } else {
      const int byte = line * 16 + k / 16;
      const int pairs = tile[layout.code_bytes() + byte] >> k / 8 % 2 * 4 & 15;
      const int pair = k % 8 / 2, place = (pairs & 3) == pair ? 0 : pairs >> 2 == pair ? 2 : -1;
      const int i = k / 8 * 4 + place + k % 2;
      if (place >= 0) code = tile[fp4_kept_at(line, i)] >> i % 2 * 4 & 15;
    }
    to[at] = fp4_value(
        code, tile[layout.scales_in_tile() + fp4_scale_at(line, k, 1, layout.scaled_k())], global);
  }
}

}  // namespace shunt::cuda_engine
