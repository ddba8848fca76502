// Rows in blocks of 16 or 32 integers (fixed_rows.hpp) by tiles of bf16.
//
// A row's number of 16 bits is two of bf16, n = upper + lower, of eight bits each, and a code,
// which has five at most, is one: tdpbf16ps multiplies a pair of a row by the same code twice.
// Products are integers, and sums of a block stay within 2^24 (32 times 16 times 2^15), as do those
// on their way (16 upper halves within 2^23), where f32 holds every integer: so they are the
// integers of FixedFormat's multiply, as f32 already, and meet its two roundings.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"
#include "gemm/fixed_tiles.hpp"

namespace shunt::cpu_engine::amx_bf16 {
namespace {

#include "cpu/simd_avx512.hpp"
// What is decoded.
#include "gemm/codes_avx512.hpp"
// Scales.
#include "gemm/packed_tiles.inl"
// Tiles.
#include "gemm/amx_instructions.hpp"

// ---- rows --------------------------------------------------------------------------------------
//
// Of 16 rows: each 16 of k, [16][16] pairs of bf16, then each block's units, [16].

constexpr std::size_t tile_k = 16, tile_bytes = amx_rows * tile_k * 4;

std::size_t pairs_bytes(std::size_t k) { return (k + tile_k - 1) / tile_k * tile_bytes; }
std::size_t packed_bytes(std::size_t k, std::size_t group) {
  return pairs_bytes(k) + (k + group - 1) / group * amx_rows * sizeof(float);
}

template <bool planes>
void pack_row(const void* row, std::size_t k, std::size_t group, float more, char* to,
              float* units) {
  const auto* const numbers = static_cast<const char*>(row) + fixed_numbers_at(k, group);
  const __m512i below = _mm512_set1_epi32(255);
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  const __m256i joined = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(fixed_planes.to_words)));
  for (std::size_t at = 0; at < k; at += tile_k, to += tile_bytes) {
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + 2 * at));
    if constexpr (planes) both = _mm256_shuffle_epi8(both, joined);
    const __m512i n = _mm512_cvtepi16_epi32(both);
    const __m512i lower = _mm512_and_si512(n, below);
    const __m512i first = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(n, lower)));
    const __m512i second = _mm512_castps_si512(_mm512_cvtepi32_ps(lower));
    _mm512_store_si512(
        to, _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(second, upper_half)));
  }
  const auto* const blocks = static_cast<const FixedBlock*>(row);
  for (std::size_t b = 0; b * group < k; ++b) units[b * amx_rows] = blocks[b].unit * more;
}

template <class Codes>
void pack(const void* const* rows, std::size_t count, std::size_t k, std::size_t group, void* to) {
  pack_tiles(rows, count, packed_bytes(k, group), to,
             [&](const void* row, char* tile, std::size_t r) {
               auto* const units = reinterpret_cast<float*>(tile + pairs_bytes(k));
               pack_row<Codes::planes>(row, k, group, Codes::more, tile + 64 * r, units + r);
             });
}

// ---- codes -------------------------------------------------------------------------------------
//
// A step of 16 columns becomes bf16, each twice: [step_k][16][2]. `more`: how much smaller they are
// than what the rows' units take them for.

constexpr std::uint32_t twice(int n) {
  std::uint32_t size = static_cast<std::uint32_t>(n < 0 ? -n : n), exponent = 127 + 7;
  if (n == 0) return 0;
  for (; size < 128; size *= 2) --exponent;
  const std::uint32_t bits = (n < 0 ? 0x8000U : 0U) | exponent << 7 | (size & 127U);
  return bits | bits << 16;
}
// By a code, doubled e2m1; by the lower five bits of a number.
struct Numbers {
  alignas(64) std::uint32_t e2m1[16];
  alignas(64) std::uint32_t five[32];
  constexpr Numbers() : e2m1{}, five{} {
    constexpr int sizes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int i = 0; i < 16; ++i) e2m1[i] = twice(i < 8 ? sizes[i] : -sizes[i - 8]);
    for (int i = 0; i < 32; ++i) five[i] = twice(i < 16 ? i : i - 32);
  }
};
constexpr Numbers numbers;

struct E2m1Pairs {
  static constexpr bool planes = true;  // of rows
  static constexpr float more = 1;
  static constexpr std::size_t step_k = 8, step_bytes = 256;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static void step(const char* at, std::size_t column, Extra, char* to) {
    const Words words = load_words(at + 4 * column);
    const __m512i table = _mm512_load_si512(numbers.e2m1);
    each<0, 8>([&]<int j>() SHUNT_LAMBDA {
      _mm512_store_si512(to + std::ptrdiff_t{64} * j,
                         _mm512_permutexvar_epi32(shifted<nibble_bit(j)>(words), table));
    });
  }
};
struct Int4Pairs {
  static constexpr bool planes = true;
  static constexpr float more = 1;
  static constexpr std::size_t step_k = 8, step_bytes = 256;
  using Extra = __m512i;  // the zero points
  SHUNT_INLINE static Extra extra(const char* zeros, std::size_t column) {
    return _mm512_cvtepu8_epi32(load_bytes(zeros + column));
  }
  SHUNT_INLINE static void step(const char* at, std::size_t column, Extra zero, char* to) {
    const Words words = load_words(at + 4 * column);
    const __m512i low = _mm512_load_si512(numbers.five),
                  high = _mm512_load_si512(numbers.five + 16);
    each<0, 8>([&]<int j>() SHUNT_LAMBDA {
      const __m512i code = _mm512_and_si512(shifted<nibble_bit(j)>(words), _mm512_set1_epi32(15));
      _mm512_store_si512(to + std::ptrdiff_t{64} * j,
                         _mm512_permutex2var_epi32(low, _mm512_sub_epi32(code, zero), high));
    });
  }
};
// Which byte of a column's word, of the first and the third or of the second and the fourth, goes
// to which of four places.
struct Spread {
  alignas(64) std::uint32_t at[2][16];
  constexpr Spread() : at{} {
    for (std::uint32_t n = 0; n < 16; ++n) {
      for (std::uint32_t from = 0; from < 2; ++from) {
        const std::uint32_t second = place(0x80808080, n / 4, from + 2);  // else zeros
        at[from][n] = place(second, n % 4, from);
      }
    }
  }
  static constexpr std::uint32_t place(std::uint32_t bytes, std::uint32_t at, std::uint32_t from) {
    return (bytes & ~(255U << 8 * at)) | from << 8 * at;
  }
};
constexpr Spread spread;
struct SparsePairs {
  static constexpr bool planes = false;
  static constexpr float more = 256;
  static constexpr std::size_t step_k = 16, step_bytes = 384;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static void step(const char* at, std::size_t column, Extra, char* to) {
    const Words where = widen_half_words(at + 2 * column);
    const __m512i words = load_words(at + 128 + 4 * column).v, nibble = _mm512_set1_epi8(15);
    const __m512i kept[2] = {_mm512_and_si512(words, nibble),
                             _mm512_and_si512(_mm512_srli_epi32(words, 4), nibble)};
    const __m512i own = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m512i table = _mm512_load_si512(numbers.e2m1);
    each<0, 4>([&]<int j>() SHUNT_LAMBDA {
      const __m512i bytes = _mm512_permutexvar_epi32(shifted<4 * j>(where),
                                                     _mm512_load_si512(spread.at[j < 2 ? 0 : 1]));
      const Words four{_mm512_shuffle_epi8(kept[j % 2], _mm512_add_epi8(bytes, own))};
      each<0, 4>([&]<int i>() SHUNT_LAMBDA {
        _mm512_store_si512(to + std::ptrdiff_t{64} * (4 * j + i),
                           _mm512_permutexvar_epi32(shifted<8 * i>(four), table));
      });
    });
  }
};

// ---- products ----------------------------------------------------------------------------------

// Tiles 0 to 3: sums of 16 columns each; 4: rows; 5, 6: weights.
void configure(std::size_t rows) {
  AmxConfig config;
  for (int t = 0; t < 7; ++t) {
    config.rows[t] = static_cast<std::uint8_t>(t < 5 ? rows : tile_k);
    config.row_bytes[t] = 64;
  }
  config.load();
}
template <int sums>
SHUNT_INLINE void multiply_add(const char* weights) {
  tile_load<5 + sums % 2>(weights, 64);
  __asm__ volatile("tdpbf16ps %%tmm%c1,%%tmm4,%%tmm%c0" ::"i"(sums), "i"(5 + sums % 2));
}

constexpr std::size_t chunk_k = 64;  // decoded at a time
constexpr std::size_t most_groups = chunk_k / tile_k;

// Rows times 16 `blocks` columns.
template <class Codes, int blocks, PackedScale... scales>
class Pairs {
 public:
  Pairs(const PackedProduct& product, std::size_t first)
      : p(product), rows_at(static_cast<const char*>(product.tiles)), column(first) {}

  void run() {
    const std::size_t bytes = packed_bytes(p.k, p.group);
    const char* at = p.panel;
    for (std::size_t begin = 0; begin < p.k; begin += chunk_k) {
      const std::size_t end = begin + chunk_k < p.k ? begin + chunk_k : p.k;
      at = decode(at, begin, end);
      const std::size_t groups = (end - begin + p.group - 1) / p.group;
      for (std::size_t r = 0; r < p.count; r += amx_rows) {
        const char* const rows = rows_at + r / amx_rows * bytes;
        const auto* const units = reinterpret_cast<const float*>(rows + pairs_bytes(p.k));
        for (std::size_t g = 0; g < groups; ++g) {
          multiply(rows + (begin + g * p.group) / tile_k * tile_bytes, g);
        }
        add(r, units + begin / p.group * amx_rows, groups);
      }
    }
  }

 private:
  // k in [begin, end), whose groups begin at `at`; returns where the next begin.
  SHUNT_INLINE const char* decode(const char* at, std::size_t begin, std::size_t end) {
    const std::size_t header_bytes = header_bytes_of(p);
    const std::size_t ahead =
        2 * (chunk_k / p.group * header_bytes + chunk_k / Codes::step_k * Codes::step_bytes);
    std::size_t to = 0;
    for (std::size_t group = begin, g = 0; group < end; group += p.group, ++g) {
      const char* const header = at;
      at += header_bytes;
      if (column == 0) __builtin_prefetch(header + ahead, 0, 2);
      typename Codes::Extra extra[blocks];
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        extra[b] = Codes::extra(zero_points(p, header), column + lanes(b));
        store(scale[g][b], scale_of<scales...>(p, header, column + lanes(b)));
      }
      const std::size_t group_end = group + p.group < end ? group + p.group : end;
      for (std::size_t k = group; k < group_end; k += Codes::step_k, at += Codes::step_bytes) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          __builtin_prefetch(at + ahead + 4 * (column + lanes(b)), 0, 2);
          Codes::step(at, column + lanes(b), extra[b], weights[b] + to);
        }
        to += 64 * Codes::step_k;
      }
      for (; to % (64 * tile_k) != 0; to += 64) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          _mm512_store_si512(weights[b] + to, _mm512_setzero_si512());
        }
      }
      filled[g] = to;
    }
    return at;
  }

  // The sums of group `g`, whose numbers begin at `rows`.
  SHUNT_INLINE void multiply(const char* rows, std::size_t g) {
    tile_zero<0>();
    if constexpr (blocks > 1) tile_zero<1>();
    if constexpr (blocks > 2) {
      tile_zero<2>();
      tile_zero<3>();
    }
    for (std::size_t at = 64 * p.group * g; at < filled[g]; at += 64 * tile_k, rows += tile_bytes) {
      tile_load<4>(rows, 64);
      multiply_add<0>(weights[0] + at);
      if constexpr (blocks > 1) multiply_add<1>(weights[1] + at);
      if constexpr (blocks > 2) {
        multiply_add<2>(weights[2] + at);
        multiply_add<3>(weights[3] + at);
      }
    }
    tile_store<0>(sums[g][0], 64);
    if constexpr (blocks > 1) tile_store<1>(sums[g][1], 64);
    if constexpr (blocks > 2) {
      tile_store<2>(sums[g][2], 64);
      tile_store<3>(sums[g][3], 64);
    }
  }

  // The groups' sums, times their scales, to those of all groups.
  SHUNT_INLINE void add(std::size_t first, const float* units, std::size_t groups) {
    const std::size_t count = p.count - first < amx_rows ? p.count - first : amx_rows;
    float* to = p.sums + 64 * first + column;
    for (std::size_t r = 0; r < count; ++r, to += 64) {
      F32 sum[blocks];
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) sum[b] = load(to + lanes(b));
      for (std::size_t g = 0; g < groups; ++g) {
        const F32 unit = set1(units[g * amx_rows + r]);
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          sum[b] = fma(mul(load(sums[g][b][r]), unit), load(scale[g][b]), sum[b]);
        }
      }
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) store(to + lanes(b), sum[b]);
    }
  }

  const PackedProduct& p;
  const char* const rows_at;
  const std::size_t column;
  std::size_t filled[most_groups];
  alignas(64) char weights[blocks][chunk_k * 64];
  alignas(64) float scale[most_groups][blocks][16];
  alignas(64) float sums[most_groups][blocks][amx_rows][16];
};

template <class Codes, PackedScale... scales>
void multiply(const PackedProduct& p) {
  configure(p.count < amx_rows ? p.count : amx_rows);
  const auto column = static_cast<std::size_t>(p.column);
  if (p.columns == 64) {
    Pairs<Codes, 4, scales...>(p, column).run();
  } else if (p.columns == 32) {
    Pairs<Codes, 2, scales...>(p, column).run();
  } else {
    Pairs<Codes, 1, scales...>(p, column).run();
  }
  release();
}

template <class Codes, PackedScale... scales>
constexpr FixedTiles fixed_pairs = {{least_tiled_rows, packed_bytes, pack<Codes>},
                                    multiply<Codes, scales...>};

}  // namespace

const FixedTiles nvfp4_pairs = fixed_pairs<E2m1Pairs, PackedScale::e4m3>;
const FixedTiles mxfp4_pairs = fixed_pairs<E2m1Pairs, PackedScale::e8m0>;
const FixedTiles int4_pairs = fixed_pairs<Int4Pairs, PackedScale::f16, PackedScale::bf16>;
const FixedTiles sparse_pairs = fixed_pairs<SparsePairs, PackedScale::e4m3>;

}  // namespace shunt::cpu_engine::amx_bf16
