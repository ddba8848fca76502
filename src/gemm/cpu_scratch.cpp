#include "gemm/cpu_scratch.hpp"

#include <algorithm>

#include "gemm/packed_panels.hpp"

namespace shunt::cpu_engine {
namespace {

std::int64_t most_blocks(int groups, std::int64_t rows) {
  return std::min<std::int64_t>(groups, rows) + rows / most_block_rows;
}

}  // namespace

ThreadScratch carve_thread(Carver& carver, const ProductPlan& plan, const PanelLayout& layout,
                           bool prepared) {
  ThreadScratch s;
  s.sums = carver.take<float>(plan.block_rows * panel_columns);
  s.rows = carver.take<const void*>(plan.block_rows);
  s.out = carver.take<void*>(plan.block_rows);
  const std::int64_t steps = static_cast<std::int64_t>(fixed_step);
  const std::int64_t padded = (layout.k + steps - 1) / steps * steps;
  if (layout.format.ordered || plan.fixed > 0) s.row = carver.take<float>(padded);
  if (layout.format.ordered && plan.fixed > 0) s.ordered = carver.take<float>(padded);
  if (!prepared) {
    s.packed = carver.take_bytes(static_cast<std::size_t>(layout.chunk_bytes(plan.stretch)));
  }
  if (plan.widen) s.wide = carver.take<float>(plan.stretch * panel_columns);
  if (plan.tiles.from > 0) {
    const auto rows = static_cast<std::size_t>(plan.block_rows);
    s.tiles = carver.take_bytes((rows + RowTiles::rows - 1) / RowTiles::rows *
                                plan.tiles.bytes(static_cast<std::size_t>(layout.k), plan.fixed));
    s.tiles_of = carver.take<std::int64_t>(1);
  }
  return s;
}

std::int64_t operand_stride(const ProductPlan& plan, const PanelLayout& layout) {
  const std::int64_t plain = layout.k * static_cast<std::int64_t>(form_bytes(plan.operand));
  std::int64_t fixed = 0;
  if (plan.fixed > 0) {
    fixed =
        static_cast<std::int64_t>(fixed_row_bytes(static_cast<std::size_t>(layout.k), plan.fixed));
  }
  return (std::max(plain, fixed) + 63) / 64 * 64;
}

Scratch carve(const Pool& pool, const ProductPlan& plan, const PanelLayout& layout, int groups,
              std::int64_t rows, std::int64_t operands, bool prepared, Workspace workspace) {
  Carver carver = workspace.data == nullptr ? Carver() : Carver(workspace);
  Carver thread;
  carve_thread(thread, plan, layout, prepared);
  Scratch s;
  s.blocks = carver.take<Block>(most_blocks(groups, rows));
  s.operands = carver.take_bytes(static_cast<std::size_t>(operands * operand_stride(plan, layout)));
  if (plan.fixed > 0) s.floats = carver.take<std::uint8_t>(operands);
  s.thread_bytes = thread.used();
  s.threads = static_cast<std::byte*>(
      carver.take_bytes(s.thread_bytes * static_cast<std::size_t>(pool.threads())));
  s.total = carver.used();
  return s;
}

std::int64_t copies_of(const PanelLayout& layout) {
  return std::max<std::int64_t>(1, packed_panels(layout).orders());
}

}  // namespace shunt::cpu_engine
