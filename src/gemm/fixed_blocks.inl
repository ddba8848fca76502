// Rows in blocks of integers (fixed_rows.hpp): what every kernel that multiplies them begins with,
// and how it passes over a panel. Include after packed_tiles.inl.

// ---- rows --------------------------------------------------------------------------------------

// The largest of |from[begin .. end)|, as an f32's bits.
SHUNT_INLINE std::uint32_t largest_bits(const float* from, std::size_t begin, std::size_t end) {
  std::uint32_t largest = 0;
  for (std::size_t i = begin; i < end; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, from + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
// Of the largest one, -111 at least; 255: it is no number.
SHUNT_INLINE std::uint32_t block_exponent(std::uint32_t largest) {
  const std::uint32_t exponent = largest >> 23;
  return exponent < 16 ? 16 : exponent;
}
// To nearest even, for less than 2^22.
SHUNT_INLINE std::int32_t nearest(float x) {
  constexpr float bias = 0x1.8p23F;  // leaves an integer in the lowest bits
  constexpr std::int32_t bias_bits = 0x4b400000;
  const float shifted = x + bias;
  std::int32_t n;
  __builtin_memcpy(&n, &shifted, sizeof n);
  return n - bias_bits;
}
SHUNT_INLINE float power_of_bits(std::uint32_t exponent) {
  const std::uint32_t bits = exponent << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return power;
}

// The second and the third of four.
SHUNT_INLINE void swap_middle(std::int16_t* four) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, four, sizeof bits);
  bits = (bits & 0xffff00000000ffffU) | (bits & 0xffff0000U) << 16 | (bits >> 16 & 0xffff0000U);
  __builtin_memcpy(four, &bits, sizeof bits);
}

// `less`: bits of 16.
template <class Codes, std::uint32_t less = 0>
bool fix_row(const float* from, std::size_t k, std::size_t group, void* to) {
  const std::size_t padded = (k + fixed_step - 1) / fixed_step * fixed_step;
  auto* block = static_cast<FixedBlock*>(to);
  auto* const numbers =
      reinterpret_cast<std::int16_t*>(static_cast<char*>(to) + fixed_numbers_at(k, group));
  for (std::size_t begin = 0; begin < k; begin += group, ++block) {
    const std::size_t end = begin + group < padded ? begin + group : padded;
    const std::uint32_t exponent = block_exponent(largest_bits(from, begin, end));
    if (exponent == 255) return false;
    const float factor = power_of_bits(268 - less - exponent);
    std::int32_t sum = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const std::int32_t n = nearest(from[i] * factor);
      numbers[i] = static_cast<std::int16_t>(n);
      sum += n;
    }
    *block = {power_of_bits(exponent - 14 + less) * Codes::unit, -Codes::more * sum};
  }
  if constexpr (Codes::of_bytes) {
    for (std::size_t i = 0; i < padded; i += 4) swap_middle(numbers + i);
  }
  return true;
}

// ---- panels ------------------------------------------------------------------------------------

// A part of a panel, of whole groups.
struct FixedPart {
  const char* at;
  std::size_t begin, end;  // of k
  std::size_t block, x;    // where the rows' blocks and their numbers begin, in bytes
  std::size_t ahead;       // how far from what is read to fetch
};
// Two parts, and what rows they meet, fit the L1.
constexpr std::size_t fixed_part_bytes = 8192;
// One row reads a panel once, front to back, and lines come to the L1 from p.fetch_ahead before it.
// Where p.fetch_near is not 0 they come to the L2 then and to the L1 from there before it; of a
// kernel by_l2 always.

// Several rows take a panel in parts that stay in the L1 while they and the columns pass over one;
// the first tile of rows fetches what lies at its place in the part behind.
template <class Kernel>
void fixed_multiply(const PackedProduct& p) {
  const std::size_t group_bytes = Kernel::group_bytes(p);
  const std::size_t fit = fixed_part_bytes / group_bytes;
  const std::size_t groups = p.count == 1 ? (p.k + p.group - 1) / p.group : fit > 1 ? fit : 1;
  FixedPart part{.at = Kernel::codes_at(p),
                 .begin = 0,
                 .end = 0,
                 .block = 0,
                 .x = fixed_numbers_at(p.k, p.group),
                 .ahead = groups * group_bytes};
  for (; part.begin < p.k; part.begin = part.end) {
    part.end = part.begin + groups * p.group < p.k ? part.begin + groups * p.group : p.k;
    packed_multiply<Kernel>(p, part);
    part.at += groups * group_bytes;
    part.block += groups * sizeof(FixedBlock);
    part.x += groups * p.group * sizeof(std::int16_t);
  }
}

// The tiles of a kernel whose step is a whole group, with a header of e4m3 scales. Kernel has
// group, code_bytes, columns(), most_rows; Tables, looked up in; fetch_codes<level>(), of a vector
// of columns; sums<rows>(), a group's integers as f32; by_l2 where lines of one row come to the L2
// before the L1; and at_once(), of how many vectors of columns shared_sums<rows, vectors>() is to
// be asked where these are more than one.
template <class Kernel>
struct ByGroups {
  static constexpr std::size_t header_bytes = 64;
  static constexpr bool by_l2 = false;
  static constexpr int at_once(int /*rows*/, int /*vectors*/) { return 1; }
  static std::size_t group_bytes(const PackedProduct&) { return header_bytes + Kernel::code_bytes; }
  static const char* codes_at(const PackedProduct& p) { return p.panel; }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column,
                                             const FixedPart& part) {
    constexpr int vectors = wide / F32::width;
    if constexpr (wide == 64) column = 0;
    const TileRows<char, rows> tile(p, first, last_row);
    F32 sum[rows][vectors];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        sum[r][v] = load(tile.sums[r] + column + lanes(v));
      }
    }
    const typename Kernel::Tables tables;
    const char* at = part.at;
    const bool far = rows == 1 && (Kernel::by_l2 || p.fetch_near > 0);
    const std::size_t row_ahead = Kernel::by_l2        ? fetch_near_bytes
                                  : p.fetch_near > 0   ? p.fetch_near
                                                       : p.fetch_ahead;
    const std::size_t row_far = Kernel::by_l2 ? fetch_far_bytes : p.fetch_ahead;
    const std::size_t ahead = rows == 1 ? row_ahead : first == 0 ? part.ahead : 0;
    std::size_t block = part.block, x = part.x;
    for (std::size_t begin = part.begin; begin < part.end; begin += Kernel::group) {
      const char* const header = at;
      at += header_bytes;
      // One row takes a line at a time from memory's way to the L1; where several pass over a part,
      // the next one waits in the L2.
      constexpr int level = rows == 1 ? 3 : 2;
      if (column == 0) __builtin_prefetch(header + ahead, 0, level);
      if (far && column == 0) __builtin_prefetch(header + row_far, 0, 2);
      constexpr int many = Kernel::at_once(rows, vectors);
      SHUNT_UNROLL for (int v = 0; v < vectors; v += many) {
        SHUNT_UNROLL for (int i = v; i < v + many; ++i) {
          const std::size_t c = column + lanes(i);
          Kernel::template fetch_codes<level>(at + ahead, c);
          if (far) Kernel::template fetch_codes<2>(at + row_far, c);
        }
        F32 integers[many][rows];
        if constexpr (many == 1) {
          Kernel::template sums<rows>(tables, at, column + lanes(v), tile.row, block, x,
                                      integers[0]);
        } else {
          Kernel::template shared_sums<rows, many>(tables, at, column + lanes(v), tile.row, block,
                                                   x, integers);
        }
        SHUNT_UNROLL for (int i = 0; i < many; ++i) {
          const F32 scale = scale_of<PackedScale::e4m3>(p, header, column + lanes(v + i));
          SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
            const float unit = reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->unit;
            sum[r][v + i] = fma(mul(integers[i][r], set1(unit)), scale, sum[r][v + i]);
          }
        }
      }
      at += Kernel::code_bytes;
      x += 2 * Kernel::group;
      block += sizeof(FixedBlock);
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        store(tile.sums[r] + column + lanes(v), sum[r][v]);
      }
    }
  }

 private:
  ByGroups() = default;
  friend Kernel;
};
