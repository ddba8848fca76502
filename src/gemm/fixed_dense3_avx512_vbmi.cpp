// dense3 times rows in blocks of integers (fixed_rows.hpp), in AVX-512 with VNNI and VBMI.
//
// A weight is one of 64 numbers, all multiples of 2^-13: with 105 * 256 more each is a positive
// integer of two bytes, which two look-ups of 64 bytes find. Rows are two signed bytes a number.
// vpdpbusd adds up four products of bytes of a column at a time, so that a block has three sums: of
// upper bytes, of upper by lower, and of lower ones. A step is 32 k of 16 columns: 8 windows of a
// column from 24 bits (vpmultishiftqb), 16 look-ups, and 32 times vpdpbusd for each row.
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

SHUNT_INLINE __m512i eight_bytes(const char* p) {
  std::int64_t eight;
  __builtin_memcpy(&eight, p, sizeof eight);
  return _mm512_set1_epi64(eight);
}
// In the first of each column's two chains.
SHUNT_INLINE __m512i start_of(std::int32_t sum) {
  return _mm512_set1_epi64(static_cast<std::int64_t>(
      static_cast<std::uint32_t>(-fixed_dense3_more * static_cast<std::int64_t>(sum))));
}
// The sums of columns' two chains. Four columns of a lane stand as 0, 0, 1, 1 and 2, 2, 3, 3.
SHUNT_INLINE __m512i joined(__m512i low, __m512i high) {
  const __m512 a = _mm512_castsi512_ps(low), b = _mm512_castsi512_ps(high);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
}

struct Dense3Fixed : ByGroups<Dense3Fixed> {
  static constexpr std::size_t group = 32, code_bytes = 768;
  static constexpr int most_rows = 4;
  static constexpr std::size_t columns(int rows) { return rows == 1 ? 64 : 16; }

  struct Tables {
    __m512i upper = _mm512_load_si512(dense3_integers.upper);
    __m512i lower = _mm512_load_si512(dense3_integers.lower);
  };
  SHUNT_INLINE static void fetch_codes(const char* at, std::size_t column) {
    SHUNT_UNROLL for (int word = 0; word < 3; ++word) {
      __builtin_prefetch(at + 4 * column + std::ptrdiff_t{256} * word, 0, 3);
    }
  }

  template <int rows>
  SHUNT_STEP static void sums(const Tables& t, const char* at, std::size_t column,
                              const char* const (&row)[rows], std::size_t block, std::size_t x,
                              F32 (&to)[rows]) {
    const Dense3Bits bits(at + 4 * column);
    __m512i high[rows][2], middle[rows][2], low[rows][2];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      const std::int32_t start = reinterpret_cast<const FixedBlock*>(row[r] + block)->start;
      SHUNT_UNROLL for (int h = 0; h < 2; ++h) {
        high[r][h] = start_of(start >> 16);
        middle[r][h] = start_of(static_cast<std::int16_t>(start & 0xffff));
        low[r][h] = _mm512_setzero_si512();
      }
    }
    each<0, 4>([&]<int o>() SHUNT_LAMBDA {
      SHUNT_UNROLL for (int h = 0; h < 2; ++h) {
        const __m512i windows = bits.windows<o>(h);
        const __m512i w1 = _mm512_permutexvar_epi8(windows, t.upper);
        const __m512i w0 = _mm512_permutexvar_epi8(windows, t.lower);
        SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
          const __m512i x1 = eight_bytes(row[r] + x + std::ptrdiff_t{8} * o);
          const __m512i x0 = eight_bytes(row[r] + x + 32 + std::ptrdiff_t{8} * o);
          high[r][h] = _mm512_dpbusd_epi32(high[r][h], w1, x1);
          middle[r][h] = _mm512_dpbusd_epi32(middle[r][h], w1, x0);
          low[r][h] = _mm512_dpbusd_epi32(low[r][h], w0, x0);
          middle[r][h] = _mm512_dpbusd_epi32(middle[r][h], w0, x1);
        }
      }
    });
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      const __m512i below = _mm512_add_epi32(
          _mm512_slli_epi32(joined(middle[r][0], middle[r][1]), 8), joined(low[r][0], low[r][1]));
      const F32 above{_mm512_cvtepi32_ps(joined(high[r][0], high[r][1]))};
      to[r] = fma(above, set1(65536), {_mm512_cvtepi32_ps(below)});
    }
  }
};

}  // namespace

const FixedFormat fixed_dense3 = {fix_row_to_bytes, fixed_multiply<Dense3Fixed>};

}  // namespace shunt::cpu_engine::avx512_vbmi
