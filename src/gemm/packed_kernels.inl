// The kernels of packed_kernels.hpp, for the set whose simd_*.hpp was included before, and its
// codes_*.hpp.
//
// A register tile is rows x (vectors * width) sums and as many sums of the group at hand. A step is
// the k that one word of each column holds: its codes are loaded once and taken apart by shifts,
// each becomes a vector of weights by one look-up or conversion, and is multiplied with one number
// of each row. For one row and nvfp4 that is a load, 7 shifts, 8 look-ups and 8 FMA for 128 weights.
// The last step of k reads rows from a copy that is filled up with zeros.

// Where sanitizers watch every load, unrolled code takes minutes to compile.
#if defined(SHUNT_SANITIZED)
#define SHUNT_UNROLL
#define SHUNT_LAMBDA
#define SHUNT_STEP inline __attribute__((noinline))
#else
#define SHUNT_UNROLL _Pragma("GCC unroll 16")
#define SHUNT_LAMBDA __attribute__((always_inline))
#define SHUNT_STEP SHUNT_INLINE
#endif

template <int j, int end, class F>
SHUNT_STEP void each(const F& f) {
  if constexpr (j < end) {
    f.template operator()<j>();
    each<j + 1, end>(f);
  }
}

// ---- codes: what a step holds, and the weights in it ----------------------------------------------

struct Nibbles {
  static constexpr int step_k = 8, step_bytes = 256;
  using Codes = Words;
  SHUNT_INLINE static Codes load_codes(const char* step, int column) {
    return load_words(step + std::ptrdiff_t{4} * column);
  }
};
struct E2m1Codes : Nibbles {
  struct Extra {};
  static constexpr int extra_bytes = 0;
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    return e2m1_of<4 * j>(c);
  }
};
struct Int4Codes : Nibbles {
  using Extra = F32;  // the zero points
  SHUNT_INLINE static Extra extra(const char* at, int column) { return bytes_to_f32(at + column); }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra& zero) {
    return sub(nibble_of<4 * j>(c), zero);
  }
};
struct Int8Codes {
  static constexpr int step_k = 4, step_bytes = 256;
  using Codes = Words;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, int column) {
    return load_words(step + std::ptrdiff_t{4} * column);
  }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    return signed_byte_of<8 * j>(c);
  }
};
// Weights are 2^-8 of what they mean: an e4m3 in the fields of an f16.
struct E4m3Codes {
  static constexpr int step_k = 2, step_bytes = 128;
  using Codes = Halves;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, int column) {
    return load_half_words(step + std::ptrdiff_t{2} * column);
  }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    return e4m3_of<j>(c);
  }
};
struct Dense3Codes {
  static constexpr int step_k = 32, step_bytes = 768;
  struct Codes {
    Words word[3];
  };
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, int) { return {}; }
  SHUNT_INLINE static Codes load_codes(const char* step, int column) {
    const char* const at = step + std::ptrdiff_t{4} * column;
    return {{load_words(at), load_words(at + 256), load_words(at + 512)}};
  }
  template <int j>
  SHUNT_INLINE static F32 weight(const Codes& c, const Extra&) {
    constexpr int bit = 3 * j - 3, word = bit < 0 ? 0 : bit / 32, shift = bit - 32 * word;
    if constexpr (shift > 26) {
      return dense3_of<0>(funnel<shift>(c.word[word], c.word[word < 2 ? word + 1 : 2]));
    } else {
      return dense3_of<shift>(c.word[word]);
    }
  }
};

// ---- scales ---------------------------------------------------------------------------------------

// In `bytes` before a group's codes.
struct ScaleE4m3 {
  static constexpr int bytes = 64;
  SHUNT_INLINE static F32 scale(const PackedProduct& p, const char* at, int column) {
    return mul(e4m3_bytes(at + column), set1(p.globals[column / 16]));
  }
};
struct ScaleE8m0 {
  static constexpr int bytes = 64;
  SHUNT_INLINE static F32 scale(const PackedProduct&, const char* at, int column) {
    return e8m0_bytes(at + column);
  }
};
struct ScaleColumn {
  static constexpr int bytes = 256;
  SHUNT_INLINE static F32 scale(const PackedProduct&, const char* at, int column) {
    return load(reinterpret_cast<const float*>(at) + column);
  }
};
struct ScaleBlock {
  static constexpr int bytes = 64;
  SHUNT_INLINE static F32 scale(const PackedProduct&, const char* at, int column) {
    return set1(reinterpret_cast<const float*>(at)[column / 16]);
  }
};
struct ScaleInt4 {
  static constexpr int bytes = 192;  // and zero points behind 128
  SHUNT_INLINE static F32 scale(const PackedProduct& p, const char* at, int column) {
    const auto* const halves = reinterpret_cast<const std::uint16_t*>(at) + column;
    return p.halves ? load_f16(halves) : load_bf16(halves);
  }
};

// ---- tiles ----------------------------------------------------------------------------------------

constexpr int most_step = 32;

// `step_k` numbers of each row from k on, zeros past the end.
template <int rows>
struct LastStep {
  float padded[rows][most_step];
  const float* row[rows];
  SHUNT_INLINE LastStep(const float* const* from, std::size_t k, std::size_t end) {
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < most_step; ++i) padded[r][i] = k + i < end ? from[r][k + i] : 0;
      row[r] = padded[r];
    }
  }
};

template <class Codes, int rows, int vectors>
struct DenseStep {
  static constexpr int step_k = Codes::step_k, step_bytes = Codes::step_bytes;
  typename Codes::Extra extra[vectors];
  SHUNT_INLINE DenseStep(const char* scales, int column) {
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      extra[v] = Codes::extra(scales + 128, column + v * F32::width);
    }
  }
  SHUNT_INLINE static std::size_t code_offset() { return 0; }
  SHUNT_STEP void run(const char* step, int column, const float* const* row, std::size_t k,
                        F32 (&acc)[rows][vectors]) const {
    typename Codes::Codes c[vectors];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      c[v] = Codes::load_codes(step, column + v * F32::width);
    }
    each<0, step_k>([&]<int j>() SHUNT_LAMBDA {
      F32 w[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] = Codes::template weight<j>(c[v], extra[v]);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        const F32 x = set1(row[r][k + j]);
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
      }
    });
  }
};

// Sixteen k of which eight are kept: 64 half-words of positions, then 64 words of codes.
template <int rows, int vectors>
struct SparseStep {
  static constexpr int step_k = 16, step_bytes = 384;
  SHUNT_INLINE SparseStep(const char*, int) {}
  SHUNT_STEP void run(const char* step, int column, const float* const* row, std::size_t k,
                        F32 (&acc)[rows][vectors]) const {
    Words c[vectors], place[vectors];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      const std::ptrdiff_t at = column + v * F32::width;
      place[v] = widen_half_words(step + 2 * at);
      c[v] = load_words(step + 128 + 4 * at);
    }
    each<0, 8>([&]<int j>() SHUNT_LAMBDA {
      F32 w[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) w[v] = e2m1_of<4 * j>(c[v]);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        const Four x = load_four(row[r] + k + std::size_t{4} * (j / 2));
        SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
          acc[r][v] = fma(pick<2 * j>(x, place[v]), w[v], acc[r][v]);
        }
      }
    });
  }
};

// The power of two by which decoded weights are too small.
template <class Codes>
constexpr float code_unit = 1;
template <>
constexpr float code_unit<E4m3Codes> = 256;

template <class Step, class Scale, int rows, int vectors>
__attribute__((noinline)) void packed_tile(const PackedProduct& p, std::size_t first_row,
                                           int column, float unit) {
  const float* row[rows];
  F32 sum[rows][vectors];
  float* const sums = p.sums + 64 * first_row + column;
  SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
    row[r] = p.rows[first_row + static_cast<std::size_t>(r)];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) sum[r][v] = load(sums + std::ptrdiff_t{64} * r + std::ptrdiff_t{F32::width} * v);
  }
  const char* at = p.panel;
  for (std::size_t begin = 0; begin < p.k; begin += p.group) {
    const std::size_t end = begin + p.group < p.k ? begin + p.group : p.k;
    const char* const scales = at;
    at += Scale::bytes;
    const Step step(scales, column);
    F32 acc[rows][vectors];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) acc[r][v] = zero();
    }
    std::size_t k = begin;
    for (; k + Step::step_k <= end; k += Step::step_k) {
      SHUNT_UNROLL for (int line = 0; line < (Step::step_bytes + 63) / 64; ++line) {
        __builtin_prefetch(at + 2048 + std::ptrdiff_t{64} * line, 0, 3);
      }
      step.run(at, column, row, k, acc);
      at += Step::step_bytes;
    }
    if (k < end) {
      const LastStep<rows> last(row, k, end);
      step.run(at, column, last.row, 0, acc);
      at += Step::step_bytes;
    }
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      const F32 scale = Scale::scale(p, scales, column + v * F32::width);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        sum[r][v] = fma(mul(acc[r][v], set1(unit)), scale, sum[r][v]);
      }
    }
  }
  SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) store(sums + std::ptrdiff_t{64} * r + std::ptrdiff_t{F32::width} * v, sum[r][v]);
  }
}

// Tiles of up to four rows. Vectors beside each other while the sums stay in registers.
// Without vector registers there is nothing to share.
constexpr int packed_rows = F32::width == 4 ? 1 : packed_tile_rows;
constexpr int packed_vectors(int rows) {
  if (F32::width == 16) return rows < 4 ? 4 : 2;
  return rows == 1 ? 4 : rows == 2 ? 2 : F32::width == 8 ? 2 : 4;
}

template <template <int, int> class Step, class Scale, int rows>
SHUNT_INLINE void packed_columns(const PackedProduct& p, std::size_t row, float unit) {
  constexpr int vectors = packed_vectors(rows), least = 16 / F32::width;
  int column = p.column;
  const int end = p.column + p.columns;
  if constexpr (vectors > least) {
    for (; column + vectors * F32::width <= end; column += vectors * F32::width) {
      packed_tile<Step<rows, vectors>, Scale, rows, vectors>(p, row, column, unit);
    }
  }
  for (; column < end; column += 16) {
    packed_tile<Step<rows, least>, Scale, rows, least>(p, row, column, unit);
  }
}

template <template <int, int> class Step, class Scale>
void packed_multiply(const PackedProduct& p, float unit) {
  std::size_t row = 0;
  for (; row + packed_rows <= p.count; row += packed_rows) {
    packed_columns<Step, Scale, packed_rows>(p, row, unit);
  }
  if constexpr (packed_rows > 1) {
    switch (p.count - row) {
      case 1:
        return packed_columns<Step, Scale, 1>(p, row, unit);
      case 2:
        return packed_columns<Step, Scale, 2>(p, row, unit);
      case 3:
        return packed_columns<Step, Scale, 3>(p, row, unit);
      default:
        return;
    }
  }
}

template <class Codes>
struct Dense {
  template <int rows, int vectors>
  using Step = DenseStep<Codes, rows, vectors>;
};

template <class Codes, class Scale>
void packed_dense(const PackedProduct& p) {
  packed_multiply<Dense<Codes>::template Step, Scale>(p, code_unit<Codes>);
}
void packed_sparse(const PackedProduct& p) { packed_multiply<SparseStep, ScaleE4m3>(p, 1); }

constexpr PackedKernels all_packed_kernels = {
    .fp8_column = packed_dense<E4m3Codes, ScaleColumn>,
    .fp8_block = packed_dense<E4m3Codes, ScaleBlock>,
    .mxfp8 = packed_dense<E4m3Codes, ScaleE8m0>,
    .nvfp4 = packed_dense<E2m1Codes, ScaleE4m3>,
    .mxfp4 = packed_dense<E2m1Codes, ScaleE8m0>,
    .int8 = packed_dense<Int8Codes, ScaleColumn>,
    .int4 = packed_dense<Int4Codes, ScaleInt4>,
    .dense3 = packed_dense<Dense3Codes, ScaleE4m3>,
    .sparse_nvfp4 = packed_sparse,
};
