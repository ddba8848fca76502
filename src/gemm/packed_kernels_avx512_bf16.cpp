// The kernels of packed_kernels.hpp for rows in bf16, by vdpbf16ps: two weights of a column and two
// numbers of a row at once.
//
// Every code is exact in bf16 (at most eight significant bits, no subnormals), found by a look-up
// of half-words or of bytes and laid in pairs of k. A group of k is summed by `parts` chains of
// vdpbf16ps from 0, each over its pairs in order, the chains are added, and the sum, times the
// scale, is fused to the sums: sums[r][c] = fma(group, scale, sums[r][c]).
//
// Rounding: a product of two bf16 is exact in f32, a pair takes two additions, and the chains one
// more: the bound of a sum of k products in f32, one after the other, holds. vdpbf16ps takes
// subnormal numbers for zero and returns none: beyond that bound, a row's numbers below 2^-126 are
// lost, and each addition may lose 2^-126, all times the group's scale.
//
// A register tile is rows x (units * parts) vectors of a group's sums, and as many of all groups
// where they fit; a unit of columns is what the codes of one 64-byte vector cover. A step is
// decoded once for all rows. For one row and nvfp4, 16 columns and k take 22 instructions on
// vectors, and 7 for the scale: half of what f32 takes.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/packed_kernels.hpp"

namespace shunt::cpu_engine::avx512_bf16 {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/bytes_bf16.hpp"
#include "gemm/codes_avx512.hpp"
// How rows are cut.
#include "gemm/packed_tiles.inl"

using Row = std::uint16_t;

// ---- codes -------------------------------------------------------------------------------------
// Each has: step_k, step_bytes, `dots` a step; unit_columns and parts; Tables, looked up in; Group,
// what a group's header adds; State, a unit's codes of a step; weight<j>, numbers<j> of a row and,
// made of these, factor<j> of the j-th dot product, which goes to chain part(j); natural(), the
// chains as columns.

struct HalfWords {
  alignas(64) std::uint16_t at[32];
};
// -16 to 15, by five bits.
constexpr HalfWords small_integers = [] {
  HalfWords table{};
  for (int i = 0; i < 32; ++i) table.at[i] = bf16_of(i < 16 ? i : i - 32);
  return table;
}();
// e2m1; bit 4 of an index is the next nibble's.
constexpr HalfWords e2m1 = [] {
  HalfWords table{};
  for (int i = 0; i < 32; ++i) {
    const int code = i % 8, twice = code < 4 ? code : (2 + code % 2) << (code / 2 - 1);
    table.at[i] = static_cast<std::uint16_t>((code == 0 ? 0 : bf16_of(twice) - (1 << 7)) |
                                             (i % 16 < 8 ? 0 : 0x8000));
  }
  return table;
}();
SHUNT_INLINE __m512i load_table(const HalfWords& table) { return _mm512_load_si512(table.at); }

// Half-words `bits` further right. As products where multipliers lie idle and shifts share their
// units with look-ups; as shifts where dot products keep the multipliers busy.
struct ByProducts {
  template <int bits>
  SHUNT_INLINE static __m512i right(__m512i codes) {
    if constexpr (bits == 0) {
      return codes;
    } else {
      return _mm512_mulhi_epu16(codes, _mm512_set1_epi16(1 << (16 - bits)));
    }
  }
};
struct ByShifts {
  template <int bits>
  SHUNT_INLINE static __m512i right(__m512i codes) {
    return _mm512_srli_epi16(codes, bits);
  }
};

struct NoGroup {};
struct NoTables {};

// Pairs of k, 32 bits of a row.
struct Pairs {
  template <int j>
  SHUNT_INLINE static __m512i numbers(const Row* row) {
    std::int32_t two;
    __builtin_memcpy(&two, row + std::ptrdiff_t{2} * j, sizeof two);
    return _mm512_set1_epi32(two);
  }
  template <int j, class State>
  SHUNT_INLINE static __m512i factor(__m512i x, const State&) {
    return x;
  }
};
struct OneChain {
  static constexpr int unit_columns = 16, parts = 1;
  static constexpr int part(int) { return 0; }
  SHUNT_INLINE static void natural(const F32 (&chain)[1], F32 (&columns)[1]) {
    columns[0] = chain[0];
  }
};
// Four k, 64 bits of a row; the first two summed apart from the others. The chain 0 has columns 0
// and 1 of every four, the chain 1 the others, each in two lanes side by side.
struct FourK {
  static constexpr int unit_columns = 16, parts = 2;
  static constexpr int part(int j) { return j % 2; }
  template <int j>
  SHUNT_INLINE static __m512i numbers(const Row* row) {
    std::int64_t four;
    __builtin_memcpy(&four, row + std::ptrdiff_t{4} * (j / 2), sizeof four);
    return _mm512_set1_epi64(four);
  }
  template <int j, class State>
  SHUNT_INLINE static __m512i factor(__m512i x, const State&) {
    return x;
  }
  SHUNT_INLINE static void natural(const F32 (&chain)[2], F32 (&columns)[1]) {
    columns[0] = add({_mm512_shuffle_ps(chain[0].v, chain[1].v, 0x88)},
                     {_mm512_shuffle_ps(chain[0].v, chain[1].v, 0xdd)});
  }
};

template <class Move>
struct E2m1Dot : Pairs, OneChain {
  static constexpr int step_k = 8, step_bytes = 256, dots = 4;
  struct Tables {
    __m512i value = load_table(e2m1);
  };
  using Group = NoGroup;
  using State = Words;
  SHUNT_INLINE static Group group(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static State state(const Tables&, const Group&, const char* step, std::size_t column,
                                  bool) {
    return load_words(step + 4 * column);
  }
  template <int j>
  SHUNT_INLINE static __m512i weight(const Tables& t, const State& s) {
    return _mm512_permutexvar_epi16(Move::template right<4 * j>(s.v), t.value);
  }
};

// A code less its zero point, -16 to 15: five bits.
template <class Move>
struct Int4Dot : Pairs, OneChain {
  static constexpr int step_k = 8, step_bytes = 256, dots = 4;
  struct Tables {
    __m512i value = load_table(small_integers);
  };
  struct Group {
    __m512i zeros;  // a column's in all four bytes
  };
  struct State {
    Words codes[2];  // of even and of odd place in their bytes
  };
  SHUNT_INLINE static Group group(const char* zeros, std::size_t column) {
    const __m512i wide = _mm512_cvtepu8_epi32(load_bytes(zeros + column));
    return {_mm512_shuffle_epi8(wide,
                                _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000))};
  }
  SHUNT_INLINE static State state(const Tables&, const Group& g, const char* step,
                                  std::size_t column, bool) {
    const Words codes = load_words(step + 4 * column);
    const __m512i mask = _mm512_set1_epi8(15);
    return {{{_mm512_sub_epi8(_mm512_and_si512(codes.v, mask), g.zeros)},
             {_mm512_sub_epi8(_mm512_and_si512(shifted<4>(codes), mask), g.zeros)}}};
  }
  template <int j>
  SHUNT_INLINE static __m512i weight(const Tables& t, const State& s) {
    return _mm512_permutexvar_epi16(Move::template right<8 * (j / 2)>(s.codes[j % 2].v), t.value);
  }
};

struct Int8Dot : FourK {
  static constexpr int step_k = 4, step_bytes = 256, dots = 2;
  struct Tables : ByteTables {
    SHUNT_INLINE Tables() : ByteTables(sizes) {}
  };
  using Group = NoGroup;
  using State = SplitBytes;
  SHUNT_INLINE static Group group(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static State state(const Tables& t, const Group&, const char* step,
                                  std::size_t column, bool) {
    const __m512i codes = load_words(step + 4 * column).v;
    State s(t, _mm512_abs_epi8(codes), codes);
    // Seven bits of 128 are those of 0.
    const __mmask64 least = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
    s.upper = _mm512_mask_mov_epi8(s.upper, least, _mm512_set1_epi8(bf16_of(-128) / 256 - 256));
    return s;
  }
  template <int j>
  SHUNT_INLINE static __m512i weight(const Tables&, const State& s) {
    return s.half<j>();
  }
};

// Two k of 32 columns: chain 0 has the first four columns of every eight.
struct E4m3Dot : Pairs {
  static constexpr int step_k = 2, step_bytes = 128, dots = 2;
  static constexpr int unit_columns = 32, parts = 2;
  static constexpr int part(int j) { return j; }
  struct Tables : ByteTables {
    SHUNT_INLINE Tables() : ByteTables(e4m3) {}
  };
  using Group = NoGroup;
  using State = SplitBytes;
  SHUNT_INLINE static Group group(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static State state(const Tables& t, const Group&, const char* step,
                                  std::size_t column, bool half) {
    const char* const at = step + 2 * column;
    const __m512i codes = half ? _mm512_maskz_loadu_epi32(0xff, at) : load_words(at).v;
    return {t, codes, codes};
  }
  template <int>
  SHUNT_INLINE static __m512i numbers(const Row* row) {
    return Pairs::numbers<0>(row);
  }
  template <int j>
  SHUNT_INLINE static __m512i weight(const Tables&, const State& s) {
    return s.half<j>();
  }
  SHUNT_INLINE static void natural(const F32 (&chain)[2], F32 (&columns)[2]) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512d a = _mm512_castps_pd(chain[0].v), b = _mm512_castps_pd(chain[1].v);
    columns[0] = {_mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b))};
    columns[1] = {_mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b))};
  }
};

// Sixteen k of which eight are kept. A row's four numbers, in every lane, are looked up in by the
// places of a column's two: bits above the second of an index choose among copies.
template <class Move>
struct SparseDot : OneChain {
  static constexpr int step_k = 16, step_bytes = 384, dots = 4;
  struct Tables {
    __m512i value = load_table(e2m1);
  };
  using Group = NoGroup;
  struct State {
    Words codes, places;
  };
  SHUNT_INLINE static Group group(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static State state(const Tables&, const Group&, const char* step, std::size_t column,
                                  bool) {
    const Words places = widen_half_words(step + 2 * column);
    // The second's places in the upper half.
    const __m512i both =
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), places.v, shifted<-14>(places), 0xca);
    return {load_words(step + 128 + 4 * column), {both}};
  }
  template <int j>
  SHUNT_INLINE static __m512i weight(const Tables& t, const State& s) {
    return _mm512_permutexvar_epi16(Move::template right<4 * j>(s.codes.v), t.value);
  }
  template <int j>
  SHUNT_INLINE static __m512i numbers(const Row* row) {
    return FourK::numbers<2 * j>(row);
  }
  template <int j>
  SHUNT_INLINE static __m512i factor(__m512i x, const State& s) {
    return _mm512_permutexvar_epi16(Move::template right<4 * j>(s.places.v), x);
  }
};

// ---- tiles -------------------------------------------------------------------------------------

template <class Codes, PackedScale... scales>
struct PackedDot {
  static constexpr int most_rows = 6;
  // int4's scales and zero points take 192 bytes.
  static constexpr int header_lines = ((scales == PackedScale::bf16) || ...) ? 3 : 1;
  // As many columns as leave registers for the tables; with six rows, for the sums of all groups.
  static constexpr int columns(int rows) {
    const bool two_chains = Codes::parts * 16 > Codes::unit_columns;
    return (rows > 4 ? 32 : 64) / (two_chains && rows > 2 ? 2 : 1);
  }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column) {
    constexpr int unit = Codes::unit_columns, units = (wide + unit - 1) / unit,
                  parts = Codes::parts;
    constexpr int vectors = unit / 16, used = wide < unit ? 1 : vectors;
    // The sums of all groups in registers.
    constexpr bool held = rows * units * (parts + vectors) <= 24;
    TileRows<Row, rows> tile(p, first, last_row);
    F32 sum[rows][units * vectors];
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < units * used; ++v) {
          sum[r][v] = load(tile.sums[r] + column + 16 * v);
        }
      }
    }
    const typename Codes::Tables tables;
    const char* at = p.panel;
    const std::size_t header_bytes = header_bytes_of(p);
    std::size_t x = 0;  // where in the rows the step begins
    for (std::size_t begin = 0; begin < p.k; begin += p.group) {
      const std::size_t end = begin + p.group < p.k ? begin + p.group : p.k;
      const char* const header = at;
      // With its codes, all lines of a group.
      SHUNT_UNROLL for (int line = 0; line < header_lines; ++line) {
        __builtin_prefetch(header + p.fetch_ahead + std::ptrdiff_t{64} * line, 0, 3);
      }
      at += header_bytes;
      F32 acc[rows][units][parts];
      typename Codes::Group group[units];
      SHUNT_UNROLL for (int u = 0; u < units; ++u) {
        group[u] =
            Codes::group(zero_points(p, header), column + unit * static_cast<std::size_t>(u));
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          SHUNT_UNROLL for (int i = 0; i < parts; ++i) acc[r][u][i] = zero();
        }
      }
      LastStep<Row, rows, Codes::step_k> last;
      for (std::size_t k = begin; k < end; k += Codes::step_k) {
        SHUNT_UNROLL for (int line = 0; line < (Codes::step_bytes + 63) / 64; ++line) {
          __builtin_prefetch(at + p.fetch_ahead + std::ptrdiff_t{64} * line, 0, 3);
        }
        if (k + Codes::step_k > end) {
          last.take(tile.row, x, end - k);
          x = 0;
        }
        typename Codes::State state[units];
        SHUNT_UNROLL for (int u = 0; u < units; ++u) {
          state[u] = Codes::state(tables, group[u], at, column + unit * static_cast<std::size_t>(u),
                                  wide < unit);
        }
        each<0, Codes::dots>([&]<int j>() SHUNT_LAMBDA {
          __m512i w[units];
          SHUNT_UNROLL for (int u = 0; u < units; ++u) {
            w[u] = Codes::template weight<j>(tables, state[u]);
          }
          SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
            const __m512i four = Codes::template numbers<j>(tile.row[r] + x);
            SHUNT_UNROLL for (int u = 0; u < units; ++u) {
              F32& chain = acc[r][u][Codes::part(j)];
              chain = {_mm512_dpbf16_ps(
                  chain.v, reinterpret_cast<__m512bh>(Codes::template factor<j>(four, state[u])),
                  reinterpret_cast<__m512bh>(w[u]))};
            }
          }
        });
        at += Codes::step_bytes;
        x += Codes::step_k;
      }
      SHUNT_UNROLL for (int u = 0; u < units; ++u) {
        F32 scale[vectors];
        const std::size_t c = column + unit * static_cast<std::size_t>(u);
        SHUNT_UNROLL for (int v = 0; v < used; ++v) {
          scale[v] = scale_of<scales...>(p, header, c + std::size_t{16} * v);
        }
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          F32 natural[vectors];
          Codes::natural(acc[r][u], natural);
          SHUNT_UNROLL for (int v = 0; v < used; ++v) {
            if constexpr (held) {
              F32& to = sum[r][u * vectors + v];
              to = fma(natural[v], scale[v], to);
            } else {
              float* const sums = tile.sums[r] + c + 16 * v;
              store(sums, fma(natural[v], scale[v], load(sums)));
            }
          }
        }
      }
    }
    if constexpr (held) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        SHUNT_UNROLL for (int v = 0; v < units * used; ++v) {
          store(tile.sums[r] + column + 16 * v, sum[r][v]);
        }
      }
    }
  }
};

template <class Move>
constexpr PackedKernels kernels_moving = {
    .e4m3 = packed_multiply<
        PackedDot<E4m3Dot, PackedScale::column, PackedScale::block, PackedScale::e8m0>>,
    .e2m1 =
        [](const PackedProduct& p) {
          using Codes = E2m1Dot<Move>;
          p.scale == PackedScale::e8m0 ? packed_multiply<PackedDot<Codes, PackedScale::e8m0>>(p)
                                       : packed_multiply<PackedDot<Codes, PackedScale::e4m3>>(p);
        },
    .int8 = packed_multiply<PackedDot<Int8Dot, PackedScale::column>>,
    .int4 = packed_multiply<PackedDot<Int4Dot<Move>, PackedScale::f16, PackedScale::bf16>>,
    .dense3 = nullptr,  // its rows become integers
    .sparse = packed_multiply<PackedDot<SparseDot<Move>, PackedScale::e4m3>>,
    .tile_rows = 6,
};

}  // namespace

const PackedKernels packed_kernels = kernels_moving<ByProducts>;
const PackedKernels packed_kernels_by_shifts = kernels_moving<ByShifts>;

}  // namespace shunt::cpu_engine::avx512_bf16
