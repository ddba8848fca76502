#include "checkpoint/leftovers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"

namespace shunt {

namespace {

class Leftovers {
 public:
  Leftovers(const TensorStore& store, const TensorNames& names, const LayerSpec& spec,
            const std::string& prefix, bool quantised)
      : store_(store),
        spec_(spec),
        prefix_(prefix),
        others_beside_(names.others_beside),
        quantised_(quantised) {
    for (const auto* sources :
         {&names.router, &names.router_bias, &names.selection_bias, &names.per_expert_scale,
          &names.hash_table, &names.shared_gate, &names.output_bias, &names.router_norm}) {
      for (const Source& source : *sources) known_.insert(source.name);
    }
    known_.insert(names.beside.begin(), names.beside.end());
    for (const Source& source : names.router) {
      const std::string module = source.name.substr(0, source.name.rfind('.') + 1);
      routers_.insert(module);
      const std::size_t root = module.find('.') + 1;
      if (root < module.size()) roots_.insert(module.substr(0, root));
    }
    std::vector<ExpertNames> routed = names.experts;
    routed.insert(routed.end(), names.slots.begin(), names.slots.end());
    routed.push_back(single_experts(names));
    for (const ExpertNames& each : names.experts) add_first(each.up, firsts_);
    add_first(single_experts(names).up, firsts_);
    for (const ExpertNames& each : names.shared) add_first(each.up, first_shared_);
    for (const ExpertNames& each : routed) {
      const std::string folder = folder_of(each.up);
      // "block_sparse_moe." would be the block itself.
      if (folder.find("expert") != std::string::npos) experts_.insert(folder);
    }
    for (const ExpertNames& each : names.shared) shared_.insert(folder_of(each.up));
    for (const auto* sources :
         {&names.router, &names.shared_gate, &names.latent_down, &names.latent_up}) {
      for (const Source& source : *sources) matrices_.insert(source.name);
    }
    for (const ExpertNames& each : names.experts) {
      if (each.form == ExpertNames::Form::each) continue;
      for (const std::string& name : {each.gate, each.up, each.down}) {
        if (!name.empty()) matrices_.insert(name);
      }
      for (const std::string& name : {each.up_bias, each.down_bias}) known_.insert(name);
    }
  }

  void check() const {
    const bool any_shared = spec_.shared.intermediate > 0 || spec_.route.shared.count > 0;
    const bool biased = spec_.experts.gate_up_bias || spec_.experts.down_bias;
    const bool shared_biased = spec_.shared.gate_up_bias || spec_.shared.down_bias;
    const std::int64_t most = spec_.experts.experts + spec_.zero_experts;
    for (const Set& firsts : {firsts_, first_shared_}) {
      if (firsts.size() < 2) continue;
      const std::string name = prefix_ + *firsts.rbegin();
      fail(Status::bad_file, "{}: tensors '{}' and '{}' are both there: must be one of them",
           store_.file_of(name), clean(prefix_ + *firsts.begin()), clean(name));
    }
    check_unnamed();
    for (const std::string& name : store_.names_from(prefix_)) {
      const std::string_view rest = std::string_view(name).substr(prefix_.size());
      if (known_.contains(rest)) continue;
      if (!quantised_ && (of(experts_, rest) || of(shared_, rest))) check_scale(name);
      if (!any_shared) {
        for (const char* word : {"shared_expert", "share_expert", "shared_mlp"}) {
          const std::size_t at = rest.find(word);
          // A "shared_mlp" beside the block is not the block's.
          const bool beside = at == 0 && rest.starts_with("shared_mlp");
          if (at != std::string_view::npos && !beside) refuse(name, "shared experts");
        }
      }
      // "gate_proj.lora_A.weight": not merged into its weight, which alone would be read.
      if (rest.find("lora_") != std::string_view::npos &&
          (of(experts_, rest) || of(shared_, rest) || of(routers_, rest))) {
        refuse(name, "adapters");
      }
      if (!others_beside_ && (of(routers_, rest) || is_gate(rest))) refuse(name, "it");
      if (!others_beside_ && other_experts(rest)) refuse(name, "other experts");
      if (const auto folder = of(experts_, rest)) {
        const std::int64_t number = leading_number(rest.substr(folder->size()));
        if (number >= most && !others_beside_)
          refuse(name, fmt::format("more than {} experts", most));
        if (!biased && is_bias(rest) && !is_zero(name)) refuse(name, "biases");
      } else if (!shared_biased && of(shared_, rest) && is_bias(rest) && !is_zero(name)) {
        refuse(name, "biases");
      }
    }
    for (const std::string& matrix : matrices_) check_no_bias(matrix);
  }

 private:
  using Set = std::set<std::string, std::less<>>;

  [[noreturn]] void refuse(const std::string& name, const std::string& what) const {
    fail(Status::bad_file, "{}: tensor '{}' is there: config.json says nothing of {}",
         store_.file_of(name), clean(name), what);
  }
  // Of a matrix that is read, a bias that no list of names has.
  void check_no_bias(const std::string& matrix) const {
    if (!store_.contains(prefix_ + matrix)) return;
    const bool module = matrix.ends_with(".weight");
    const std::string base = module ? matrix.substr(0, matrix.size() - 7) : matrix;
    for (const char* end : {".bias", "_bias"}) {
      const std::string bias = base + end;
      if (known_.contains(bias) || !store_.contains(prefix_ + bias)) continue;
      if (!is_zero(prefix_ + bias)) refuse(prefix_ + bias, "biases");
    }
  }
  // What shards hold of the block behind the index's back: programs that read whole files have it.
  void check_unnamed() const {
    for (const auto& [name, file] : store_.unnamed_from(prefix_)) {
      const std::string_view rest = std::string_view(name).substr(prefix_.size());
      if (!known_.contains(rest) && !of(routers_, rest) && !of(experts_, rest) &&
          !of(shared_, rest)) {
        continue;
      }
      if (!store_.contains(name)) {
        fail(Status::bad_file, "{}: tensor '{}' is there: the index does not name it", file->path(),
             clean(name));
      }
      const Tensor here = file->flat(name), named = store_.flat(name);
      if (here.dtype == named.dtype && file->shape(name) == store_.shape(name) &&
          std::memcmp(here.data, named.data, static_cast<std::size_t>(here.bytes())) == 0) {
        continue;
      }
      fail(Status::bad_file, "{}: tensor '{}' is there: in {}, where the index has it, is another",
           file->path(), clean(name), store_.file_of(name));
    }
  }
  // Of the first expert, where it is there, plain or packed.
  void add_first(std::string up, Set& firsts) const {
    const std::size_t number = up.find("{}");
    if (number != std::string::npos) up[number] = '0', up.erase(number + 1, 1);
    if (up.empty()) return;
    const bool module = up.ends_with(".weight");
    const std::string base = module ? up.substr(0, up.size() - 7) : up;
    for (const char* end : {"", ".weight_packed", ".qweight", "_blocks"}) {
      const std::string name = *end == 0 ? up : base + end;
      if (!store_.contains(prefix_ + name)) continue;
      firsts.insert(name);
      return;
    }
  }
  // Of "up_proj.weight_scale" "up_proj.weight"; of "gate_up_proj_scale" "gate_up_proj". And of what
  // else a packed matrix has beside it.
  void check_scale(const std::string& name) const {
    std::string weight;
    for (const auto& [end, of] : {std::pair(".weight_scale", ".weight"),
                                  {".weight_scale_inv", ".weight"},
                                  {".weight_scale_2", ".weight"},
                                  {".weight_global_scale", ".weight"},
                                  {".scale", ".weight"},
                                  {".scales", ".weight"},
                                  {".weight_zero_point", ".weight"},
                                  {".qzeros", ".weight"},
                                  {".weight_g_idx", ".weight"},
                                  {".g_idx", ".weight"},
                                  {".weight_shape", ".weight"},
                                  {".weight_positions", ".weight"},
                                  {"_weight_scale", ""},
                                  {"_weight_scale_inv", ""},
                                  {"_scale", ""},
                                  {"_scale_inv", ""},
                                  {"_scales", ""}}) {
      if (!name.ends_with(end)) continue;
      weight = name.substr(0, name.size() - std::string_view(end).size()) + of;
      if (store_.contains(weight)) break;
    }
    if (weight.empty() || !store_.contains(weight)) return;
    const DType dtype = store_.get(weight).dtype;
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) return;
    fail(Status::bad_file, "{}: tensor '{}' is there: its weight is {}, which has {}",
         store_.file_of(name), clean(name), to_string(dtype),
         name.find("scale") != std::string::npos ? "no scales" : "nothing beside it");
  }
  // "mlp.experts." of "mlp.experts.{}.up_proj.weight"; "mlp.shared_experts." of its up_proj's.
  static std::string folder_of(const std::string& name) {
    const std::size_t number = name.find("{}");
    return name.substr(0, number != std::string::npos ? number
                          : name.ends_with(".weight") ? name.rfind('.', name.size() - 8) + 1
                                                      : name.rfind('.') + 1);
  }
  static std::optional<std::string_view> of(const Set& folders, std::string_view name) {
    for (const std::string& folder : folders) {
      if (name.starts_with(folder)) return std::string_view(folder);
    }
    return std::nullopt;
  }
  // "mlp.image_gate.weight": beside the router, for other tokens or other experts.
  bool is_gate(std::string_view name) const {
    const auto root = of(roots_, name);
    if (!root || !name.ends_with(".weight")) return false;
    const std::string_view module = name.substr(root->size(), name.size() - root->size() - 7);
    return module.find('.') == std::string_view::npos &&
           (module.ends_with("_gate") || module.ends_with("_router"));
  }
  // "mlp.chunk_experts.0.up_proj.weight": GroveMoE's, whatever model_type its config has.
  bool other_experts(std::string_view name) const {
    const auto root = of(roots_, name);
    if (!root || of(experts_, name) || of(shared_, name)) return false;
    const std::string_view rest = name.substr(root->size());
    return rest.substr(0, rest.find('.')).ends_with("_experts");
  }
  static bool is_bias(std::string_view name) {
    return name.ends_with(".bias") || name.ends_with("_bias");
  }
  static std::int64_t leading_number(std::string_view text) {
    std::int64_t number = -1;
    for (const char c : text) {
      if (c < '0' || c > '9') return c == '.' ? number : -1;
      number = std::min<std::int64_t>(std::max<std::int64_t>(number, 0) * 10 + (c - '0'), 1 << 30);
    }
    return -1;
  }
  // Older writers of GPTQ's form put zeros where a model has no bias.
  bool is_zero(const std::string& name) const {
    const Tensor tensor = store_.get(name);
    if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::f16) {
      return false;
    }
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      if (load_f32(tensor.data, tensor.dtype, i) != 0) return false;
    }
    return true;
  }

  const TensorStore& store_;
  const LayerSpec& spec_;
  const std::string& prefix_;
  bool others_beside_, quantised_;
  Set known_, routers_, roots_, experts_, shared_, matrices_;
  Set firsts_, first_shared_;  // the first expert's up, under each name that it has
};

}  // namespace

void check_leftovers(const TensorStore& store, const TensorNames& names, const LayerSpec& spec,
                     const std::string& prefix, bool quantised) {
  Leftovers(store, names, spec, prefix, quantised).check();
}

void check_no_router(const TensorStore& store, const TensorNames& names, int layer,
                     const std::string& note, const std::string& prefix) {
  if (names.others_beside) return;
  for (const Source& source : names.router) {
    const std::string name = prefix + source.name;
    if (!store.contains(name)) continue;
    fail(Status::bad_file,
         "{}: tensor '{}' is there: config.json says that layer {} has no experts ({})",
         store.file_of(name), name, layer, note);
  }
}

}  // namespace shunt
