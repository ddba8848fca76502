// Packed weights into the layout that an engine multiplies them in.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/memory.hpp"
#include "core/shape.hpp"
#include "cpu/pool.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "format/codes.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/k_order.hpp"
#include "gemm/packed_panels.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/packed_product.hpp"
#include "gemm/prepared_sizes.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

// Throws unless the format has a prepared layout on the context's device.
void check_sizes(const char* what, const Context& context, DType dtype, const FormatSpec& format,
                 int groups, std::int64_t n, std::int64_t k, bool paired, RowFormat rows) {
  if (cuda_engine::on_gpu(context) && rows != RowFormat::as_dtype &&
      !cuda_engine::computed(format.format, rows)) {
    fail(Status::unsupported,
         "{}: format is {} for rows {}: must be fp8_block for fp8_block, fp8_channel or fp8_tensor "
         "for fp8_token, nvfp4 or sparse_nvfp4 for nvfp4",
         what, to_string(format), to_string(rows));
  }
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context)) {
      require(cuda_engine::packed_support(context.device(), format, rows), what);
    }
  }
  if (cuda_engine::on_gpu(context) && rows == RowFormat::as_dtype && dtype == DType::f32) {
    fail(Status::unsupported, "{}: dtype is f32: must be bf16 or f16 on a GPU", what);
  }
  if (format != format.of_matrix() && format.format != Format::int4) {
    fail(Status::invalid_argument, "{}: format is {}: only int4 can be ordered or have zeros", what,
         to_string(format));
  }
  check_prepared_sizes(what, dtype, groups, n, k, paired);
  (void)packed_bytes(format.of_matrix(), n, k);
}

cpu_engine::PackedPanels panels_of(const FormatSpec& format, std::int64_t n, std::int64_t k,
                                   bool paired) {
  return {resolved(format), n, k, paired};
}

std::size_t bytes_of(const Context& context, const FormatSpec& format, int groups, std::int64_t n,
                     std::int64_t k, bool paired, DType dtype, RowFormat rows) {
  if (cuda_engine::on_gpu(context) && rows == RowFormat::nvfp4) {
    const cuda_engine::Fp4Kernel kernel = cuda_engine::fp4_kernel(context.gpu().compute);
    const cuda_engine::Fp4Weights layout{kernel, format.format, n, k, paired};
    return static_cast<std::size_t>(layout.group_bytes() * groups);
  }
  const std::int64_t one =
      !cuda_engine::on_gpu(context) ? panels_of(format, n, k, paired).group_bytes()
      : rows == RowFormat::as_dtype
          ? cuda_engine::FragmentLayout{resolved(format), dtype, n, k, paired}.group_bytes()
          : cuda_engine::PackedLayout{format.format, n, k, paired}.group_bytes();
  return static_cast<std::size_t>(one * groups);
}

// As many k of each group as an order can give it: all, and of the last what is left.
void check_order(const std::string& name, const PackedMatrix& m) {
  const std::int64_t group = m.format.group;
  std::vector<std::int64_t> count(static_cast<std::size_t>(groups_of(m.k, group)));
  const auto* const of = m.group_of.as<const std::int32_t>();
  for (std::int64_t k = 0; k < m.k; ++k) ++count[static_cast<std::size_t>(of[k])];
  for (std::size_t g = 0; g < count.size(); ++g) {
    const std::int64_t wanted = std::min(group, m.k - static_cast<std::int64_t>(g) * group);
    if (count[g] == wanted) continue;
    fail(Status::unsupported, "{}.group_of names group {} {} times: must be {} times", name, g,
         count[g], wanted);
  }
}

// On a GPU rows are put into one order, which is gate's and up's.
void check_one_order(const std::string& gate, const std::string& up, const PackedMatrix& g,
                     const PackedMatrix& u) {
  std::vector<std::int32_t> first(static_cast<std::size_t>(g.k)), second(first.size());
  write_k_order(g, first.data());
  write_k_order(u, second.data());
  if (first == second) return;
  fail(Status::unsupported, "{}.group_of is not that of {}: must be the same on a GPU", up, gate);
}

// The CPU keeps the scales of a pair as one type of 16 bits: f16 where one of the two is.
void check_scale_types(const std::string& gate, const std::string& up, const PackedMatrix& g,
                       const PackedMatrix& u) {
  if (g.format.format != Format::int4 || g.scales.dtype == u.scales.dtype) return;
  if (g.scales.dtype != DType::f16 && u.scales.dtype != DType::f16) return;  // exact in bf16
  const bool second = g.scales.dtype == DType::f16;
  const Tensor& scales = (second ? u : g).scales;
  for (std::int64_t i = 0; i < scales.elements(); ++i) {
    const float scale = load_f32(scales.data, scales.dtype, i);
    if (!std::isfinite(scale) || f16_to_f32(f32_to_f16(scale)) == scale) continue;
    fail(Status::unsupported,
         "{}.scales[{}, {}] is {}, {}: must be exact in f16, which {}'s are, or both of one type",
         second ? up : gate, i / scales.shape[1], i % scales.shape[1], scale,
         to_string(scales.dtype), second ? gate : up);
  }
}

// Whether every weight is, of formats that are multiplied by rows in fewer bits.
[[maybe_unused]] bool is_finite(const PackedMatrix& m) {
  if (m.values.dtype == DType::f8_e4m3) {
    bool finite = true;
    for (std::int64_t row = 0; row < m.n; ++row) {
      const auto* const codes = m.values.as<const std::uint8_t>() + row * m.values.strides[0];
      for (std::int64_t k = 0; k < m.k; ++k) finite &= !e4m3_is_nan(codes[k]);
    }
    if (!finite) return false;
  }
  const Tensor& scales = m.scales;  // [rows] or [rows, groups], or none
  const std::int64_t across = scales.rank == 2 ? scales.shape[1] : 1;
  for (std::int64_t row = 0; row < scales.shape[0]; ++row) {
    for (std::int64_t i = 0; i < across; ++i) {
      const float scale =
          load_f32(scales.data, scales.dtype, row * scales.strides[0] + i * scales.strides[1]);
      if (!std::isfinite(scale * m.global_scale)) return false;
    }
  }
  return true;
}

// `most_zero`: of zero points.
void check_matrix(const std::string& name, const PackedMatrix& m, const PackedMatrix& first,
                  int most_zero) {
  if (m.format != first.format || m.n != first.n || m.k != first.k) {
    fail(Status::invalid_argument, "{} is {} [{}, {}]: must be {} [{}, {}], as the first", name,
         to_string(m.format), m.n, m.k, to_string(first.format), first.n, first.k);
  }
  check_packed(name, m, Device{});
  if (m.group_of) check_order(name, m);
  if (m.format.format == Format::int4 && m.scales.dtype == DType::f32) {
    const auto* const scales = m.scales.as<const float>();
    for (std::int64_t i = 0; i < m.scales.elements(); ++i) {
      if (bf16_to_f32(f32_to_bf16(scales[i])) == scales[i]) continue;
      fail(Status::unsupported, "{}.scales[{}, {}] is {}: must be exact in bf16, or all be f16",
           name, i / m.scales.shape[1], i % m.scales.shape[1], scales[i]);
    }
  }
  if (m.format.format == Format::int4 && m.zeros) {
    const auto* const zeros = m.zeros.as<const std::uint8_t>();
    for (std::int64_t i = 0; i < m.zeros.elements(); ++i) {
      if (zeros[i] <= most_zero) continue;
      fail(zeros[i] > 16 ? Status::invalid_argument : Status::unsupported,
           "{}.zeros[{}, {}] is {}: must be at most {}", name, i / m.zeros.shape[1],
           i % m.zeros.shape[1], zeros[i], most_zero);
    }
  }
}

PreparedWeights prepare_all(const char* what, const Context& context, DType dtype,
                            const std::vector<PackedMatrix>& gate,
                            const std::vector<PackedMatrix>* up, Workspace memory, RowFormat rows) {
  const cuda_engine::Current current(context);
  if (gate.empty()) fail(Status::invalid_argument, "{}: no matrices are given", what);
  if (up != nullptr && up->size() != gate.size()) {
    fail(Status::invalid_argument, "{}: {} gates are given, but {} ups", what, gate.size(),
         up->size());
  }
  const bool paired = up != nullptr;
  const auto groups = static_cast<int>(gate.size());
  const std::int64_t n = gate[0].n * (paired ? 2 : 1);
  FormatSpec format = gate[0].format;
  check_sizes(what, context, dtype, format, groups, n, gate[0].k, paired, rows);
  const auto name = [&](std::size_t g, bool second) {
    return fmt::format("{}: {}[{}]", what, !paired ? "matrices" : second ? "up" : "gate", g);
  };
  for (std::size_t g = 0; g < gate.size(); ++g) {
    const int most_zero = cuda_engine::on_gpu(context) ? 15 : 16;  // four bits there
    check_matrix(name(g, false), gate[g], gate[0], most_zero);
    if (!paired) continue;
    check_matrix(name(g, true), (*up)[g], gate[0], most_zero);
    if (cuda_engine::on_gpu(context) && (gate[g].group_of || (*up)[g].group_of)) {
      check_one_order(name(g, false), name(g, true), gate[g], (*up)[g]);
    }
    if (!cuda_engine::on_gpu(context)) {
      check_scale_types(name(g, false), name(g, true), gate[g], (*up)[g]);
    }
  }
  format = paired ? prepared_format(gate, *up) : prepared_format(gate);
  const std::size_t bytes = bytes_of(context, format, groups, n, gate[0].k, paired, dtype, rows);
  check_memory(what, "memory", memory, bytes);
  const Tensor written = bytes_at(memory.data, bytes, context.device());
  for (const std::vector<PackedMatrix>* list : {&gate, up}) {
    if (list == nullptr) continue;
    for (const PackedMatrix& matrix : *list) check_apart_from(what, {"memory", written}, matrix);
  }
  const PreparedWeights prepared{.dtype = dtype,
                                 .groups = groups,
                                 .n = n,
                                 .k = gate[0].k,
                                 .paired = paired,
                                 .device = context.device(),
                                 .data = memory.data,
                                 .bytes = bytes,
                                 .format = format,
                                 .rows = cuda_engine::on_gpu(context) ? rows : RowFormat::as_dtype};
  const bool dense3 = format.format == Format::dense3 && cuda_engine::on_gpu(context);
  const auto refuse_group = [&](std::size_t g) {
    fail(Status::invalid_argument, "{}{} holds a NaN or an infinite scale{}: must be finite{}",
         name(g, false), paired ? ", or its up," : "", dense3 ? " or a negative one" : "",
         dense3 ? ", and of dense3 not negative" : "");
  };
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && rows == RowFormat::as_dtype) {
      const std::size_t bad = cuda_engine::write_fragments(
          context, cuda_engine::fragments_of(prepared), gate, up, memory.data);
      if (bad < gate.size()) refuse_group(bad);
      return prepared;
    }
    if (cuda_engine::on_gpu(context)) {  // whose layouts have codes and scales as they are
      for (std::size_t g = 0; g < gate.size(); ++g) {
        if (!is_finite(gate[g]) || (paired && !is_finite((*up)[g]))) refuse_group(g);
      }
    }
    if (cuda_engine::on_gpu(context) && rows == RowFormat::nvfp4) {
      cuda_engine::write_fp4(what, context,
                             cuda_engine::fp4_weights(context.gpu().compute, prepared), gate, up,
                             memory.data);
      return prepared;
    }
    if (cuda_engine::on_gpu(context)) {
      cuda_engine::write_packed(context, {gate[0].format.format, n, gate[0].k, paired}, gate, up,
                                memory.data);
      return prepared;
    }
  }

  const cpu_engine::PackedPanels layout = panels_of(format, n, gate[0].k, paired);
  auto* const to = static_cast<char*>(memory.data);
  const auto panels = static_cast<std::size_t>(layout.order().panels());
  std::atomic<std::size_t> bad{gate.size()};
  const auto group_at = [&](std::size_t g) {
    return to + static_cast<std::int64_t>(g) * layout.group_bytes();
  };
  const auto other = [&](std::size_t g) { return paired ? &(*up)[g] : nullptr; };
  context.pool().run([&](cpu_engine::Team& team) {
    team.for_each(gate.size(), [&](std::size_t g) {
      cpu_engine::write_packed_header(layout, gate[g], other(g), group_at(g));
    });
    team.barrier();
    team.for_each(panels * gate.size(), [&](std::size_t task) {
      const std::size_t g = task / panels;
      const auto panel = static_cast<std::int64_t>(task % panels);
      if (!cpu_engine::write_packed_panel(layout, gate[g], other(g), panel, group_at(g))) {
        std::size_t first = bad.load();
        while (g < first && !bad.compare_exchange_weak(first, g)) {
        }
      }
    });
  });
  if (bad.load() < gate.size()) refuse_group(bad.load());
  return prepared;
}

}  // namespace

FormatSpec prepared_format(const std::vector<PackedMatrix>& matrices,
                           const std::vector<PackedMatrix>& up) {
  if (matrices.empty()) fail(Status::invalid_argument, "prepared_format: no matrices are given");
  FormatSpec format = matrices[0].format;
  for (const auto* list : {&matrices, &up}) {
    for (const PackedMatrix& m : *list) {
      format.ordered = format.ordered || m.group_of;
      if (!m.zeros || format.zeros) continue;
      check_packed("prepared_format: a matrix", m, Device{});
      const auto* const zeros = m.zeros.as<const std::uint8_t>();
      format.zeros =
          std::any_of(zeros, zeros + m.zeros.elements(), [](int zero) { return zero != 8; });
    }
  }
  return format;
}

std::size_t prepared_bytes(const Context& context, DType dtype, const FormatSpec& format,
                           int groups, std::int64_t n, std::int64_t k, bool paired,
                           RowFormat rows) {
  if (format == FormatSpec{}) return prepared_bytes(context, dtype, groups, n, k, paired);
  check_sizes("prepared_bytes", context, dtype, format, groups, n, k, paired, rows);
  return bytes_of(context, format, groups, n, k, paired, dtype, rows);
}

PreparedWeights prepare_packed(const Context& context, DType dtype,
                               const std::vector<PackedMatrix>& matrices, Workspace memory,
                               RowFormat rows) {
  return prepare_all("prepare_packed", context, dtype, matrices, nullptr, memory, rows);
}

PreparedWeights prepare_packed_paired(const Context& context, DType dtype,
                                      const std::vector<PackedMatrix>& gate,
                                      const std::vector<PackedMatrix>& up, Workspace memory,
                                      RowFormat rows) {
  return prepare_all("prepare_packed_paired", context, dtype, gate, &up, memory, rows);
}

}  // namespace shunt
