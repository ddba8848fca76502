#include "checkpoint/read_weights.hpp"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "checkpoint/leftovers.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/shape.hpp"
#include "cpu/float_mode.hpp"

namespace shunt {

namespace {

using Shape = std::vector<std::int64_t>;

std::string words(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

class Reader {
 public:
  Reader(const TensorStore& store, const QuantisedReader& quantised, Repacking& repacking,
         std::string prefix, bool fill)
      : store_(store),
        quantised_(quantised),
        repacking_(repacking),
        prefix_(std::move(prefix)),
        fill_(fill) {}

  // The one of `sources` that is there, with `shape`; a leading dimension of 1 may be left over.
  Tensor one(const std::vector<Source>& sources, const Shape& shape) const {
    const Source& source = present(sources);
    const std::string name = prefix_ + source.name;
    Tensor tensor = floats(name);
    if (source.row >= 0) {
      if (tensor.rank < 2 || tensor.shape[0] <= source.row) mismatch(name, tensor, words(shape));
      tensor = tensor[source.row];
    }
    if (source.transposed && tensor.rank == 2) tensor = tensor.transposed();
    if (static_cast<std::size_t>(tensor.rank) == shape.size() + 1 && tensor.shape[0] == 1) {
      tensor = tensor[0];
    }
    if (!has_shape(tensor, shape)) mismatch(name, tensor, words(shape));
    check_numbers(name, tensor);
    return source.times == 1 && source.plus == 0 ? tensor : changed(tensor, source);
  }

  // A vector, or one number that stands for all of it.
  Tensor broadcast(const std::vector<Source>& sources, std::int64_t size) const {
    const std::string name = prefix_ + present(sources).name;
    Tensor tensor = floats(name);
    if (tensor.elements() != 1) return one(sources, {size});
    check_numbers(name, tensor);
    tensor.rank = 1;
    tensor.shape[0] = size;
    tensor.strides[0] = 0;
    return tensor;
  }

  Tensor hash_table(const std::vector<Source>& sources, std::int64_t top_k) const {
    const std::string name = prefix_ + present(sources).name;
    const Tensor tensor = store_.get(name);
    if (tensor.rank != 2 || tensor.shape[1] != top_k ||
        (tensor.dtype != DType::i32 && tensor.dtype != DType::i64)) {
      mismatch(name, tensor, fmt::format("i64 or i32 [vocabulary, {}]", top_k));
    }
    return tensor;
  }

  // Names of a tensor an expert, and the number of the first.
  struct PerExpert {
    ExpertNames names;
    int first = 0;
  };
  // Appends `count` experts, `hidden` wide. `zero` more may stand behind them in a merged tensor.
  // `per_expert`: tried behind all alternatives; may be null.
  void experts(const std::vector<ExpertNames>& alternatives, const PerExpert* per_expert, int count,
               std::int64_t hidden, std::int64_t intermediate, bool gated, bool biased,
               std::int64_t zero, bool single, ExpertWeights& out) const {
    for (const ExpertNames& names : alternatives) {
      if (!has(names.up)) continue;
      const bool last = &names == &alternatives.back();
      if (gated && !names.gate.empty() && !last && !has(names.gate)) {
        continue;
      }
      switch (names.form) {
        case ExpertNames::Form::each:
          return each(names, 0, count, hidden, intermediate, gated, out);
        case ExpertNames::Form::merged:
          return merged(names, count, hidden, intermediate, biased, zero, single, out);
        case ExpertNames::Form::apart:
          return apart(names, count, hidden, intermediate, gated, out);
        case ExpertNames::Form::flat:
          return flat(names, count, hidden, intermediate, out);
      }
    }
    if (per_expert != nullptr && has(per_expert->names.up, per_expert->first)) {
      const ExpertNames& names = per_expert->names;
      if (biased) single_biases(*per_expert, count, hidden, intermediate, gated, out);
      return each(names, per_expert->first, count, hidden, intermediate, gated, out);
    }
    std::vector<Source> sources;
    sources.reserve(alternatives.size());
    for (const ExpertNames& names : alternatives) sources.push_back({numbered(names.up, 0)});
    missing(sources);
  }

 private:
  const Source& present(const std::vector<Source>& sources) const {
    const Source* found = nullptr;
    for (const Source& source : sources) {
      const std::string name = prefix_ + source.name;
      if (!store_.contains(name)) continue;
      if (found != nullptr) {
        fail(Status::bad_file, "{}: tensors '{}' and '{}' are both there: must be one of them",
             store_.file_of(name), clean(prefix_ + found->name), clean(name));
      }
      found = &source;
    }
    if (found == nullptr) missing(sources);
    return *found;
  }

  // times * tensor + plus, in f32.
  Tensor changed(const Tensor& tensor, const Source& source) const {
    const std::int64_t columns = tensor.shape[tensor.rank - 1];
    const std::int64_t rows = tensor.elements() / std::max<std::int64_t>(columns, 1);
    auto* const to = static_cast<float*>(
        repacking_.take(static_cast<std::size_t>(tensor.elements()) * sizeof(float)));
    for (std::int64_t r = 0; r < rows; ++r) {
      const Tensor row = tensor.rank == 2 ? tensor[r] : tensor;
      for (std::int64_t i = 0; i < columns; ++i) {
        const float value = load_f32(row.data, row.dtype, i * row.strides[0]);
        to[r * columns + i] = source.times * value + source.plus;
      }
    }
    return tensor.rank == 2 ? view(to, {rows, columns}) : view(to, {columns});
  }

  static std::string numbered(const std::string& name, int expert) {
    const std::size_t at = name.find("{}");
    if (at == std::string::npos) return name;
    return name.substr(0, at) + std::to_string(expert) + name.substr(at + 2);
  }

  // What lists of quantization_config call a matrix.
  static std::string module_of(const std::string& name) {
    constexpr std::string_view ending = ".weight";
    return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : name;
  }

  // The matrix of an expert, plain or quantised.
  bool has(const std::string& name, int expert = 0) const {
    const std::string full = prefix_ + numbered(name, expert);
    return store_.contains(full) || quantised_.has(full) || quantised_.has_blocks(full);
  }

  Tensor floats(const std::string& name) const {
    const Tensor tensor = store_.get(name);
    if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::f16) {
      fail(Status::unsupported, "{}: tensor '{}' is {}: only f32, bf16 and f16 are read here",
           store_.file_of(name), name, tensor.describe());
    }
    return tensor;
  }

  // Throws where a NaN is among them: of a router or a bias it would only choose other experts.
  void check_numbers(const std::string& name, const Tensor& tensor) const {
    if (!fill_) return;
    const std::int64_t columns = tensor.rank == 0 ? 1 : tensor.shape[tensor.rank - 1];
    const std::int64_t rows = tensor.elements() / std::max<std::int64_t>(columns, 1);
    const std::int64_t stride = tensor.rank == 0 ? 1 : tensor.strides[tensor.rank - 1];
    for (std::int64_t r = 0; r < rows; ++r) {
      const Tensor row = tensor.rank == 2 ? tensor[r] : tensor;
      for (std::int64_t i = 0; i < columns; ++i) {
        if (!std::isnan(load_f32(row.data, row.dtype, i * stride))) continue;
        fail(Status::bad_file, "{}: tensor '{}' holds NaN at [{}]: must be numbers",
             store_.file_of(name), clean(name),
             tensor.rank == 2 ? fmt::format("{}, {}", r, i) : fmt::format("{}", i));
      }
    }
  }

  // Biases of experts.
  Tensor bias(const std::string& relative, const Shape& shape) const {
    const Tensor tensor = exact(relative, shape);
    check_numbers(prefix_ + relative, tensor);
    return tensor;
  }

  Tensor exact(const std::string& relative, const Shape& shape) const {
    const std::string name = prefix_ + relative;
    if (!store_.contains(name)) missing({{relative}});
    const Tensor tensor = floats(name);
    if (!has_shape(tensor, shape)) mismatch(name, tensor, words(shape));
    return tensor;
  }

  [[noreturn]] void mismatch(const std::string& name, const Tensor& tensor,
                             const std::string& wanted) const {
    fail(Status::bad_file, "{}: tensor '{}' is {}: config.json asks for {}", store_.file_of(name),
         name, tensor.describe(), wanted);
  }

  // Of two experts' matrices one is packed, the other plain.
  [[noreturn]] void unlike(const std::string& name, bool packed, const std::string& other) const {
    if (packed && store_.contains(name)) {
      fail(Status::unsupported, "{}: tensor '{}' is {}: must be f32, bf16 or f16, as '{}' is",
           store_.file_of(name), clean(name), store_.get(name).describe(), clean(other));
    }
    fail(Status::unsupported, "{}: tensors of '{}' are {} and those of '{}' {}: must be alike",
         store_.folder(), clean(module_of(name)), packed ? "packed" : "plain",
         clean(module_of(other)), packed ? "plain" : "packed");
  }

  [[noreturn]] void missing(const std::vector<Source>& sources) const {
    std::string list;
    for (const Source& source : sources) {
      if (!list.empty()) list += " or ";
      list += "'" + prefix_ + source.name + "'";
    }
    fail(Status::bad_file, "{}: has no tensor {}", store_.folder(), list);
  }

  void each(const ExpertNames& names, int first, int count, std::int64_t hidden,
            std::int64_t intermediate, bool gated, ExpertWeights& out) const {
    const auto read = [&](const std::string& name, std::int64_t n, std::int64_t k,
                          std::vector<Tensor>& plain, std::vector<PackedMatrix>& packed) {
      const bool quantised = quantised_.has(prefix_ + numbered(name, first));
      for (int e = first; e < first + count; ++e) {
        const std::string full = prefix_ + numbered(name, e);
        quantised_.check_one_form(full);
        const bool here = quantised_.has(full);
        if (!here && !store_.contains(full)) missing({{numbered(name, e)}});
        quantised_.check_listed(module_of(full), here);
        if (here != quantised) unlike(full, here, prefix_ + numbered(name, first));
        if (quantised) {
          packed.push_back(quantised_.matrix(full, n, k));
        } else {
          plain.push_back(exact(numbered(name, e), {n, k}));
        }
      }
    };
    if (gated) read(names.gate, intermediate, hidden, out.gate, out.packed_gate);
    read(names.up, intermediate, hidden, out.up, out.packed_up);
    read(names.down, hidden, intermediate, out.down, out.packed_down);
  }

  // gate and up of a matrix [2I, W], or of a vector [2I].
  static std::pair<Tensor, Tensor> split(const Tensor& both, bool interleaved) {
    const std::int64_t half = both.shape[0] / 2;
    if (!interleaved) return {both.rows(0, half), both.rows(half, 2 * half)};
    Tensor gate = both.rows(0, half);
    gate.strides[0] *= 2;
    Tensor up = gate;
    up.data = static_cast<char*>(up.data) + both.strides[0] * bits(both.dtype) / 8;
    return {gate, up};
  }

  void merged(const ExpertNames& names, int count, std::int64_t hidden, std::int64_t intermediate,
              bool biased, std::int64_t zero, bool single, ExpertWeights& out) const {
    const std::string up_name = prefix_ + names.up;
    const std::string down_name = prefix_ + names.down;
    for (const std::string& name : {up_name, down_name}) quantised_.check_one_form(name);
    if (biased) biases(names, count, hidden, intermediate, out);
    if (quantised_.has_fused(up_name)) {
      return fused(names, count, hidden, intermediate, out);
    }
    if (quantised_.has_blocks(up_name)) {
      const auto take = [&](const std::string& name, const QuantisedReader::FusedPart& part) {
        return quantised_.blocks(name, part);
      };
      return fused_parts(names, count, hidden, intermediate, false, take, out);
    }
    if (!store_.contains(down_name)) missing({{names.down}});
    Tensor up = floats(up_name);
    Tensor down = floats(down_name);
    if (single) {  // one expert, stored without its dimension
      for (Tensor* tensor : {&up, &down}) {
        if (tensor->rank != 2) continue;
        *tensor = view(tensor->data, tensor->dtype, {1, tensor->shape[0], tensor->shape[1]});
      }
    }
    // The tensors of zero-compute experts are padding.
    if (zero > 0 && up.rank == 3 && up.shape[0] == count + zero) up = up.rows(0, count);
    const Shape up_last = {count, 2 * intermediate, hidden};
    const Shape down_last = {count, hidden, intermediate};
    const Shape up_first = {count, hidden, 2 * intermediate};
    const Shape down_first = {count, intermediate, hidden};
    bool first = names.inner == ExpertNames::Inner::first;
    if (names.inner == ExpertNames::Inner::either) {
      // Of the two tensors one tells always: they are both square only if I were H and 2I were H.
      first = has_shape(up, up_first) && has_shape(down, down_first);
    }
    if (!has_shape(up, first ? up_first : up_last)) {
      mismatch(up_name, up, words(first ? up_first : up_last));
    }
    if (!has_shape(down, first ? down_first : down_last)) {
      mismatch(down_name, down, words(first ? down_first : down_last));
    }
    for (int e = 0; e < count; ++e) {
      const auto [gate, up_part] = split(first ? up[e].transposed() : up[e], names.interleaved);
      out.gate.push_back(gate);
      out.up.push_back(up_part);
      out.down.push_back(first ? down[e].transposed() : down[e]);
    }
  }

  // All experts packed in one tensor.
  void fused(const ExpertNames& names, int count, std::int64_t hidden, std::int64_t intermediate,
             ExpertWeights& out) const {
    const std::string up_name = prefix_ + names.up, down_name = prefix_ + names.down;
    if (!quantised_.has_fused(down_name)) {
      if (!store_.contains(down_name)) missing({{names.down}});
      mismatch(down_name, store_.get(down_name), "the packed form that " + up_name + " has");
    }
    bool first = names.inner == ExpertNames::Inner::first;
    if (names.inner == ExpertNames::Inner::either) {
      first = quantised_.fused_fits(up_name, 2 * intermediate, hidden, true) &&
              quantised_.fused_fits(down_name, hidden, intermediate, true);
    }
    const auto take = [&](const std::string& name, const QuantisedReader::FusedPart& part) {
      return quantised_.fused(name, part);
    };
    fused_parts(names, count, hidden, intermediate, first, take, out);
  }

  // gate, up and down of each expert, taken from the two tensors that hold all.
  template <class Take>
  void fused_parts(const ExpertNames& names, int count, std::int64_t hidden,
                   std::int64_t intermediate, bool transposed, const Take& take,
                   ExpertWeights& out) const {
    const std::string up_name = prefix_ + names.up, down_name = prefix_ + names.down;
    quantised_.check_listed(module_of(up_name), true);
    quantised_.check_listed(module_of(down_name), true);
    QuantisedReader::FusedPart gate{.experts = count,
                                    .rows = 2 * intermediate,
                                    .step = names.interleaved ? 2 : 1,
                                    .n = intermediate,
                                    .k = hidden,
                                    .transposed = transposed};
    QuantisedReader::FusedPart up = gate;
    up.first = names.interleaved ? 1 : intermediate;
    QuantisedReader::FusedPart down{
        .experts = count, .rows = hidden, .n = hidden, .k = intermediate, .transposed = transposed};
    for (int e = 0; e < count; ++e) {
      gate.expert = up.expert = down.expert = e;
      out.packed_gate.push_back(take(up_name, gate));
      out.packed_up.push_back(take(up_name, up));
      out.packed_down.push_back(take(down_name, down));
    }
  }

  void biases(const ExpertNames& names, int count, std::int64_t hidden, std::int64_t intermediate,
              ExpertWeights& out) const {
    const bool up_bias = !names.up_bias.empty(), down_bias = !names.down_bias.empty();
    const Tensor up_biases = up_bias ? bias(names.up_bias, {count, 2 * intermediate}) : Tensor{};
    const Tensor down_biases = down_bias ? bias(names.down_bias, {count, hidden}) : Tensor{};
    for (int e = 0; e < count; ++e) {
      if (up_bias) {
        const auto [gate_bias, up_bias_part] = split(up_biases[e], names.interleaved);
        out.gate_bias.push_back(gate_bias);
        out.up_bias.push_back(up_bias_part);
      }
      if (down_bias) out.down_bias.push_back(down_biases[e]);
    }
  }

  // An expert's own beside its matrices, as AutoRound writes them; else those of all experts.
  void single_biases(const PerExpert& experts, int count, std::int64_t hidden,
                     std::int64_t intermediate, bool gated, ExpertWeights& out) const {
    const ExpertNames& names = experts.names;
    const auto named = [&](const std::string& matrix, int expert) {
      return numbered(module_of(matrix) + ".bias", experts.first + expert);
    };
    const std::string& any = names.up_bias.empty() ? names.down : names.up;
    if (!store_.contains(prefix_ + named(any, 0))) {
      return biases(names, count, hidden, intermediate, out);
    }
    for (int e = 0; e < count; ++e) {
      if (!names.up_bias.empty()) {
        if (gated) out.gate_bias.push_back(bias(named(names.gate, e), {intermediate}));
        out.up_bias.push_back(bias(named(names.up, e), {intermediate}));
      }
      if (!names.down_bias.empty()) out.down_bias.push_back(bias(named(names.down, e), {hidden}));
    }
  }

  void apart(const ExpertNames& names, int count, std::int64_t hidden, std::int64_t intermediate,
             bool gated, ExpertWeights& out) const {
    const Tensor gate = gated ? exact(names.gate, {count, intermediate, hidden}) : Tensor{};
    const Tensor up = exact(names.up, {count, intermediate, hidden});
    const Tensor down = exact(names.down, {count, hidden, intermediate});
    for (int e = 0; e < count; ++e) {
      if (gated) out.gate.push_back(gate[e]);
      out.up.push_back(up[e]);
      out.down.push_back(down[e]);
    }
  }

  void flat(const ExpertNames& names, int count, std::int64_t hidden, std::int64_t intermediate,
            ExpertWeights& out) const {
    const Shape shape = {count * intermediate, hidden};
    const Tensor gate = exact(names.gate, shape);
    const Tensor up = exact(names.up, shape);
    const Tensor down = exact(names.down, shape);
    for (int e = 0; e < count; ++e) {
      const std::int64_t begin = e * intermediate, end = begin + intermediate;
      out.gate.push_back(gate.rows(begin, end));
      out.up.push_back(up.rows(begin, end));
      out.down.push_back(down.rows(begin, end).transposed());
    }
  }

  const TensorStore& store_;
  const QuantisedReader& quantised_;
  Repacking& repacking_;
  std::string prefix_;
  bool fill_;
};

}  // namespace

LayerWeights read_weights(const TensorStore& store, const TensorNames& names,
                          const QuantisedConfig& quantised, const LayerSpec& spec,
                          const std::string& prefix, bool fill) {
  const cpu_engine::FloatMode mode;
  Repacking repacking;
  const QuantisedReader packed(store, quantised, repacking);
  const Reader reader(store, packed, repacking, prefix, fill);
  const RouteSpec& route = spec.route;
  const std::int64_t hidden = spec.hidden;
  LayerWeights out;
  const Tensor router = reader.one(names.router, {route.columns(), hidden});
  if (!names.router_apart) out.router = router;
  if (route.router_bias) out.router_bias = reader.one(names.router_bias, {route.columns()});
  if (route.selection_bias) {
    out.selection_bias = reader.one(names.selection_bias, {route.experts});
  }
  if (route.per_expert_scale) {
    out.per_expert_scale = reader.broadcast(names.per_expert_scale, route.columns());
  }
  if (route.hashed) out.hash_table = reader.hash_table(names.hash_table, route.top_k);

  const ExpertSpec& experts = spec.experts;
  const int slots = route.shared.count;
  const bool biased = experts.gate_up_bias || experts.down_bias;
  Reader::PerExpert per_expert{.names = single_experts(names)};
  reader.experts(names.experts, &per_expert, experts.experts - slots, experts.hidden,
                 experts.intermediate, experts.activation.gated, biased, spec.zero_experts, false,
                 out.experts);
  if (slots > 0) {
    per_expert.first = experts.experts - slots;
    reader.experts(names.slots, &per_expert, slots, experts.hidden, experts.intermediate,
                   experts.activation.gated, biased, 0, false, out.experts);
    const ExpertWeights& all = out.experts;
    for (const auto& [plain_ones, packed_ones] :
         {std::pair(all.gate.size(), all.packed_gate.size()),
          std::pair(all.up.size(), all.packed_up.size()),
          std::pair(all.down.size(), all.packed_down.size())}) {
      if (plain_ones == 0 || packed_ones == 0) continue;
      fail(Status::unsupported,
           "{}: experts of '{}' are packed, and those of its shared slots are not, or the other "
           "way round: must be packed alike",
           store.folder(), clean(prefix));
    }
  }
  if (spec.shared.intermediate > 0) {
    reader.experts(names.shared, nullptr, 1, hidden, spec.shared.intermediate,
                   spec.shared.activation.gated, spec.shared.gate_up_bias || spec.shared.down_bias,
                   0, true, out.shared);
    if (spec.shared.sigmoid_gate) out.shared_gate = reader.one(names.shared_gate, {hidden});
  }
  check_leftovers(store, names, spec, prefix, !quantised.method.empty());
  if (spec.latent > 0) {
    out.latent_down = reader.one(names.latent_down, {spec.latent, hidden});
    out.latent_up = reader.one(names.latent_up, {hidden, spec.latent});
  }
  if (spec.output_bias) out.output_bias = reader.one(names.output_bias, {hidden});
  const auto norm = [&](const NormSpec& norm_spec, const std::vector<Source>& sources,
                        std::int64_t width) {
    return norm_spec.enabled && norm_spec.weight ? reader.one(sources, {width}) : Tensor{};
  };
  out.router_norm = norm(spec.router_norm, names.router_norm, hidden);
  out.input_norm = norm(spec.input_norm, names.input_norm, hidden);
  out.output_norm = norm(spec.output_norm, names.output_norm, hidden);
  out.latent_norm = norm(spec.latent_norm, names.latent_norm, spec.latent);
  out.latent_input_norm = norm(spec.latent_input_norm, names.latent_input_norm, spec.latent);
  out.expert_norm = norm(spec.expert_norm, names.expert_norm, experts.hidden);
  out.experts.memory = out.shared.memory = repacking.finish(fill);
  return out;
}

}  // namespace shunt
