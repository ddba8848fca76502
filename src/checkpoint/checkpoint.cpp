#include "shunt/checkpoint.hpp"

#include <array>

#include "checkpoint/access.hpp"
#include "checkpoint/leftovers.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/model.hpp"
#include "checkpoint/read_weights.hpp"
#include "checkpoint/tensor_store.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

constexpr std::size_t max_config_bytes = 64u << 20;

// What stands before "layers." in the names of tensors, and in transformers' names of modules.
struct Prefix {
  std::string_view tensors, modules;
};
constexpr std::array<Prefix, 13> prefixes = {{{"model.", "model."},
                                              {"model.language_model.", "model.language_model."},
                                              {"language_model.model.", "language_model.model."},
                                              {"thinker.model.", "thinker.model."},
                                              {"transformer.", "transformer."},
                                              {"model.llm.", "model.language_model."},
                                              {"backbone.", "model."},
                                              {"language_model.", "language_model."},
                                              {"language_model.backbone.", "language_model.model."},
                                              {"language.model.", "language.model."},
                                              {"llm.model.", "llm.model."},
                                              {"", "model."},
                                              {"model.text_model.", "model.text_model."}}};

std::string layer_name(std::string_view prefix, const TensorNames& names, int layer) {
  return fmt::format("{}{}.{}.", prefix, names.stack, layer);
}

// The prefix under which the router of `layer` is there.
const Prefix& find_prefix(const TensorStore& store, const TensorNames& names, int layer) {
  for (const Prefix& prefix : prefixes) {
    for (const Source& source : names.router) {
      if (store.contains(layer_name(prefix.tensors, names, layer) + source.name)) return prefix;
    }
  }
  fail(Status::bad_file,
       "{}: has no tensor '{}{}', with or without a prefix: no router in layer {}", store.folder(),
       layer_name("model.", names, layer), names.router.front().name, layer);
}

}  // namespace

struct Checkpoint::Impl {
  std::string folder;
  std::string family;
  Model model;
  TensorStore store;
  std::string prefix;  // of tensors
  std::vector<CheckpointLayer> layers;
  int first_moe = -1;
  std::string behind;  // a name of what is stored behind the last layer, if anything is

  LayerWeights weights(int layer, bool fill) const {
    const TensorNames& names = model.plan.names;
    return read_weights(store, names, model.quantised, model.spec(layer),
                        layer_name(prefix, names, layer), fill);
  }
};

Checkpoint Checkpoint::open(const std::string& folder) {
  if (folder.empty()) {
    fail(Status::invalid_argument, "checkpoint: folder is '': must name one");
  }
  const auto impl = std::make_shared<Impl>();
  impl->folder = folder;
  const std::string config = folder + "/config.json";
  impl->model = read_model(config, read_text(config, max_config_bytes));
  // ModelOpt's own file, of checkpoints whose config.json does not repeat it.
  const std::string beside = folder + "/hf_quant_config.json";
  if (impl->model.quantised.method.empty() && file_exists(beside)) {
    impl->model.quantised = read_quantised_beside(beside, read_text(beside, max_config_bytes));
  }
  impl->family = impl->model.family->type;
  impl->store = TensorStore::open(folder);
  const Plan& plan = impl->model.plan;
  const int count = static_cast<int>(plan.layers.size());
  for (int i = 0; i < count && impl->first_moe < 0; ++i) {
    if (impl->model.moe(i)) impl->first_moe = i;
  }
  std::string module_prefix = "model.";
  if (impl->first_moe >= 0) {
    const Prefix& prefix = find_prefix(impl->store, plan.names, impl->first_moe);
    impl->prefix = prefix.tensors;
    module_prefix = prefix.modules;
  }
  for (int i = 0; i < count; ++i) {
    const LayerKind& kind = plan.layers[static_cast<std::size_t>(i)];
    const std::string of_layer = layer_name(impl->prefix, plan.names, i);
    if (kind.moe && impl->store.names_from(of_layer).empty()) {
      fail(Status::bad_file, "{}: layer {} of {} has experts, but no tensor '{}*' is in {}", config,
           i, count, of_layer, folder);
    }
    if (!kind.moe && impl->first_moe >= 0) {
      check_no_router(impl->store, plan.names, i, kind.note, of_layer);
    }
    impl->layers.push_back(
        {.index = i,
         .moe = kind.moe,
         .note = kind.note,
         .module = layer_name(module_prefix, plan.names, i) + plan.names.module});
  }
  // Layers of multi-token prediction, mostly.
  const std::string next = layer_name(impl->prefix, plan.names, count);
  if (!impl->store.names_from(next).empty()) impl->behind = next + "*";
  Checkpoint checkpoint;
  checkpoint.impl_ = impl;
  return checkpoint;
}

namespace {
template <class Impl>
const Impl& opened(const std::shared_ptr<const Impl>& impl) {
  return held(impl, "checkpoint", "Checkpoint::open()");
}
}  // namespace

const std::string& Checkpoint::folder() const { return opened(impl_).folder; }
const std::string& Checkpoint::family() const { return opened(impl_).family; }
const std::string& Checkpoint::model_name() const { return opened(impl_).model.name; }
const std::vector<CheckpointLayer>& Checkpoint::layers() const { return opened(impl_).layers; }
int Checkpoint::first_moe_layer() const { return opened(impl_).first_moe; }

std::string Checkpoint::summary() const {
  const Impl& self = opened(impl_);
  const Plan& plan = self.model.plan;
  int moe = 0;
  for (const LayerKind& kind : plan.layers) moe += kind.moe ? 1 : 0;
  std::string text = fmt::format("{} ({}), {} of {} layers with experts", self.model.family->title,
                                 self.family, moe, plan.layers.size());
  if (self.first_moe >= 0) text += "; " + describe(self.model.spec(self.first_moe));
  if (!plan.beside.empty()) text += "; not in the block: " + plan.beside;
  if (!self.behind.empty()) text += "; behind the last layer and not read: " + self.behind;
  return text;
}

LayerSpec Checkpoint::spec(int layer) const { return opened(impl_).model.spec(layer); }

LayerWeights Checkpoint::weights(int layer) const { return opened(impl_).weights(layer, true); }

std::vector<std::string> Checkpoint::tensor_names() const { return opened(impl_).store.names(); }
bool Checkpoint::contains(const std::string& name) const {
  return opened(impl_).store.contains(name);
}
Tensor Checkpoint::tensor(const std::string& name) const { return opened(impl_).store.get(name); }

const Model& CheckpointAccess::model(const Checkpoint& checkpoint) {
  return opened(checkpoint.impl_).model;
}
const TensorStore& CheckpointAccess::store(const Checkpoint& checkpoint) {
  return opened(checkpoint.impl_).store;
}
std::string CheckpointAccess::layer_prefix(const Checkpoint& checkpoint, int layer) {
  return layer_name(opened(checkpoint.impl_).prefix, opened(checkpoint.impl_).model.plan.names,
                    layer);
}
LayerWeights CheckpointAccess::unfilled_weights(const Checkpoint& checkpoint, int layer) {
  return opened(checkpoint.impl_).weights(layer, false);
}

}  // namespace shunt
