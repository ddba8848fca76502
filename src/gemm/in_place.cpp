// Weights that become their prepared form where they lie, a matrix at a time through a copy of one.
#include <limits>

#include "core/check.hpp"
#include "core/memory.hpp"
#include "cuda/current.hpp"
#include "shunt/gemm.hpp"

namespace shunt {

namespace {

std::size_t matrix_bytes(const Tensor& matrices) {
  return static_cast<std::size_t>(matrices.shape[1] * matrices.shape[2] *
                                  (bits(matrices.dtype) / 8));
}

// A matrix of a group as it lay before, at `data`: gate's rows, or all; and up's.
struct Parts {
  Tensor first, second;
  Parts(const void* data, DType dtype, std::int64_t n, std::int64_t k, bool paired,
        const Device& device)
      : first(view(data, dtype, {paired ? n / 2 : n, k}, device)) {
    if (!paired) return;
    const std::int64_t half = n / 2 * k * (bits(dtype) / 8);
    second = view(static_cast<const char*>(data) + half, dtype, {n / 2, k}, device);
  }
};

}  // namespace

PreparedWeights prepare_in_place(const Context& context, Tensor matrices, bool paired,
                                 Workspace scratch) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  check_tensor("prepare_in_place: matrices", matrices,
               {.dtypes = float_dtypes, .shape = {any_size, any_size, any_size}, .dense = true},
               device);
  if (matrices.shape[0] > std::numeric_limits<int>::max()) {
    fail(Status::invalid_argument, "prepare_in_place: matrices are {}: must be fewer than 2^31",
         matrices.shape[0]);
  }
  const auto groups = static_cast<int>(matrices.shape[0]);
  const std::int64_t n = matrices.shape[1], k = matrices.shape[2];
  const std::size_t one = matrix_bytes(matrices);
  if (const std::size_t needed = prepared_bytes(context, matrices.dtype, 1, n, k, paired);
      needed != one) {
    fail(Status::unsupported,
         "prepare_in_place: matrices are {} [{}, {}, {}]: a prepared one takes {} bytes, {} more "
         "than there are; legal are {}",
         to_string(matrices.dtype), groups, n, k, needed, needed - one,
         device.type == DeviceType::cpu ? "multiples of 64 rows, in bf16 of an even width"
                                        : "multiples of 128 rows of a multiple of 64");
  }
  if (reinterpret_cast<std::uintptr_t>(matrices.data) % 64 != 0) {
    fail(Status::invalid_argument, "prepare_in_place: matrices must be 64-byte aligned");
  }
  check_memory("prepare_in_place", "scratch", scratch, one);
  auto* const data = static_cast<char*>(matrices.data);
  PreparedWeights made{.dtype = matrices.dtype,
                       .groups = 0,
                       .n = n,
                       .k = k,
                       .paired = paired,
                       .device = device,
                       .data = matrices.data,
                       .bytes = 0};
  for (; made.groups < groups; ++made.groups, made.bytes += one) {
    char* const at = data + made.bytes;
    context.copy(scratch.data, at, one);
    try {
      const Parts parts(scratch.data, matrices.dtype, n, k, paired, device);
      if (paired) {
        prepare_paired(context, matrices.dtype, {parts.first}, {parts.second}, {at, one});
      } else {
        prepare(context, matrices.dtype, {parts.first}, {at, one});
      }
    } catch (...) {  // memory is out: the caller's weights are to be what they were
      context.copy(at, scratch.data, one);
      if (made.groups > 0) unprepare_in_place(context, made, scratch);
      throw;
    }
  }
  return made;
}

void unprepare_in_place(const Context& context, const PreparedWeights& weights, Workspace scratch) {
  const cuda_engine::Current current(context);
  if (!weights) fail(Status::invalid_argument, "unprepare_in_place: no weights are given");
  if (weights.device != context.device()) {
    fail(Status::invalid_argument,
         "unprepare_in_place: weights are on another device than the context");
  }
  const std::size_t one =
      static_cast<std::size_t>(weights.n * weights.k * (bits(weights.dtype) / 8));
  if (weights.format != FormatSpec{} ||
      weights.bytes != static_cast<std::size_t>(weights.groups) * one) {
    fail(Status::invalid_argument,
         "unprepare_in_place: weights take {} bytes: must be what {} [{}, {}, {}] take, {}",
         weights.bytes, to_string(weights.dtype), weights.groups, weights.n, weights.k,
         static_cast<std::size_t>(weights.groups) * one);
  }
  if (weights.groups < 0) {
    fail(Status::invalid_argument,
         "unprepare_in_place: weights are of {} groups: must be 0 or more", weights.groups);
  }
  if (reinterpret_cast<std::uintptr_t>(weights.data) % 64 != 0) {
    fail(Status::invalid_argument, "unprepare_in_place: weights must be 64-byte aligned");
  }
  check_memory("unprepare_in_place", "scratch", scratch, one);
  PreparedWeights copy = weights;
  copy.groups = 1;
  copy.bytes = one;
  copy.data = scratch.data;
  for (int g = 0; g < weights.groups; ++g) {
    char* const at = static_cast<char*>(weights.data) + static_cast<std::size_t>(g) * one;
    context.copy(scratch.data, at, one);
    unprepare(context, copy, 0, view(at, weights.dtype, {weights.n, weights.k}, context.device()));
  }
  context.synchronize();  // the last still reads `scratch`
}

}  // namespace shunt
