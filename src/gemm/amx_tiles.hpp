// Tiles of bf16 (AMX): up to 16 rows times 16, 32 or 64 columns of weights, 32 of k at a time.
// Include inside the unnamed namespace, after simd_avx512.hpp and amx_instructions.hpp.
//
// tdpbf16ps adds the products of even k, one after the other, and those of odd k, each rounded to
// f32; then both, and then these to the sum. What is subnormal is zero, in and out. A row's sums do
// not depend on the tile's other rows, and FMA with two chains gives the same bits (Chains): so few
// rows need no tiles, whose weights pass through memory.

constexpr std::size_t amx_k = 32;

template <int sums, int weights>
SHUNT_INLINE void tile_multiply() {  // with the rows of tile 4
  __asm__ volatile("tdpbf16ps %%tmm%c1,%%tmm4,%%tmm%c0" ::"i"(sums), "i"(weights));
}

// Tiles 0 to 3: sums, [rows][16] each; 4: rows, [rows][32]; 5, 6: weights, [16 pairs of k][16][2].
SHUNT_INLINE void configure(int rows) {
  AmxConfig config;
  for (int t = 0; t < 7; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<std::uint8_t>(t < 5 ? rows : 16);
  }
  config.load();
}

// `blocks` of 16 columns; 64 floats from a row of `sums` to the next.
template <int blocks>
SHUNT_INLINE void load_sums(const float* sums) {
  tile_load<0>(sums, 256);
  if constexpr (blocks > 1) tile_load<1>(sums + 16, 256);
  if constexpr (blocks > 2) {
    tile_load<2>(sums + 32, 256);
    tile_load<3>(sums + 48, 256);
  }
}
template <int blocks>
SHUNT_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (blocks > 1) tile_zero<1>();
  if constexpr (blocks > 2) {
    tile_zero<2>();
    tile_zero<3>();
  }
}
template <int blocks>
SHUNT_INLINE void store_sums(float* sums) {
  tile_store<0>(sums, 256);
  if constexpr (blocks > 1) tile_store<1>(sums + 16, 256);
  if constexpr (blocks > 2) {
    tile_store<2>(sums + 32, 256);
    tile_store<3>(sums + 48, 256);
  }
}
template <int blocks>
SHUNT_INLINE void copy_sums(const float* from, float* to, std::size_t rows) {
  for (std::size_t r = 0; r < rows; ++r, from += 64, to += 64) {
    SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
      const std::ptrdiff_t at = std::ptrdiff_t{16} * b;
      store(to + at, load(from + at));
    }
  }
}
// 32 of k: rows beside each other, pairs of k of the weights `pair_bytes` apart.
template <int blocks>
SHUNT_INLINE void multiply_add(const char* rows, const char* weights, std::size_t pair_bytes) {
  tile_load<4>(rows, 64);
  tile_load<5>(weights, pair_bytes);
  tile_multiply<0, 5>();
  if constexpr (blocks > 1) {
    tile_load<6>(weights + 64, pair_bytes);
    tile_multiply<1, 6>();
  }
  if constexpr (blocks > 2) {
    tile_load<5>(weights + 128, pair_bytes);
    tile_multiply<2, 5>();
    tile_load<6>(weights + 192, pair_bytes);
    tile_multiply<3, 6>();
  }
}

// Rows beside each other: of 16 of them each 32 of k, [16][32], and zeros behind the last of k.
constexpr std::size_t row_tile_bytes = amx_rows * amx_k * 2;
// How far into them `k`, a multiple of 32, begins.
constexpr std::size_t row_tile_at(std::size_t k) { return k / amx_k * row_tile_bytes; }

inline std::size_t row_tiles_bytes(std::size_t k, std::size_t = 0) {
  return row_tile_at(k + amx_k - 1);
}
inline void pack_rows(const void* const* rows, std::size_t count, std::size_t k, std::size_t,
                      void* to) {
  pack_tiles(rows, count, row_tiles_bytes(k), to, [&](const void* row, char* tile, std::size_t r) {
    const auto* const from = static_cast<const std::uint16_t*>(row);
    for (std::size_t at = 0; at < k; at += amx_k) {
      const std::size_t left = k - at;
      const __mmask32 there = left >= amx_k ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      _mm512_store_si512(tile + row_tile_at(at) + 64 * r,
                         _mm512_maskz_loadu_epi16(there, from + at));
    }
  });
}

// ---- few rows ----------------------------------------------------------------------------------

constexpr std::size_t most_chained_rows = 2;

// While it lives subnormal numbers are zeros, as in tiles.
class Flushed {
 public:
  Flushed() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~Flushed() { _mm_setcsr(before_); }
  Flushed(const Flushed&) = delete;
  Flushed& operator=(const Flushed&) = delete;

 private:
  unsigned before_;
};

// The sums of even and of odd k that a tile's 32 make, of rows by vectors of 16 columns.
template <int rows, int vectors>
struct Chains {
  F32 even[rows][vectors], odd[rows][vectors];

  SHUNT_INLINE void begin() {
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) even[r][v] = odd[r][v] = set1(0);
    }
  }
  // A pair of k: [16][2] bf16 of each vector's columns, and two numbers of each row, or the one
  // that it has left.
  SHUNT_INLINE void add(const __m512i (&weights)[vectors], const std::uint16_t* const (&row)[rows],
                        std::size_t k, bool one = false) {
    F32 first[rows], second[rows];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      std::int32_t two = 0;
      if (one) {
        two = row[r][k];
      } else {
        __builtin_memcpy(&two, row[r] + k, sizeof two);
      }
      split(_mm512_set1_epi32(two), first[r], second[r]);
    }
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      F32 low, high;
      split(weights[v], low, high);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        even[r][v] = fma(first[r], low, even[r][v]);
        odd[r][v] = fma(second[r], high, odd[r][v]);
      }
    }
  }
  SHUNT_INLINE F32 end(int r, int v) const { return {_mm512_add_ps(even[r][v].v, odd[r][v].v)}; }

 private:
  SHUNT_INLINE static void split(__m512i pairs, F32& first, F32& second) {
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    second = {_mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
  }
};

// f<blocks>() for 16, 32 or 64 columns.
template <class F>
SHUNT_INLINE void with_blocks(int columns, const F& f) {
  if (columns == 64) return f.template operator()<4>();
  columns == 32 ? f.template operator()<2>() : f.template operator()<1>();
}
// f<rows, blocks>() for so few rows.
template <class F>
SHUNT_INLINE void with_few_rows(std::size_t rows, int columns, const F& f) {
  static_assert(most_chained_rows == 2);
  with_blocks(columns, [&]<int blocks>() {
    rows == 1 ? f.template operator()<1, blocks>() : f.template operator()<2, blocks>();
  });
}
