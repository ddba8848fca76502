// dense3 times many rows in blocks of integers (fixed_rows.hpp) by tiles of bytes: the sums of
// fixed_dense3_avx512_vbmi.cpp, of rows' upper bytes and of their lower ones, in two tiles.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_dense3.hpp"
#include "gemm/fixed_rows.hpp"
#include "gemm/fixed_tiles.hpp"

namespace shunt::cpu_engine::amx_int8 {
namespace {

#include "cpu/simd_avx512.hpp"
// What is decoded.
#include "gemm/codes_avx512.hpp"

#include "gemm/dense3_bits.hpp"
// Scales.
#include "gemm/packed_tiles.inl"
// Tiles.
#include "gemm/amx_instructions.hpp"

constexpr std::size_t group_k = 32, group_bytes = 64 + 768;
// Of 16 rows: for each block [16][32 upper bytes, 32 lower ones], then the blocks' units, [16].
constexpr std::size_t block_bytes = amx_rows * 2 * group_k;

std::size_t blocks_in(std::size_t k) { return (k + group_k - 1) / group_k; }
std::size_t packed_bytes(std::size_t k, std::size_t) {
  return blocks_in(k) * (block_bytes + amx_rows * sizeof(float));
}

void pack(const void* const* rows, std::size_t count, std::size_t k, std::size_t, void* to) {
  const std::size_t blocks = blocks_in(k);
  pack_tiles(
      rows, count, packed_bytes(k, group_k), to, [&](const void* row, char* tile, std::size_t r) {
        const auto* const head = static_cast<const FixedBlock*>(row);
        const char* const numbers = static_cast<const char*>(row) + fixed_numbers_at(k, group_k);
        auto* const units = reinterpret_cast<float*>(tile + blocks * block_bytes) + r;
        for (std::size_t b = 0; b < blocks; ++b) {
          _mm512_store_si512(tile + b * block_bytes + 64 * r, _mm512_loadu_si512(numbers + 64 * b));
          units[b * amx_rows] = head[b].unit;
        }
      });
}

// Tiles 0, 1: sums of rows' upper and lower bytes; 2, 3: these; 4: weights.
void configure(std::size_t rows) {
  AmxConfig config;
  for (int t = 0; t < 5; ++t) {
    config.rows[t] = static_cast<std::uint8_t>(t < 4 ? rows : group_k / 4);
    config.row_bytes[t] = static_cast<std::uint16_t>(t == 2 || t == 3 ? group_k : 64);
  }
  config.load();
}

constexpr std::size_t most_groups = 4;  // decoded at a time

// Rows times 16 columns.
class Tiles {
 public:
  Tiles(const PackedProduct& product, std::size_t first)
      : p(product), rows_at(static_cast<const char*>(product.tiles)), column(first) {}

  void run() {
    const std::size_t all = blocks_in(p.k), bytes = packed_bytes(p.k, group_k);
    const char* at = p.panel;
    for (std::size_t begin = 0; begin < all; begin += most_groups) {
      const std::size_t groups = begin + most_groups < all ? most_groups : all - begin;
      for (std::size_t g = 0; g < groups; ++g, at += group_bytes) decode(at, g);
      for (std::size_t r = 0; r < p.count; r += amx_rows) {
        const char* const rows = rows_at + r / amx_rows * bytes;
        const auto* const units = reinterpret_cast<const float*>(rows + all * block_bytes);
        for (std::size_t g = 0; g < groups; ++g) multiply(rows + (begin + g) * block_bytes, g);
        add(r, units + begin * amx_rows, groups);
      }
    }
  }

 private:
  SHUNT_INLINE void decode(const char* at, std::size_t g) {
    constexpr std::size_t ahead = 2 * most_groups * group_bytes;
    store(scale[g], scale_of<PackedScale::e4m3>(p, at, column));
    if (column == 0) __builtin_prefetch(at + ahead, 0, 2);
    const char* const words = at + 64 + 4 * column;
    SHUNT_UNROLL for (int word = 0; word < 3; ++word) {
      __builtin_prefetch(words + ahead + std::ptrdiff_t{256} * word, 0, 2);
    }
    const __m512i numbers = _mm512_load_si512(dense3_numbers);
    const Dense3Bits bits(words);
    each<0, 4>([&]<int o>() SHUNT_LAMBDA {
      const Dense3Fours fours(_mm512_permutexvar_epi8(bits.windows<o>(0), numbers),
                              _mm512_permutexvar_epi8(bits.windows<o>(1), numbers));
      SHUNT_UNROLL for (int h = 0; h < 2; ++h) {
        _mm512_store_si512(weights[g][2 * o + h], fours.of[h]);
      }
    });
  }

  SHUNT_INLINE void multiply(const char* rows, std::size_t g) {
    tile_zero<0>();
    tile_zero<1>();
    tile_load<2>(rows, 64);
    tile_load<3>(rows + group_k, 64);
    tile_load<4>(weights[g], 64);
    __asm__ volatile("tdpbssd %tmm4,%tmm2,%tmm0");
    __asm__ volatile("tdpbssd %tmm4,%tmm3,%tmm1");
    tile_store<0>(sums[g][0], 64);
    tile_store<1>(sums[g][1], 64);
  }

  SHUNT_INLINE void add(std::size_t first, const float* units, std::size_t groups) {
    const std::size_t count = p.count - first < amx_rows ? p.count - first : amx_rows;
    float* to = p.sums + 64 * first + column;
    for (std::size_t r = 0; r < count; ++r, to += 64) {
      F32 sum = load(to);
      for (std::size_t g = 0; g < groups; ++g) {
        const F32 whole{_mm512_cvtepi32_ps(
            _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[g][0][r]), 8),
                             _mm512_load_si512(sums[g][1][r])))};
        sum = fma(mul(whole, set1(units[g * amx_rows + r])), load(scale[g]), sum);
      }
      store(to, sum);
    }
  }

  const PackedProduct& p;
  const char* const rows_at;
  const std::size_t column;
  alignas(64) char weights[most_groups][group_k / 4][64];
  alignas(64) float scale[most_groups][16];
  alignas(64) std::int32_t sums[most_groups][2][amx_rows][16];
};

void multiply(const PackedProduct& p) {
  configure(p.count < amx_rows ? p.count : amx_rows);
  const auto first = static_cast<std::size_t>(p.column);
  const std::size_t end = first + static_cast<std::size_t>(p.columns);
  for (std::size_t column = first; column < end; column += 16) Tiles(p, column).run();
  release();
}

}  // namespace

const FixedTiles dense3_tiles = {{least_tiled_rows, packed_bytes, pack}, multiply};

}  // namespace shunt::cpu_engine::amx_int8
