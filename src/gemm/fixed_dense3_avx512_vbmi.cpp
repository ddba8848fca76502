// dense3 times rows in blocks of integers (fixed_rows.hpp), in AVX-512 with VNNI and VBMI.
//
// A weight is one of 64 integers of eight bits, which a look-up of 64 bytes finds; with 128 more
// they are positive. Rows are two signed bytes a number. vpdpbusd adds up four products of bytes of
// a column at a time, so that a block has two sums, of upper bytes and of lower ones. A step is 32
// k of 16 columns: 8 windows of a column from 24 bits (vpmultishiftqb), 8 look-ups, and 16 times
// vpdpbusd for each row.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_dense3.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx512_vbmi {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/codes_avx512.hpp"
// How rows are cut.
#include "gemm/dense3_bits.hpp"
#include "gemm/packed_tiles.inl"
// How they become integers.
#include "gemm/fixed_blocks.inl"
// And in bytes.
#include "gemm/fix_rows_avx512.inl"

template <class Word>
SHUNT_INLINE Word bytes_at(const char* p) {
  Word bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return bytes;
}
SHUNT_INLINE __m512i start_of(const char* block) {
  return _mm512_set1_epi32(reinterpret_cast<const FixedBlock*>(block)->start);
}
SHUNT_INLINE __m512i whole(__m512i upper, __m512i lower) {
  return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

// In two bytes a number, 32 at a time.
bool fix_row_to_bytes(const float* from, std::size_t k, std::size_t group, void* to) {
  const auto store = [](char* numbers, std::size_t i, __m512i n) {
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
    auto* const at = reinterpret_cast<__m128i*>(numbers + i / 32 * 64 + i % 32);
    _mm_storeu_si128(at, _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(at + 2, _mm512_cvtepi32_epi8(n));  // what is left, with its sign
  };
  return fix_blocks<fixed_dense3_less>(from, k, group, to, dense3_unit, fixed_dense3_more, store);
}

// `shares`: two to four rows meet 32 columns at once, so that what is loaded of a row serves twice.
template <bool shares>
struct Dense3Fixed : ByGroups<Dense3Fixed<shares>> {
  static constexpr std::size_t group = 32, code_bytes = 768;
  static constexpr int most_rows = 6;
  static constexpr bool by_l2 = true;
  static constexpr std::size_t columns(int rows) {
    return rows == 1 ? 64 : shares && rows <= 4 ? 32 : 16;
  }
  static constexpr int at_once(int rows, int vectors) { return rows > 1 ? vectors : 1; }

  struct Tables {
    __m512i numbers = _mm512_load_si512(dense3_positive.numbers);
  };
  template <int level>
  SHUNT_INLINE static void fetch_codes(const char* at, std::size_t column) {
    SHUNT_UNROLL for (int word = 0; word < 3; ++word) {
      __builtin_prefetch(at + 4 * column + std::ptrdiff_t{256} * word, 0, level);
    }
  }

  template <int rows>
  SHUNT_STEP static void sums(const Tables& t, const char* at, std::size_t column,
                              const char* const (&row)[rows], std::size_t block, std::size_t x,
                              F32 (&to)[rows]) {
    if constexpr (rows == 1) {
      const Dense3Bits bits(at + 4 * column);
      // A column has two chains, of every eight k the first four and the others.
      __m512i upper[2] = {}, lower[2] = {};
      each<0, 4>([&]<int o>() SHUNT_LAMBDA {
        const char* const from = row[0] + x + std::ptrdiff_t{8} * o;
        const __m512i x1 = _mm512_set1_epi64(bytes_at<std::int64_t>(from));
        const __m512i x0 = _mm512_set1_epi64(bytes_at<std::int64_t>(from + 32));
        SHUNT_UNROLL for (int h = 0; h < 2; ++h) {
          const __m512i w = _mm512_permutexvar_epi8(bits.windows<o>(h), t.numbers);
          upper[h] = _mm512_dpbusd_epi32(upper[h], w, x1);
          lower[h] = _mm512_dpbusd_epi32(lower[h], w, x0);
        }
      });
      const Dense3Fours chains(whole(upper[0], lower[0]), whole(upper[1], lower[1]));
      to[0] = {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(chains.of[0], chains.of[1]),
                                                   start_of(row[0] + block)))};
      return;
    }
    F32 all[1][rows];
    shared_sums<rows, 1>(t, at, column, row, block, x, all);
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) to[r] = all[0][r];
  }
  // Of more rows. With two vectors eight k are decoded while the eight before are multiplied.
  template <int rows, int vectors>
  SHUNT_STEP static void shared_sums(const Tables& t, const char* at, std::size_t column,
                                     const char* const (&row)[rows], std::size_t block,
                                     std::size_t x, F32 (&to)[vectors][rows]) {
    static_assert(vectors <= 2);
    constexpr int ahead = vectors - 1;
    const Dense3Bits bits[2] = {Dense3Bits(at + 4 * column),
                                Dense3Bits(at + 4 * (column + lanes(vectors - 1)))};
    __m512i upper[vectors][rows], lower[vectors][rows];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        upper[v][r] = _mm512_setzero_si512();
        lower[v][r] = start_of(row[r] + block);
      }
    }
    __m512i w[2][vectors][2];
    const auto decode = [&]<int o>() SHUNT_LAMBDA {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        const Dense3Fours fours(_mm512_permutexvar_epi8(bits[v].template windows<o>(0), t.numbers),
                                _mm512_permutexvar_epi8(bits[v].template windows<o>(1), t.numbers));
        w[o % 2][v][0] = fours.of[0], w[o % 2][v][1] = fours.of[1];
      }
    };
    if constexpr (ahead > 0) decode.template operator()<0>();
    each<0, 4>([&]<int o>() SHUNT_LAMBDA {
      if constexpr (o + ahead < 4) decode.template operator()<o + ahead>();
      SHUNT_UNROLL for (int h = 0; h < 2; ++h) {
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const char* const from = row[r] + x + (8 * o + 4 * h);
          const __m512i x1 = _mm512_set1_epi32(bytes_at<std::int32_t>(from)),
                        x0 = _mm512_set1_epi32(bytes_at<std::int32_t>(from + 32));
          SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
            upper[v][r] = _mm512_dpbusd_epi32(upper[v][r], w[o % 2][v][h], x1);
            lower[v][r] = _mm512_dpbusd_epi32(lower[v][r], w[o % 2][v][h], x0);
          }
        }
      }
    });
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        to[v][r] = {_mm512_cvtepi32_ps(whole(upper[v][r], lower[v][r]))};
      }
    }
  }
};

}  // namespace

const FixedFormat fixed_dense3 = {fix_row_to_bytes, fixed_multiply<Dense3Fixed<false>>},
                  fixed_dense3_shared = {fix_row_to_bytes, fixed_multiply<Dense3Fixed<true>>};

}  // namespace shunt::cpu_engine::avx512_vbmi
