// Packed weights into the layout that an engine multiplies them in.
#include <atomic>
#include <cmath>
#include <string>

#include "core/check.hpp"
#include "core/convert.hpp"
#include "cpu/pool.hpp"
#include "cuda/runtime.hpp"
#include "gemm/packed_panels.hpp"
#include "gemm/packed_prepare.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

constexpr double most_bytes = 0x1p62;

bool on_gpu(const Context& context) {
  return cuda_engine::built && context.device().type == DeviceType::cuda;
}

// Throws unless the format has a prepared layout on the context's device.
void check_sizes(const char* what, const Context& context, DType dtype, const FormatSpec& format,
                 int groups, std::int64_t n, std::int64_t k, bool paired) {
  if (on_gpu(context) && format.format != Format::fp8_tensor &&
      format.format != Format::fp8_channel && format.format != Format::fp8_block) {
    fail(Status::unsupported,
         "{}: format is {}: must be fp8_tensor, fp8_channel or fp8_block on a GPU", what,
         to_string(format));
  }
  if (dtype != DType::bf16 && dtype != DType::f16 && dtype != DType::f32) {
    fail(Status::invalid_argument, "{}: dtype is {}: must be f32, bf16 or f16", what,
         to_string(dtype));
  }
  if (groups < 0) fail(Status::invalid_argument, "{}: groups is {}: must be >= 0", what, groups);
  if (n < 0) fail(Status::invalid_argument, "{}: n is {}: must be >= 0", what, n);
  if (k < 0) fail(Status::invalid_argument, "{}: k is {}: must be >= 0", what, k);
  if (paired && n % 2 != 0) {
    fail(Status::invalid_argument, "{}: n is {}: must be even when gate and up are paired", what,
         n);
  }
  (void)packed_bytes(format, n, k);
  if (static_cast<double>(groups) * (static_cast<double>(n) + 256) *
          (static_cast<double>(k) + 256) * 4 >
      most_bytes) {
    fail(Status::invalid_argument, "{}: {} matrices [{}, {}] do not fit 64-bit sizes", what, groups,
         n, k);
  }
}

cpu_engine::PackedPanels panels_of(const FormatSpec& format, std::int64_t n, std::int64_t k,
                                   bool paired) {
  return {resolved(format), n, k, paired};
}

std::size_t bytes_of(const Context& context, const FormatSpec& format, int groups, std::int64_t n,
                     std::int64_t k, bool paired) {
  const std::int64_t one =
      on_gpu(context) ? cuda_engine::PackedLayout{format.format, n, k, paired}.group_bytes()
                      : panels_of(format, n, k, paired).group_bytes();
  return static_cast<std::size_t>(one * groups);
}

void check_matrix(const std::string& name, const PackedMatrix& m, const PackedMatrix& first) {
  if (m.format != first.format || m.n != first.n || m.k != first.k) {
    fail(Status::invalid_argument, "{} is {} [{}, {}]: must be {} [{}, {}], as the first", name,
         to_string(m.format), m.n, m.k, to_string(first.format), first.n, first.k);
  }
  check_packed(name, m, Device{});
  if (m.group_of) {
    fail(Status::unsupported, "{}.group_of is given: groups must be consecutive k; unpack first",
         name);
  }
  if (m.format.format == Format::int4 && m.scales.dtype == DType::f32) {
    const auto* const scales = m.scales.as<const float>();
    for (std::int64_t i = 0; i < m.scales.elements(); ++i) {
      if (bf16_to_f32(f32_to_bf16(scales[i])) == scales[i]) continue;
      fail(Status::unsupported, "{}.scales[{}, {}] is {}: must be exact in bf16, or all be f16",
           name, i / m.scales.shape[1], i % m.scales.shape[1], scales[i]);
    }
  }
}

PreparedWeights prepare_all(const char* what, const Context& context, DType dtype,
                            const std::vector<PackedMatrix>& gate,
                            const std::vector<PackedMatrix>* up, Workspace memory) {
  if (gate.empty()) fail(Status::invalid_argument, "{}: no matrices are given", what);
  if (up != nullptr && up->size() != gate.size()) {
    fail(Status::invalid_argument, "{}: {} gates are given, but {} ups", what, gate.size(),
         up->size());
  }
  const bool paired = up != nullptr;
  const auto groups = static_cast<int>(gate.size());
  const std::int64_t n = gate[0].n * (paired ? 2 : 1);
  check_sizes(what, context, dtype, gate[0].format, groups, n, gate[0].k, paired);
  const auto name = [&](std::size_t g, bool second) {
    return fmt::format("{}: {}[{}]", what, !paired ? "matrices" : second ? "up" : "gate", g);
  };
  for (std::size_t g = 0; g < gate.size(); ++g) {
    check_matrix(name(g, false), gate[g], gate[0]);
    if (paired) check_matrix(name(g, true), (*up)[g], gate[0]);
  }
  const std::size_t bytes = bytes_of(context, gate[0].format, groups, n, gate[0].k, paired);
  check_workspace(what, memory, bytes);
  const PreparedWeights prepared{.dtype = dtype,
                                 .groups = groups,
                                 .n = n,
                                 .k = gate[0].k,
                                 .paired = paired,
                                 .device = context.device(),
                                 .data = memory.data,
                                 .bytes = bytes,
                                 .format = gate[0].format};
  if constexpr (cuda_engine::built) {
    if (on_gpu(context)) {
      cuda_engine::write_packed(context, {gate[0].format.format, n, gate[0].k, paired}, gate, up,
                                memory.data);
      return prepared;
    }
  }

  const cpu_engine::PackedPanels layout = panels_of(gate[0].format, n, gate[0].k, paired);
  auto* const to = static_cast<char*>(memory.data);
  const auto panels = static_cast<std::size_t>(layout.order().panels());
  std::atomic<std::size_t> bad{gate.size()};
  context.pool().run([&](cpu_engine::Team& team) {
    team.for_each(panels * gate.size(), [&](std::size_t task) {
      const std::size_t g = task / panels;
      const PackedMatrix* const other = paired ? &(*up)[g] : nullptr;
      char* const group = to + static_cast<std::int64_t>(g) * layout.group_bytes();
      const auto panel = static_cast<std::int64_t>(task % panels);
      if (panel == 0) cpu_engine::write_packed_header(gate[g], other, group);
      char* const at =
          group + cpu_engine::PackedPanels::header_bytes + panel * layout.panel_bytes();
      if (!cpu_engine::write_packed_panel(layout, gate[g], other, panel, at)) bad.store(g);
    });
  });
  if (bad.load() < gate.size()) {
    fail(Status::invalid_argument, "{}{} holds a NaN or an infinite scale: must be finite",
         name(bad.load(), false), paired ? ", or its up," : "");
  }
  return prepared;
}

}  // namespace

std::size_t prepared_bytes(const Context& context, DType dtype, const FormatSpec& format,
                           int groups, std::int64_t n, std::int64_t k, bool paired) {
  if (format == FormatSpec{}) return prepared_bytes(context, dtype, groups, n, k, paired);
  check_sizes("prepared_bytes", context, dtype, format, groups, n, k, paired);
  return bytes_of(context, format, groups, n, k, paired);
}

PreparedWeights prepare_packed(const Context& context, DType dtype,
                               const std::vector<PackedMatrix>& matrices, Workspace memory) {
  return prepare_all("prepare_packed", context, dtype, matrices, nullptr, memory);
}

PreparedWeights prepare_packed_paired(const Context& context, DType dtype,
                                      const std::vector<PackedMatrix>& gate,
                                      const std::vector<PackedMatrix>& up, Workspace memory) {
  return prepare_all("prepare_packed_paired", context, dtype, gate, &up, memory);
}

}  // namespace shunt
