// Rows in blocks of integers (fixed_rows.hpp) by tiles of bytes.
//
// A row's 16 bits are two planes of bytes: n = 256 * upper + lower, the upper one signed and the
// lower one not. Weights are signed bytes, decoded once for all rows. For each block of the rows
// tdpbssd and tdpbusd make two tiles of sums, 16 rows by 16 columns, which pass through memory to
// be joined, scaled and fused to the sums in f32, as everywhere.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"
#include "gemm/fixed_tiles.hpp"

namespace shunt::cpu_engine::amx_int8 {
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
// Of 16 rows: for each 64 of k the lower bytes, [16][64], then the upper ones; then each block's
// units, [16].

constexpr std::size_t line_k = 64;
constexpr std::size_t line_bytes = 2 * amx_rows * line_k, upper_at = amx_rows * line_k;

std::size_t lines_bytes(std::size_t k) { return (k + line_k - 1) / line_k * line_bytes; }
std::size_t packed_bytes(std::size_t k, std::size_t group) {
  return lines_bytes(k) + (k + group - 1) / group * amx_rows * sizeof(float);
}

// The bytes of 64 numbers, each eight of them in the order of the codes: the lower or upper ones.
template <class Codes>
struct Order {
  alignas(64) std::uint8_t at[2][64];
  constexpr Order() : at{} {
    for (int i = 0; i < 64; ++i) {
      at[0][i] = static_cast<std::uint8_t>(i / 8 * 16 + Codes::lower(i % 8));
      at[1][i] = static_cast<std::uint8_t>(i / 8 * 16 + Codes::upper(i % 8));
    }
  }
};
template <class Codes>
constexpr Order<Codes> order_of;

template <class Codes>
void pack_row(const void* row, std::size_t k, std::size_t group, char* to, float* units) {
  const auto* const from = static_cast<const char*>(row) + fixed_numbers_at(k, group);
  const std::size_t there = (k + fixed_step - 1) / fixed_step * fixed_step;
  const __m512i lower = _mm512_load_si512(order_of<Codes>.at[0]);
  const __m512i upper = _mm512_load_si512(order_of<Codes>.at[1]);
  for (std::size_t at = 0; at < k; at += line_k, to += line_bytes) {
    const __m512i first = _mm512_loadu_si512(from + 2 * at);
    const __m512i second =
        at + fixed_step < there ? _mm512_loadu_si512(from + 2 * at + 64) : _mm512_setzero_si512();
    _mm512_store_si512(to, _mm512_permutex2var_epi8(first, lower, second));
    _mm512_store_si512(to + upper_at, _mm512_permutex2var_epi8(first, upper, second));
  }
  const auto* const blocks = static_cast<const FixedBlock*>(row);
  for (std::size_t b = 0; b * group < k; ++b) units[b * amx_rows] = blocks[b].unit;
}

template <class Codes>
void pack(const void* const* rows, std::size_t count, std::size_t k, std::size_t group, void* to) {
  pack_tiles(rows, count, packed_bytes(k, group), to,
             [&](const void* row, char* tile, std::size_t r) {
               auto* const units = reinterpret_cast<float*>(tile + lines_bytes(k));
               pack_row<Codes>(row, k, group, tile + r * line_k, units + r);
             });
}

// ---- codes -------------------------------------------------------------------------------------
//
// A step of 16 columns becomes signed bytes, [step_k / 4][16][4]. lower(i), upper(i): which byte of
// eight of a row's numbers meets the i-th of them.

SHUNT_INLINE __m512i low_nibbles(__m512i words) {
  return _mm512_and_si512(words, _mm512_set1_epi8(15));
}
SHUNT_INLINE __m512i high_nibbles(__m512i words) {
  return low_nibbles(_mm512_srli_epi32(words, 4));
}

struct Int4Tiles {
  // Rows lie in planes.
  static constexpr int lower(int i) { return 8 + i; }
  static constexpr int upper(int i) { return i; }
  static constexpr bool of_bytes = false;
  static constexpr std::size_t step_k = 8, step_bytes = 256;
  using Extra = __m512i;  // the zero points, four times each
  SHUNT_INLINE static Extra extra(const char* zeros, std::size_t column) {
    return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(load_bytes(zeros + column)),
                              _mm512_set1_epi32(0x01010101));
  }
  SHUNT_INLINE static void step(const char* at, std::size_t column, Extra zero, char* to) {
    const __m512i words = load_words(at + 4 * column).v;
    _mm512_store_si512(to, _mm512_sub_epi8(low_nibbles(words), zero));
    _mm512_store_si512(to + 64, _mm512_sub_epi8(high_nibbles(words), zero));
  }
};
struct Int8Tiles {
  // Of words, as fix_row() left them.
  static constexpr int order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  static constexpr int lower(int i) { return 2 * order[i]; }
  static constexpr int upper(int i) { return 2 * order[i] + 1; }
  static constexpr bool of_bytes = true;
  static constexpr std::size_t step_k = 4, step_bytes = 256;
  struct Extra {};
  SHUNT_INLINE static Extra extra(const char*, std::size_t) { return {}; }
  SHUNT_INLINE static void step(const char* at, std::size_t column, Extra, char* to) {
    _mm512_store_si512(to, load_words(at + 4 * column).v);
  }
};

// ---- products ----------------------------------------------------------------------------------

// Tiles 0 to 3: sums, of lower and of upper bytes, of one 16 columns and the next; 4, 5: rows'
// lower and upper bytes; 6, 7: weights of one 16 columns and the next.
void configure(std::size_t rows) {
  AmxConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<std::uint8_t>(t < 6 ? rows : line_k / 4);
    config.row_bytes[t] = 64;
  }
  config.load();
}
template <int sums, int weights>
SHUNT_INLINE void multiply_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c1,%%tmm4,%%tmm%c0" ::"i"(sums), "i"(weights));
  __asm__ volatile("tdpbssd %%tmm%c1,%%tmm5,%%tmm%c0" ::"i"(sums + 1), "i"(weights));
}

// Decoded at a time: of blocks of 64 two.
constexpr std::size_t chunk_k = 128, most_groups = chunk_k / line_k;

// Rows times 16 `blocks` columns.
template <class Codes, int blocks, PackedScale... scales>
class Tiles {
 public:
  Tiles(const PackedProduct& product, std::size_t first)
      : p(product),
        rows_at(static_cast<const char*>(product.tiles)),
        column(first),
        header_bytes(Codes::of_bytes ? 0 : header_bytes_of(product)) {}

  void run() {
    const std::size_t chunk = p.group < chunk_k ? chunk_k / p.group * p.group : p.group;
    const std::size_t bytes = packed_bytes(p.k, p.group);
    const char* at = p.panel + (Codes::of_bytes ? scale_bytes(p.scale) : 0);
    for (std::size_t begin = 0; begin < p.k; begin += chunk) {
      const std::size_t end = begin + chunk < p.k ? begin + chunk : p.k;
      at = decode(at, begin, end);
      for (std::size_t r = 0; r < p.count; r += amx_rows) {
        const char* const rows = rows_at + r / amx_rows * bytes;
        const auto* const units = reinterpret_cast<const float*>(rows + lines_bytes(p.k));
        const std::size_t count = p.count - r < amx_rows ? p.count - r : amx_rows;
        for (std::size_t group = begin, g = 0; group < end; group += p.group, ++g) {
          const std::size_t group_end = group + p.group < end ? group + p.group : end;
          multiply(rows, group, group_end, 16 * (group - begin));
          add();  // while these multiply, the sums before
          waiting = {p.sums + 64 * r + column, units + group / p.group * amx_rows, g, count};
          now = 1 - now;
        }
      }
      add();
      waiting.count = 0;
    }
  }

 private:
  // Groups of k in [begin, end), which begin at `at`; returns where the next begin.
  SHUNT_INLINE const char* decode(const char* at, std::size_t begin, std::size_t end) {
    const std::size_t ahead =
        (end - begin) / p.group * header_bytes + (end - begin) / Codes::step_k * Codes::step_bytes;
    std::size_t to = 0;
    for (std::size_t group = begin, g = 0; group < end; group += p.group, ++g) {
      const char* const header = Codes::of_bytes ? p.panel : at;
      at += header_bytes;
      const std::size_t group_end = group + p.group < end ? group + p.group : end;
      if (!Codes::of_bytes && column == 0) __builtin_prefetch(header + ahead, 0, 2);
      typename Codes::Extra extra[blocks];
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        extra[b] = Codes::extra(zero_points(p, header), column + lanes(b));
        store(scale[g][b], scale_of<scales...>(p, header, column + lanes(b)));
      }
      for (std::size_t k = group; k < group_end; k += Codes::step_k, to += 16 * Codes::step_k) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          __builtin_prefetch(at + ahead + 4 * (column + lanes(b)), 0, 2);
          Codes::step(at, column + lanes(b), extra[b], weights[b] + to);
        }
        at += Codes::step_bytes;
      }
      for (; to % (16 * line_k) != 0; to += 64) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          _mm512_store_si512(weights[b] + to, _mm512_setzero_si512());
        }
      }
    }
    return at;
  }

  // The sums of a group, whose weights begin at `from`.
  SHUNT_INLINE void multiply(const char* rows, std::size_t begin, std::size_t end,
                             std::size_t from) {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (blocks > 1) {
      tile_zero<2>();
      tile_zero<3>();
    }
    for (std::size_t k = begin; k < end; k += line_k, from += 16 * line_k) {
      const char* const line = rows + k / line_k * line_bytes;
      tile_load<4>(line, line_k);
      tile_load<5>(line + upper_at, line_k);
      tile_load<6>(weights[0] + from, 64);
      multiply_bytes<0, 6>();
      if constexpr (blocks > 1) {
        tile_load<7>(weights[1] + from, 64);
        multiply_bytes<2, 7>();
      }
    }
    tile_store<0>(sums[now][0][0], 64);
    tile_store<1>(sums[now][0][1], 64);
    if constexpr (blocks > 1) {
      tile_store<2>(sums[now][1][0], 64);
      tile_store<3>(sums[now][1][1], 64);
    }
  }

  // The sums of the group before, times their scales, to those of all groups.
  SHUNT_INLINE void add() {
    float* to = waiting.to;
    const auto& from = sums[1 - now];
    F32 scales_of[blocks];
    SHUNT_UNROLL for (int b = 0; b < blocks; ++b) scales_of[b] = load(scale[waiting.scale][b]);
    for (std::size_t r = 0; r < waiting.count; ++r, to += 64) {
      const F32 unit = set1(waiting.units[r]);
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        const __m512i lower = _mm512_load_si512(from[b][0][r]);
        const __m512i upper = _mm512_load_si512(from[b][1][r]);
        const F32 whole{_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower))};
        store(to + lanes(b), fma(mul(whole, unit), scales_of[b], load(to + lanes(b))));
      }
    }
  }

  const PackedProduct& p;
  const char* const rows_at;
  const std::size_t column, header_bytes;
  int now = 0;
  struct Waiting {
    float* to = nullptr;
    const float* units = nullptr;
    std::size_t scale = 0, count = 0;
  } waiting;
  alignas(64) char weights[blocks][most_tiled_group * 16];
  alignas(64) float scale[most_groups][blocks][16];
  alignas(64) std::int32_t sums[2][blocks][2][amx_rows][16];  // of one group and the next
};

template <class Codes, PackedScale... scales>
void multiply(const PackedProduct& p) {
  configure(p.count < amx_rows ? p.count : amx_rows);
  auto column = static_cast<std::size_t>(p.column);
  const std::size_t end = column + static_cast<std::size_t>(p.columns);
  for (; column + 32 <= end; column += 32) Tiles<Codes, 2, scales...>(p, column).run();
  if (column < end) Tiles<Codes, 1, scales...>(p, column).run();
  release();
}

template <class Codes, PackedScale... scales>
constexpr FixedTiles fixed_tiles = {{least_tiled_rows, packed_bytes, pack<Codes>},
                                    multiply<Codes, scales...>};

}  // namespace

const FixedTiles int4_tiles = fixed_tiles<Int4Tiles, PackedScale::f16, PackedScale::bf16>;
const FixedTiles int8_tiles = fixed_tiles<Int8Tiles, PackedScale::column>;

}  // namespace shunt::cpu_engine::amx_int8
