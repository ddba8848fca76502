// Tiles (AMX). Include inside the unnamed namespace, after simd_avx512.hpp, and row_tiles.hpp
// outside.
//
// The instructions, in asm: g++ 12's intrinsics do not tell it that they read memory.

struct alignas(64) AmxConfig {
  std::uint8_t palette = 1, start = 0;
  std::uint8_t unused[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  // From here on tiles hold something, until release(); what they held is lost.
  SHUNT_INLINE void load() const { __asm__ volatile("ldtilecfg %0" ::"m"(*this)); }
};
SHUNT_INLINE void release() { __asm__ volatile("tilerelease"); }

template <int tile>
SHUNT_INLINE void tile_load(const void* from, std::size_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1),%%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile)
                   : "memory");
}
template <int tile>
SHUNT_INLINE void tile_store(void* to, std::size_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c2,(%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
SHUNT_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// ---- rows beside each other (row_tiles.hpp) ----------------------------------------------------

constexpr std::size_t amx_rows = RowTiles::rows;

// pack_row(row, tile, r): row r of a tile of 16, which takes `bytes`. Behind the rows of the last
// tile, where it is not the only one, are zeros.
template <class PackRow>
SHUNT_INLINE void pack_tiles(const void* const* rows, std::size_t count, std::size_t bytes,
                             void* to, const PackRow& pack_row) {
  for (std::size_t first = 0; first < count; first += amx_rows) {
    char* const tile = static_cast<char*>(to) + first / amx_rows * bytes;
    if (first > 0 && count - first < amx_rows) __builtin_memset(tile, 0, bytes);
    for (std::size_t r = 0; r < amx_rows && first + r < count; ++r) {
      pack_row(rows[first + r], tile, r);
    }
  }
}
