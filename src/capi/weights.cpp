// Packed weights, prepared weights and the grouped GEMM of the C ABI.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "capi/call.hpp"
#include "capi/specs.hpp"
#include "shunt/indexed_gemm.hpp"
#include "shunt/sparse.hpp"

using shunt::PackedMatrix;
using shunt::Tensor;
using shunt::capi::Call;
using shunt::capi::run;
using shunt::capi::run_supports;
using shunt::capi::to_format;
using shunt::capi::to_packed;
using shunt::capi::to_rows;
using shunt::capi::to_spec;
using shunt::capi::to_text;

namespace {

void put_text(char (&to)[32], const std::string& text) {
  std::memset(to, 0, sizeof to);
  std::memcpy(to, text.data(), std::min(text.size(), sizeof to - 1));
}

shunt::PreparedWeights to_prepared(const Call& call, const char* name,
                                   const shunt_prepared_weights* given) {
  if (given == nullptr) return {};
  const shunt_prepared_weights p = call.read(name, given);
  call.reserved("prepared.reserved", p.reserved);
  call.reserved("prepared.reserved_end", p.reserved_end);
  return {.dtype = call.choice("prepared.dtype", p.dtype, shunt::DType::f4_e2m1),
          .groups = p.groups,
          .n = p.n,
          .k = p.k,
          .paired = call.flag("prepared.paired", p.paired),
          .device = {call.choice("prepared.device_type", p.device_type, shunt::DeviceType::cuda),
                     p.device_index},
          .data = p.data,
          .bytes = static_cast<std::size_t>(p.bytes),
          .format = to_format(to_text(call, "prepared.format", p.format).c_str()),
          .rows = to_rows(call, "prepared.rows", p.rows)};
}

// Before the work, not after: that packed weights can be written there.
void check_room(const Call& call, const shunt_prepared_weights* to) {
  call.read("prepared", to);
  if (to->struct_size < sizeof *to) {
    call.wrong("prepared.struct_size is {}: must be {} for packed weights", to->struct_size,
               sizeof *to);
  }
}

void write_prepared(const Call& call, shunt_prepared_weights* to,
                    const shunt::PreparedWeights& weights) {
  const bool packed = weights.format != shunt::FormatSpec{};
  if (packed) check_room(call, to);
  shunt_prepared_weights p{};
  p.dtype = static_cast<int32_t>(weights.dtype);
  p.groups = weights.groups;
  p.n = weights.n;
  p.k = weights.k;
  p.paired = weights.paired ? 1 : 0;
  p.device_type = static_cast<int32_t>(weights.device.type);
  p.device_index = weights.device.index;
  p.data = weights.data;
  p.bytes = weights.bytes;
  if (packed) put_text(p.format, to_string(weights.format));
  p.rows = static_cast<int32_t>(weights.rows);
  call.write("prepared", to, p);
}

std::vector<Tensor> to_tensors(const Call& call, const char* name, const shunt_tensor* tensors,
                               int32_t count) {
  if (count < 0) call.wrong("groups is {}: must be 0 or more", count);
  std::vector<Tensor> result;
  if (count > 0) call.not_null(name, tensors);
  for (int32_t i = 0; i < count; ++i) result.push_back(call.tensor(name, tensors + i));
  return result;
}

std::vector<PackedMatrix> to_matrices(const Call& call, const char* name,
                                      const shunt_packed_matrix* matrices, int32_t count) {
  if (count < 0) call.wrong("groups is {}: must be 0 or more", count);
  std::vector<PackedMatrix> result;
  if (count > 0) call.not_null(name, matrices);
  for (int32_t i = 0; i < count; ++i) {
    result.push_back(to_packed(call, fmt::format("{}[{}]", name, i), matrices[i]));
  }
  return result;
}

shunt_packed_matrix to_c(const PackedMatrix& matrix) {
  shunt_packed_matrix p{};
  put_text(p.format, to_string(matrix.format));
  p.n = matrix.n;
  p.k = matrix.k;
  p.global_scale = matrix.global_scale;
  const auto part = [](const Tensor& tensor) {
    return tensor ? shunt::capi::to_c(tensor) : shunt_tensor{};
  };
  p.values = part(matrix.values);
  p.scales = part(matrix.scales);
  p.zeros = part(matrix.zeros);
  p.group_of = part(matrix.group_of);
  p.positions = part(matrix.positions);
  return p;
}

shunt::KMajorSparse to_k_major_views(const Call& call, const shunt_k_major_sparse& matrix) {
  call.reserved("matrix.reserved", matrix.reserved);
  return {.comp = call.tensor("matrix.comp", &matrix.comp),
          .meta = call.tensor("matrix.meta", &matrix.meta),
          .scale = call.tensor("matrix.scale", &matrix.scale),
          .global_scale = matrix.global_scale};
}

}  // namespace

// ---- packed weights -----------------------------------------------------------------------------

shunt_status shunt_packed_bytes(const char* format, int64_t n, int64_t k, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const auto spec = shunt::format_from_string(&call.not_null("format", format));
    call.not_null("bytes", bytes) = shunt::packed_bytes(spec, n, k);
  });
}

shunt_status shunt_pack(const char* format, const shunt_tensor* matrix, float global_amax,
                        void* memory, size_t memory_bytes, shunt_packed_matrix* packed) {
  return run(__func__, [&](const Call& call) {
    const auto spec = shunt::format_from_string(&call.not_null("format", format));
    call.not_null("matrix", matrix);
    shunt_packed_matrix& out = call.not_null("packed", packed);
    out =
        to_c(shunt::pack(spec, call.tensor("matrix", matrix), {memory, memory_bytes}, global_amax));
  });
}

shunt_status shunt_unpack(const shunt_packed_matrix* packed, const shunt_tensor* out) {
  return run(__func__, [&](const Call& call) {
    const PackedMatrix matrix = to_packed(call, "packed", call.not_null("packed", packed));
    call.not_null("out", out);
    shunt::unpack(matrix, call.tensor("out", out));
  });
}

shunt_status shunt_from_k_major(const shunt_k_major_sparse* matrix, void* memory,
                                size_t memory_bytes, shunt_packed_matrix* packed) {
  return run(__func__, [&](const Call& call) {
    const shunt::KMajorSparse from = to_k_major_views(call, call.not_null("matrix", matrix));
    shunt_packed_matrix& out = call.not_null("packed", packed);
    out = to_c(shunt::from_k_major(from, {memory, memory_bytes}));
  });
}

shunt_status shunt_to_k_major(const shunt_packed_matrix* packed, shunt_k_major_sparse* matrix) {
  return run(__func__, [&](const Call& call) {
    const PackedMatrix from = to_packed(call, "packed", call.not_null("packed", packed));
    shunt::KMajorSparse to = to_k_major_views(call, call.not_null("matrix", matrix));
    shunt::to_k_major(from, to);
    matrix->global_scale = to.global_scale;
  });
}

// ---- prepared weights ---------------------------------------------------------------------------

shunt_status shunt_prepared_bytes(const shunt_context* context, int32_t dtype, int32_t groups,
                                  int64_t n, int64_t k, int32_t paired, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    call.not_null("bytes", bytes) =
        shunt::prepared_bytes(on, type, groups, n, k, call.flag("paired", paired));
  });
}

shunt_status shunt_prepare(const shunt_context* context, int32_t dtype,
                           const shunt_tensor* matrices, int32_t groups, void* memory,
                           size_t memory_bytes, shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    const auto list = to_tensors(call, "matrices", matrices, groups);
    call.read("prepared", prepared);  // refused before the work, not after
    write_prepared(call, prepared, shunt::prepare(on, type, list, {memory, memory_bytes}));
  });
}

shunt_status shunt_prepare_paired(const shunt_context* context, int32_t dtype,
                                  const shunt_tensor* gate, const shunt_tensor* up, int32_t groups,
                                  void* memory, size_t memory_bytes,
                                  shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    const auto gates = to_tensors(call, "gate", gate, groups);
    const auto ups = to_tensors(call, "up", up, groups);
    call.read("prepared", prepared);
    write_prepared(call, prepared,
                   shunt::prepare_paired(on, type, gates, ups, {memory, memory_bytes}));
  });
}

shunt_status shunt_prepared_packed_bytes(const shunt_context* context, int32_t dtype,
                                         const char* format, int32_t rows, int32_t groups,
                                         int64_t n, int64_t k, int32_t paired, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    const auto spec = shunt::format_from_string(&call.not_null("format", format));
    call.not_null("bytes", bytes) =
        shunt::prepared_bytes(on, type, shunt::resolved(spec), groups, n, k,
                              call.flag("paired", paired), to_rows(call, "rows", rows));
  });
}

shunt_status shunt_prepared_format(const shunt_packed_matrix* matrices,
                                   const shunt_packed_matrix* up, int32_t groups, char* format,
                                   size_t room) {
  return run(__func__, [&](const Call& call) {
    const auto list = to_matrices(call, "matrices", matrices, groups);
    const auto other =
        up != nullptr ? to_matrices(call, "up", up, groups) : std::vector<PackedMatrix>{};
    const std::string text = to_string(shunt::prepared_format(list, other));
    call.not_null("format", format);
    if (room <= text.size()) {
      call.wrong("room is {}: must be {} for {}", room, text.size() + 1, text);
    }
    std::memcpy(format, text.c_str(), text.size() + 1);
  });
}

shunt_status shunt_prepare_packed(const shunt_context* context, int32_t dtype, int32_t rows,
                                  const shunt_packed_matrix* matrices, int32_t groups, void* memory,
                                  size_t memory_bytes, shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    const auto list = to_matrices(call, "matrices", matrices, groups);
    check_room(call, prepared);
    write_prepared(
        call, prepared,
        shunt::prepare_packed(on, type, list, {memory, memory_bytes}, to_rows(call, "rows", rows)));
  });
}

shunt_status shunt_prepare_packed_paired(const shunt_context* context, int32_t dtype, int32_t rows,
                                         const shunt_packed_matrix* gate,
                                         const shunt_packed_matrix* up, int32_t groups,
                                         void* memory, size_t memory_bytes,
                                         shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto type = call.choice("dtype", dtype, shunt::DType::f4_e2m1);
    const auto gates = to_matrices(call, "gate", gate, groups);
    const auto ups = to_matrices(call, "up", up, groups);
    check_room(call, prepared);
    write_prepared(call, prepared,
                   shunt::prepare_packed_paired(on, type, gates, ups, {memory, memory_bytes},
                                                to_rows(call, "rows", rows)));
  });
}

shunt_status shunt_unprepare(const shunt_context* context, const shunt_prepared_weights* prepared,
                             int32_t group, const shunt_tensor* out) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    call.not_null("prepared", prepared);
    shunt::unprepare(on, to_prepared(call, "prepared", prepared), group, call.tensor("out", out));
  });
}

shunt_status shunt_prepare_in_place(const shunt_context* context, const shunt_tensor* matrices,
                                    int32_t paired, void* scratch, size_t scratch_bytes,
                                    shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    call.read("prepared", prepared);
    write_prepared(call, prepared,
                   shunt::prepare_in_place(on, call.tensor("matrices", matrices),
                                           call.flag("paired", paired), {scratch, scratch_bytes}));
  });
}

shunt_status shunt_unprepare_in_place(const shunt_context* context,
                                      const shunt_prepared_weights* prepared, void* scratch,
                                      size_t scratch_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    call.not_null("prepared", prepared);
    shunt::unprepare_in_place(on, to_prepared(call, "prepared", prepared),
                              {scratch, scratch_bytes});
  });
}

shunt_status shunt_prepared_save(const shunt_context* context,
                                 const shunt_prepared_weights* prepared, const char* path) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    call.not_null("prepared", prepared);
    shunt::save_prepared(on, to_prepared(call, "prepared", prepared), &call.not_null("path", path));
  });
}

shunt_status shunt_prepared_load(const shunt_context* context, const char* path,
                                 shunt_buffer** memory, shunt_prepared_weights* prepared) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt_buffer*& out = call.not_null("memory", memory);
    call.read("prepared", prepared);
    auto made = std::make_unique<shunt_buffer>();
    write_prepared(call, prepared,
                   shunt::load_prepared(on, &call.not_null("path", path), made->buffer));
    out = made.release();
  });
}

// ---- the grouped GEMM ---------------------------------------------------------------------------

shunt_status shunt_grouped_gemm_supports(const shunt_context* context,
                                         const shunt_grouped_gemm_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_grouped_gemm_workspace_bytes(const shunt_context* context,
                                                const shunt_grouped_gemm_spec* spec, int64_t rows,
                                                size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::grouped_gemm_workspace_bytes(on, rule, rows);
  });
}

shunt_status shunt_grouped_gemm(const shunt_context* context, const shunt_grouped_gemm_spec* spec,
                                const shunt_grouped_gemm_inputs* inputs, const shunt_tensor* out,
                                void* workspace, size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_grouped_gemm_inputs in = call.read("inputs", inputs);
    shunt::grouped_gemm(on, rule,
                        {.rows = call.tensor("inputs.rows", in.rows),
                         .offsets = call.tensor("inputs.offsets", in.offsets),
                         .counts = call.tensor("inputs.counts", in.counts),
                         .expected_rows = in.expected_rows,
                         .weights = call.tensor("inputs.weights", in.weights),
                         .prepared = to_prepared(call, "inputs.prepared", in.prepared),
                         .bias = call.tensor("inputs.bias", in.bias),
                         .row_scales = call.tensor("inputs.row_scales", in.row_scales)},
                        call.tensor("out", out), {workspace, workspace_bytes});
  });
}

// ---- the indexed GEMM ---------------------------------------------------------------------------

shunt_status shunt_indexed_gemm_supports(const shunt_context* context,
                                         const shunt_grouped_gemm_spec* spec) {
  return run_supports(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    return shunt::supports_indexed(to_spec(call, spec), on.device());
  });
}

shunt_status shunt_indexed_gemm_workspace_bytes(const shunt_context* context,
                                                const shunt_grouped_gemm_spec* spec, int64_t tokens,
                                                int32_t slots, size_t* bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    call.not_null("bytes", bytes) = shunt::indexed_gemm_workspace_bytes(on, rule, tokens, slots);
  });
}

shunt_status shunt_indexed_gemm(const shunt_context* context, const shunt_grouped_gemm_spec* spec,
                                const shunt_indexed_gemm_inputs* inputs, const shunt_tensor* out,
                                void* workspace, size_t workspace_bytes) {
  return run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    const auto rule = to_spec(call, spec);
    const shunt_indexed_gemm_inputs in = call.read("inputs", inputs);
    shunt::indexed_gemm(on, rule,
                        {.rows = call.tensor("inputs.rows", in.rows),
                         .ids = call.tensor("inputs.ids", in.ids),
                         .prepared = to_prepared(call, "inputs.prepared", in.prepared),
                         .bias = call.tensor("inputs.bias", in.bias)},
                        call.tensor("out", out), {workspace, workspace_bytes});
  });
}
