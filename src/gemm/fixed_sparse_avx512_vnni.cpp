// sparse_nvfp4 times rows in blocks of integers (fixed_rows.hpp), in AVX-512 with VNNI.
//
// Of four k two are kept: a column's two codes become 16-bit integers (e2m1 doubled, times 256, so
// that their byte stands in the upper half and carries the sign), and its two places a look-up
// (vpermd) turns into the bytes of the row's four numbers that it wants, which vpshufb brings
// beside each other. vpdpwssd multiplies both. A step is a group: 16 k of 16 columns, 34
// instructions on vectors for one row.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx512_vnni {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/codes_avx512.hpp"
#include "gemm/fixed_codes_avx512.hpp"
// The kernels' tiles, rows and parts.
#include "gemm/packed_tiles.inl"
// For rows in blocks of integers.
#include "gemm/fixed_blocks.inl"

// Where the numbers at places n % 4 and n / 4 of four have their bytes.
struct Places {
  alignas(64) std::int32_t at[16];
  constexpr Places() : at{} {
    for (int n = 0; n < 16; ++n) {
      const int first = 2 * (n % 4), second = 2 * (n / 4);
      at[n] = first | (first + 1) << 8 | second << 16 | (second + 1) << 24;
    }
  }
};
constexpr Places places_of_two;

struct SparseFixed : ByGroups<SparseFixed> {
  static constexpr bool of_bytes = false;
  static constexpr float unit = 0.5F / 256;
  static constexpr std::int32_t more = 0;

  static constexpr std::size_t group = 16, code_bytes = 384;
  static constexpr int most_rows = 6;
  static constexpr std::size_t columns(int rows) { return rows == 1 ? 64 : rows < 6 ? 32 : 16; }

  struct Tables {
    __m512i places = _mm512_load_si512(places_of_two.at);
    __m512i nibbles = _mm512_set1_epi32(0x0f0f0f0f);
    // e2m1 doubled.
    __m512i doubled =
        _mm512_set4_epi32(static_cast<std::int32_t>(0xf4f8fafcU),
                          static_cast<std::int32_t>(0xfdfeff00U), 0x0c080604, 0x03020100);
  };
  template <int level>
  SHUNT_INLINE static void fetch_codes(const char* at, std::size_t column) {
    if (column % 32 == 0) __builtin_prefetch(at + 2 * column, 0, level);
    __builtin_prefetch(at + 128 + 4 * column, 0, level);
  }

  template <int rows>
  SHUNT_STEP static void sums(const Tables& t, const char* at, std::size_t column,
                              const char* const (&row)[rows], std::size_t /*block*/, std::size_t x,
                              F32 (&to)[rows]) {
    const Words where = widen_half_words(at + 2 * column);
    const __m512i codes = load_words(at + 128 + 4 * column).v;
    const __m512i even = _mm512_shuffle_epi8(t.doubled, _mm512_and_si512(codes, t.nibbles));
    const __m512i odd =
        _mm512_shuffle_epi8(t.doubled, _mm512_and_si512(_mm512_srli_epi32(codes, 4), t.nibbles));
    __m512i acc[rows];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) acc[r] = _mm512_setzero_si512();
    each<0, 4>([&]<int j>() SHUNT_LAMBDA {
      const __m512i bytes = j % 2 == 0 ? even : odd;
      const __m512i w =
          j < 2 ? _mm512_slli_epi16(bytes, 8)
                : _mm512_and_si512(bytes, _mm512_set1_epi32(static_cast<int>(0xff00ff00U)));
      const __m512i pick = _mm512_permutexvar_epi32(shifted<4 * j>(where), t.places);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        std::int64_t four;
        __builtin_memcpy(&four, row[r] + x + std::ptrdiff_t{8} * j, sizeof four);
        const __m512i two = _mm512_shuffle_epi8(_mm512_set1_epi64(four), pick);
        acc[r] = _mm512_dpwssd_epi32(acc[r], w, two);
      }
    });
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) to[r] = {_mm512_cvtepi32_ps(acc[r])};
  }
};

}  // namespace

const FixedFormat fixed_sparse = {fix_row<SparseFixed>, fixed_multiply<SparseFixed>};

}  // namespace shunt::cpu_engine::avx512_vnni
