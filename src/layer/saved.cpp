// A layer as a file, and back: prepared weights as they lie in memory, small ones dense.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/json.hpp"
#include "core/shown.hpp"
#include "gemm/prepared_file.hpp"
#include "layer/impl.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {

namespace {

constexpr const char* kind_key = "shunt.layer";
// Of a layer without one: a file that has merely lost its router is another thing.
constexpr const char* no_router_key = "no_router";

struct Small {
  const char* name;
  Tensor LayerWeights::*member;
};
constexpr std::array small = {Small{"router", &LayerWeights::router},
                              Small{"router_bias", &LayerWeights::router_bias},
                              Small{"selection_bias", &LayerWeights::selection_bias},
                              Small{"per_expert_scale", &LayerWeights::per_expert_scale},
                              Small{"hash_table", &LayerWeights::hash_table},
                              Small{"shared_gate", &LayerWeights::shared_gate},
                              Small{"output_bias", &LayerWeights::output_bias},
                              Small{"router_norm", &LayerWeights::router_norm},
                              Small{"input_norm", &LayerWeights::input_norm},
                              Small{"output_norm", &LayerWeights::output_norm},
                              Small{"latent_norm", &LayerWeights::latent_norm},
                              Small{"latent_input_norm", &LayerWeights::latent_input_norm},
                              Small{"expert_norm", &LayerWeights::expert_norm}};

class Writer {
 public:
  explicit Writer(const Context& context) : context_(context) {}

  void add(const std::string& name, const Tensor& dense) {
    if (!dense) return;
    Tensor here = dense;
    here.device = Device{};
    here.data = const_cast<void*>(on_host(dense.data, static_cast<std::size_t>(dense.bytes())));
    tensors_.emplace_back(name, here);
  }
  void add(const std::string& name, const PreparedWeights& weights) {
    if (!weights) return;
    metadata_[name] = saved_words(weights);
    tensors_.emplace_back(name, view(on_host(weights.data, weights.bytes), DType::u8,
                                     {static_cast<std::int64_t>(weights.bytes)}));
  }
  void add(const std::string& name, const PreparedExperts& experts) {
    add(name + ".gate_up", experts.gate_up);
    add(name + ".down", experts.down);
    add(name + ".gate_up_bias", experts.gate_up_bias);
    add(name + ".down_bias", experts.down_bias);
  }
  void say(const std::string& key, std::string value) { metadata_[key] = std::move(value); }
  void write(const std::string& path) const { write_with_checksums(path, tensors_, metadata_); }

 private:
  const void* on_host(const void* data, std::size_t bytes) {
    if (context_.device().type == DeviceType::cpu) return data;
    copies_.emplace_back(bytes);
    context_.copy(copies_.back().data(), data, bytes);
    return copies_.back().data();
  }

  Context context_;
  std::vector<std::pair<std::string, Tensor>> tensors_;
  std::map<std::string, std::string> metadata_;
  std::vector<std::vector<char>> copies_;
};

class Reader {
 public:
  Reader(const Context& context, const std::string& path)
      : context_(context), path_(path), file_(SafetensorsFile::open(path)) {}

  std::string said(const char* key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) {
      fail(Status::bad_file, "{}: holds no prepared layer: its metadata has no '{}'", path_, key);
    }
    return found->second;
  }
  void check_bytes() const { check_checksums(file_); }
  bool says(const char* key) const { return file_.metadata().contains(key); }
  Tensor tensor(const std::string& name) {
    read_.insert(name);
    return file_.contains(name) ? file_.get(name) : Tensor{};
  }
  // Throws for a tensor that nothing asked for: the spec is not that of the layer that was saved.
  void finish() const {
    for (const std::string& name : file_.names()) {
      if (read_.contains(name)) continue;
      fail(Status::bad_file, "{}: {} is given, but the layer's spec does not use it", path_,
           clean(name));
    }
  }
  // [n, k] of each of `groups`, where the file is mapped.
  PreparedWeights checked(const std::string& name, const PreparedWeights& wanted) {
    const std::string where = path_ + ": " + name;
    read_.insert(name);
    PreparedWeights read = read_saved_words(context_, where, said(name.c_str()), file_.get(name));
    // Not their groups: those that are whole rows differ from product to product.
    if (wanted.format != FormatSpec{} && read.format.format != wanted.format.format) {
      fail(Status::bad_file, "{}: is in format {}: the layer's options say {}", where,
           to_string(read.format), to_string(wanted.format));
    }
    if (read.rows != wanted.rows) {
      fail(Status::bad_file, "{}: takes rows as {}: the layer's options say {}", where,
           to_string(read.rows), to_string(wanted.rows));
    }
    if (read.dtype != wanted.dtype || read.groups != wanted.groups || read.n != wanted.n ||
        read.k != wanted.k || read.paired != wanted.paired) {
      fail(Status::bad_file, "{}: is {} [{}, {}, {}]: the layer's spec says {} [{}, {}, {}]", where,
           to_string(read.dtype), read.groups, read.n, read.k, to_string(wanted.dtype),
           wanted.groups, wanted.n, wanted.k);
    }
    return read;
  }
  // Copied to the device, into memory with room for so many groups more.
  PreparedWeights prepared(const std::string& name, const PreparedWeights& wanted, Buffer& memory,
                           int more = 0) {
    PreparedWeights read = checked(name, wanted);
    const std::size_t one = read.bytes / static_cast<std::size_t>(wanted.groups);
    memory = context_.allocate(read.bytes + static_cast<std::size_t>(more) * one);
    context_.copy(memory.data(), file_.get(name).data, read.bytes);
    read.data = memory.data();
    return read;
  }
  // One group behind those that are there.
  void add_group(const std::string& name, PreparedWeights& weights) {
    PreparedWeights wanted = weights;
    wanted.groups = 1;
    const PreparedWeights read = checked(name, wanted);
    context_.copy(static_cast<char*>(weights.data) + weights.bytes, file_.get(name).data,
                  read.bytes);
    weights.bytes += read.bytes;
    ++weights.groups;
  }
  // As it says of itself.
  PreparedWeights words(const std::string& name) const {
    return read_saved_words(context_, path_ + ": " + name, said(name.c_str()), file_.get(name));
  }
  // A plain format of the options is any that the weights were prepared from.
  PreparedExperts experts(const std::string& name, const LayerOptions& options, int groups,
                          std::int64_t hidden, std::int64_t intermediate, bool gated,
                          bool gate_up_bias, bool down_bias, int more = 0) {
    PreparedExperts experts;
    const std::int64_t columns = gated ? 2 * intermediate : intermediate;
    const auto matrix = [&](const char* which, std::int64_t n, std::int64_t k, bool paired) {
      Buffer memory;
      const PreparedWeights read = prepared(name + which,
                                            {.dtype = options.dtype,
                                             .groups = groups,
                                             .n = n,
                                             .k = k,
                                             .paired = paired,
                                             .format = resolved(options.format),
                                             .rows = options.rows},
                                            memory, more);
      experts.keep(std::move(memory));
      return read;
    };
    experts.gate_up = matrix(".gate_up", columns, hidden, gated);
    experts.down = matrix(".down", hidden, intermediate, false);
    const auto bias = [&](const char* which, bool wanted, std::int64_t n) -> Tensor {
      const std::string full = path_ + ": " + name + which;
      const Tensor values = tensor(name + which);
      try {
        if (!check_given(full, values, wanted, "the layer's spec")) return {};
        check_tensor(full, values, {.dtypes = {DType::f32}, .shape = {groups, n}}, Device{});
      } catch (const Error& error) {
        fail(Status::bad_file, "{}", error.what());
      }
      Buffer memory = context_.allocate(static_cast<std::size_t>(values.bytes()));
      context_.copy(memory.data(), values.data, memory.bytes());
      return view(experts.keep(std::move(memory)), DType::f32, {groups, n}, context_.device());
    };
    experts.gate_up_bias = bias(".gate_up_bias", gate_up_bias, columns);
    experts.down_bias = bias(".down_bias", down_bias, hidden);
    return experts;
  }

 private:
  Context context_;
  std::string path_;
  SafetensorsFile file_;
  std::set<std::string> read_;
};

std::string options_words(const LayerOptions& options) {
  SpecWriter words;
  words.add("dtype", static_cast<int>(options.dtype));
  words.add("batch_invariant", options.batch_invariant);
  if (options.format != FormatSpec{}) words.add("format", to_string(options.format));
  if (options.rows != RowFormat::as_dtype) words.add("rows", static_cast<int>(options.rows));
  if (options.fast_accumulation) words.add("fast_accumulation", true);
  return words.text();
}
LayerOptions options_of(const std::string& words) {
  SpecReader reader("options", words);
  FormatSpec format;
  if (const auto text = reader.take_text("format")) format = format_from_string(*text);
  reader.require("dtype");
  int dtype = 0;
  reader.read("dtype", dtype, 0, static_cast<int>(DType::f4_e2m1));
  LayerOptions options{.dtype = static_cast<DType>(dtype), .format = format};
  reader.read("batch_invariant", options.batch_invariant);
  int rows = 0;
  reader.read("rows", rows, 0, static_cast<int>(RowFormat::fp8_block));
  options.rows = static_cast<RowFormat>(rows);
  reader.read("fast_accumulation", options.fast_accumulation);
  reader.finish();
  return options;
}

}  // namespace

void Layer::save_prepared(const std::string& path) const {
  impl_of(impl_).check_prepared("Layer::save_prepared");
  const Impl& layer = *impl_;
  if (layer.options.rows == RowFormat::nvfp4) {
    fail(
        Status::unsupported,
        "Layer::save_prepared: LayerOptions.rows is 3 (nvfp4), whose layout is of one GPU: prepare "
        "the layer anew");
  }
  Writer writer(layer.context);
  writer.say(kind_key, std::string(saved_version));
  writer.say("spec", to_json(layer.spec));
  writer.say("options", options_words(layer.options));
  if (!layer.held.views.router) writer.say(no_router_key, "1");
  for (const Small& one : small) writer.add(one.name, layer.held.views.*one.member);
  writer.add("experts", layer.experts);
  writer.add("shared", layer.shared);
  writer.add("latent_down", layer.latent_down);
  writer.add("latent_up", layer.latent_up);
  writer.write(path);
}

Layer Layer::load_prepared(const std::string& path, const Context& context) {
  Reader reader(context, path);
  if (const std::string version = reader.said(kind_key); version != saved_version) {
    fail(Status::unsupported, "{}: {} is '{}': this build reads version {}", path, kind_key,
         version, saved_version);
  }
  reader.check_bytes();
  auto layer = std::make_unique<Impl>();
  layer->context = context;
  LayerWeights weights;
  for (const Small& one : small) weights.*one.member = reader.tensor(one.name);
  const std::string spec_words = reader.said("spec"), option_words = reader.said("options");
  try {
    layer->spec = layer_spec_from_json(spec_words);
    layer->options = options_of(option_words);
    for (const Support& each : {supports(layer->spec, {}, Device{}), legal(layer->options)}) {
      if (!each) fail(Status::bad_file, "{}", each.reason);
    }
    check_given("router", weights.router, !reader.says(no_router_key), "its metadata");
    check_held(layer->spec, weights, Device{});
  } catch (const Error& error) {
    fail(Status::bad_file, "{}: {}", path, error.what());
  }
  const LayerSpec& spec = layer->spec;
  const DType dtype = layer->options.dtype;
  require(supports(spec, layer->options, context.device()), path);
  layer->held = HeldWeights(context, weights);
  const ExpertSpec& e = spec.experts;
  const auto all_plain = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(),
                       [&](const char* name) { return reader.words(name).format == FormatSpec{}; });
  };
  const bool folds =
      shunt::folds(spec, layer->options, context) &&
      all_plain({"experts.gate_up", "experts.down", "shared.gate_up", "shared.down"});
  layer->experts = reader.experts("experts", layer->options, e.experts, e.hidden, e.intermediate,
                                  e.activation.gated, e.gate_up_bias, e.down_bias, folds ? 1 : 0);
  if (folds) {
    reader.add_group("shared.gate_up", layer->experts.gate_up);
    reader.add_group("shared.down", layer->experts.down);
    layer->fold(std::move(layer->experts));
  } else if (const SharedExpertSpec& s = spec.shared; s.intermediate > 0) {
    LayerOptions options{.dtype = dtype};
    // Rounded as the others' or not: its own format, which no option says, has decided.
    if (reader.words("shared.gate_up").rows == layer->options.rows) {
      options.rows = layer->options.rows;
    }
    layer->shared = reader.experts("shared", options, 1, spec.hidden, s.intermediate,
                                   s.activation.gated, s.gate_up_bias, s.down_bias);
  }
  if (spec.latent > 0) {
    const auto one = [&](const char* name, std::int64_t n, std::int64_t k) {
      return reader.prepared(name, {.dtype = dtype, .groups = 1, .n = n, .k = k},
                             layer->latent_memory.emplace_back());
    };
    layer->latent_down = one("latent_down", spec.latent, spec.hidden);
    layer->latent_up = one("latent_up", spec.hidden, spec.latent);
  }
  reader.finish();
  layer->set_up();
  return Layer(std::move(layer));
}

void Layer::unprepare() {
  if (!impl_of(impl_).options.in_place) {
    fail(Status::invalid_argument,
         "unprepare: the layer holds copies: nothing was overwritten (LayerOptions.in_place)");
  }
  const auto one = [](const PreparedWeights& weights) {
    return weights.bytes / static_cast<std::size_t>(weights.groups);
  };
  PreparedExperts& experts = impl_->experts;
  const Context& context = impl_->context;
  impl_->check_prepared("unprepare");
  const Buffer scratch = context.allocate(std::max(one(experts.gate_up), one(experts.down)));
  unprepare_in_place(context, experts.gate_up, scratch);
  unprepare_in_place(context, experts.down, scratch);
  context.synchronize();
  experts = {};
}

}  // namespace shunt
