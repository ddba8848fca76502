// What writers and readers of both prepared layouts of FP4 for Blackwell share.
#pragma once

#include <array>
#include <cstdint>

#include "format/codes.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {

// A row of a matrix of 4-bit codes, as it is packed.
struct Fp4Row {
  const std::uint8_t *codes = nullptr, *scales = nullptr, *positions = nullptr;
  Fp4Row() = default;
  Fp4Row(const PackedMatrix& m, std::int64_t row)
      : codes(m.values.as<const std::uint8_t>() + row * m.values.strides[0]),
        scales(m.scales.as<const std::uint8_t>() + row * m.scales.strides[0]),
        positions(m.positions ? m.positions.as<const std::uint8_t>() + row * m.positions.strides[0]
                              : nullptr) {}
};

// Eight neighbours along k of a sparse_nvfp4 row, from `at` on, dense; what is 0 or -0 is 0.
inline std::array<int, 8> eight_of(const Fp4Row& row, std::int64_t at, std::int64_t k) {
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
inline KeptPairs kept_pairs(const std::array<int, 8>& eight) {
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
inline bool empty_block(const Fp4Row& row, std::int64_t at, std::int64_t k) {
  for (const std::int64_t eight : {at, at + 8}) {
    for (const int code : eight_of(row, eight, k)) {
      if (code != 0) return false;
    }
  }
  return true;
}

// Of 32 of a sparse row: that of the first 16, or of the second where the first are zeros.
inline int scale_of_32(const Fp4Row& row, std::int64_t at, std::int64_t k) {
  const bool second = at + 16 < k && empty_block(row, at, k);
  return row.scales[at / 16 + static_cast<int>(second)];
}

// Where row `row` of a group's matrices, gate's before up's, is stored.
struct Fp4Stored {
  std::int64_t row = 0;  // of the layout
  bool second = false;   // of up
  template <class Layout>
  Fp4Stored(const Layout& layout, std::int64_t of)
      : row(of), second(layout.paired && of >= layout.n / 2) {
    const std::int64_t within = second ? of - layout.n / 2 : of;
    if (layout.paired) row = within / 8 * 16 + (second ? 8 : 0) + within % 8;
  }
};

inline double fp4_value(int code, char scale, float global) {
  return static_cast<double>(e2m1_values[static_cast<std::size_t>(code)]) *
         static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(scale))) *
         static_cast<double>(global);
}

}  // namespace shunt::cuda_engine
