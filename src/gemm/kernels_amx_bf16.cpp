#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/kernels.hpp"

namespace shunt::cpu_engine::amx_bf16 {
namespace {

#include "cpu/simd_avx512.hpp"
// The kernels of 32 bits and f16.
#include "gemm/kernels.inl"
// Tiles of bf16.
#include "gemm/amx_instructions.hpp"

#include "gemm/amx_tiles.hpp"

// How far ahead of a single tile of rows, which reads the panel from memory.
constexpr std::size_t tile_ahead = 8192;
constexpr std::size_t pair_bytes = 256;  // of a panel's 64 columns

// Asks for the next of what is read meanwhile: the panel itself by one tile of rows, else what
// comes next, in equal parts.
struct Ahead {
  bool near;
  const char *at = nullptr, *end = nullptr;
  std::size_t lines = 0;  // a step

  Ahead(const Product& p, std::size_t tiles) : near(tiles == 1) {
    if (near || p.ahead == nullptr) return;
    const std::size_t steps = (p.k + amx_k - 1) / amx_k * tiles;
    at = p.ahead;
    end = p.ahead + p.ahead_bytes;
    lines = (p.ahead_bytes / 64 + steps - 1) / steps;
  }
  template <int blocks>
  SHUNT_INLINE void step(const char* weights) {
    if (near) {
      SHUNT_UNROLL for (std::size_t pair = 0; pair < amx_k / 2; ++pair) {
        SHUNT_UNROLL for (int b = 0; b < blocks; ++b) {
          __builtin_prefetch(weights + tile_ahead + pair * pair_bytes + std::ptrdiff_t{64} * b, 0,
                             2);
        }
      }
      return;
    }
    for (std::size_t line = 0; line < lines && at < end; ++line, at += 64) {
      __builtin_prefetch(at, 0, 2);
    }
  }
};

template <int blocks>
void multiply_tiles(const Product& p) {
  const std::size_t tiles = (p.count + amx_rows - 1) / amx_rows;
  const std::size_t all = tiles > 1 ? amx_rows : p.count;
  configure(static_cast<int>(all));
  Ahead ahead(p, tiles);
  alignas(64) float whole[amx_rows][64];
  alignas(64) char rest[amx_k / 2 * pair_bytes];
  for (std::size_t first = 0; first < p.count; first += all) {
    const std::size_t count = p.count - first < all ? p.count - first : all;
    float* const given = p.sums + 64 * first;
    // Sums of fewer rows than a tile's pass by way of memory that has as many.
    float* const sums = count == all ? given : whole[0];
    if (count < all) copy_sums<blocks>(given, whole[0], count);
    load_sums<blocks>(sums);
    const char* weights = static_cast<const char*>(p.weights);
    const char* rows = p.tiles + first / amx_rows * p.tile_bytes;
    std::size_t k = 0;
    for (; k + amx_k <= p.k; k += amx_k, rows += row_tile_bytes) {
      ahead.step<blocks>(weights);
      multiply_add<blocks>(rows, weights, pair_bytes);
      weights += amx_k / 2 * pair_bytes;
    }
    if (k < p.k) {
      // What is left of k, filled up with zeros.
      const std::size_t pairs = (p.k - k + 1) / 2;
      for (std::size_t pair = 0; pair < amx_k / 2; ++pair) {
        for (std::size_t b = 0; b < std::size_t{64} * blocks; b += 64) {
          const __m512i line = pair < pairs ? _mm512_loadu_si512(weights + pair * pair_bytes + b)
                                            : _mm512_setzero_si512();
          _mm512_store_si512(rest + pair * pair_bytes + b, line);
        }
      }
      multiply_add<blocks>(rows, rest, pair_bytes);
    }
    store_sums<blocks>(sums);
    if (count < all) copy_sums<blocks>(whole[0], given, count);
  }
  release();
}

// Few rows, with the same bits.
template <int rows, int vectors>
void multiply_chains(const Product& p) {
  const std::uint16_t* row[rows];
  for (int r = 0; r < rows; ++r) {
    row[r] =
        reinterpret_cast<const std::uint16_t*>(static_cast<const char*>(p.rows[r]) + p.row_offset);
  }
  const Flushed flushed;
  const char* weights = static_cast<const char*>(p.weights);
  for (std::size_t begin = 0; begin < p.k; begin += amx_k) {
    const std::size_t end = begin + amx_k < p.k ? begin + amx_k : p.k;
    Chains<rows, vectors> chains;
    chains.begin();
    for (std::size_t k = begin; k < end; k += 2, weights += pair_bytes) {
      __m512i w[vectors];
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        __builtin_prefetch(weights + near_bytes + std::ptrdiff_t{64} * v, 0, 2);
        w[v] = _mm512_loadu_si512(weights + std::ptrdiff_t{64} * v);
      }
      chains.add(w, row, k);
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
        float* const to = p.sums + std::ptrdiff_t{64} * r + std::ptrdiff_t{16} * v;
        store(to, {_mm512_add_ps(load(to).v, chains.end(r, v).v)});
      }
    }
  }
}

void multiply_bf16(const Product& p) {
  if (p.count == 0) return;
  if (p.count <= most_chained_rows) {
    return with_few_rows(p.count, p.columns,
                         [&]<int rows, int blocks>() { multiply_chains<rows, blocks>(p); });
  }
  with_blocks(p.columns, [&]<int blocks>() { multiply_tiles<blocks>(p); });
}

}  // namespace

const GemmKernels gemm_kernels{
    .f32 = multiply<WeightsF32>,
    .f16 = multiply<WeightsF16>,
    .bf16 = multiply<WeightsBf16>,
    .bf16_dot = multiply_bf16,
    .tiles = {most_chained_rows + 1, row_tiles_bytes, pack_rows},
    .widen_f16 = widen<WeightsF16>,
    .widen_bf16 = widen<WeightsBf16>,
    .tile_rows = tile_rows,
};

}  // namespace shunt::cpu_engine::amx_bf16
