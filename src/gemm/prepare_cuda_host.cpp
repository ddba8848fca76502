// Weights from the host into the layout on the GPU, and from there those that the host decodes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "format/codes.hpp"
#include "gemm/cuda_engine.hpp"
#include "shunt/context.hpp"

namespace shunt::cuda_engine {

namespace {

// The elements that a view reaches, from the lowest address to the highest.
struct Reach {
  std::int64_t low = 0, high = 0;
  explicit Reach(const Tensor& matrix) {
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t reach = (matrix.shape[d] - 1) * matrix.strides[d];
      (reach < 0 ? low : high) += reach;
    }
  }
  std::int64_t elements() const { return high - low + 1; }
};

bool on_host(const Tensor& matrix) {
  return matrix.device.type == DeviceType::cpu && matrix.elements() > 0;
}

std::int64_t width(const Tensor& matrix) { return bits(matrix.dtype) / 8; }

// Views of a much larger whole are gathered before they cross, others cross gaps and all: a
// transposed or interleaved matrix needs no work of the host.
bool sparse(const Tensor& matrix) { return Reach(matrix).elements() > 4 * matrix.elements(); }

std::size_t staged_bytes(const Tensor& matrix) {
  if (!on_host(matrix)) return 0;
  const std::int64_t elements = sparse(matrix) ? matrix.elements() : Reach(matrix).elements();
  return static_cast<std::size_t>((elements * width(matrix) + 255) / 256 * 256);
}

// The matrix on the device: itself, or a copy at `to`.
Tensor staged(const Context& context, const Tensor& matrix, char* to) {
  if (!on_host(matrix)) return matrix;
  Tensor there = matrix;
  there.device = context.device();
  const auto size = static_cast<std::size_t>(width(matrix));
  if (!sparse(matrix)) {
    const Reach reach(matrix);
    context.copy(to, matrix.as<const char>() + reach.low * width(matrix),
                 static_cast<std::size_t>(reach.elements()) * size);
    there.data = to - reach.low * width(matrix);
    return there;
  }
  std::vector<char> dense(static_cast<std::size_t>(matrix.elements()) * size);
  char* at = dense.data();
  for (std::int64_t i = 0; i < matrix.shape[0]; ++i) {
    for (std::int64_t j = 0; j < matrix.shape[1]; ++j, at += size) {
      std::memcpy(
          at,
          matrix.as<const char>() + (i * matrix.strides[0] + j * matrix.strides[1]) * width(matrix),
          size);
    }
  }
  context.copy(to, dense.data(), dense.size());
  there.data = to;
  there.strides[0] = matrix.shape[1];
  there.strides[1] = 1;
  return there;
}

}  // namespace

void write_groups(const Context& context, const RowLayout& layout, const std::vector<Tensor>& gate,
                  const std::vector<Tensor>* up, void* to) {
  std::size_t room = 0;
  for (std::size_t g = 0; g < gate.size(); ++g) {
    room = std::max(room, staged_bytes(gate[g]) + (up != nullptr ? staged_bytes((*up)[g]) : 0));
  }
  const Buffer memory = context.allocate(room);
  auto* const first = static_cast<char*>(memory.data());
  for (std::size_t g = 0; g < gate.size(); ++g) {
    const Tensor gate_there = staged(context, gate[g], first);
    const Tensor up_there =
        up != nullptr ? staged(context, (*up)[g], first + staged_bytes(gate[g])) : Tensor{};
    write_group(context.gpu(), layout, gate_there, up_there,
                static_cast<char*>(to) + static_cast<std::int64_t>(g) * layout.group_bytes());
  }
  context.synchronize();  // the copies are freed now, and the matrices are the caller's again
}

void read_decoded(const Context& context, const void* from, std::int64_t bytes,
                  const DecodedRow& row_of, const Tensor& out) {
  const std::int64_t n = out.shape[0], k = out.shape[1];
  if (n == 0 || k == 0) return;
  std::vector<char> group(static_cast<std::size_t>(bytes));
  context.copy(group.data(), from, group.size());
  const RowLayout plain{DType::f32, n, k, false};
  std::vector<float> exact(static_cast<std::size_t>(plain.group_bytes()) / sizeof(float));
  std::vector<double> row(static_cast<std::size_t>(k));
  for (std::int64_t i = 0; i < n; ++i) {
    row_of(group.data(), i, row.data());
    for (std::int64_t j = 0; j < k; ++j) {
      const double value = row[static_cast<std::size_t>(j)];
      // To odd, so that the second rounding, to 16 bits, rounds as one from `value` does.
      exact[static_cast<std::size_t>(plain.element(i, j))] =
          out.dtype == DType::f32 ? static_cast<float>(value) : to_odd_f32(value);
    }
  }
  const Buffer there = context.allocate(exact.size() * sizeof(float));
  context.copy(there.data(), exact.data(), exact.size() * sizeof(float));
  read_group(context.gpu(), plain, there.data(), out);
  context.synchronize();
}

}  // namespace shunt::cuda_engine
