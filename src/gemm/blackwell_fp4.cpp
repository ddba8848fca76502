#include "gemm/blackwell_fp4.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "gemm/fp4_stored.hpp"

namespace shunt::cuda_engine {

Support fp4_pairs_support(const PackedMatrix& matrix) {
  if (matrix.format.format != Format::sparse_nvfp4) {
    return Support::no("weights in " + to_string(matrix.format) + " are not sparse_nvfp4");
  }
  const auto where = [](std::int64_t row, std::int64_t k, int count) {
    return "sparse_nvfp4 as mma.sp of Blackwell: row " + std::to_string(row) + ", k " +
           std::to_string(k) + " to " + std::to_string(k + count - 1);
  };
  for (std::int64_t i = 0; i < matrix.n; ++i) {
    const Fp4Row row(matrix, i);
    for (std::int64_t k = 0; k < matrix.k; k += 8) {
      if (kept_pairs(eight_of(row, k, matrix.k)).count > 2) {
        return Support::no(where(i, k, 8) + ": values in more than two of its four aligned pairs");
      }
    }
    for (std::int64_t k = 0; k + 16 < matrix.k; k += 32) {
      if (row.scales[k / 16] != row.scales[k / 16 + 1] && !empty_block(row, k, matrix.k) &&
          !empty_block(row, k + 16, matrix.k)) {
        return Support::no(where(i, k, 32) + ": two scales where one is taken");
      }
    }
  }
  return {};
}

void read_fp4_row(const Fp4Layout& layout, const char* from, std::int64_t row, double* to) {
  const Fp4Stored stored(layout, row);
  float global;
  std::memcpy(&global, from + layout.globals_at() + (stored.second ? 4 : 0), sizeof global);
  const auto within = static_cast<int>(stored.row % Fp4Layout::fragment_rows);
  for (std::int64_t step = 0; step < layout.steps(); ++step) {
    const std::int64_t f = stored.row / Fp4Layout::fragment_rows * layout.steps() + step;
    const std::int64_t first = step * layout.fragment_k();
    const auto put = [&](std::int64_t k, int code) {
      if (first + k >= layout.k) return;
      const std::int64_t word = layout.scales_at() + (f * 16 + within) * 4;
      const char scale = from[word + k / layout.scaled_k()];
      to[first + k] = fp4_value(code, scale, global);
    };
    const auto code_of = [&](int lane, int r, int nibble) {
      const int at = 16 * lane + 4 * r + nibble / 2;
      const char both = from[f * Fp4Layout::fragment_bytes + at];
      return both >> nibble % 2 * 4 & 15;
    };
    for (int lane = within % 8 * 4; lane < within % 8 * 4 + 4; ++lane) {
      for (int r = within / 8; r < 4; r += 2) {
        for (int i = 0; i < 8; ++i) {
          if (!layout.sparse) {
            put(fp4_weight_place(lane, r, i).k, code_of(lane, r, i));
          } else if (i % 4 == 0) {
            const int eight = fp4_kept_place(lane, r, i).k;
            for (int k = 0; k < 8; ++k) put(eight + k, 0);
            const int holder = within % 8 * 4 + within / 8 + eight / 64 * 2;
            const int at = 4 * holder + eight % 64 / 16;
            const char both = from[layout.positions_at() + f * 128 + at];
            const int pairs = both >> eight / 8 % 2 * 4 & 15;
            for (int j = 0; j < 4; ++j) {
              put(eight + (pairs >> j / 2 * 2 & 3) * 2 + j % 2, code_of(lane, r, i + j));
            }
          }
        }
      }
    }
  }
}

void lay_out_fp4(const Fp4Layout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                 char* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.group_bytes()));
  const RowLayout order = layout.order();
  const float globals[2] = {gate.global_scale, up != nullptr ? up->global_scale : 1.0F};
  std::memcpy(to + layout.globals_at(), globals, sizeof globals);
  // A row of the layout, or nothing.
  const auto row_of = [&](std::int64_t at) -> Fp4Row {
    const std::int64_t row = at < layout.rows() ? order.source(at) : -1;
    if (row < 0) return {};
    const bool second = layout.paired && row >= layout.n / 2;
    return {second ? *up : gate, second ? row - layout.n / 2 : row};
  };
  for (std::int64_t f = 0; f < layout.fragments(); ++f) {
    const std::int64_t first = f / layout.steps() * Fp4Layout::fragment_rows;
    const std::int64_t k = f % layout.steps() * layout.fragment_k();
    Fp4Row rows[Fp4Layout::fragment_rows];
    for (int i = 0; i < Fp4Layout::fragment_rows; ++i) rows[i] = row_of(first + i);
    const auto code_at = [&](int lane, int r, int nibble) {
      if (layout.sparse) {
        const Fp4Place place = fp4_kept_place(lane, r, nibble);
        return kept_pairs(eight_of(rows[place.row], k + place.k, layout.k))
            .codes[static_cast<std::size_t>(nibble % 4)];
      }
      const Fp4Place place = fp4_weight_place(lane, r, nibble);
      const Fp4Row& row = rows[place.row];
      const std::int64_t at = k + place.k;
      if (row.codes == nullptr || at >= layout.k) return 0;
      return row.codes[at / 2] >> at % 2 * 4 & 15;
    };
    for (int byte = 0; byte < Fp4Layout::fragment_bytes; ++byte) {
      int both = 0;
      for (int nibble = 0; nibble < 2; ++nibble) {
        both |= code_at(byte / 16, byte % 16 / 4, byte % 4 * 2 + nibble) << 4 * nibble;
      }
      to[f * Fp4Layout::fragment_bytes + byte] = static_cast<char>(both);
    }
    for (int byte = 0; layout.sparse && byte < 128; ++byte) {
      int both = 0;
      for (int half = 0; half < 2; ++half) {
        const Fp4Place place = fp4_positions_place(byte / 4, byte % 4 * 2 + half);
        both |= kept_pairs(eight_of(rows[place.row], k + place.k, layout.k)).positions << 4 * half;
      }
      to[layout.positions_at() + f * 128 + byte] = static_cast<char>(both);
    }
    for (int byte = 0; byte < 64; ++byte) {
      const Fp4Row& row = rows[byte / 4];
      const std::int64_t at = k + byte % 4 * layout.scaled_k();
      if (row.scales == nullptr || at >= layout.k) continue;
      to[layout.scales_at() + f * 64 + byte] = static_cast<char>(
          layout.sparse ? scale_of_32(row, at, layout.k) : int{row.scales[at / 16]});
    }
  }
}

}  // namespace shunt::cuda_engine
