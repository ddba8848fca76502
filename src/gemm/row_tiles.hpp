// Rows that tiles (AMX) multiply, beside each other: put so once for all panels that a thread takes
// with the same block of rows.
#pragma once

#include <cstddef>

namespace shunt::cpu_engine {

struct RowTiles {
  static constexpr std::size_t rows = 16;  // of a tile
  std::size_t from = 0;                    // rows that tiles are for; 0: none
  // What a tile of rows takes over all of k; `group` where rows are in blocks of so many integers.
  std::size_t (*bytes)(std::size_t k, std::size_t group) = nullptr;
  // `count` rows, tile after tile; `to` at a multiple of 64.
  void (*pack)(const void* const* rows, std::size_t count, std::size_t k, std::size_t group,
               void* to) = nullptr;
};

}  // namespace shunt::cpu_engine
