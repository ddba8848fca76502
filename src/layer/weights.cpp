#include "layer/weights.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "layer/plan.hpp"

namespace shunt {

namespace {

// Where a tensor may be: on the host, or on the layer's device.
Device place(const Tensor& tensor, Device device) {
  return tensor.device == device ? device : Device{};
}

void check_list(const std::string& name, const std::vector<Tensor>& tensors, bool wanted, int count,
                std::initializer_list<std::int64_t> shape, Device device) {
  const std::size_t expected = wanted ? static_cast<std::size_t>(count) : 0;
  if (tensors.size() != expected) {
    fail(Status::invalid_argument, "layer: {} has {} tensors, the spec asks for {}", name,
         tensors.size(), expected);
  }
  for (std::size_t e = 0; e < tensors.size(); ++e) {
    check_tensor(fmt::format("layer: {}[{}]", name, e), tensors[e],
                 {.dtypes = float_dtypes, .shape = shape}, place(tensors[e], device));
  }
}

// A whole row to a group differs with the row: up and down need not agree but in their formats.
void check_packed_list(const std::string& name, const FormatSpec& up,
                       const std::vector<PackedMatrix>& matrices, std::int64_t n, std::int64_t k) {
  for (std::size_t e = 0; e < matrices.size(); ++e) {
    const PackedMatrix& m = matrices[e];
    const std::string full = fmt::format("layer: {}[{}]", name, e);
    check_packed(full, m, Device{});
    if (m.n != n || m.k != k) {
      fail(Status::invalid_argument, "{} is [{}, {}]: must be [{}, {}]", full, m.n, m.k, n, k);
    }
    if (m.format.format != up.format) {
      fail(Status::invalid_argument, "{} is {}: must be {}, as up[0]", full, to_string(m.format),
           to_string(up));
    }
  }
}

void check_experts(const std::string& name, const ExpertWeights& weights, int count,
                   std::int64_t hidden, std::int64_t intermediate, bool gated, bool gate_up_bias,
                   bool down_bias, Device device) {
  const bool packed = is_packed(weights);
  if (packed) {
    const auto refuse_plain = [&](const char* what, const std::vector<Tensor>& plain,
                                  const std::vector<PackedMatrix>& matrices) {
      if (plain.empty() || !matrices.empty()) return;
      fail(Status::unsupported,
           "layer: {}.{} is plain and others of its matrices are packed: must be packed alike, as "
           "`shunt convert` makes them",
           name, what);
    };
    refuse_plain("gate", weights.gate, weights.packed_gate);
    refuse_plain("up", weights.up, weights.packed_up);
    refuse_plain("down", weights.down, weights.packed_down);
    const auto check_count = [&](const char* what, const std::vector<PackedMatrix>& matrices,
                                 bool wanted) {
      const std::size_t expected = wanted ? static_cast<std::size_t>(count) : 0;
      if (matrices.size() == expected) return;
      fail(Status::invalid_argument, "layer: {}.{} has {} matrices, the spec asks for {}", name,
           what, matrices.size(), expected);
    };
    check_count("packed_gate", weights.packed_gate, gated);
    check_count("packed_up", weights.packed_up, true);
    check_count("packed_down", weights.packed_down, true);
    if (count > 0) {
      const FormatSpec& up = weights.packed_up[0].format;
      check_packed_list(name + ".packed_gate", up, weights.packed_gate, intermediate, hidden);
      check_packed_list(name + ".packed_up", up, weights.packed_up, intermediate, hidden);
      check_packed_list(name + ".packed_down", up, weights.packed_down, hidden, intermediate);
    }
  }
  check_list(name + ".gate", weights.gate, gated && !packed, count, {intermediate, hidden}, device);
  check_list(name + ".up", weights.up, !packed, count, {intermediate, hidden}, device);
  check_list(name + ".down", weights.down, !packed, count, {hidden, intermediate}, device);
  check_list(name + ".gate_bias", weights.gate_bias, gated && gate_up_bias, count, {intermediate},
             device);
  check_list(name + ".up_bias", weights.up_bias, gate_up_bias, count, {intermediate}, device);
  check_list(name + ".down_bias", weights.down_bias, down_bias, count, {hidden}, device);
}

void check_one(const char* name, const Tensor& tensor, bool wanted,
               std::initializer_list<std::int64_t> shape, Device device) {
  const std::string full = fmt::format("layer: weights.{}", name);
  if (check_given(full, tensor, wanted, "the LayerSpec")) {
    check_tensor(full, tensor, {.dtypes = float_dtypes, .shape = shape}, place(tensor, device));
  }
}

// Matrices that are prepared as they are: what is packed may be of any dtypes.
void check_one_dtype(const ExpertWeights& weights) {
  const auto check = [](const char* name, const std::vector<Tensor>& matrices, const char* like,
                        DType dtype) {
    for (std::size_t e = 0; e < matrices.size(); ++e) {
      if (matrices[e].dtype == dtype) continue;
      fail(Status::unsupported, "layer: {} of expert {} is {}: must be {}, as {} of expert 0", name,
           e, matrices[e].describe(), to_string(dtype), like);
    }
  };
  check("up", weights.up, "up", weights.up[0].dtype);
  check("gate", weights.gate, "up", weights.up[0].dtype);
  check("down", weights.down, "down", weights.down[0].dtype);
}

}  // namespace

bool is_packed(const ExpertWeights& weights) {
  return !weights.packed_gate.empty() || !weights.packed_up.empty() || !weights.packed_down.empty();
}

void check_held(const LayerSpec& spec, const LayerWeights& weights, Device device) {
  const RouteSpec& route = spec.route;
  const std::int64_t hidden = spec.hidden;
  const std::int64_t columns = route.columns();
  check_one("router", weights.router, static_cast<bool>(weights.router) && !spec.routed_outside,
            {columns, hidden}, device);
  check_one("router_bias", weights.router_bias, route.router_bias, {columns}, device);
  check_one("selection_bias", weights.selection_bias, route.selection_bias, {route.experts},
            device);
  check_one("per_expert_scale", weights.per_expert_scale, route.per_expert_scale, {columns},
            device);
  if (check_given("layer: weights.hash_table", weights.hash_table, route.hashed, "the LayerSpec")) {
    check_tensor("layer: weights.hash_table", weights.hash_table,
                 {.dtypes = {DType::i32, DType::i64}, .shape = {any_size, route.top_k}},
                 place(weights.hash_table, device));
  }
  if (check_given("layer: weights.shared_gate", weights.shared_gate,
                  spec.shared.intermediate > 0 && spec.shared.sigmoid_gate, "the LayerSpec")) {
    const Tensor& gate = weights.shared_gate;
    // [1, H] is the same vector.
    const bool row = gate.rank == 2 && gate.shape[0] == 1;
    check_tensor("layer: weights.shared_gate", row ? gate[0] : gate,
                 {.dtypes = float_dtypes, .shape = {hidden}}, place(gate, device));
  }
  check_one("output_bias", weights.output_bias, spec.output_bias, {hidden}, device);
  const auto norm = [&](const char* name, const Tensor& weight, const NormSpec& norm_spec,
                        std::int64_t width) {
    check_one(name, weight, norm_spec.enabled && norm_spec.weight, {width}, device);
  };
  norm("router_norm", weights.router_norm, spec.router_norm, hidden);
  norm("input_norm", weights.input_norm, spec.input_norm, hidden);
  norm("output_norm", weights.output_norm, spec.output_norm, hidden);
  norm("latent_norm", weights.latent_norm, spec.latent_norm, spec.latent);
  norm("latent_input_norm", weights.latent_input_norm, spec.latent_input_norm, spec.latent);
  norm("expert_norm", weights.expert_norm, spec.expert_norm, spec.experts.hidden);
}

void check_weights(const LayerSpec& spec, const LayerWeights& weights, Device device) {
  const std::int64_t hidden = spec.hidden;
  const bool shared = spec.shared.intermediate > 0;
  check_held(spec, weights, device);
  check_experts("experts", weights.experts, spec.experts.experts, spec.experts.hidden,
                spec.experts.intermediate, spec.experts.activation.gated, spec.experts.gate_up_bias,
                spec.experts.down_bias, device);
  check_experts("shared", weights.shared, shared ? 1 : 0, hidden, spec.shared.intermediate,
                spec.shared.activation.gated, spec.shared.gate_up_bias, spec.shared.down_bias,
                device);
  check_one("latent_down", weights.latent_down, spec.latent > 0, {spec.latent, hidden}, device);
  check_one("latent_up", weights.latent_up, spec.latent > 0, {hidden, spec.latent}, device);
}

namespace {

// The elements of a vector or matrix one after the other, in memory of the host.
std::vector<char> on_host(const Context& context, const Tensor& source) {
  const std::int64_t width = bits(source.dtype) / 8;
  const std::int64_t columns = source.rank == 2 ? source.shape[1] : 1;
  const std::int64_t column_stride = source.rank == 2 ? source.strides[1] : 0;
  if (source.elements() == 0) return {};
  const auto bytes = static_cast<std::size_t>(source.bytes());  // refused where none can be had
  const auto* from = source.as<const char>();
  std::vector<char> reach;  // of a view on the device, gaps and all
  if (source.device.type != DeviceType::cpu) {
    std::int64_t low = 0, high = 0;
    for (const std::int64_t end :
         {(source.shape[0] - 1) * source.strides[0], (columns - 1) * column_stride}) {
      (end < 0 ? low : high) += end;
    }
    reach.resize(static_cast<std::size_t>((high - low + 1) * width));
    context.copy(reach.data(), from + low * width, reach.size());
    from = reach.data() - low * width;
  }
  std::vector<char> dense(bytes);
  char* to = dense.data();
  for (std::int64_t i = 0; i < source.shape[0]; ++i) {
    for (std::int64_t j = 0; j < columns; ++j, to += width) {
      std::memcpy(to, from + (i * source.strides[0] + j * column_stride) * width,
                  static_cast<std::size_t>(width));
    }
  }
  return dense;
}

// A copy on the context's device, in a new one of `buffers`.
void* hold_bytes(const Context& context, const void* data, std::size_t bytes,
                 std::vector<Buffer>& buffers) {
  buffers.push_back(context.allocate(bytes));
  context.copy(buffers.back().data(), data, bytes);
  return buffers.back().data();
}

// One f32 row an expert: first's, then second's values.
Tensor hold_bias(const Context& context, const std::vector<Tensor>* first,
                 const std::vector<Tensor>& second, std::vector<Buffer>& buffers) {
  std::vector<float> values;
  for (std::size_t e = 0; e < second.size(); ++e) {
    for (const auto* list : {first, &second}) {
      if (list == nullptr) continue;
      const Tensor& source = (*list)[e];
      const std::vector<char> dense = on_host(context, source);
      for (std::int64_t i = 0; i < source.shape[0]; ++i) {
        values.push_back(load_f32(dense.data(), source.dtype, i));
      }
    }
  }
  const auto groups = static_cast<std::int64_t>(second.size());
  return view(hold_bytes(context, values.data(), values.size() * sizeof(float), buffers),
              DType::f32, {groups, static_cast<std::int64_t>(values.size()) / groups},
              context.device());
}

// first[e] and second[e], or second[e] alone, of all experts as one tensor [E, rows, k].
Tensor stacked(const std::string& name, DType dtype, Device device,
               const std::vector<Tensor>* first, const std::vector<Tensor>& second) {
  const Tensor& base = first != nullptr ? (*first)[0] : second[0];
  const std::int64_t rows = second[0].shape[0], k = second[0].shape[1];
  const char* next = base.as<const char>();
  for (std::size_t e = 0; e < second.size(); ++e) {
    for (const auto* list : {first, &second}) {
      if (list == nullptr) continue;
      const Tensor& matrix = (*list)[e];
      if (matrix.data != next || !matrix.contiguous() || matrix.dtype != dtype ||
          matrix.device != device) {
        fail(Status::invalid_argument,
             "layer: experts.{}[{}] is {}: for LayerOptions.in_place all must be {} on the layer's "
             "device and lie one after the other{}",
             list == first ? "gate" : name, e, matrix.describe(), to_string(dtype),
             first != nullptr ? ", each up behind its gate" : "");
      }
      next += matrix.bytes();
    }
  }
  const auto count = static_cast<std::int64_t>(second.size());
  return view(base.data, dtype, {count, first != nullptr ? 2 * rows : rows, k}, device);
}

// The matrices packed, in memory of the copy.
ExpertWeights packed_copy(const Context& context, const ExpertWeights& weights,
                          const FormatSpec& format) {
  const Context host = cpu({.threads = 1});
  const auto memory = std::make_shared<std::vector<Buffer>>();
  ExpertWeights copy;
  const auto pack_all = [&](const char* name, const std::vector<Tensor>& from,
                            std::vector<PackedMatrix>& to) {
    for (const Tensor& matrix : from) {
      memory->push_back(host.allocate(packed_bytes(format, matrix.shape[0], matrix.shape[1])));
      const std::vector<char> dense = on_host(context, matrix);
      try {
        to.push_back(pack(format,
                          view(static_cast<const void*>(dense.data()), matrix.dtype,
                               {matrix.shape[0], matrix.shape[1]}),
                          memory->back()));
      } catch (const Error& error) {  // a number that is none
        fail(error.status(), "layer: experts.{}[{}]: {}", name, to.size(), error.what());
      }
    }
  };
  pack_all("gate", weights.gate, copy.packed_gate);
  pack_all("up", weights.up, copy.packed_up);
  pack_all("down", weights.down, copy.packed_down);
  copy.memory = memory;
  return copy;
}

std::size_t total(const std::vector<Buffer>& buffers) {
  std::size_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes();
  return bytes;
}

}  // namespace

RowFormat shared_rows(const LayerSpec& spec, const ExpertWeights& shared,
                      const LayerOptions& options) {
  const bool takes = in_fp8(options.rows) && is_packed(shared) &&
                     takes_rows(shared.packed_up[0].format.format, options.rows);
  const bool fits = options.rows != RowFormat::fp8_token ||
                    Fp8Rows::fits_in_place(options.rows, spec.shared.intermediate);
  return takes && fits ? options.rows : RowFormat::as_dtype;
}

HeldWeights::HeldWeights(const Context& context, const LayerWeights& weights) {
  const auto hold = [&](const Tensor& source) -> Tensor {
    if (!source) return {};
    const std::vector<char> copy = on_host(context, source);  // refuses sizes that none can have
    Tensor dense = source;
    std::int64_t stride = 1;
    for (int d = dense.rank - 1; d >= 0; --d) {
      dense.strides[static_cast<std::size_t>(d)] = stride;
      stride *= dense.shape[static_cast<std::size_t>(d)];
    }
    dense.data = hold_bytes(context, copy.data(), copy.size(), buffers_);
    dense.device = context.device();
    return dense;
  };
  // The quick selections on a GPU read f32 alone.
  const auto hold_in_f32 = [&](const Tensor& source) -> Tensor {
    if (!source || source.dtype == DType::f32) return hold(source);
    const std::vector<char> copy = on_host(context, source);
    std::vector<float> wide(static_cast<std::size_t>(source.elements()));
    for (std::int64_t i = 0; i < source.elements(); ++i) {
      wide[static_cast<std::size_t>(i)] = load_f32(copy.data(), source.dtype, i);
    }
    return view(hold_bytes(context, wide.data(), wide.size() * sizeof(float), buffers_), DType::f32,
                {source.elements()}, context.device());
  };
  views.router = hold(weights.router);
  views.router_bias = hold(weights.router_bias);
  views.selection_bias = hold_in_f32(weights.selection_bias);
  views.per_expert_scale = hold(weights.per_expert_scale);
  views.hash_table = hold(weights.hash_table);
  views.shared_gate = hold(weights.shared_gate);
  // [1, H] becomes [H]: one form for the gate of a shared expert.
  if (views.shared_gate.rank == 2) views.shared_gate = views.shared_gate[0];
  views.output_bias = hold(weights.output_bias);
  views.router_norm = hold(weights.router_norm);
  views.input_norm = hold(weights.input_norm);
  views.output_norm = hold(weights.output_norm);
  views.latent_norm = hold(weights.latent_norm);
  views.latent_input_norm = hold(weights.latent_input_norm);
  views.expert_norm = hold(weights.expert_norm);
}

std::size_t HeldWeights::bytes() const { return total(buffers_); }

PreparedExperts::PreparedExperts(const Context& context, DType dtype,
                                 const ActivationSpec& activation, const ExpertWeights& weights,
                                 bool in_place, const FormatSpec& format, RowFormat rows) {
  if (is_packed(weights)) {
    prepare_packed_ones(context, dtype, activation.gated, weights, format, in_place, rows);
    hold_biases(context, activation.gated, weights);
    return;
  }
  if (format != FormatSpec{}) {
    prepare_packed_ones(context, dtype, activation.gated, packed_copy(context, weights, format),
                        format, in_place, rows);
    hold_biases(context, activation.gated, weights);
    return;
  }
  check_one_dtype(weights);
  const int groups = static_cast<int>(weights.up.size());
  const std::int64_t intermediate = weights.up[0].shape[0];
  const std::int64_t hidden = weights.up[0].shape[1];
  const bool gated = activation.gated;
  const std::int64_t columns = gated ? 2 * intermediate : intermediate;
  if (in_place) {
    const Device device = context.device();
    const Tensor first = stacked("up", dtype, device, gated ? &weights.gate : nullptr, weights.up);
    const Tensor second = stacked("down", dtype, device, nullptr, weights.down);
    const auto scratch = static_cast<std::size_t>(std::max(first[0].bytes(), second[0].bytes()));
    // Refused before anything is overwritten.
    check_apart("layer: LayerOptions.in_place: experts.down", second,
                gated ? "experts.gate and up" : "experts.up", first);
    for (const Tensor& all : {first, second}) {
      if (reinterpret_cast<std::uintptr_t>(all.data) % 64 != 0) {
        fail(Status::invalid_argument,
             "layer: LayerOptions.in_place: matrices [{}, {}] begin at {}: must be 64-byte aligned",
             all.shape[1], all.shape[2], all.data);
      }
      const bool pairs = gated && all.data == first.data;
      const std::size_t needed =
          shunt::prepared_bytes(context, dtype, groups, all.shape[1], all.shape[2], pairs);
      if (needed != static_cast<std::size_t>(all.bytes())) {
        fail(Status::unsupported,
             "layer: LayerOptions.in_place: matrices [{}, {}] take {} bytes prepared, {} as they "
             "are",
             all.shape[1], all.shape[2], needed, all.bytes());
      }
    }
    const Buffer copy = context.allocate(scratch);
    hold_biases(context, gated, weights);
    gate_up = prepare_in_place(context, first, gated, copy);
    try {
      down = prepare_in_place(context, second, false, copy);
    } catch (...) {
      unprepare_in_place(context, gate_up, copy);
      throw;
    }
    context.synchronize();
    return;
  }
  buffers_.push_back(
      context.allocate(shunt::prepared_bytes(context, dtype, groups, columns, hidden, gated)));
  gate_up = gated ? prepare_paired(context, dtype, weights.gate, weights.up, buffers_.back())
                  : prepare(context, dtype, weights.up, buffers_.back());
  buffers_.push_back(
      context.allocate(shunt::prepared_bytes(context, dtype, groups, hidden, intermediate)));
  down = prepare(context, dtype, weights.down, buffers_.back());
  hold_biases(context, gated, weights);
}

void PreparedExperts::hold_biases(const Context& context, bool gated,
                                  const ExpertWeights& weights) {
  if (!weights.up_bias.empty()) {
    gate_up_bias =
        hold_bias(context, gated ? &weights.gate_bias : nullptr, weights.up_bias, buffers_);
  }
  if (!weights.down_bias.empty()) {
    down_bias = hold_bias(context, nullptr, weights.down_bias, buffers_);
  }
}

void PreparedExperts::prepare_packed_ones(const Context& context, DType dtype, bool gated,
                                          const ExpertWeights& weights, const FormatSpec& wanted,
                                          bool in_place, RowFormat rows) {
  const PackedMatrix& up = weights.packed_up[0];
  const PackedMatrix& second = weights.packed_down[0];
  if (in_place) {
    fail(Status::unsupported, "layer: LayerOptions.in_place: weights are packed, {}",
         to_string(up.format));
  }
  if (wanted != FormatSpec{} && resolved(wanted) != up.format) {
    fail(Status::invalid_argument,
         "layer: LayerOptions.format is {}: weights are packed already, as {}", to_string(wanted),
         to_string(up.format));
  }
  const int groups = static_cast<int>(weights.packed_up.size());
  const std::int64_t columns = gated ? 2 * up.n : up.n;
  const FormatSpec first_format = prepared_format(weights.packed_up, weights.packed_gate);
  buffers_.push_back(context.allocate(
      shunt::prepared_bytes(context, dtype, first_format, groups, columns, up.k, gated, rows)));
  gate_up = gated ? prepare_packed_paired(context, dtype, weights.packed_gate, weights.packed_up,
                                          buffers_.back(), rows)
                  : prepare_packed(context, dtype, weights.packed_up, buffers_.back(), rows);
  buffers_.push_back(
      context.allocate(shunt::prepared_bytes(context, dtype, prepared_format(weights.packed_down),
                                             groups, second.n, second.k, false, rows)));
  down = prepare_packed(context, dtype, weights.packed_down, buffers_.back(), rows);
}

std::size_t PreparedExperts::bytes() const { return total(buffers_); }

PreparedExperts PreparedExperts::part(int first, int groups) const {
  const auto cut = [&](PreparedWeights weights) {
    const std::size_t one = weights.bytes / static_cast<std::size_t>(weights.groups);
    weights.data = static_cast<char*>(weights.data) + static_cast<std::size_t>(first) * one;
    weights.groups = groups;
    weights.bytes = static_cast<std::size_t>(groups) * one;
    return weights;
  };
  PreparedExperts some;
  some.gate_up = cut(gate_up);
  some.down = cut(down);
  return some;
}

void* PreparedExperts::keep(Buffer memory) {
  buffers_.push_back(std::move(memory));
  return buffers_.back().data();
}

}  // namespace shunt
