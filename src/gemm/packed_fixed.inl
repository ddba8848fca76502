// The kernels of fixed_rows.hpp, for the set whose simd_*.hpp, codes_*.hpp and fixed_codes_*.hpp
// were included before, and packed_tiles.inl.
//
// A register tile is rows x (vectors * width) sums of the group (or, of int8, the rows' block) at
// hand, and as many of all groups where registers are left for them. One row takes all 64 columns
// at once: in two passes, memory would be read in the first alone. A step is a word of each column.

// ---- codes -------------------------------------------------------------------------------------
//
// A word of a column holds `word_k` codes, multiplied in pairs of k. They are multiplied as numbers
// that are `more` than they mean (times the column's zero point, where it has one), so that none is
// negative; a sum starts from what that adds too much.

struct Int4Fixed {
  static constexpr int word_k = 8;
  static constexpr bool of_bytes = false;
  static constexpr float unit = 1;
  static constexpr std::int32_t more = 1;
  using Extra = Whole;  // the zero points
  SHUNT_INLINE static Extra extra(const char* zeros, std::size_t column) {
    return widen_bytes(zeros + column);
  }
  SHUNT_INLINE static Whole start(const Extra& zero, std::int32_t sum) {
    return times(zero, whole(sum));
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
  static constexpr bool of_bytes = false;
  static constexpr float unit = 0.5F;
  static constexpr std::int32_t more = 12;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static Whole start(const Extra&, std::int32_t sum) { return whole(sum); }
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
// 128 more: 0 to 255. A pair is k 0 and 2, or 1 and 3: fix_row() lays rows out like that.
struct Int8Fixed {
  static constexpr int word_k = 4;
  static constexpr bool of_bytes = true;  // a column has one scale
  static constexpr float unit = 1;
  static constexpr std::int32_t more = 128;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static Whole start(const Extra&, std::int32_t sum) { return whole(sum); }
  using Codes = Words;
  SHUNT_INLINE static Codes codes(Words a) {
    return flipped(a, each_word(static_cast<std::int32_t>(0x80808080U)));
  }
  template <int j>
  SHUNT_INLINE static Words pair(const Codes& c) {
    if constexpr (j == 0) return both(c, each_word(0x00ff00ff));
    return upper_bytes(c);
  }
};

// Towards the L1 (3); with AVX-512 towards the L2 alone (2), which is worth a tenth for codes of 8
// bits on a Xeon, and costs 5 % on Zen 5 (measured: docs/notes/cpu-packed.md).
constexpr int usual_level = F32::width == 16 ? 2 : 3;
template <int level>
SHUNT_INLINE void fetch(const char* at) {
  __builtin_prefetch(at, 0, level);
}

// ---- tiles -------------------------------------------------------------------------------------

template <class Codes, int level, PackedScale... scales>
struct PackedFixed {
  static constexpr int most_rows = F32::width == 16 ? 6 : 4;
  static constexpr std::size_t columns(int rows) {
    if (rows == 1 || (rows == 2 && F32::width == 16)) return 64;
    return lanes(rows == 2 && Codes::of_bytes ? 4 : 2);
  }
  static std::size_t header_bytes(const PackedProduct& p) {
    return Codes::of_bytes ? 0 : header_bytes_of(p);
  }
  static std::size_t group_bytes(const PackedProduct& p) {
    return header_bytes(p) + (p.group + Codes::word_k - 1) / Codes::word_k * 256;
  }
  static const char* codes_at(const PackedProduct& p) {
    return p.panel + (Codes::of_bytes ? scale_bytes(p.scale) : 0);
  }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column,
                                             const FixedPart& part) {
    constexpr int vectors = wide / F32::width;
    if constexpr (wide == 64) column = 0;
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
    const char* at = part.at;
    const std::size_t ahead = rows == 1 ? p.fetch_ahead : first == 0 ? part.ahead : 0;
    const std::size_t header_size = header_bytes(p);
    std::size_t block = part.block, x = part.x;
    for (std::size_t begin = part.begin; begin < part.end; begin += p.group) {
      const std::size_t end = begin + p.group < part.end ? begin + p.group : part.end;
      const char* const header = Codes::of_bytes ? p.panel : at;
      at += header_size;
      if constexpr (!Codes::of_bytes) {
        if (column == 0) fetch<level>(header + ahead);
      }
      const char* const zeros = zero_points(p, header);
      Whole acc[rows][vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const auto extra = Codes::extra(zeros, column + lanes(v));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          acc[r][v] =
              Codes::start(extra, reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->start);
        }
      }
      at += 4 * column;
      for (std::size_t k = begin; k < end; k += Codes::word_k) {
        SHUNT_UNROLL for (int line = 0; line < wide / 16; ++line) {
          fetch<level>(at + ahead + std::ptrdiff_t{64} * line);
        }
        step(at, tile.row, x, acc);
        at += 256;
        x += 2 * Codes::word_k;
      }
      at -= 4 * column;
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const F32 scale = scale_of<scales...>(p, header, column + lanes(v));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const float unit = reinterpret_cast<const FixedBlock*>(tile.row[r] + block)->unit;
          const F32 group = mul(to_f32(acc[r][v]), set1(unit));
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

template <class Codes, int level, PackedScale... scales>
constexpr FixedFormat fixed_format = {fix_row<Codes>,
                                      fixed_multiply<PackedFixed<Codes, level, scales...>>};

constexpr FixedKernels all_fixed_kernels = {
    .nvfp4 = fixed_format<E2m1Fixed, usual_level, PackedScale::e4m3>,
    .mxfp4 = fixed_format<E2m1Fixed, usual_level, PackedScale::e8m0>,
    .int4 = fixed_format<Int4Fixed, usual_level, PackedScale::f16, PackedScale::bf16>,
    .int8 = fixed_format<Int8Fixed, usual_level, PackedScale::column>,
    .int8_to_l1 = fixed_format<Int8Fixed, 3, PackedScale::column>,
};
