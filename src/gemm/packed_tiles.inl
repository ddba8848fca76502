// What the kernels of packed_kernels.hpp share: rows are cut into register tiles, and scales are
// read. Include after simd_*.hpp and codes_*.hpp.

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

// Columns of `vectors` vectors.
constexpr std::size_t lanes(int vectors) {
  return static_cast<std::size_t>(vectors) * static_cast<std::size_t>(F32::width);
}

// Eight codes of k on in a word: a pair of k stands 16 bits apart, so that a look-up of half-words
// finds both. Of the sparse format, the codes kept.
constexpr int nibble_bit(int k) { return 16 * (k % 2) + 4 * (k / 2); }

// ---- scales ---------------------------------------------------------------------------------------

constexpr int scale_bytes(PackedScale scale) {
  switch (scale) {
    case PackedScale::column:
      return 256;
    case PackedScale::f16:
    case PackedScale::bf16:
      return 128;
    default:
      return 64;
  }
}

// Of scales and zero points.
SHUNT_INLINE std::size_t header_bytes_of(const PackedProduct& p) {
  return static_cast<std::size_t>(scale_bytes(p.scale)) + (p.zeros ? 64 : 0);
}

struct Eights {
  alignas(64) unsigned char at[64];
};
constexpr Eights eights = [] {
  Eights all{};
  for (unsigned char& zero : all.at) zero = 8;
  return all;
}();
// int4's zero points of a panel's columns.
SHUNT_INLINE const char* zero_points(const PackedProduct& p, const char* header) {
  return p.zeros ? header + 128 : reinterpret_cast<const char*>(eights.at);
}

// Of the columns from `column` on; `kinds` are those that can be met.
template <PackedScale... kinds>
SHUNT_INLINE F32 scale_of(const PackedProduct& p, const char* at, std::size_t column) {
  constexpr auto possible = [](PackedScale kind) { return ((kind == kinds) || ...); };
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(at) + column;
  if constexpr (possible(PackedScale::block)) {
    if (p.scale == PackedScale::block) {
      return set1(reinterpret_cast<const float*>(at)[column / 16]);
    }
  }
  if constexpr (possible(PackedScale::e8m0)) {
    if (sizeof...(kinds) == 1 || p.scale == PackedScale::e8m0) return e8m0_bytes(at + column);
  }
  if constexpr (possible(PackedScale::f16)) {
    return p.scale == PackedScale::f16 ? load_f16(halves) : load_bf16(halves);
  } else if constexpr (possible(PackedScale::e4m3)) {
    return mul(e4m3_bytes(at + column), set1(p.globals[column / 16]));
  } else {
    return load(reinterpret_cast<const float*>(at) + column);
  }
}

// ---- rows -----------------------------------------------------------------------------------------

// The rows of a tile. The last tile is filled up with its last row, whose further sums go nowhere.
template <class Row, int rows>
struct TileRows {
  const Row* row[rows];
  float* sums[rows];
  alignas(64) float nowhere[64];

  SHUNT_INLINE TileRows(const PackedProduct& p, std::size_t first, std::size_t end) {
    if (end - first < rows) {
      SHUNT_UNROLL for (int i = 0; i < 64; ++i) nowhere[i] = 0;
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      const std::size_t at = first + static_cast<std::size_t>(r);
      row[r] = static_cast<const Row*>(p.rows[at < end ? at : end - 1]);
      sums[r] = at < end ? p.sums + 64 * at : nowhere;
    }
  }
};

// The last `count` numbers of each row from `at` on, and zeros up to a whole step.
template <class Row, int rows, int step_k>
struct LastStep {
  Row padded[rows][step_k];
  __attribute__((noinline)) void take(const Row* (&row)[rows], std::size_t at, std::size_t count) {
    for (int r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < step_k; ++i) {
        padded[r][i] = i < count ? row[r][at + i] : static_cast<Row>(0);
      }
      row[r] = padded[r];
    }
  }
};

// Tiles that are compiled: of 1, 2, 3, 4 and 6 rows as far as the set's registers go, and of the first
// and the largest of these for 16 columns, which only small products take. `part`: what a kernel may
// want to know beside the product.
template <class Kernel, int rows, class... Part>
SHUNT_INLINE void packed_columns(const PackedProduct& p, std::size_t first, const Part&... part) {
  constexpr std::size_t wide = Kernel::columns(rows);
  const std::size_t last = first + rows < p.count ? first + rows : p.count;
  constexpr int narrow_rows = rows == 1 ? 1 : Kernel::most_rows;
  auto column = static_cast<std::size_t>(p.column);
  const std::size_t end = column + static_cast<std::size_t>(p.columns);
  for (; column + wide <= end; column += wide) {
    Kernel::template tile<rows, wide>(p, first, last, column, part...);
  }
  if constexpr (wide > 16) {
    for (; column < end; column += 16) {
      Kernel::template tile<narrow_rows, 16>(p, first, last, column, part...);
    }
  }
}

template <class Kernel, class... Part>
void packed_multiply(const PackedProduct& p, const Part&... part) {
  std::size_t row = 0;
  while (row < p.count) {
    const std::size_t left = p.count - row;
    if constexpr (Kernel::most_rows >= 6) {
      if (left > 4 && left != 7 && left != 8) {
        packed_columns<Kernel, 6>(p, row, part...);
        row += 6;
        continue;
      }
    }
    if constexpr (Kernel::most_rows >= 4) {
      if (left > 3) {
        packed_columns<Kernel, 4>(p, row, part...);
        row += 4;
        continue;
      }
      if (left == 3) return packed_columns<Kernel, 3>(p, row, part...);
    }
    if constexpr (Kernel::most_rows >= 2) {
      if (left == 2) return packed_columns<Kernel, 2>(p, row, part...);
    }
    packed_columns<Kernel, 1>(p, row, part...);
    row += 1;
  }
}
