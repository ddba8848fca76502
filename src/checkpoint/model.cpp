#include "checkpoint/model.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {

namespace {

// Where models of several modalities keep their text model.
constexpr std::array<std::string_view, 4> nested_keys = {"text_config", "thinker_config",
                                                         "llm_config", "language_config"};

// Types of whole models whose text model says none of its own.
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> text_models = {
    {{"deepseek_vl_v2", "deepseek_v2"},
     {"unlimited-ocr", "unlimited_ocr_text"},
     {"nemotron_h_omni", "nemotron_h"}}};

// Published without a model_type; their code is found by the class.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> classes = {
    {{"LongcatFlashForCausalLM", "longcat_flash"},
     {"LongcatFlashNgramForCausalLM", "longcat_flash_ngram"}}};

// The first of `architectures`, or nothing.
std::string class_of(const nlohmann::json& root) {
  const nlohmann::json* const names = child(root, "architectures");
  const bool named =
      names != nullptr && names->is_array() && !names->empty() && names->front().is_string();
  return named ? names->front().get<std::string>() : std::string();
}

std::string model_type(const std::string& where, const nlohmann::json& object) {
  const nlohmann::json* type = child(object, "model_type");
  if (type == nullptr) return {};
  if (!type->is_string()) {
    fail(Status::bad_file, "{}: model_type is {}: must be a string", where, shown(*type));
  }
  return type->get<std::string>();
}

void read_expert_dtype(const std::string& where, const nlohmann::json& object,
                       QuantisedConfig& out) {
  // DeepSeek-V4's own word, beside its own method.
  const nlohmann::json* const dtype = child(object, "expert_dtype");
  if (dtype == nullptr || (!out.method.empty() && out.method != "fp8")) return;
  std::vector<Format> formats;
  if (*dtype == "fp4") formats = {Format::mxfp4};
  if (*dtype == "fp8") {
    formats = {Format::fp8_block, Format::fp8_channel, Format::fp8_tensor, Format::mxfp8};
  }
  out.experts.push_back({fmt::format("{}: expert_dtype is {}", where, shown(*dtype)), formats});
}

// transformers' field and its older name; MLX's is another format.
void read_quantised_field(const std::string& where, const nlohmann::json& object,
                          QuantisedConfig& out) {
  for (const char* field : {"quantization_config", "compression_config"}) {
    const nlohmann::json* quantised = child(object, field);
    if (quantised == nullptr) continue;
    const std::string at = fmt::format("{}: {}", where, field);
    out = read_quantised(at, *quantised);
    read_expert_dtype(at, *quantised, out);  // DeepSeek-V4.1 has it there
  }
  if (const nlohmann::json* mlx = child(object, "quantization")) {
    fail(Status::unsupported, "{}: quantization is {}: MLX's formats are not read", where,
         shown(*mlx));
  }
}

const Family* find_family(const std::string& type) {
  for (const Family& family : family_table()) {
    if (family.type == type) return &family;
  }
  return nullptr;
}

}  // namespace

Model read_model(const std::string& where, const std::string& text) {
  const nlohmann::json root = parse_object(where, text);
  const nlohmann::json* object = &root;
  std::string path = where;
  std::string type = model_type(path, root);
  Model model;
  read_quantised_field(path, root, model.quantised);
  for (bool descended = true; descended;) {
    descended = false;
    for (const std::string_view key : nested_keys) {
      const nlohmann::json* inner = child(*object, key);
      if (inner == nullptr) continue;
      path += fmt::format("{}{}", object == &root ? ": " : ".", key);
      if (!inner->is_object()) {
        fail(Status::bad_file, "{} is {}: must be an object", path, shown(*inner));
      }
      object = inner;
      read_quantised_field(path, *object, model.quantised);
      const std::string inner_type = model_type(path, *object);
      if (!inner_type.empty()) {
        type = inner_type;
      } else {
        constexpr std::string_view whole = "_mm_model";  // Inkling's
        const std::string base =
            type.ends_with(whole) ? type.substr(0, type.size() - whole.size()) : type;
        if (find_family(base + "_text") != nullptr) type = base + "_text";
        for (const auto& [of, text_model] : text_models) {
          if (type == of) type = text_model;
        }
      }
      descended = true;
      break;
    }
  }
  const std::string class_name = class_of(root);
  if (type.empty()) {
    for (const auto& [name, of] : classes) {
      if (class_name == name) type = of;
    }
  }
  if (type.empty()) {
    fail(Status::bad_file, "{}: model_type is missing: must name the model's family", path);
  }
  for (const Refusal& refusal : refusal_table()) {
    if (refusal.type == type) {
      fail(Status::unsupported, "{}: model_type is '{}': not supported, {}", path, type,
           refusal.reason);
    }
  }
  model.family = find_family(type);
  if (model.family == nullptr) {
    std::string list;
    for (const std::string& known : known_families()) list += (list.empty() ? "" : " ") + known;
    fail(Status::unsupported, "{}: model_type is '{}': unknown; known are {}", path, clean(type),
         list);
  }
  Config config(path, *object);
  model.plan = model.family->plan(config);
  config.finish(type);
  read_expert_dtype(path, *object, model.quantised);

  model.name = class_name.empty() ? type : clean(class_name);
  return model;
}

bool Model::moe(int layer) const {
  return layer >= 0 && static_cast<std::size_t>(layer) < plan.layers.size() &&
         plan.layers[static_cast<std::size_t>(layer)].moe;
}

LayerSpec Model::spec(int layer) const {
  if (layer < 0 || static_cast<std::size_t>(layer) >= plan.layers.size()) {
    fail(Status::invalid_argument, "layer is {}: must be 0 to {}", layer, plan.layers.size() - 1);
  }
  if (!moe(layer)) {
    fail(Status::invalid_argument, "layer {} has no experts: {}", layer,
         plan.layers[static_cast<std::size_t>(layer)].note);
  }
  LayerSpec spec = plan.spec;
  if (plan.per_layer) plan.per_layer(layer, spec);
  return spec;
}

std::vector<std::string> known_families() {
  std::vector<std::string> result;
  for (const Family& family : family_table()) result.emplace_back(family.type);
  std::sort(result.begin(), result.end());
  return result;
}

LayerSpec layer_spec_from_config(const std::string& config_json, int layer) {
  return read_model("config.json", config_json).spec(layer);
}

}  // namespace shunt
