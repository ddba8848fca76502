// The kernels of packed_kernels.hpp for rows in f32, for the set whose simd_*.hpp was included
// before, and its codes_*.hpp and packed_tiles.inl.
//
// A register tile is rows x (vectors * width) sums of the group at hand; beyond eight vectors of
// them the sums of all groups stay in memory. A step is the k that one word of each column holds:
// its codes are loaded once and taken apart by shifts, each becomes a vector of weights by a
// look-up or conversion, and is multiplied with one number of each row. The last step of k reads
// rows from a copy that is filled up with zeros.

// ---- codes: what a step holds, and the weights in it ---------------------------------------------
//
// `part<p>`: what the weights of k = p * part_k .. are looked up in together; `weight<i>`: that of the
// i-th of them.

struct Nibbles {
  static constexpr int step_k = 8, part_k = 2, step_bytes = 256;
  using Codes = Words;
  SHUNT_INLINE static Codes load_codes(const char* step, std::size_t column) {
    return load_words(step + 4 * column);
  }
};
struct E2m1Codes : Nibbles {
  struct Extra {};
  static constexpr int extra_bytes = 0;
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  template <int p>
  SHUNT_INLINE static auto part(const Codes& c) {
    return e2m1_pair<nibble_bit(2 * p)>(c);
  }
  template <int i, class Part>
  SHUNT_INLINE static F32 weight(const Part& pair, const Extra&) {
    return e2m1_of<i>(pair);
  }
};
struct Int4Codes : Nibbles {
  using Extra = F32;  // the zero points
  SHUNT_INLINE static Extra extra(const char* zeros, std::size_t column) {
    return bytes_to_f32(zeros + column);
  }
  template <int p>
  struct Pair {
    Codes codes;
  };
  template <int p>
  SHUNT_INLINE static Pair<p> part(const Codes& c) {
    return {c};
  }
  template <int i, int p>
  SHUNT_INLINE static F32 weight(const Pair<p>& pair, const Extra& zero) {
    return sub(nibble_of<nibble_bit(2 * p + i)>(pair.codes), zero);
  }
};
// Looked up each by itself.
template <class Codes>
struct Singly {
  template <int>
  SHUNT_INLINE static Codes part(const Codes& c) {
    return c;
  }
};
struct Int8Codes : Singly<Words> {
  static constexpr int step_k = 4, part_k = 4, step_bytes = 256;
  using Codes = Words;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, std::size_t column) {
    return load_words(step + 4 * column);
  }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    return signed_byte_of<8 * j>(c);
  }
};
// Weights are 2^-8 of what they mean: an e4m3 in the fields of an f16.
struct E4m3Codes : Singly<Halves> {
  static constexpr int step_k = 2, part_k = 2, step_bytes = 128;
  using Codes = Halves;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, std::size_t column) {
    return load_half_words(step + std::ptrdiff_t{2} * column);
  }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    return e4m3_of<j>(c);
  }
};
struct Dense3Codes {
  static constexpr int step_k = 32, part_k = 4, step_bytes = 768;
  struct Codes {
    Words word[3];
  };
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, std::size_t column) {
    const char* const at = step + 4 * column;
    return {{load_words(at), load_words(at + 256), load_words(at + 512)}};
  }
  template <int p>
  SHUNT_INLINE static auto part(const Codes& c) {
    constexpr int bit = 12 * p - 3, word = bit < 0 ? 0 : bit / 32, shift = bit - 32 * word;
    if constexpr (shift > 32 - 15) {
      return dense3_four<0>(Words(funnel<shift>(c.word[word], c.word[word < 2 ? word + 1 : 2])));
    } else {
      return dense3_four<shift>(c.word[word]);
    }
  }
  template <int i, class Part>
  SHUNT_INLINE static F32 weight(const Part& four, const Extra&) {
    return dense3_of<i>(four);
  }
};

// ---- tiles ---------------------------------------------------------------------------------------

template <class Codes, int rows, int vectors>
struct DenseStep {
  static constexpr int step_k = Codes::step_k, step_bytes = Codes::step_bytes;
  typename Codes::Extra extra[vectors];
  SHUNT_INLINE DenseStep(const PackedProduct& p, const char* header, std::size_t column) {
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      extra[v] = Codes::extra(zero_points(p, header), column + lanes(v));
    }
  }
  SHUNT_INLINE static std::size_t code_offset() { return 0; }
  SHUNT_STEP void run(const char* step, std::size_t column, const float* const* row, std::size_t k,
                      F32 (&acc)[rows][vectors]) const {
    typename Codes::Codes c[vectors];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      c[v] = Codes::load_codes(step, column + lanes(v));
    }
    constexpr int part_k = Codes::part_k;
    each<0, step_k / part_k>([&]<int p>() SHUNT_LAMBDA {
      std::remove_cvref_t<decltype(Codes::template part<p>(c[0]))> part[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) part[v] = Codes::template part<p>(c[v]);
      each<0, part_k>([&]<int i>() SHUNT_LAMBDA {
        F32 w[vectors];
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] =
            Codes::template weight<i>(part[v], extra[v]);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const F32 x = set1(row[r][k + std::size_t{part_k * p + i}]);
          SHUNT_UNROLL for (int v = 0; v < vectors; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
      });
    });
  }
};

// Sixteen k of which eight are kept: 64 half-words of positions, then 64 words of codes.
template <int rows, int vectors>
struct SparseStep {
  static constexpr int step_k = 16, step_bytes = 384;
  SHUNT_INLINE SparseStep(const PackedProduct&, const char*, std::size_t) {}
  SHUNT_STEP void run(const char* step, std::size_t column, const float* const* row, std::size_t k,
                      F32 (&acc)[rows][vectors]) const {
    Words c[vectors], place[vectors];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      const std::size_t at = column + lanes(v);
      place[v] = widen_half_words(step + 2 * at);
      c[v] = load_words(step + 128 + 4 * at);
    }
    each<0, 4>([&]<int p>() SHUNT_LAMBDA {
      E2m1Pair<nibble_bit(2 * p)> pair[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) pair[v] = e2m1_pair<nibble_bit(2 * p)>(c[v]);
      each<0, 2>([&]<int i>() SHUNT_LAMBDA {
        F32 w[vectors];
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] = e2m1_of<i>(pair[v]);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const Four x = load_four(row[r] + k + std::size_t{4} * p);
          SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
            acc[r][v] = fma(pick<2 * (2 * p + i)>(x, place[v]), w[v], acc[r][v]);
          }
        }
      });
    });
  }
};

// The power of two by which decoded weights are too small.
template <class Step>
constexpr float code_unit = 1;
template <int rows, int vectors>
constexpr float code_unit<DenseStep<E4m3Codes, rows, vectors>> = 256;

// Vectors beside each other while the sums of a group stay in registers. Without vector registers
// there is nothing to share among rows.
constexpr int packed_vectors(int rows) {
  if (F32::width == 16) return 4;
  return rows == 1 ? 4 : rows == 2 ? 2 : F32::width == 8 ? 2 : 4;
}

template <template <int, int> class Step, PackedScale... scales>
struct PackedF32 {
  static constexpr int most_rows = F32::width == 4 ? 1 : F32::width == 8 ? 4 : 6;
  static constexpr std::size_t columns(int rows) { return lanes(packed_vectors(rows)); }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column) {
    constexpr int vectors = wide / F32::width;
    using Steps = Step<rows, vectors>;
    constexpr bool held = rows * vectors <= 8;  // the sums of all groups
    TileRows<float, rows> tile(p, first, last_row);
    F32 sum[rows][vectors];
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
          sum[r][v] = load(tile.sums[r] + column + lanes(v));
        }
      }
    }
    const char* at = p.panel;
    const std::size_t header = header_bytes_of(p);
    std::size_t x = 0;  // where in the rows the step begins
    for (std::size_t begin = 0; begin < p.k; begin += p.group) {
      const std::size_t end = begin + p.group < p.k ? begin + p.group : p.k;
      const char* const header_at = at;
      at += header;
      const Steps step(p, header_at, column);
      F32 acc[rows][vectors];
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) acc[r][v] = zero();
      }
      LastStep<float, rows, Steps::step_k> last;
      for (std::size_t k = begin; k < end; k += Steps::step_k) {
        SHUNT_UNROLL for (int line = 0; line < (Steps::step_bytes + 63) / 64; ++line) {
          __builtin_prefetch(at + p.fetch_ahead + std::ptrdiff_t{64} * line, 0, 3);
        }
        if (k + Steps::step_k > end) {
          last.take(tile.row, x, end - k);
          x = 0;
        }
        step.run(at, column, tile.row, x, acc);
        at += Steps::step_bytes;
        x += Steps::step_k;
      }
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const std::size_t c = column + lanes(v);
        const F32 scale = scale_of<scales...>(p, header_at, c);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          F32 group = acc[r][v];
          if constexpr (code_unit<Steps> != 1) group = mul(group, set1(code_unit<Steps>));
          if constexpr (held) {
            sum[r][v] = fma(group, scale, sum[r][v]);
          } else {
            store(tile.sums[r] + c, fma(group, scale, load(tile.sums[r] + c)));
          }
        }
      }
    }
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
          store(tile.sums[r] + column + lanes(v), sum[r][v]);
        }
      }
    }
  }
};

template <class Codes>
struct Dense {
  template <int rows, int vectors>
  using Step = DenseStep<Codes, rows, vectors>;
};
template <class Codes, PackedScale... scales>
using PackedDense = PackedF32<Dense<Codes>::template Step, scales...>;

constexpr PackedKernels all_packed_kernels = {
    .e4m3 = packed_multiply<
        PackedDense<E4m3Codes, PackedScale::column, PackedScale::block, PackedScale::e8m0>>,
    .e2m1 = packed_multiply<PackedDense<E2m1Codes, PackedScale::e8m0, PackedScale::e4m3>>,
    .int8 = packed_multiply<PackedDense<Int8Codes, PackedScale::column>>,
    .int4 = packed_multiply<PackedDense<Int4Codes, PackedScale::f16, PackedScale::bf16>>,
    .dense3 = packed_multiply<PackedDense<Dense3Codes, PackedScale::e4m3>>,
    .sparse = packed_multiply<PackedF32<SparseStep, PackedScale::e4m3>>,
    .tile_rows = F32::width == 4   ? 1
                 : F32::width == 8 ? 4
                                   : 6,
};
