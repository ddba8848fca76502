// Weights into the prepared layout, and back.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/memory.hpp"
#include "cpu/pool.hpp"
#include "cuda/current.hpp"
#include "format/codes.hpp"
#include "gemm/check_prepared.hpp"
#include "gemm/cuda_engine.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/layout.hpp"
#include "gemm/packed_panels.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/prepared_sizes.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

struct AsF32 {
  using Word = std::uint32_t;
  static float get(Word w) { return std::bit_cast<float>(w); }
  static Word put(float x) { return std::bit_cast<Word>(x); }
};
struct AsBf16 {
  using Word = std::uint16_t;
  static float get(Word w) { return bf16_to_f32(w); }
  static Word put(float x) { return f32_to_bf16(x); }
};
struct AsF16 {
  using Word = std::uint16_t;
  static float get(Word w) { return f16_to_f32(w); }
  static Word put(float x) { return f32_to_f16(x); }
};

// Blocks of 16 k by 64 columns: the part of the panel that a block fills stays in the L1, and a
// row of the matrix is read a cache line at a time.
template <class To, class From>
void write_chunk(const PanelLayout& layout, const Tensor& gate, const Tensor& up,
                 std::int64_t panel, std::int64_t begin, std::int64_t depth, void* data) {
  using Word = typename To::Word;
  struct Column {
    const typename From::Word* row;
    std::int64_t stride;
  };
  const std::int64_t gate_rows = layout.paired ? layout.n / 2 : layout.n;
  std::array<Column, panel_columns> columns;
  for (std::int64_t c = 0; c < panel_columns; ++c) {
    const std::int64_t row = layout.row(panel, c);
    const Tensor& source = row < gate_rows ? gate : up;
    const std::int64_t at = row < gate_rows ? row : row - gate_rows;
    columns[static_cast<std::size_t>(c)] =
        row < 0 ? Column{nullptr, 0}
                : Column{source.as<const typename From::Word>() + at * source.strides[0] +
                             begin * source.strides[1],
                         source.strides[1]};
  }
  const bool pairs = layout.dtype == DType::bf16;
  const std::int64_t padded = pairs ? (depth + 1) / 2 * 2 : depth;
  auto* to = static_cast<Word*>(data);
  for (std::int64_t first = 0; first < padded; first += 16) {
    const std::int64_t last = std::min(first + 16, padded);
    for (std::int64_t c = 0; c < panel_columns; ++c) {
      const Column& column = columns[static_cast<std::size_t>(c)];
      for (std::int64_t k = first; k < last; ++k) {
        Word word = 0;
        if (column.row != nullptr && k < depth) {
          const auto from = column.row[k * column.stride];
          if constexpr (std::is_same_v<To, From>) {
            word = from;
          } else {
            word = To::put(From::get(from));
          }
        }
        to[pairs ? (k / 2 * panel_columns + c) * 2 + k % 2 : k * panel_columns + c] = word;
      }
    }
  }
}

template <class To>
void write_chunk_from(const PanelLayout& layout, const Tensor& gate, const Tensor& up,
                      std::int64_t panel, std::int64_t begin, std::int64_t depth, void* to) {
  switch (gate.dtype) {
    case DType::f32:
      return write_chunk<To, AsF32>(layout, gate, up, panel, begin, depth, to);
    case DType::bf16:
      return write_chunk<To, AsBf16>(layout, gate, up, panel, begin, depth, to);
    default:
      return write_chunk<To, AsF16>(layout, gate, up, panel, begin, depth, to);
  }
}

PanelLayout checked_layout(const char* what, DType dtype, int groups, std::int64_t n,
                           std::int64_t k, bool paired) {
  check_prepared_sizes(what, dtype, groups, n, k, paired);
  return {dtype, n, k, paired};
}

PreparedWeights prepare_all(const char* what, const Context& context, DType dtype,
                            const std::vector<Tensor>& gate, const std::vector<Tensor>* up,
                            Workspace memory) {
  const cuda_engine::Current current(context);
  if (gate.empty()) fail(Status::invalid_argument, "{}: no matrices are given", what);
  const Device device = context.device();
  // A GPU takes matrices from the host as well.
  const auto legal_place = [&](const Tensor& matrix) {
    return matrix.device.type == DeviceType::cpu ? Device{} : device;
  };
  const auto check_all = [&](const std::vector<Tensor>& list, const char* name) {
    for (std::size_t g = 0; g < list.size(); ++g) {
      check_tensor(fmt::format("{}: {}[{}]", what, name, g), list[g],
                   {.dtypes = {gate[0].dtype}, .shape = {gate[0].shape[0], gate[0].shape[1]}},
                   legal_place(list[g]));
    }
  };
  check_tensor(fmt::format("{}: {}[0]", what, up == nullptr ? "matrices" : "gate"), gate[0],
               {.dtypes = float_dtypes, .shape = {any_size, any_size}}, legal_place(gate[0]));
  check_all(gate, up == nullptr ? "matrices" : "gate");
  if (up != nullptr) {
    if (up->size() != gate.size()) {
      fail(Status::invalid_argument, "{}: {} gates are given, but {} ups", what, gate.size(),
           up->size());
    }
    check_all(*up, "up");
  }
  const bool paired = up != nullptr;
  const int groups = static_cast<int>(gate.size());
  const std::int64_t n = gate[0].shape[0] * (paired ? 2 : 1);
  const PanelLayout layout = checked_layout(what, dtype, groups, n, gate[0].shape[1], paired);
  const std::size_t bytes = shunt::prepared_bytes(context, dtype, groups, n, layout.k, paired);
  check_memory(what, "memory", memory, bytes);
  const Tensor written = bytes_at(memory.data, bytes, device);
  const auto check_memory_apart = [&](const std::vector<Tensor>& list, const char* name) {
    for (const Tensor& matrix : list) {
      check_all_apart(what, {{"memory", written}}, {{name, matrix}});
    }
  };
  check_memory_apart(gate, paired ? "gate" : "matrices");
  if (paired) check_memory_apart(*up, "up");
  const PreparedWeights prepared{.dtype = dtype,
                                 .groups = groups,
                                 .n = n,
                                 .k = layout.k,
                                 .paired = paired,
                                 .device = device,
                                 .data = memory.data,
                                 .bytes = bytes};
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context)) {
      cuda_engine::write_groups(context, {dtype, n, layout.k, paired}, gate, up, memory.data);
      return prepared;
    }
  }

  auto* const to = static_cast<char*>(memory.data);
  const auto panels = static_cast<std::size_t>(layout.panels());
  context.pool().run([&](cpu_engine::Team& team) {
    team.for_each(panels * gate.size(), [&](std::size_t task) {
      const std::size_t g = task / panels;
      write_panel(layout, gate[g], paired ? (*up)[g] : Tensor{},
                  static_cast<std::int64_t>(task % panels), 0, layout.k,
                  to + static_cast<std::int64_t>(task) * layout.panel_bytes());
    });
  });
  return prepared;
}

}  // namespace

void write_panel(const PanelLayout& layout, const Tensor& gate, const Tensor& up,
                 std::int64_t panel, std::int64_t begin, std::int64_t depth, void* to) {
  switch (layout.dtype) {
    case DType::f32:
      return write_chunk_from<AsF32>(layout, gate, up, panel, begin, depth, to);
    case DType::bf16:
      return write_chunk_from<AsBf16>(layout, gate, up, panel, begin, depth, to);
    default:
      return write_chunk_from<AsF16>(layout, gate, up, panel, begin, depth, to);
  }
}

std::size_t prepared_bytes(const Context& context, DType dtype, int groups, std::int64_t n,
                           std::int64_t k, bool paired) {
  const PanelLayout layout = checked_layout("prepared_bytes", dtype, groups, n, k, paired);
  if (cuda_engine::on_gpu(context)) {
    const cuda_engine::RowLayout rows{dtype, n, k, paired};
    return static_cast<std::size_t>(rows.group_bytes() * groups);
  }
  return static_cast<std::size_t>(layout.group_bytes() * groups);
}

PreparedWeights prepare(const Context& context, DType dtype, const std::vector<Tensor>& matrices,
                        Workspace memory) {
  return prepare_all("prepare", context, dtype, matrices, nullptr, memory);
}

PreparedWeights prepare_paired(const Context& context, DType dtype, const std::vector<Tensor>& gate,
                               const std::vector<Tensor>& up, Workspace memory) {
  return prepare_all("prepare_paired", context, dtype, gate, &up, memory);
}

void unprepare(const Context& context, const PreparedWeights& weights, int group, Tensor out) {
  const cuda_engine::Current current(context);
  if (!weights) fail(Status::invalid_argument, "unprepare: no weights are given");
  if (group < 0 || group >= weights.groups) {
    fail(Status::invalid_argument, "unprepare: group is {}: must be 0 to {}", group,
         weights.groups - 1);
  }
  check_tensor("unprepare: out", out, {.dtypes = float_dtypes, .shape = {weights.n, weights.k}},
               context.device());
  check_elements_apart("unprepare: out", out);
  check_prepared_memory("unprepare", weights, context);
  const Tensor read = bytes_at(weights.data, weights.bytes, weights.device);
  check_all_apart("unprepare", {{"out", out}}, {{"prepared weights", read}});
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && weights.format != FormatSpec{} &&
        weights.rows == RowFormat::as_dtype) {
      const cuda_engine::FragmentLayout layout = cuda_engine::fragments_of(weights);
      return cuda_engine::read_fragments(
          context, layout, static_cast<const char*>(weights.data) + group * layout.group_bytes(),
          out);
    }
    if (cuda_engine::on_gpu(context) && weights.rows == RowFormat::nvfp4) {
      const cuda_engine::Fp4Weights layout =
          cuda_engine::fp4_weights(context.gpu().compute, weights);
      return cuda_engine::read_fp4(
          context, layout, static_cast<const char*>(weights.data) + group * layout.group_bytes(),
          out);
    }
    if (cuda_engine::on_gpu(context) && weights.format != FormatSpec{}) {
      const cuda_engine::PackedLayout layout = cuda_engine::layout_of(weights);
      return cuda_engine::read_packed(
          context, layout, static_cast<const char*>(weights.data) + group * layout.group_bytes(),
          out);
    }
    if (cuda_engine::on_gpu(context)) {
      const cuda_engine::RowLayout rows{weights.dtype, weights.n, weights.k, weights.paired};
      return cuda_engine::read_group(
          context.gpu(), rows, static_cast<const char*>(weights.data) + group * rows.group_bytes(),
          out);
    }
  }
  const PanelLayout layout(weights);
  if (weights.format != FormatSpec{}) {
    const cpu_engine::PackedPanels packed{weights.format, weights.n, weights.k, weights.paired};
    const char* const group_data =
        static_cast<const char*>(weights.data) + group * packed.group_bytes();
    context.pool().run([&](cpu_engine::Team& team) {
      std::vector<double> values(static_cast<std::size_t>(packed.k));
      team.for_each(
          static_cast<std::size_t>(layout.panels() * panel_columns), [&](std::size_t task) {
            const auto panel = static_cast<std::int64_t>(task) / panel_columns;
            const std::int64_t column = static_cast<std::int64_t>(task) % panel_columns;
            const std::int64_t row = layout.row(panel, column);
            if (row < 0) return;
            cpu_engine::read_packed_column(packed, group_data, panel, column, values.data());
            for (std::int64_t k = 0; k < packed.k; ++k) {
              store_f64(out.data, out.dtype, row * out.strides[0] + k * out.strides[1],
                        values[static_cast<std::size_t>(k)]);
            }
          });
    });
    return;
  }
  const char* const from = static_cast<const char*>(weights.data) + group * layout.group_bytes();
  context.pool().run([&](cpu_engine::Team& team) {
    team.for_each(static_cast<std::size_t>(layout.panels()), [&](std::size_t task) {
      const auto panel = static_cast<std::int64_t>(task);
      const char* const data = from + panel * layout.panel_bytes();
      for (std::int64_t c = 0; c < panel_columns; ++c) {
        const std::int64_t row = layout.row(panel, c);
        if (row < 0) continue;
        for (std::int64_t k = 0; k < layout.k; ++k) {
          const std::int64_t at = layout.dtype == DType::bf16
                                      ? (k / 2 * panel_columns + c) * 2 + k % 2
                                      : k * panel_columns + c;
          store_f32(out.data, out.dtype, row * out.strides[0] + k * out.strides[1],
                    load_f32(data, layout.dtype, at));
        }
      }
    });
  });
}

}  // namespace shunt
