// Packed weights into the layout that an engine multiplies them in.
#include <algorithm>
#include <string>

#include "core/check.hpp"
#include "cuda/runtime.hpp"
#include "gemm/packed_prepare.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

constexpr double most_bytes = 0x1p62;

// The formats that have a prepared layout on the context's device.
cuda_engine::PackedLayout checked_layout(const char* what, const Context& context, DType dtype,
                                         const FormatSpec& format, int groups, std::int64_t n,
                                         std::int64_t k, bool paired) {
  const bool gpu = cuda_engine::built && context.device().type == DeviceType::cuda;
  const bool fp8 = format.format == Format::fp8_tensor || format.format == Format::fp8_channel ||
                   format.format == Format::fp8_block;
  if (!gpu || !fp8) {
    fail(Status::unsupported, "{}: format is {}: {}", what, to_string(format),
         gpu ? "must be fp8_tensor, fp8_channel or fp8_block on a GPU"
             : "the CPU multiplies plain weights only");
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
  if (static_cast<double>(groups) * (static_cast<double>(n) + 256) *
          (static_cast<double>(k) + 256) * 4 >
      most_bytes) {
    fail(Status::invalid_argument, "{}: {} matrices [{}, {}] do not fit 64-bit sizes", what, groups,
         n, k);
  }
  return {format.format, n, k, paired};
}

void check_matrix(const std::string& name, const PackedMatrix& m, const PackedMatrix& first) {
  if (m.format != first.format || m.n != first.n || m.k != first.k) {
    fail(Status::invalid_argument, "{} is {} [{}, {}]: must be {} [{}, {}], as the first", name,
         to_string(m.format), m.n, m.k, to_string(first.format), first.n, first.k);
  }
  check_packed(name, m, Device{});
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
  for (std::size_t g = 0; g < gate.size(); ++g) {
    check_matrix(fmt::format("{}: {}[{}]", what, paired ? "gate" : "matrices", g), gate[g],
                 gate[0]);
    if (paired) check_matrix(fmt::format("{}: up[{}]", what, g), (*up)[g], gate[0]);
  }
  const auto groups = static_cast<int>(gate.size());
  const std::int64_t n = gate[0].n * (paired ? 2 : 1);
  const cuda_engine::PackedLayout layout =
      checked_layout(what, context, dtype, gate[0].format, groups, n, gate[0].k, paired);
  const auto bytes = static_cast<std::size_t>(layout.group_bytes()) * gate.size();
  check_workspace(what, memory, bytes);
  if constexpr (cuda_engine::built) {
    cuda_engine::write_packed(context, layout, gate, up, memory.data);
  }
  return {.dtype = dtype,
          .groups = groups,
          .n = n,
          .k = gate[0].k,
          .paired = paired,
          .device = context.device(),
          .data = memory.data,
          .bytes = bytes,
          .format = gate[0].format};
}

}  // namespace

std::size_t prepared_bytes(const Context& context, DType dtype, const FormatSpec& format,
                           int groups, std::int64_t n, std::int64_t k, bool paired) {
  if (format == FormatSpec{}) return prepared_bytes(context, dtype, groups, n, k, paired);
  return static_cast<std::size_t>(
      checked_layout("prepared_bytes", context, dtype, format, groups, n, k, paired).group_bytes() *
      groups);
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
