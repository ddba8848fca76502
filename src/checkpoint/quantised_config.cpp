// quantization_config of every method that is read, and refusals of the others.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/quantised.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {
namespace {

using Json = nlohmann::json;

// A null says no more than absence.
const Json* child(const Json& object, std::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

class Fields {
 public:
  Fields(std::string where, const Json& object) : where_(std::move(where)), object_(object) {}

  const Json* get(std::string_view key) const { return child(object_, key); }
  void expect(std::string_view key, const std::vector<Json>& legal) const {
    const Json* const value = get(key);
    if (value == nullptr || std::find(legal.begin(), legal.end(), *value) != legal.end()) return;
    std::string list;
    for (const Json& one : legal) list += (list.empty() ? "" : " or ") + one.dump();
    refuse(key, *value, list);
  }
  void expect_empty(std::string_view key) const {
    const Json* const value = get(key);
    if (value != nullptr && !value->empty()) refuse(key, *value, "empty");
  }
  // A group size that is there: an integer, -1 for a whole row.
  void add_group(std::string_view key, std::vector<int>& groups) const {
    const Json* const value = get(key);
    if (value == nullptr) return;
    const std::int64_t size = value->is_number_integer() ? value->get<std::int64_t>() : 0;
    const bool legal = size == -1 || (size >= 16 && size <= (1 << 24) && size % 16 == 0);
    if (!legal) refuse(key, *value, "-1 or a multiple of 16");
    groups.push_back(static_cast<int>(size));
  }
  // The modules that a list names.
  void add_modules(std::string_view key, ListSyntax syntax, ModuleList& to) const {
    const Json* const value = get(key);
    if (value == nullptr) return;
    if (!value->is_array()) refuse(key, *value, "a list of names");
    for (const Json& name : *value) {
      if (!name.is_string()) refuse(key, *value, "a list of names");
      try {
        to.add(syntax, name.get_ref<const std::string&>());
      } catch (const Error& error) {
        fail(Status::unsupported, "{}: {}: {}", where_, key, error.what());
      }
    }
  }
  [[noreturn]] void refuse(std::string_view key, const Json& value,
                           const std::string& legal) const {
    fail(Status::unsupported, "{}: {} is {}: must be {}", where_, key, shown(value), legal);
  }
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  const Json& object_;
};

void read_compressed(const Fields& f, QuantisedConfig& out) {
  f.expect("format",
           {"float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
            "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"});
  f.expect("quantization_status", {"compressed", "frozen"});
  if (const Json* sparsity = f.get("sparsity_config")) {
    const Json* const format = sparsity->is_object() ? child(*sparsity, "format") : nullptr;
    if (!sparsity->empty() && (format == nullptr || *format != "dense")) {
      f.refuse("sparsity_config", *sparsity, "dense");
    }
  }
  f.expect_empty("transform_config");
  out.list = "ignore";
  f.add_modules("ignore", ListSyntax::compressed, out.excluded);
  const Json* const groups = f.get("config_groups");
  if (groups == nullptr || !groups->is_object()) return;
  bool linear = false;  // a group is of all linear layers
  ModuleList targets;
  for (const auto& item : groups->items()) {
    if (!item.value().is_object()) continue;
    const Fields group(fmt::format("{}.config_groups.{}", f.where(), clean(item.key())),
                       item.value());
    group.add_modules("targets", ListSyntax::compressed, targets);
    const Json* const names = child(item.value(), "targets");
    linear = linear || names == nullptr ||
             std::find(names->begin(), names->end(), Json("Linear")) != names->end();
    const Json* const weights = child(item.value(), "weights");
    if (weights == nullptr || !weights->is_object()) continue;
    const Fields w(fmt::format("{}.config_groups.{}.weights", f.where(), clean(item.key())),
                   *weights);
    w.expect("num_bits", {4, 8});
    w.expect("type", {"int", "float"});
    w.expect("strategy", {"tensor", "channel", "group", "tensor_group", "block"});
    if (const Json* block = w.get("block_structure")) {
      if (*block != Json::array({128, 128}) && *block != "128x128") {
        w.refuse("block_structure", *block, "[128, 128]");
      }
    }
    if (w.get("strategy") != nullptr && *w.get("strategy") == "channel") out.groups.push_back(-1);
    w.add_group("group_size", out.groups);
  }
  if (!linear) out.targets = targets;
}

void read_modelopt(const Fields& f, QuantisedConfig& out) {
  out.list = f.get("exclude_modules") != nullptr ? "exclude_modules" : "ignore";
  for (const char* key : {"ignore", "exclude_modules"}) {
    f.add_modules(key, ListSyntax::globs, out.excluded);
  }
  f.expect("quant_algo", {"NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8",
                          "W4A16_NVFP4", "MIXED_PRECISION"});
}

// GPTQModel's `dynamic`: "-:REGEX" leaves modules plain, "+:REGEX" or REGEX gives them other
// settings. `modules_in_block_to_quantize`: nothing else is packed.
void read_gptq_modules(const Fields& f, QuantisedConfig& out) {
  if (const Json* dynamic = f.get("dynamic")) {
    if (!dynamic->is_object()) f.refuse("dynamic", *dynamic, "an object");
    if (!dynamic->empty()) out.list = "dynamic";
    for (const auto& item : dynamic->items()) {
      if (item.key().starts_with("-:")) {
        try {
          out.excluded.add(ListSyntax::compressed, "re:" + item.key().substr(2));
        } catch (const Error& error) {
          fail(Status::unsupported, "{}: dynamic: {}", f.where(), error.what());
        }
      } else if (item.value().is_object()) {
        const Fields other(fmt::format("{}.dynamic.{}", f.where(), clean(item.key())),
                           item.value());
        other.expect("bits", {4});
        other.add_group("group_size", out.groups);
      }
    }
  }
  if (const Json* modules = f.get("modules_in_block_to_quantize")) {
    for (const Json& list : *modules) {
      for (const Json& name : list.is_array() ? list : Json::array({list})) {
        if (!name.is_string()) f.refuse("modules_in_block_to_quantize", *modules, "lists of names");
        out.targets.add(ListSyntax::transformers, name.get_ref<const std::string&>());
      }
    }
  }
}

}  // namespace

QuantisedConfig read_quantised(const std::string& where, const nlohmann::json& object) {
  QuantisedConfig out;
  const Fields f(where, object);
  const Json* const method = object.is_object() ? child(object, "quant_method") : nullptr;
  if (method == nullptr || !method->is_string()) {
    fail(Status::unsupported,
         "{}: quant_method is {}: must be fp8, fbgemm_fp8, compressed-tensors, modelopt, mxfp4, "
         "gptq or "
         "awq",
         where, method == nullptr ? "missing" : shown(*method));
  }
  out.method = method->get<std::string>();
  const auto transformers_list = [&](const char* other) {
    if (f.get(other) != nullptr) out.list = other;
    f.add_modules(other, ListSyntax::transformers, out.excluded);
    if (std::string_view(other) != "modules_to_not_convert") {
      f.add_modules("modules_to_not_convert", ListSyntax::transformers, out.excluded);
    }
  };
  if (out.method == "fp8") {
    f.expect("fmt", {"e4m3"});
    f.expect("weight_block_size", {Json::array({128, 128})});
    f.expect("activation_scheme", {"dynamic", "static"});
    f.expect("scale_fmt", {"ue8m0", "float"});
    transformers_list("ignored_layers");
  } else if (out.method == "fbgemm_fp8") {
    transformers_list("ignored_layers");
  } else if (out.method == "compressed-tensors") {
    read_compressed(f, out);
  } else if (out.method == "modelopt" || out.method == "modelopt_fp4") {
    read_modelopt(f, out);
    // What is packed, and how, stands in a list of its own.
    const Json* const algorithm = f.get("quant_algo");
    if (algorithm != nullptr && *algorithm == "MIXED_PRECISION") {
      out.excluded.add(ListSyntax::globs, "nothing is known");
      out.targets.add(ListSyntax::globs, "nothing is known");
    }
  } else if (out.method == "gptq") {
    f.expect("bits", {4});
    f.add_group("group_size", out.groups);
    f.expect("checkpoint_format", {"gptq", "gptq_v2"});
    f.expect("is_marlin_format", {false});
    read_gptq_modules(f, out);
    out.next_zero = f.get("checkpoint_format") == nullptr || *f.get("checkpoint_format") == "gptq";
  } else if (out.method == "awq") {
    f.expect("bits", {4});
    f.expect("w_bit", {4});
    f.add_group(f.get("group_size") != nullptr ? "group_size" : "q_group_size", out.groups);
    f.expect("version", {"gemm", "GEMM"});
    transformers_list("modules_to_not_convert");
  } else if (out.method == "shunt") {
    f.expect("format", {"dense3", "sparse_nvfp4"});
    const Json* const format = f.get("format");
    if (format == nullptr) f.refuse("format", nullptr, "\"dense3\" or \"sparse_nvfp4\"");
    out.own = format_from_string(format->get<std::string>());
    transformers_list("modules_to_not_convert");
  } else if (out.method == "mxfp4") {
    transformers_list("modules_to_not_convert");
  } else {
    fail(Status::unsupported,
         "{}: quant_method is {}: not read; fp8, fbgemm_fp8, compressed-tensors, modelopt, mxfp4, "
         "gptq "
         "and awq are",
         where, shown(*method));
  }
  return out;
}

}  // namespace shunt
