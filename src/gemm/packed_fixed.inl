// The kernels of fixed_rows.hpp, for the set whose simd_*.hpp, codes_*.hpp and fixed_codes_*.hpp
// were included before, and packed_tiles.inl.
//
// A register tile is rows x (vectors * width) sums of the group at hand, and as many of all groups
// where registers are left for them. One row takes all 64 columns at once: in two passes, memory
// would be read in the first alone. A step is a word of each column.

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

// The second and the third of four.
SHUNT_INLINE void swap_middle(std::int16_t* four) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, four, sizeof bits);
  bits = (bits & 0xffff00000000ffffU) | (bits & 0xffff0000U) << 16 | (bits >> 16 & 0xffff0000U);
  __builtin_memcpy(four, &bits, sizeof bits);
}

template <bool of_bytes>
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
  if constexpr (of_bytes) {
    for (std::size_t i = 0; i < padded; i += 4) swap_middle(numbers + i);
  }
  return true;
}

#ifndef SHUNT_AHEAD
#define SHUNT_AHEAD 2048
#endif
// ---- codes -------------------------------------------------------------------------------------
//
// A word of a column holds `word_k` codes, multiplied in pairs of k. Codes are multiplied as they
// are not meant, by a constant of the column more: start() takes off what that adds.

struct Int4Fixed {
  static constexpr int word_k = 8;
  static constexpr bool scale_of_column = false;
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
    return both({shifted<4 * j>(c)}, each_word(0x000f000f));
  }
};
// Doubled and 12 more: 0 to 24. Looked up a byte each, which takes half as many look-ups as words
// would.
struct E2m1Fixed {
  static constexpr int word_k = 8;
  static constexpr bool scale_of_column = false;
  static constexpr float unit = 0.5F;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static Whole start(const Extra&, std::int32_t sum) { return whole(-12 * sum); }
  struct Codes {
    Words even, odd;  // k 0, 4, 1, 5 and 2, 6, 3, 7
  };
  SHUNT_INLINE static Codes codes(Words a) {
    static constexpr std::int32_t table[4] = {0x0f0e0d0c, 0x18141210, 0x090a0b0c, 0x00040608};
    const Words nibbles = each_word(0x0f0f0f0f);
    return {look_up(table, both(a, nibbles)), look_up(table, both({shifted<4>(a)}, nibbles))};
  }
  template <int j>
  SHUNT_INLINE static Words pair(const Codes& c) {
    const Words bytes = j % 2 == 0 ? c.even : c.odd;
    if constexpr (j < 2) return both(bytes, each_word(0x00ff00ff));
    return upper_bytes(bytes);
  }
};
// 128 more: 0 to 255. A pair is k 0 and 2, or 1 and 3: fix_row<true>() lays rows out like that.
struct Int8Fixed {
  static constexpr int word_k = 4;
  static constexpr bool scale_of_column = true;
  static constexpr float unit = 1;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static Whole start(const Extra&, std::int32_t sum) { return whole(-128 * sum); }
  using Codes = Words;
  SHUNT_INLINE static Codes codes(Words a) {
    return either(a, each_word(static_cast<std::int32_t>(0x80808080U)));
  }
  template <int j>
  SHUNT_INLINE static Words pair(const Codes& c) {
    if constexpr (j == 0) return both(c, each_word(0x00ff00ff));
    return upper_bytes(c);
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
    // Where a column has one scale they are sums of blocks, and come to the others in the end.
    constexpr bool apart = Codes::scale_of_column;
    TileRows<char, rows> tile(p, first, last_row);
    alignas(64) float own[apart && !held ? rows * wide : 1];
    float* to[rows];
    F32 sum[rows][vectors];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      to[r] = apart ? own + (held ? 0 : r * wide) : tile.sums[r] + column;
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        sum[r][v] = apart || !held ? zero() : load(to[r] + lanes(v));
        if constexpr (apart && !held) store(to[r] + lanes(v), zero());
      }
    }
    const char* at = p.panel;
    const char* header = at;
    const std::size_t header_bytes = static_cast<std::size_t>(scale_bytes(p.scale));
    if constexpr (apart) at += header_bytes;
    std::size_t block = 0, x = fixed_numbers_at(p.k, p.group);  // bytes of the rows
    for (std::size_t begin = 0; begin < p.k; begin += p.group) {
      const std::size_t end = begin + p.group < p.k ? begin + p.group : p.k;
      if constexpr (!apart) {
        header = at;
        at += header_bytes;
      }
      Whole acc[rows][vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const auto extra = Codes::extra(header, column + lanes(v));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          acc[r][v] =
              Codes::start(extra, reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->sum);
        }
      }
      for (std::size_t k = begin; k < end; k += Codes::word_k) {
        SHUNT_UNROLL for (int line = 0; line < 4; ++line) {
          __builtin_prefetch(at + SHUNT_AHEAD + std::ptrdiff_t{64} * line, 0, 3);
        }
        step(at + 4 * column, tile.row, x, acc);
        at += 256;
        x += 2 * Codes::word_k;
      }
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const float unit =
              Codes::unit * reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->unit;
          const F32 before = held ? sum[r][v] : load(to[r] + lanes(v));
          if constexpr (apart) {
            sum[r][v] = fma(to_f32(acc[r][v]), set1(unit), before);
          } else {
            const F32 scale = scale_of<scales...>(p, header, column + lanes(v));
            sum[r][v] = fma(mul(to_f32(acc[r][v]), set1(unit)), scale, before);
          }
          if constexpr (!held) store(to[r] + lanes(v), sum[r][v]);
        }
      }
      block += sizeof(FixedBlock);
    }
    SHUNT_UNROLL for (int v = 0; (apart || held) && v < vectors; ++v) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        float* const sums = tile.sums[r] + column + lanes(v);
        if constexpr (apart) {
          const F32 scale = scale_of<scales...>(p, header, column + lanes(v));
          const F32 all = held ? sum[r][v] : load(to[r] + lanes(v));
          store(sums, fma(all, scale, load(sums)));
        } else {
          store(sums, sum[r][v]);
        }
      }
    }
  }

  // Of one row the numbers stay in registers, of more the codes.
  template <int rows, int vectors>
  SHUNT_STEP static void step(const char* at, const char* const (&row)[rows], std::size_t x,
                              Whole (&acc)[rows][vectors]) {
    constexpr int pairs = Codes::word_k / 2;
    if constexpr (rows == 1) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const auto c = Codes::codes(load_words(at + 4 * lanes(v)));
        each<0, pairs>([&]<int j>() SHUNT_LAMBDA {
          acc[0][v] = add_products(acc[0][v], Codes::template pair<j>(c), numbers<j>(row[0] + x));
        });
      }
    } else {
      typename Codes::Codes c[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        c[v] = Codes::codes(load_words(at + 4 * lanes(v)));
      }
      each<0, pairs>([&]<int j>() SHUNT_LAMBDA {
        Words w[vectors];
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] = Codes::template pair<j>(c[v]);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const Words two = numbers<j>(row[r] + x);
          SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
            acc[r][v] = add_products(acc[r][v], w[v], two);
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
    .row = fix_row<false>,
    .row_of_bytes = fix_row<true>,
    .e2m1 = packed_multiply<PackedFixed<E2m1Fixed, PackedScale::e8m0, PackedScale::e4m3>>,
    .int4 = packed_multiply<PackedFixed<Int4Fixed, PackedScale::f16, PackedScale::bf16>>,
    .int8 = packed_multiply<PackedFixed<Int8Fixed, PackedScale::column>>,
};
