// The kernels of fixed_rows.hpp, for the set whose simd_*.hpp, codes_*.hpp and fixed_codes_*.hpp
// were included before, and packed_tiles.inl.
//
// A register tile is rows x (vectors * width) sums of the group at hand, and as many of all groups
// where registers are left for them. One row takes all 64 columns at once: in two passes, memory
// would be read in the first alone. A step is a word of each column, eight codes of k, multiplied
// in pairs.

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
SHUNT_INLINE float power_of_bits(std::uint32_t exponent) {
  const std::uint32_t bits = exponent << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return power;
}

bool fix_row(const float* from, std::size_t k, std::size_t group, void* to) {
  constexpr float bias = 0x1.8p23F;  // leaves an integer in the lowest bits, to nearest even
  constexpr std::int32_t bias_bits = 0x4b400000;
  const std::size_t padded = (k + fixed_step - 1) / fixed_step * fixed_step;
  auto* block = static_cast<FixedBlock*>(to);
  auto* const numbers =
      reinterpret_cast<std::int16_t*>(static_cast<char*>(to) + fixed_numbers_at(k, group));
  for (std::size_t begin = 0; begin < k; begin += group, ++block) {
    const std::size_t end = begin + group < padded ? begin + group : padded;
    std::uint32_t exponent = largest_bits(from, begin, end) >> 23;
    if (exponent == 255) return false;
    if (exponent < 16) exponent = 16;
    const float factor = power_of_bits(268 - exponent);
    std::int32_t sum = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const float shifted = from[i] * factor + bias;
      std::int32_t n;
      __builtin_memcpy(&n, &shifted, sizeof n);
      n -= bias_bits;
      numbers[i] = static_cast<std::int16_t>(n);
      sum += n;
    }
    *block = {power_of_bits(exponent - 14), sum};
  }
  return true;
}

// ---- codes -------------------------------------------------------------------------------------
//
// Codes are multiplied as they are not meant, by a constant of the column more: start() takes off
// what that adds.

struct Int4Fixed {
  static constexpr float unit = 1;
  using Extra = Whole;  // the zero points
  SHUNT_INLINE static Extra extra(const char* header, std::size_t column) {
    return widen_bytes(header + 128 + column);
  }
  SHUNT_INLINE static Whole start(const Extra& zero, std::int32_t sum) {
    return times(zero, whole(-sum));
  }
  using Codes = Words;
  SHUNT_INLINE static Codes codes(Words a) { return a; }
  template <int j>
  SHUNT_INLINE static Words pair(const Codes& c) {
    return nibble_pair<j>(c);
  }
};
struct E2m1Fixed {
  static constexpr float unit = 0.5F;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static Whole start(const Extra&, std::int32_t sum) { return whole(-12 * sum); }
  using Codes = E2m1Sums;
  SHUNT_INLINE static Codes codes(Words a) { return e2m1_doubled(a); }
  template <int j>
  SHUNT_INLINE static Words pair(const Codes& c) {
    return doubled_pair<j>(c);
  }
};

// ---- tiles -------------------------------------------------------------------------------------

template <class Codes, PackedScale... scales>
struct PackedFixed {
  static constexpr int most_rows = F32::width == 16 ? 6 : 4;
  static constexpr std::size_t columns(int rows) {
    return rows == 1 || (rows == 2 && F32::width == 16) ? 64 : lanes(2);
  }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column) {
    constexpr int vectors = wide / F32::width;
    constexpr bool held = rows * vectors <= F32::width / 2;  // the sums of all groups
    TileRows<char, rows> tile(p, first, last_row);
    F32 sum[rows][vectors];
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
          sum[r][v] = load(tile.sums[r] + column + lanes(v));
        }
      }
    }
    const char* at = p.panel;
    const std::size_t header_bytes = static_cast<std::size_t>(scale_bytes(p.scale));
    std::size_t block = 0, x = fixed_numbers_at(p.k, p.group);  // bytes of the rows
    for (std::size_t begin = 0; begin < p.k; begin += p.group) {
      const std::size_t end = begin + p.group < p.k ? begin + p.group : p.k;
      const char* const header = at;
      at += header_bytes;
      Whole acc[rows][vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const auto extra = Codes::extra(header, column + lanes(v));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          acc[r][v] =
              Codes::start(extra, reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->sum);
        }
      }
      for (std::size_t k = begin; k < end; k += 8) {
        SHUNT_UNROLL for (int line = 0; line < 4; ++line) {
          __builtin_prefetch(at + 2048 + std::ptrdiff_t{64} * line, 0, 3);
        }
        step(at + 4 * column, tile.row, x, acc);
        at += 256;
        x += 16;
      }
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const F32 scale = scale_of<scales...>(p, header, column + lanes(v));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const float unit = reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->unit;
          const F32 group = mul(to_f32(acc[r][v]), set1(Codes::unit * unit));
          if constexpr (held) {
            sum[r][v] = fma(group, scale, sum[r][v]);
          } else {
            float* const to = tile.sums[r] + column + lanes(v);
            store(to, fma(group, scale, load(to)));
          }
        }
      }
      block += sizeof(FixedBlock);
    }
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
          store(tile.sums[r] + column + lanes(v), sum[r][v]);
        }
      }
    }
  }

  // Of one row the numbers stay in registers, of more the codes.
  template <int rows, int vectors>
  SHUNT_STEP static void step(const char* at, const char* const (&row)[rows], std::size_t x,
                              Whole (&acc)[rows][vectors]) {
    if constexpr (rows == 1) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const auto c = Codes::codes(load_words(at + 4 * lanes(v)));
        each<0, 4>([&]<int j>() SHUNT_LAMBDA {
          acc[0][v] = add_products(acc[0][v], Codes::template pair<j>(c), numbers<j>(row[0] + x));
        });
      }
    } else {
      typename Codes::Codes c[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        c[v] = Codes::codes(load_words(at + 4 * lanes(v)));
      }
      each<0, 4>([&]<int j>() SHUNT_LAMBDA {
        Words w[vectors];
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] = Codes::template pair<j>(c[v]);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const Words both = numbers<j>(row[r] + x);
          SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
            acc[r][v] = add_products(acc[r][v], w[v], both);
          }
        }
      });
    }
  }
  template <int j>
  SHUNT_INLINE static Words numbers(const char* row) {
    std::int32_t two;
    __builtin_memcpy(&two, row + std::ptrdiff_t{4} * j, sizeof two);
    return each_word(two);
  }
};

constexpr FixedKernels all_fixed_kernels = {
    .row = fix_row,
    .e2m1 = packed_multiply<PackedFixed<E2m1Fixed, PackedScale::e8m0, PackedScale::e4m3>>,
    .int4 = packed_multiply<PackedFixed<Int4Fixed, PackedScale::f16, PackedScale::bf16>>,
};
