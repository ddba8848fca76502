// Codes of four bits times rows in blocks of integers (fixed_rows.hpp), in AVX-512 with VNNI and
// VBMI.
//
// A row's number of 16 bits is two bytes, n = 256 * upper + lower, the upper one signed and the
// lower one not, and a code is a byte below 25, which vpdpbusd takes for either: as the byte
// without a sign beside upper bytes, as the one with a sign beside lower ones. Four products of
// bytes of a column at a time, where pairs of 16 bits would have codes spread first. Two sums of a
// block, of upper bytes and of lower ones, are the integer of all other sets.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx512_vbmi {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/codes_avx512.hpp"
// How rows are cut.
#include "gemm/packed_tiles.inl"
// How they become integers.
#include "gemm/fixed_blocks.inl"
// And in bytes.
#include "gemm/fix_rows_avx512.inl"

// ---- rows --------------------------------------------------------------------------------------

template <class Codes>
bool fix_row_to_planes(const float* from, std::size_t k, std::size_t group, void* to) {
  const __m256i planes = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(fixed_planes.of_words)));
  const auto store = [&](char* numbers, std::size_t i, __m512i n) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 2 * i),
                        _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(n), planes));
  };
  return fix_blocks<0>(from, k, group, to, Codes::unit, Codes::more, store);
}

// ---- codes -------------------------------------------------------------------------------------
//
// Of a word of eight k the four in its lower nibbles and the four in its upper ones, `more` than
// they mean (times the column's zero point, where it has one): none is negative.

struct E2m1Planes {
  static constexpr float unit = 0.5F;
  static constexpr std::int32_t more = 12;  // doubled
  // By the lower six bits of a byte, of which two say nothing.
  __m512i numbers = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  SHUNT_INLINE __m512i lower(__m512i words) const {
    return _mm512_permutexvar_epi8(words, numbers);
  }
  SHUNT_INLINE __m512i upper(__m512i words) const { return lower(_mm512_srli_epi32(words, 4)); }
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static __m512i start(Extra, std::int32_t sum) { return _mm512_set1_epi32(sum); }
};
struct Int4Planes {
  static constexpr float unit = 1;
  static constexpr std::int32_t more = 1;
  SHUNT_INLINE static __m512i lower(__m512i words) {
    return _mm512_and_si512(words, _mm512_set1_epi8(15));
  }
  SHUNT_INLINE static __m512i upper(__m512i words) { return lower(_mm512_srli_epi32(words, 4)); }
  using Extra = __m512i;  // the zero points
  SHUNT_INLINE static Extra extra(const char* zeros, std::size_t column) {
    return _mm512_cvtepu8_epi32(load_bytes(zeros + column));
  }
  SHUNT_INLINE static __m512i start(Extra zero, std::int32_t sum) {
    return _mm512_mullo_epi32(zero, _mm512_set1_epi32(sum));
  }
};

// ---- tiles -------------------------------------------------------------------------------------

template <class Codes, PackedScale... scales>
struct Planes {
  static constexpr int most_rows = 6;
  static constexpr std::size_t columns(int rows) { return rows <= 3 ? 64 : 32; }
  // Vectors of columns that meet what is loaded of a row: one row has too few chains of products
  // with less than four.
  static constexpr int at_once(int rows, int vectors) {
    return rows == 1 ? vectors : rows <= 4 && vectors >= 2 ? 2 : 1;
  }
  static std::size_t group_bytes(const PackedProduct& p) {
    return header_bytes_of(p) + p.group / 8 * 256;
  }
  static const char* codes_at(const PackedProduct& p) { return p.panel; }

  template <int rows, int wide>
  __attribute__((noinline)) static void tile(const PackedProduct& p, std::size_t first,
                                             std::size_t last_row, std::size_t column,
                                             const FixedPart& part) {
    constexpr int vectors = wide / 16, many = at_once(rows, vectors);
    if constexpr (wide == 64) column = 0;
    const TileRows<char, rows> tile(p, first, last_row);
    F32 sum[rows][vectors];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        sum[r][v] = load(tile.sums[r] + column + lanes(v));
      }
    }
    const Codes codes;
    const char* at = part.at;
    const std::size_t ahead = rows == 1 ? p.fetch_ahead : first == 0 ? part.ahead : 0;
    const std::size_t near = rows == 1 ? p.fetch_near : 0;
    const std::size_t header_size = header_bytes_of(p);
    std::size_t block = part.block, x = part.x;
    for (std::size_t begin = part.begin; begin < part.end; begin += p.group) {
      const std::size_t end = begin + p.group < part.end ? begin + p.group : part.end;
      const std::size_t words = (end - begin + 7) / 8;
      const char* const header = at;
      at += header_size;
      if (column == 0) {
        fetch(header + ahead);
        if (near > 0) fetch_near(header + near);
      }
      const char* const zeros = zero_points(p, header);
      SHUNT_UNROLL for (int v = 0; v < vectors; v += many) {
        const std::size_t from = column + lanes(v);
        __m512i upper[rows][many], lower[rows][many];
        SHUNT_UNROLL for (int i = 0; i < many; ++i) {
          const auto extra = Codes::extra(zeros, from + lanes(i));
          SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
            upper[r][i] = _mm512_setzero_si512();
            lower[r][i] = Codes::start(extra, block_of(tile.row[r], block)->start);
          }
        }
        const char* word = at + 4 * from;
        std::size_t number = x;
        for (std::size_t left = words; left > 0; word += 256, number += 16, --left) {
          SHUNT_UNROLL for (int i = 0; i < many; ++i) fetch(word + ahead + std::ptrdiff_t{64} * i);
          if (near > 0) {
            SHUNT_UNROLL for (int i = 0; i < many; ++i) {
              fetch_near(word + near + std::ptrdiff_t{64} * i);
            }
          }
          step(codes, word, tile.row, number, upper, lower);
        }
        SHUNT_UNROLL for (int i = 0; i < many; ++i) {
          const F32 scale = scale_of<scales...>(p, header, from + lanes(i));
          SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(upper[r][i], 8), lower[r][i]);
            const F32 group =
                mul({_mm512_cvtepi32_ps(whole)}, set1(block_of(tile.row[r], block)->unit));
            sum[r][v + i] = fma(group, scale, sum[r][v + i]);
          }
        }
      }
      at += 256 * words;
      x += 16 * words;
      block += sizeof(FixedBlock);
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        store(tile.sums[r] + column + lanes(v), sum[r][v]);
      }
    }
  }

 private:
  SHUNT_INLINE static const FixedBlock* block_of(const char* row, std::size_t at) {
    return reinterpret_cast<const FixedBlock*>(row + at);
  }
  // Towards the L2 alone, as packed_fixed.inl does; and from there.
  SHUNT_INLINE static void fetch(const char* at) { __builtin_prefetch(at, 0, 2); }
  SHUNT_INLINE static void fetch_near(const char* at) { __builtin_prefetch(at, 0, 3); }
  SHUNT_INLINE static __m512i four(const char* at) {
    std::int32_t bytes;
    __builtin_memcpy(&bytes, at, sizeof bytes);
    return _mm512_set1_epi32(bytes);
  }

  // Eight k.
  template <int rows, int many>
  SHUNT_STEP static void step(const Codes& codes, const char* word, const char* const (&row)[rows],
                              std::size_t x, __m512i (&upper)[rows][many],
                              __m512i (&lower)[rows][many]) {
    __m512i w[2][many];
    SHUNT_UNROLL for (int i = 0; i < many; ++i) {
      const __m512i words = load_words(word + std::ptrdiff_t{64} * i).v;
      w[0][i] = codes.lower(words), w[1][i] = codes.upper(words);
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int half = 0; half < 2; ++half) {
        const __m512i x1 = four(row[r] + x + std::ptrdiff_t{4} * half);
        const __m512i x0 = four(row[r] + x + 8 + std::ptrdiff_t{4} * half);
        SHUNT_UNROLL for (int i = 0; i < many; ++i) {
          upper[r][i] = _mm512_dpbusd_epi32(upper[r][i], w[half][i], x1);
          lower[r][i] = _mm512_dpbusd_epi32(lower[r][i], x0, w[half][i]);
        }
      }
    }
  }
};

template <class Codes, PackedScale... scales>
constexpr FixedFormat planes = {fix_row_to_planes<Codes>, fixed_multiply<Planes<Codes, scales...>>};

}  // namespace

const FixedFormat nvfp4_planes = planes<E2m1Planes, PackedScale::e4m3>,
                  mxfp4_planes = planes<E2m1Planes, PackedScale::e8m0>,
                  int4_planes = planes<Int4Planes, PackedScale::f16, PackedScale::bf16>;

}  // namespace shunt::cpu_engine::avx512_vbmi
