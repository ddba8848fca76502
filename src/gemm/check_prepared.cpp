#include "gemm/check_prepared.hpp"

#include <fmt/core.h>

#include "core/check.hpp"
#include "shunt/format.hpp"

namespace shunt {

void check_prepared(std::string_view who, const GroupedGemmSpec& spec, const PreparedWeights& w,
                    const Context& context) {
  // Weights without elements have no memory either.
  if (!w && spec.n > 0 && spec.k > 0) {
    fail(Status::invalid_argument, "{}: prepared weights are missing: the spec says prepared", who);
  }
  if (!w) return;
  if (w.groups != spec.groups || w.n != spec.n || w.k != spec.k || w.dtype != spec.dtype) {
    fail(Status::invalid_argument,
         "{}: prepared weights are {} [{}, {}, {}]: the spec says {} [{}, {}, {}]", who,
         to_string(w.dtype), w.groups, w.n, w.k, to_string(spec.dtype), spec.groups, spec.n,
         spec.k);
  }
  if (w.format != resolved(spec.format)) {
    fail(Status::invalid_argument, "{}: prepared weights are {}: the spec says {}", who,
         to_string(w.format), to_string(spec.format));
  }
  if (context.device().type == DeviceType::cuda && w.rows != spec.rows) {
    fail(Status::invalid_argument,
         "{}: prepared weights are laid out for rows {}: the spec says {}", who, to_string(w.rows),
         to_string(spec.rows));
  }
  if (w.paired) {
    fail(Status::invalid_argument,
         "{}: prepared weights are paired: that form is for the fused layer only", who);
  }
  check_prepared_memory(who, w, context);
}

void check_prepared_memory(std::string_view who, const PreparedWeights& w, const Context& context) {
  if (w.device != context.device()) {
    fail(Status::invalid_argument, "{}: prepared weights are on another device than the context",
         who);
  }
  const std::size_t needed =
      w.format == FormatSpec{}
          ? prepared_bytes(context, w.dtype, w.groups, w.n, w.k, w.paired)
          : prepared_bytes(context, w.dtype, w.format, w.groups, w.n, w.k, w.paired, w.rows);
  if (w.bytes < needed) {
    fail(Status::invalid_argument, "{}: prepared weights have {} bytes, {} [{}, {}, {}] need {}",
         who, w.bytes, w.format == FormatSpec{} ? to_string(w.dtype) : to_string(w.format),
         w.groups, w.n, w.k, needed);
  }
  if (needed > 0 && reinterpret_cast<std::uintptr_t>(w.data) % 64 != 0) {
    fail(Status::invalid_argument, "{}: prepared weights begin at {}: must be 64-byte aligned", who,
         w.data);
  }
}

}  // namespace shunt
