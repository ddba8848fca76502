// quantization_config of every method that is read, and refusals of the others.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/quantised_fields.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {
namespace {

// `weights` of a group of config_groups.
void read_weights_of(const Fields& w, QuantisedScheme& to) {
  w.claim(
      "num_bits",
      {{4, {Format::int4, Format::nvfp4, Format::mxfp4}}, {8, fp8({Format::int8, Format::mxfp8})}},
      to.claims);
  w.claim("type",
          {{"int", {Format::int4, Format::int8}},
           {"float", fp8({Format::nvfp4, Format::mxfp4, Format::mxfp8})}},
          to.claims);
  w.claim("strategy",
          {{"tensor", fp8({Format::int8})},
           {"channel", fp8({Format::int8, Format::int4})},
           {"group", {Format::int4, Format::int8, Format::nvfp4, Format::mxfp4, Format::mxfp8}},
           {"tensor_group", {Format::nvfp4}},
           {"block", fp8()}},
          to.claims);
  if (const Json* block = w.get("block_structure")) {
    if (*block != Json::array({128, 128}) && *block != "128x128") {
      w.refuse("block_structure", *block, "[128, 128]");
    }
  }
  const Json* const strategy = w.get("strategy");
  if (strategy != nullptr) {
    to.strategy = strategy->get<std::string>();
    to.strategy_field = w.says("strategy");
  }
  w.add_group("group_size", to);
  if (to.strategy == "channel") to.groups = {-1};
  if (const std::optional<bool> symmetric = w.flag("symmetric")) {
    to.zeros = !*symmetric;
    to.zeros_field = w.says("symmetric");
  }
  // By weight, also called static, the order is folded in where weights were rounded.
  w.expect("actorder", {"group", "dynamic", true, "weight", "static", false});
  const Json* const order = w.get("actorder");
  to.order = order != nullptr && (*order == "group" || *order == "dynamic" || *order == true);
  to.order_field = w.says("actorder");
}

// Calls each(name, group, weights) for config_groups; weights may say nothing.
template <class Each>
void for_groups(const Fields& f, Each&& each) {
  const Json* const groups = f.get("config_groups");
  if (groups == nullptr) return;
  if (!groups->is_object()) f.refuse("config_groups", *groups, "an object");
  const Json nothing = Json::object();
  for (const auto& item : groups->items()) {
    const std::string where = fmt::format("{}.config_groups.{}", f.where(), clean(item.key()));
    if (!item.value().is_object()) {
      fail(Status::bad_file, "{} is {}: must be an object", where, shown(item.value()));
    }
    const Json* const weights = child(item.value(), "weights");
    if (weights != nullptr && !weights->is_object()) {
      Fields(where, item.value()).refuse("weights", *weights, "an object");
    }
    each(Fields(where, item.value()),
         Fields(where + ".weights", weights != nullptr ? *weights : nothing));
  }
}

// "Linear": names of modules begin with small letters.
bool is_class(const Json& name) {
  const auto& text = name.get_ref<const std::string&>();
  return !text.empty() && text[0] >= 'A' && text[0] <= 'Z';
}

// What compressed-tensors does beside rounding.
void refuse_other_than_weights(const Fields& f) {
  if (const Json* sparsity = f.get("sparsity_config")) {
    const Json* const format = sparsity->is_object() ? child(*sparsity, "format") : nullptr;
    if (!sparsity->empty() && (format == nullptr || *format != "dense")) {
      f.refuse("sparsity_config", *sparsity, "dense");
    }
  }
}

// Weights made for rows that are transformed on the way: compressed-tensors, AutoRound, GPTQModel.
// Whoever packs them anew for another method may leave the field.
void refuse_transforms(const Fields& f) {
  for (const char* of_rows :
       {"transform_config", "rotation_config", "spinquant_config", "rotation"}) {
    f.expect_empty(of_rows);
  }
}

void read_compressed(const Fields& f, QuantisedScheme base, QuantisedConfig& out) {
  const std::vector<Meaning> formats = {
      {"float-quantized", fp8({Format::mxfp8})},
      {"nvfp4-pack-quantized", {Format::nvfp4}},
      {"mxfp4-pack-quantized", {Format::mxfp4}},
      {"mxfp8-quantized", {Format::mxfp8}},
      {"pack-quantized", {Format::int4, Format::int8}},
      {"int-quantized", {Format::int8}},
      {"naive-quantized", fp8({Format::mxfp8, Format::int8})},
      {"mixed-precision", {}},
  };
  f.claim("format", formats, base.claims);
  f.expect("quantization_status", {"compressed", "frozen"});
  refuse_other_than_weights(f);
  out.list = "ignore";
  f.add_modules("ignore", ListSyntax::compressed, out.excluded);
  bool linear = false;  // a group is of a class of layers, or says nothing
  ModuleList targets;
  for_groups(f, [&](const Fields& group, const Fields& weights) {
    group.add_modules("targets", ListSyntax::compressed, targets);
    const Json* const names = group.get("targets");
    if (names != nullptr && names->empty()) group.refuse("targets", *names, "a list of modules");
    QuantisedScheme scheme = base;
    if (names == nullptr || std::any_of(names->begin(), names->end(), is_class)) {
      linear = true;
    } else {
      group.add_modules("targets", ListSyntax::compressed, scheme.targets);
    }
    group.claim("format", formats, scheme.claims);
    read_weights_of(weights, scheme);
    out.schemes.push_back(std::move(scheme));
  });
  if (out.schemes.empty()) {
    out.schemes.push_back(std::move(base));
  } else if (!linear) {
    out.targets = targets;
  }
}

void read_modelopt(const Fields& f, QuantisedScheme base, QuantisedConfig& out) {
  out.list = f.get("exclude_modules") != nullptr ? "exclude_modules" : "ignore";
  for (const char* key : {"ignore", "exclude_modules"}) {
    f.add_modules(key, ListSyntax::globs, out.excluded);
  }
  const std::vector<Meaning> algorithms = {
      {"NVFP4", {Format::nvfp4}},
      {"FP8", fp8()},
      {"FP8_PER_CHANNEL_PER_TOKEN", fp8()},
      {"FP8_PB_WO", fp8()},
      {"MXFP8", {Format::mxfp8}},
      {"W4A16_NVFP4", {Format::nvfp4}},
      {"MIXED_PRECISION", {}},
  };
  f.claim("quant_algo", algorithms, base.claims);
  for (const auto& [says, strategy] :
       {std::pair("FP8_PB_WO", "block"), std::pair("FP8_PER_CHANNEL_PER_TOKEN", "channel")}) {
    if (f.get("quant_algo") == nullptr || *f.get("quant_algo") != says) continue;
    base.strategy = strategy;
    base.strategy_field = f.says("quant_algo");
  }
  if (f.get("quant_algo") != nullptr && *f.get("quant_algo") == "FP8") out.blocks = false;
  const Json* const algorithm = f.get("quant_algo");
  if (algorithm != nullptr && *algorithm == "MIXED_PRECISION") {
    // What is packed, and how, stands in a list of its own; of what it does not name, tensors tell.
    out.excluded.add(ListSyntax::globs, "nothing is known");
    out.targets.add(ListSyntax::globs, "nothing is known");
    out.schemes.push_back(std::move(base));
    const Json* const layers = f.get("quantized_layers");
    if (layers == nullptr) return;
    if (!layers->is_object()) f.refuse("quantized_layers", *layers, "an object");
    for (const auto& item : layers->items()) {
      const std::string of_layer =
          fmt::format("{}.quantized_layers.{}", f.where(), clean(item.key()));
      if (!item.value().is_object()) {
        fail(Status::bad_file, "{} is {}: must be an object", of_layer, shown(item.value()));
      }
      const Fields layer(of_layer, item.value());
      QuantisedScheme scheme;
      layer.claim_if_known("quant_algo", algorithms, scheme.claims);
      layer.add_group("group_size", scheme);
      out.layers.emplace(item.key(), std::move(scheme.claims));
    }
    return;
  }
  f.add_group("group_size", base);
  for_groups(f, [&](const Fields&, const Fields& weights) {
    out.schemes.push_back(base);
    read_weights_of(weights, out.schemes.back());
  });
  if (out.schemes.empty()) out.schemes.push_back(std::move(base));
}

// quant_method. Older files of ModelOpt have quant_library, or only what they nest.
std::string method_of(const std::string& where, const Json& object) {
  if (!object.is_object()) {
    fail(Status::bad_file, "{} is {}: must be an object", where, shown(object));
  }
  const Json* const method = child(object, "quant_method");
  if (method != nullptr && method->is_string()) return method->get<std::string>();
  if (method == nullptr) {
    const Fields f(where, object);
    f.expect("quant_library", {"modelopt", "MODELOPT"});
    if (const Json* producer = f.get("producer"); producer != nullptr && producer->is_object()) {
      Fields(where + ": producer", *producer).expect("name", {"modelopt"});
    }
    for (const char* key : {"quant_library", "quantization", "quant_algo"}) {
      if (f.get(key) != nullptr) return "modelopt";
    }
  }
  fail(Status::unsupported,
       "{}: quant_method is {}: must be fp8, fbgemm_fp8, mxfp8, compressed-tensors, modelopt, "
       "mxfp4, gptq, awq, auto-round, quark or shunt",
       where, method == nullptr ? "missing" : shown(*method));
}

}  // namespace

namespace {

bool absent(const Json* value) { return value == nullptr || value->is_null(); }

// ModelOpt's word on a cache of keys and values alone: weights are plain.
bool cache_alone(const Json& modelopt) {
  return modelopt.is_object() && absent(child(modelopt, "quant_algo")) &&
         child(modelopt, "config_groups") == nullptr;
}

}  // namespace

QuantisedConfig read_quantised(const std::string& where, const nlohmann::json& object) {
  QuantisedConfig out;
  out.method = method_of(where, object);
  const bool modelopt = out.method == "modelopt" || out.method == "modelopt_fp4";
  const Json* const nested = modelopt ? child(object, "quantization") : nullptr;
  if (nested != nullptr && !nested->is_object()) {
    Fields(where, object).refuse("quantization", *nested, "an object");
  }
  if (nested != nullptr) out.holder += ".quantization";
  const Fields f(nested != nullptr ? where + ".quantization" : where,
                 nested != nullptr ? *nested : object);
  refuse_transforms(f);
  const Json* const groups = f.get("config_groups");
  if (out.method == "compressed-tensors" && groups != nullptr && groups->is_object() &&
      groups->empty()) {
    f.expect("format", {"dense"});
    refuse_other_than_weights(f);
    return {};
  }
  if (modelopt && cache_alone(nested != nullptr ? *nested : object)) return {};
  QuantisedScheme scheme;
  const auto means = [&](const Formats& formats) {
    scheme.claims.push_back(
        {fmt::format("{}: quant_method is \"{}\"", where, out.method), formats});
  };
  const auto transformers_list = [&](const char* other) {
    if (f.get(other) != nullptr) out.list = other;
    f.add_modules(other, ListSyntax::transformers, out.excluded);
    if (std::string_view(other) != "modules_to_not_convert") {
      f.add_modules("modules_to_not_convert", ListSyntax::transformers, out.excluded);
    }
  };
  if (out.method == "fp8") {
    const Json groups_of_32 = Json::array({1, 32});
    const Json blocks_of_32 = Json::array({32, 32});  // DeepSeek-V4.1
    const Json* const block = f.get("weight_block_size");
    out.blocks_of_32 = block != nullptr && *block == blocks_of_32;
    if (block != nullptr) out.blocks = *block == Json::array({128, 128});
    if (block != nullptr && *block == groups_of_32) {
      means({Format::mxfp8});
    } else if (out.blocks_of_32) {
      means({Format::mxfp8, Format::mxfp4});
    } else {
      means(fp8({Format::mxfp8, Format::mxfp4}));  // MiniMax-M3's, DeepSeek-V4's
    }
    f.expect("fmt", {"e4m3"});
    f.expect("weight_block_size", {Json::array({128, 128}), groups_of_32, blocks_of_32});
    f.expect("activation_scheme", {"dynamic", "static"});
    if (out.blocks_of_32) {
      f.expect("scale_fmt", {"ue8m0"});
    } else {
      f.expect("scale_fmt", {"ue8m0", "float"});
    }
    transformers_list("ignored_layers");
  } else if (out.method == "mxfp8") {
    means({Format::mxfp8});
    f.expect("fmt", {"e4m3"});
    f.expect("weight_block_size", {Json::array({1, 32})});
    f.expect("activation_scheme", {"dynamic"});
    f.expect("scale_fmt", {"ue8m0"});
    transformers_list("ignored_layers");
  } else if (out.method == "fbgemm_fp8") {
    means(fp8());
    transformers_list("ignored_layers");
  } else if (out.method == "compressed-tensors") {
    read_compressed(f, scheme, out);
  } else if (modelopt) {
    means(fp8({Format::mxfp8, Format::nvfp4, Format::mxfp4}));
    read_modelopt(f, scheme, out);
  } else if (out.method == "gptq") {
    means({Format::int4});
    read_gptq(f, scheme, out);
  } else if (out.method == "quark") {
    read_quark(f, out);
  } else if (out.method == "auto-round" || out.method == "intel/auto-round") {
    means({Format::int4});
    read_auto_round(f, scheme, out);
  } else if (out.method == "awq") {
    means({Format::int4});
    f.expect("bits", {4});
    f.expect("w_bit", {4});
    f.add_group(f.get("group_size") != nullptr ? "group_size" : "q_group_size", scheme);
    if (const Json* size = f.get("group_size")) f.expect("q_group_size", {*size});
    for (const char* field : {"version", "format"}) f.expect(field, {"gemm", "GEMM"});
    f.expect("pack_method", {"reorder"});  // Quark's
    // AWQ's own default: without zero points nothing says where zero is.
    scheme.zeros = f.flag("zero_point").value_or(true);
    scheme.zeros_field =
        f.get("zero_point") != nullptr ? f.says("zero_point") : scheme.claims.front().field;
    transformers_list("modules_to_not_convert");
  } else if (out.method == "shunt") {
    f.expect("format", {"dense3", "sparse_nvfp4"});
    const Json* const format = f.get("format");
    if (format == nullptr) f.refuse("format", nullptr, "\"dense3\" or \"sparse_nvfp4\"");
    out.own = format_from_string(format->get<std::string>());
    scheme.claims.push_back({f.says("format"), {out.own.format}});
    transformers_list("modules_to_not_convert");
  } else if (out.method == "mxfp4") {
    means({Format::mxfp4});
    transformers_list("modules_to_not_convert");
  } else {
    fail(Status::unsupported,
         "{}: quant_method is {}: not read; fp8, fbgemm_fp8, mxfp8, compressed-tensors, modelopt, "
         "mxfp4, gptq, awq, auto-round, quark and shunt are",
         where, shown(Json(out.method)));
  }
  if (out.schemes.empty()) out.schemes.push_back(std::move(scheme));
  for (const QuantisedScheme& each : out.schemes) {
    if (!each.strategy.empty()) out.blocks = out.blocks.value_or(false) || each.strategy == "block";
  }
  return out;
}

QuantisedConfig read_quantised_beside(const std::string& where, const std::string& text) {
  const Json object = parse_object(where, text);
  const Json* const nested = child(object, "quantization");
  const Json& body = nested != nullptr ? *nested : object;
  if (cache_alone(body)) return {};
  QuantisedConfig out = read_quantised(where, object);
  out.holder = nested != nullptr ? "hf_quant_config.json: quantization" : "hf_quant_config.json";
  return out;
}

}  // namespace shunt
