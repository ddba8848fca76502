#include "gemm/blackwell_fp4.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "format/rules.hpp"

namespace shunt::cuda_engine {

namespace {

// A row of a matrix of 4-bit codes, as it is packed.
struct Row {
  const std::uint8_t *codes = nullptr, *scales = nullptr, *positions = nullptr;
  Row() = default;
  Row(const PackedMatrix& m, std::int64_t row)
      : codes(m.values.as<const std::uint8_t>() + row * m.values.strides[0]),
        scales(m.scales.as<const std::uint8_t>() + row * m.scales.strides[0]),
        positions(m.positions ? m.positions.as<const std::uint8_t>() + row * m.positions.strides[0]
                              : nullptr) {}
};

// Eight neighbours along k of a sparse_nvfp4 row, from `at` on, dense; what is 0 or -0 is 0.
std::array<int, 8> eight_of(const Row& row, std::int64_t at, std::int64_t k) {
  std::array<int, 8> codes{};
  for (std::size_t four = 0; four < 8; four += 4) {
    const std::int64_t first = at + static_cast<std::int64_t>(four);
    if (row.codes == nullptr || first >= k) break;
    const int places = row.positions[first / 8] >> four, both = row.codes[first / 4];
    const auto put = [&](int place, int code) {
      if (first + place < k && code % 8 != 0) codes[four + static_cast<std::size_t>(place)] = code;
    };
    put(places & 3, both & 15);
    put(places >> 2 & 3, both >> 4);
  }
  return codes;
}

// What mma.sp has of eight: two pairs of codes, and which pairs they are.
struct KeptPairs {
  std::array<int, 4> codes{};
  int positions = 0;  // the lower in bits 1:0
  int count = 0;      // of pairs that are not zero; more than 2: does not fit
};
KeptPairs kept_pairs(const std::array<int, 8>& eight) {
  std::array<bool, 4> kept{};
  KeptPairs to;
  for (std::size_t pair = 0; pair < 4; ++pair) {
    kept[pair] = eight[2 * pair] != 0 || eight[2 * pair + 1] != 0;
    to.count += static_cast<int>(kept[pair]);
  }
  if (to.count > 2) return to;
  // Two different ones in any case, in order.
  for (std::size_t pair = 0, more = static_cast<std::size_t>(2 - to.count); more > 0; ++pair) {
    if (!kept[pair]) kept[pair] = true, --more;
  }
  std::size_t place = 0;
  for (std::size_t pair = 0; pair < 4; ++pair) {
    if (!kept[pair]) continue;
    to.codes[2 * place] = eight[2 * pair], to.codes[2 * place + 1] = eight[2 * pair + 1];
    to.positions |= static_cast<int>(pair) << 2 * place;
    ++place;
  }
  return to;
}

// Whether 16 from `at` on are zeros, so that their scale says nothing.
bool empty_block(const Row& row, std::int64_t at, std::int64_t k) {
  for (const std::int64_t eight : {at, at + 8}) {
    for (const int code : eight_of(row, eight, k)) {
      if (code != 0) return false;
    }
  }
  return true;
}

// Of 32 of a sparse row: that of the first 16, or of the second where the first are zeros.
int scale_of_32(const Row& row, std::int64_t at, std::int64_t k) {
  const bool second = at + 16 < k && empty_block(row, at, k);
  return row.scales[at / 16 + static_cast<int>(second)];
}

}  // namespace

Support fp4_pairs_support(const PackedMatrix& matrix) {
  if (matrix.format.format != Format::sparse_nvfp4) {
    return Support::no("weights in " + to_string(matrix.format) + " are not sparse_nvfp4");
  }
  const auto where = [](std::int64_t row, std::int64_t k, int count) {
    return "sparse_nvfp4 as mma.sp of Blackwell: row " + std::to_string(row) + ", k " +
           std::to_string(k) + " to " + std::to_string(k + count - 1);
  };
  for (std::int64_t i = 0; i < matrix.n; ++i) {
    const Row row(matrix, i);
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

void lay_out_fp4(const Fp4Layout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                 char* to) {
  std::memset(to, 0, static_cast<std::size_t>(layout.group_bytes()));
  const RowLayout order = layout.order();
  const float globals[2] = {gate.global_scale, up != nullptr ? up->global_scale : 1.0F};
  std::memcpy(to + layout.globals_at(), globals, sizeof globals);
  // A row of the layout, or nothing.
  const auto row_of = [&](std::int64_t at) -> Row {
    const std::int64_t row = at < layout.rows() ? order.source(at) : -1;
    if (row < 0) return {};
    const bool second = layout.paired && row >= layout.n / 2;
    return {second ? *up : gate, second ? row - layout.n / 2 : row};
  };
  for (std::int64_t f = 0; f < layout.fragments(); ++f) {
    const std::int64_t first = f / layout.steps() * Fp4Layout::fragment_rows;
    const std::int64_t k = f % layout.steps() * layout.fragment_k();
    Row rows[Fp4Layout::fragment_rows];
    for (int i = 0; i < Fp4Layout::fragment_rows; ++i) rows[i] = row_of(first + i);
    const auto code_at = [&](int lane, int r, int nibble) {
      if (layout.sparse) {
        const Fp4Place place = fp4_kept_place(lane, r, nibble);
        return kept_pairs(eight_of(rows[place.row], k + place.k, layout.k))
            .codes[static_cast<std::size_t>(nibble % 4)];
      }
      const Fp4Place place = fp4_weight_place(lane, r, nibble);
      const Row& row = rows[place.row];
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
      const Row& row = rows[byte / 4];
      const std::int64_t at = k + byte % 4 * layout.scaled_k();
      if (row.scales == nullptr || at >= layout.k) continue;
      to[layout.scales_at() + f * 64 + byte] = static_cast<char>(
          layout.sparse ? scale_of_32(row, at, layout.k) : int{row.scales[at / 16]});
    }
  }
}

}  // namespace shunt::cuda_engine
