// e4m3 times rows in bf16 by tdpbf16ps: codes are decoded once for all rows, exactly, into the form
// that tiles take; of one row into registers, for FMA. A group's sum starts at 0 and, times its
// scale, is fused to the sums: sums[r][c] = fma(group, scale, sums[r][c]).
//
// Rounding: a product is exact in f32 and meets at most 17 additions within its 32 of k, and one
// for each 32 from there on: the bound of a sum of k products in f32, one after the other, holds.
// Subnormal numbers are lost as packed_kernels_avx512_bf16.cpp has it.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/packed_kernels.hpp"
#include "gemm/row_tiles.hpp"

namespace shunt::cpu_engine::amx_bf16 {
namespace {

#include "cpu/simd_avx512.hpp"
// What is decoded.
#include "gemm/bytes_bf16.hpp"
#include "gemm/codes_avx512.hpp"
// Scales.
#include "gemm/packed_tiles.inl"
// Tiles of bf16.
#include "gemm/amx_instructions.hpp"

#include "gemm/amx_tiles.hpp"

constexpr std::size_t most_rows = 192;
constexpr std::size_t chunk_k = 128, step_pairs = amx_k / 2;
constexpr std::size_t chunk_ahead = 4096;
// Up to so many it pays to decode a group at a time, beside the products of the one before; more
// gain by groups added up together (two cores of a Xeon, mxfp8: 33 rows 57 ms and 67, 128 rows 300
// and 180).
constexpr std::size_t few_tiled_rows = 64;

// The matrix of vgf2p8affineqb whose result has, from bit 7 down, these bits of a byte.
constexpr std::int64_t bits_of(const std::uint8_t (&from_7_down)[8]) {
  std::uint64_t matrix = 0;
  for (int i = 0; i < 8; ++i) matrix |= std::uint64_t{from_7_down[i]} << 8 * i;
  return static_cast<std::int64_t>(matrix);
}

// A pair of k of 16 `blocks` columns as bf16, in their order: codes are put where the halves of
// every 16 bytes bring them back from.
//
// A normal number's bf16 is (120 << 7) + (code << 4) beside the sign: of its exponent's eight bits
// the upper four of 120 and the code's, which is each bit the code's or its opposite. Zeros and
// subnormal numbers, few where scales fit, are looked up.
struct Decoder {
  ByteTables tables{e4m3};
  __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  __m512i upper = _mm512_set1_epi64(bits_of({0x80, 0x40, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10})),
          lower = _mm512_set1_epi64(bits_of({0x08, 0x04, 0x02, 0x01, 0, 0, 0, 0}));
  static constexpr int upper_flipped = 0x3c;

  template <int blocks>
  SHUNT_INLINE void pair(const char* codes, __m512i (&weights)[blocks]) const {
    __m512i here[blocks];
    __mmask64 small = 0;
    SHUNT_UNROLL for (int b = 0; b < blocks; b += 2) {
      const char* const at = codes + std::ptrdiff_t{32} * b;
      here[b] =
          blocks == 1  // those of 16 columns, twice
              ? _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))
              : _mm512_loadu_si512(at);
      small |= _mm512_testn_epi8_mask(here[b], _mm512_set1_epi8(0x78));
      here[b] = _mm512_permutexvar_epi64(order, here[b]);
    }
    SHUNT_UNROLL for (int b = 0; b < blocks; b += 2) {
      SplitBytes split;
      if (small == 0) [[likely]] {
        split.upper = _mm512_gf2p8affine_epi64_epi8(here[b], upper, upper_flipped);
        split.lower = _mm512_gf2p8affine_epi64_epi8(here[b], lower, 0);
      } else {
        split = SplitBytes(tables, here[b], here[b]);
      }
      weights[b] = split.half<0>();
      if constexpr (blocks > 1) weights[b + 1] = split.half<1>();
    }
  }
};

template <int blocks>
struct Chunk {
  static constexpr std::size_t pair_bytes = std::size_t{64} * blocks;
  alignas(64) char weights[chunk_k / 2 * pair_bytes];

  const char* at(std::size_t pair) const { return weights + pair * pair_bytes; }
  // Pairs of k from `pair` to `end`, 128 bytes of `codes` each, and zeros up to a multiple of 32 of
  // k.
  SHUNT_INLINE void decode(const Decoder& decoder, const char* codes, std::size_t pair,
                           std::size_t end) {
    char* to = weights + pair * pair_bytes;
    codes += 128 * pair;
    for (; pair < end; ++pair, codes += 128, to += pair_bytes) {
      SHUNT_UNROLL for (int b = 0; b < blocks; b += 2) {
        __builtin_prefetch(codes + chunk_ahead + std::ptrdiff_t{32} * b, 0, 2);
      }
      __m512i w[blocks];
      decoder.pair<blocks>(codes, w);
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        _mm512_store_si512(to + std::ptrdiff_t{64} * b, w[b]);
      }
    }
    for (; pair % (amx_k / 2) != 0; ++pair) {
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b, to += 64) {
        _mm512_store_si512(to, _mm512_setzero_si512());
      }
    }
  }
};

// Many tiles of rows, and groups that a chunk holds whole: their sums are scaled and added up a
// tile of rows at a time.
template <int blocks>
class ShortGroups {
 public:
  explicit ShortGroups(const PackedProduct& product)
      : p(product), column(static_cast<std::size_t>(product.column)) {}

  void run() {
    const std::size_t tile_bytes = row_tiles_bytes(p.k), chunk = chunk_k / p.group * p.group;
    configure(amx_rows);
    const char* at = p.panel;
    for (std::size_t begin = 0; begin < p.k; begin += chunk) {
      const std::size_t end = begin + chunk < p.k ? begin + chunk : p.k;
      at = decode(at, begin, end);
      for (std::size_t r = 0; r < p.count; r += amx_rows) {
        const char* rows =
            static_cast<const char*>(p.tiles) + r / amx_rows * tile_bytes + row_tile_at(begin);
        std::size_t groups = 0;
        for (std::size_t group = begin; group < end; group += p.group, ++groups) {
          const std::size_t group_end = group + p.group < end ? group + p.group : end;
          zero_sums<blocks>();
          for (std::size_t k = group; k < group_end; k += amx_k, rows += row_tile_bytes) {
            multiply_add<blocks>(rows, weights.at((k - begin) / 2), Chunk<blocks>::pair_bytes);
          }
          store_sums<blocks>(sums[groups][0]);
        }
        add(r, p.count - r < amx_rows ? p.count - r : amx_rows, groups);
      }
    }
    release();
  }

 private:
  // Groups of k in [begin, end), which begin at `at`; returns where the next begin.
  SHUNT_INLINE const char* decode(const char* at, std::size_t begin, std::size_t end) {
    for (std::size_t group = begin, g = 0; group < end; group += p.group, ++g) {
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        store(scale[g][b], scale_of<PackedScale::column, PackedScale::block, PackedScale::e8m0>(
                               p, at, column + lanes(b)));
      }
      at += scale_bytes(p.scale);
      const std::size_t group_end = group + p.group < end ? group + p.group : end;
      const std::size_t pair = (group - begin) / 2, pairs = (group_end - group + 1) / 2;
      weights.decode(decoder, at + 2 * column - 128 * pair, pair, pair + pairs);
      at += 128 * pairs;
    }
    return at;
  }

  // Of `count` rows from `first` on.
  SHUNT_INLINE void add(std::size_t first, std::size_t count, std::size_t groups) {
    float* to = p.sums + 64 * first + column;
    for (std::size_t r = 0; r < count; ++r, to += 64) {
      F32 sum[blocks];
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) sum[b] = load(to + lanes(b));
      for (std::size_t g = 0; g < groups; ++g) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          sum[b] = fma(load(sums[g][r] + lanes(b)), load(scale[g][b]), sum[b]);
        }
      }
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) store(to + lanes(b), sum[b]);
    }
  }

  const PackedProduct& p;
  const std::size_t column;
  const Decoder decoder;
  Chunk<blocks> weights;
  alignas(64) float scale[chunk_k / amx_k][blocks][16];
  alignas(64) float sums[chunk_k / amx_k][amx_rows][64];
};

template <int blocks>
void multiply_rows(const PackedProduct& p, std::size_t first, std::size_t count) {
  const std::size_t all = count < amx_rows ? count : amx_rows;
  const std::size_t column = static_cast<std::size_t>(p.column);
  const Decoder decoder;
  Chunk<blocks> chunk;
  alignas(64) float sums[most_rows][64];  // of the group at hand
  configure(static_cast<int>(all));
  const std::size_t tile_bytes = row_tiles_bytes(p.k);
  const char* const tiles = static_cast<const char*>(p.tiles) + first / amx_rows * tile_bytes;
  const char* at = p.panel;
  for (std::size_t group = 0; group < p.k; group += p.group) {
    const std::size_t group_end = group + p.group < p.k ? group + p.group : p.k;
    const char* const header = at;
    at += scale_bytes(p.scale);
    for (std::size_t begin = group; begin < group_end; begin += chunk_k) {
      const std::size_t end = begin + chunk_k < group_end ? begin + chunk_k : group_end;
      const std::size_t pairs = (end - begin + 1) / 2;
      const char* const codes = at + 2 * column;
      at += 128 * pairs;
      const auto decode = [&](std::size_t first_pair, std::size_t most) {
        chunk.decode(decoder, codes, first_pair,
                     first_pair + most < pairs ? first_pair + most : pairs);
      };
      // Several tiles of rows meet what was decoded once; for one the next 32 of k are decoded
      // while it multiplies.
      decode(0, count > all ? pairs : step_pairs);
      for (std::size_t r = 0; r < count; r += all) {
        const char* rows = tiles + r / amx_rows * tile_bytes + row_tile_at(begin);
        begin == group ? zero_sums<blocks>() : load_sums<blocks>(sums[r]);
        for (std::size_t pair = 0; pair < pairs; pair += step_pairs) {
          if (count <= all && pair + step_pairs < pairs) decode(pair + step_pairs, step_pairs);
          multiply_add<blocks>(rows, chunk.weights + pair * Chunk<blocks>::pair_bytes,
                               Chunk<blocks>::pair_bytes);
          rows += row_tile_bytes;
        }
        store_sums<blocks>(sums[r]);
      }
    }
    F32 scale[blocks];
    SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
      scale[b] = scale_of<PackedScale::column, PackedScale::block, PackedScale::e8m0>(
          p, header, column + lanes(b));
    }
    for (std::size_t r = 0; r < count; ++r) {
      float* const to = p.sums + 64 * (first + r) + column;
      SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
        store(to + lanes(b), fma(load(sums[r] + lanes(b)), scale[b], load(to + lanes(b))));
      }
    }
  }
  release();
}

// One row, with the same bits: decoded into registers.
template <int blocks>
void multiply_row(const PackedProduct& p) {
  const std::uint16_t* const row[] = {static_cast<const std::uint16_t*>(p.rows[0])};
  const Decoder decoder;
  const auto column = static_cast<std::size_t>(p.column);
  const char* at = p.panel;
  for (std::size_t group = 0; group < p.k; group += p.group) {
    const std::size_t group_end = group + p.group < p.k ? group + p.group : p.k;
    const char* const header = at;
    at += scale_bytes(p.scale);
    F32 sum[blocks];
    SHUNT_UNROLL for (int b = 0; b < blocks; ++b) sum[b] = set1(0);
    {
      const Flushed flushed;
      for (std::size_t begin = group; begin < group_end; begin += amx_k) {
        const std::size_t end = begin + amx_k < group_end ? begin + amx_k : group_end;
        Chains<1, blocks> chains;
        chains.begin();
        for (std::size_t k = begin; k < end; k += 2, at += 128) {
          const char* const codes = at + 2 * column;
          SHUNT_UNROLL for (int b = 0; b < blocks; b += 2) {
            __builtin_prefetch(codes + fetch_far_bytes + std::ptrdiff_t{32} * b, 0, 2);
            __builtin_prefetch(codes + fetch_near_bytes + std::ptrdiff_t{32} * b, 0, 3);
          }
          __m512i w[blocks];
          decoder.pair<blocks>(codes, w);
          chains.add(w, row, k, k + 1 == end);
        }
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          sum[b] = {_mm512_add_ps(sum[b].v, chains.end(0, b).v)};
        }
      }
    }
    SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
      const std::size_t c = column + lanes(b);
      float* const to = p.sums + c;
      store(to,
            fma(sum[b],
                scale_of<PackedScale::column, PackedScale::block, PackedScale::e8m0>(p, header, c),
                load(to)));
    }
  }
}

void multiply_e4m3(const PackedProduct& p) {
  if (p.count == 0) return;
  if (p.count < e4m3_tiles.from) {
    return with_blocks(p.columns, [&]<int blocks>() { multiply_row<blocks>(p); });
  }
  if (p.count > few_tiled_rows && p.group <= chunk_k && p.group % amx_k == 0) {
    return with_blocks(p.columns, [&]<int blocks>() { ShortGroups<blocks>(p).run(); });
  }
  for (std::size_t first = 0; first < p.count; first += most_rows) {
    const std::size_t count = p.count - first < most_rows ? p.count - first : most_rows;
    with_blocks(p.columns, [&]<int blocks>() { multiply_rows<blocks>(p, first, count); });
  }
}

}  // namespace

const PackedKernel e4m3_kernel = multiply_e4m3;
const RowTiles e4m3_tiles = {2, row_tiles_bytes, pack_rows};

}  // namespace shunt::cpu_engine::amx_bf16
