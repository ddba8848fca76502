// What a grouped product of the CPU engine has in its workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/workspace.hpp"
#include "gemm/cpu_engine.hpp"

namespace shunt::cpu_engine {

// Rows that pass over a panel before the next panel is read: enough to hide its way from memory,
// few enough that the sums (64 floats each) stay in the caches.
constexpr std::int64_t most_block_rows = 192;

// Rows of one group that are multiplied together.
struct Block {
  std::int32_t group;
  std::int32_t rows;
  std::int64_t first;
};

// Arrays in the workspace; measured when it is null.
struct Scratch {
  Block* blocks = nullptr;
  void* operands = nullptr;        // converted rows
  std::uint8_t* floats = nullptr;  // of rows to be fixed: 1 where one stayed as it was
  // A thread's own, `thread_bytes` apart.
  std::byte* threads = nullptr;
  std::size_t thread_bytes = 0;
  std::size_t total = 0;
};
struct ThreadScratch {
  float* sums = nullptr;             // [block rows][64]
  const void** rows = nullptr;       // [block rows]
  void** out = nullptr;              // [block rows]
  float* row = nullptr;              // [k], a row before it is put in order, or fixed
  float* ordered = nullptr;          // [k], a row put in order before it is fixed
  void* packed = nullptr;            // a stretch of an unprepared panel
  float* wide = nullptr;             // a stretch of a widened one
  void* tiles = nullptr;             // the rows of a block beside each other
  std::int64_t* tiles_of = nullptr;  // which block's, and in which order of k
};

// `operands`: rows that are converted. Without data in `workspace` it is measured alone.
Scratch carve(const Pool& pool, const ProductPlan& plan, const PanelLayout& layout, int groups,
              std::int64_t rows, std::int64_t operands, bool prepared, Workspace workspace);
// One thread's, from where its own begin.
ThreadScratch carve_thread(Carver& carver, const ProductPlan& plan, const PanelLayout& layout,
                           bool prepared);

// Bytes from one converted row to the next.
std::int64_t operand_stride(const ProductPlan& plan, const PanelLayout& layout);
// Copies of each row that are kept, one after the other: an ordered format's are in the order of
// gate's k and of up's.
std::int64_t copies_of(const PanelLayout& layout);

}  // namespace shunt::cpu_engine
