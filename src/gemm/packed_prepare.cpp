#include "gemm/packed_prepare.hpp"

#include <algorithm>
#include <cstring>

#include "core/convert.hpp"
#include "cpu/free_threads.hpp"
#include "gemm/cuda_engine.hpp"

namespace shunt::cuda_engine {

namespace {

// Row `row` of the layout in its matrix: which of the two, and where.
struct Source {
  const PackedMatrix* matrix = nullptr;  // null: none
  std::int64_t row = 0;
};
Source source_of(const PackedLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                 std::int64_t at) {
  const std::int64_t row = layout.order().source(at), firsts = layout.out_columns();
  if (row < 0) return {};
  return row < firsts ? Source{&gate, row} : Source{up, row - firsts};
}

float scale_of(const PackedMatrix& m, std::int64_t row, std::int64_t block) {
  if (m.format.format == Format::fp8_tensor) return m.global_scale;
  const Tensor& scales = m.scales;
  if (m.format.format == Format::fp8_channel) {
    return load_f32(scales.data, scales.dtype, row * scales.strides[0]) * m.global_scale;
  }
  return load_f32(scales.data, scales.dtype,
                  row / 128 * scales.strides[0] + block * scales.strides[1]) *
         m.global_scale;
}

}  // namespace

void lay_out(const PackedLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
             char* to) {
  std::memset(to + layout.scales_at(), 0,
              static_cast<std::size_t>(layout.group_bytes() - layout.scales_at()));
  auto* const scales = reinterpret_cast<float*>(to + layout.scales_at());
  constexpr std::int64_t rows = PackedLayout::tile_rows;
  const std::int64_t tiles_bytes = layout.steps() * PackedLayout::tile_bytes;  // of the same rows
  const auto lay_out_rows = [&](std::int64_t tile) {
    std::memset(to + tile * tiles_bytes, 0, static_cast<std::size_t>(tiles_bytes));
    for (std::int64_t at = tile * rows; at < std::min(layout.rows(), (tile + 1) * rows); ++at) {
      const Source from = source_of(layout, gate, up, at);
      if (from.matrix == nullptr) continue;
      const char* const row =
          from.matrix->values.as<const char>() + from.row * from.matrix->values.strides[0];
      const std::int64_t whole = layout.k / 16 * 16;
      for (std::int64_t k = 0; k < whole; k += 16)
        std::memcpy(to + layout.byte(at, k), row + k, 16);
      if (whole < layout.k) {
        std::memcpy(to + layout.byte(at, whole), row + whole,
                    static_cast<std::size_t>(layout.k - whole));
      }
      if (!layout.block_scales()) scales[at] = scale_of(*from.matrix, from.row, 0);
    }
    if (!layout.block_scales()) return;
    for (const std::int64_t half : {0, 1}) {
      // The rows of either half of 16 lie in one block of 128 of their matrix.
      const Source from = source_of(layout, gate, up, tile * rows + (layout.paired ? 8 : 0) * half);
      if (from.matrix == nullptr) continue;
      for (std::int64_t step = 0; step < layout.steps(); ++step) {
        scales[(tile * layout.steps() + step) * 4 + half] = scale_of(*from.matrix, from.row, step);
      }
    }
  };
  cpu_engine::on_free_cores(layout.row_tiles(), layout.row_tiles() * rows * layout.k, lay_out_rows);
}

float weight_of(const PackedLayout& layout, const char* from, std::int64_t row, std::int64_t at) {
  const std::int64_t half = layout.paired && row >= layout.n / 2 ? 1 : 0;
  const std::int64_t within = row - half * layout.n / 2;
  const std::int64_t place = layout.paired ? within / 8 * 16 + half * 8 + within % 8 : row;
  const auto* const scales = reinterpret_cast<const float*>(from + layout.scales_at());
  const float scale =
      layout.block_scales()
          ? scales[(place / PackedLayout::tile_rows * layout.steps() + at / PackedLayout::tile_k) *
                       4 +
                   half]
          : scales[place];
  return e4m3_to_f32(static_cast<std::uint8_t>(from[layout.byte(place, at)])) * scale;
}

PackedLayout layout_of(const PreparedWeights& w) { return {w.format.format, w.n, w.k, w.paired}; }

void write_packed(const Context& context, const PackedLayout& layout,
                  const std::vector<PackedMatrix>& gate, const std::vector<PackedMatrix>* up,
                  void* to) {
  const auto bytes = static_cast<std::size_t>(layout.group_bytes());
  std::vector<char> group(bytes);
  for (std::size_t g = 0; g < gate.size(); ++g) {
    lay_out(layout, gate[g], up != nullptr ? &(*up)[g] : nullptr, group.data());
    context.copy(static_cast<char*>(to) + g * bytes, group.data(), bytes);
  }
}

void read_packed(const Context& context, const PackedLayout& layout, const void* from,
                 const Tensor& out) {
  const auto row_of = [&](const char* group, std::int64_t row, double* values) {
    for (std::int64_t k = 0; k < layout.k; ++k) {
      values[k] = static_cast<double>(weight_of(layout, group, row, k));
    }
  };
  read_decoded(context, from, layout.group_bytes(), row_of, out);
}

}  // namespace shunt::cuda_engine
