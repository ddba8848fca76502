// quantization_config of GPTQ, of AutoRound, which packs as it or AWQ does, and of Quark.
#include "checkpoint/quantised_fields.hpp"

namespace shunt {
namespace {

// What one object of GPTQ says.
void read_gptq_fields(const Fields& f, QuantisedScheme& to) {
  f.claim("bits", {{4, {Format::int4}}}, to.claims);
  if (f.get("group_size") != nullptr) to.groups.clear();
  f.add_group("group_size", to);
  if (const std::optional<bool> symmetric = f.flag("sym")) {
    to.zeros = !*symmetric;
    to.zeros_field = f.says("sym");
  }
  if (const std::optional<bool> ordered = f.flag("desc_act")) {
    to.order = *ordered;
    to.order_field = f.says("desc_act");
  }
}

// Of fnmatch's [..].
std::string regex_of_glob(const std::string& glob) {
  std::string regex = "re:";
  bool in_set = false;
  for (std::size_t i = 0; i < glob.size(); ++i) {
    const char c = glob[i];
    if (in_set) {
      regex += c == '!' && glob[i - 1] == '[' ? '^' : c;
      in_set = c != ']';
    } else if (c == '*' || c == '?') {
      regex += c == '*' ? ".*" : ".";
    } else {
      if (std::string_view(".+(){}|^$\\").find(c) != std::string_view::npos) regex += '\\';
      regex += c;
      in_set = c == '[';
    }
  }
  return regex + "$";
}

// A list's entry as Quark reads it: "re:REGEX", or fnmatch of a whole name; of what holds other
// modules, tensors tell.
void add_quark(ModuleList& to, const std::string& where, const std::string& name) {
  const bool regex = name.starts_with("re:");
  const bool sets = !regex && name.find('[') != std::string::npos;
  try {
    to.add(regex || sets ? ListSyntax::compressed : ListSyntax::globs,
           sets ? regex_of_glob(name) : name);
  } catch (const Error& error) {
    fail(Status::unsupported, "{}: {}", where, error.what());
  }
}

// What `weight` of one of Quark's objects says; false: that it is plain.
bool read_quark_weight(const Fields& f, QuantisedScheme& to) {
  const Json* const weight = f.get("weight");
  if (weight == nullptr || weight->is_null()) return false;
  // NVFP4 has its codes and its scales apart.
  const bool two = weight->is_array() && weight->size() == 2;
  const Json& codes = two ? (*weight)[0] : *weight;
  const auto is = [&](const char* key, const Json& value) {
    const Json* const there = codes.is_object() ? child(codes, key) : nullptr;
    return there != nullptr && *there == value;
  };
  const Json* const axis = codes.is_object() ? child(codes, "ch_axis") : nullptr;
  const bool by_row = is("qscheme", "per_channel") &&
                      (axis == nullptr || axis->is_null() || *axis == 0 || *axis == -2);
  Formats formats;  // none: of other layers than the experts it may be anything
  if (two) {
    if (is("dtype", "fp4") && is("group_size", 16)) formats = {Format::nvfp4};
  } else if (is("dtype", "fp4") && is("group_size", 32) && is("scale_format", "e8m0")) {
    formats = {Format::mxfp4};
  } else if (is("dtype", "fp8_e4m3") && is("qscheme", "per_tensor")) {
    formats = {Format::fp8_tensor};
  } else if (is("dtype", "fp8_e4m3") && by_row) {
    formats = {Format::fp8_channel, Format::fp8_tensor};  // of one row they are the same
  } else if (is("dtype", "int8") && is("symmetric", true) &&
             (by_row || is("qscheme", "per_tensor"))) {
    formats = {Format::int8};
  }
  to.claims.push_back({f.says("weight"), formats, formats.empty()});
  return true;
}

}  // namespace

// GPTQModel's `dynamic`: "-:REGEX" leaves modules plain, "+:REGEX" or REGEX gives them other
// settings. `modules_in_block_to_quantize`: nothing else is packed.
void read_gptq(const Fields& f, QuantisedScheme base, QuantisedConfig& out) {
  // GPTQModel calls it `format`; checkpoint_format is its older word, and others' only one.
  const Json *const format = f.get("format"), *const older = f.get("checkpoint_format");
  for (const char* field : {"checkpoint_format", "format"}) f.expect(field, {"gptq", "gptq_v2"});
  if (format != nullptr && older != nullptr && *format != *older) {
    f.refuse("format", *format, older->dump() + ", as checkpoint_format is");
  }
  f.expect("is_marlin_format", {false});
  const Json* const said = older != nullptr ? older : format;
  out.next_zero = said == nullptr || *said == "gptq";
  read_gptq_fields(f, base);
  if (const Json* dynamic = f.get("dynamic")) {
    if (!dynamic->is_object()) f.refuse("dynamic", *dynamic, "an object");
    if (!dynamic->empty()) out.list = "dynamic";
    for (const auto& item : dynamic->items()) {
      const bool plain = item.key().starts_with("-:");
      const bool marked = plain || item.key().starts_with("+:");
      if (!plain && !item.value().is_object()) continue;
      ModuleList modules;
      try {
        (plain ? out.excluded : modules)
            .add(ListSyntax::compressed, "re:" + item.key().substr(marked ? 2 : 0));
      } catch (const Error& error) {
        fail(Status::unsupported, "{}: dynamic: {}", f.where(), error.what());
      }
      if (plain) continue;
      QuantisedScheme scheme = base;
      scheme.targets = std::move(modules);
      read_gptq_fields(
          Fields(fmt::format("{}.dynamic.{}", f.where(), clean(item.key())), item.value()), scheme);
      out.schemes.push_back(std::move(scheme));
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
  out.schemes.push_back(std::move(base));
}

// AutoRound packs as GPTQ or AWQ do, its own packing as GPTQ with zero points as they are; before
// 0.5 `backend` says which. `extra_config`: NAME or REGEX, and other settings; 16 bits are plain.
// Blocks that are named: nothing else is packed.
void read_auto_round(const Fields& f, QuantisedScheme base, QuantisedConfig& out) {
  const char* const field = f.get("packing_format") != nullptr ? "packing_format" : "backend";
  const Json packing = f.get(field) != nullptr ? *f.get(field) : Json("auto");
  const auto one_of = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), packing) != names.end();
  };
  const bool awq = one_of({"auto_round:auto_awq", "auto_round:awq", "auto_round:awq:gemm"});
  const bool own = one_of({"auto_round", "auto_round:gptqmodel", "auto_round:exllamav2",
                           "auto_round:triton", "auto_round:tritonv2"});
  if (!awq && !own &&
      !one_of({"auto", "auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2",
               "auto_round:gptq:triton"})) {
    f.refuse(field, packing,
             "\"auto_round:auto_gptq\", \"auto_round:gptq\", \"auto_round:auto_awq\", "
             "\"auto_round:awq\", \"auto_round:gptqmodel\" or \"auto_round\"");
  }
  out.method = awq ? "awq" : "gptq";  // what tensors are called, and how they lie
  out.next_zero = !awq && !own;
  f.expect("data_type", {"int"});
  for (const char* bits : {"act_bits", "super_bits"}) f.expect(bits, {16});
  read_gptq_fields(f, base);
  if (!base.zeros) {  // its own default
    base.zeros = false;
    base.zeros_field = base.claims.front().field;
  }
  if (const Json* extra = f.get("extra_config")) {
    if (!extra->is_object()) f.refuse("extra_config", *extra, "an object");
    if (!extra->empty()) out.list = "extra_config";
    for (const auto& item : extra->items()) {
      const std::string where = fmt::format("{}.extra_config.{}", f.where(), clean(item.key()));
      if (!item.value().is_object()) f.refuse("extra_config", *extra, "objects by name");
      const Fields one(where, item.value());
      const Json* const bits = one.get("bits");
      const bool plain = bits != nullptr && bits->is_number_integer() && *bits >= 16;
      const bool regex = item.key().find_first_of("*+?^$()[]{}|\\") != std::string::npos;
      ModuleList modules;
      try {
        (plain ? out.excluded : modules)
            .add(regex ? ListSyntax::compressed : ListSyntax::transformers,
                 regex ? "re:.*(" + item.key() + ").*" : item.key());
      } catch (const Error& error) {
        fail(Status::unsupported, "{}: {}", where, error.what());
      }
      if (plain) continue;
      // A name goes before every expression.
      if (!regex) out.named.add(ListSyntax::transformers, item.key());
      QuantisedScheme scheme = base;
      scheme.targets = std::move(modules);
      if (bits != nullptr && *bits != 4) {
        // Of other layers than the experts it may be anything.
        scheme.claims.push_back({one.says("bits"), {}, true});
      } else {
        read_gptq_fields(one, scheme);
      }
      out.schemes.push_back(std::move(scheme));
    }
  }
  for (const char* list : {"block_name_to_quantize", "to_quant_block_names"}) {
    const Json* const blocks = f.get(list);
    if (blocks == nullptr) continue;
    std::string all;
    for (const Json& some : blocks->is_array() ? *blocks : Json::array({*blocks})) {
      for (const Json& name : some.is_array() ? some : Json::array({some})) {
        if (!name.is_string()) f.refuse(list, *blocks, "names of blocks");
        all += name.get<std::string>() + ",";
      }
    }
    std::erase(all, ' ');
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t end = all.find(',', at);
      if (end > at) out.targets.add(ListSyntax::transformers, all.substr(at, end - at));
      at = end + 1;
    }
  }
  out.schemes.push_back(std::move(base));
}

// What Quark did beside rounding: all but this is in the weights.
void check_quark_algorithms(const Fields& f) {
  const Json* const algorithms = f.get("algo_config");
  if (algorithms == nullptr) return;
  for (const Json& one : algorithms->is_array() ? *algorithms : Json::array({*algorithms})) {
    if (one.is_null() || (one.is_object() && one.empty())) continue;
    const Json* const name = one.is_object() ? child(one, "name") : nullptr;
    const auto named = [&](std::initializer_list<const char*> names) {
      return name != nullptr && std::find(names.begin(), names.end(), *name) != names.end();
    };
    if (!named({"awq", "autosmoothquant", "gptaq", "gptq", "qronos", "quarot", "rotation",
                "smooth"})) {
      f.refuse("algo_config", one,
               "awq, autosmoothquant, gptaq, gptq, qronos, quarot, rotation or smooth");
    }
    if (named({"quarot", "rotation"})) {  // of the experts' rows
      const Fields rotation(f.where() + ".algo_config", one);
      for (const char* online : {"r4", "online_r1_rotation"}) rotation.expect(online, {false});
    }
  }
}

// `global_quant_config`, and `layer_quant_config` by glob; `exclude` stays plain.
void read_quark(const Fields& f, QuantisedConfig& out) {
  if (const Json* const exported = f.get("export"); exported != nullptr && !exported->is_null()) {
    if (!exported->is_object()) f.refuse("export", *exported, "an object");
    Fields(f.where() + ".export", *exported).expect("weight_format", {"real_quantized"});
  }
  f.expect_empty("layer_type_quant_config");
  check_quark_algorithms(f);
  const Json* const global = f.get("global_quant_config");
  if (global == nullptr || !global->is_object()) {
    f.refuse("global_quant_config", global == nullptr ? Json() : *global, "an object");
  }
  out.list = "exclude";
  if (const Json* const names = f.get("exclude"); names != nullptr && !names->is_null()) {
    if (!names->is_array()) f.refuse("exclude", *names, "a list of names");
    for (const Json& name : *names) {
      if (!name.is_string()) f.refuse("exclude", *names, "a list of names");
      add_quark(out.excluded, f.where() + ": exclude", name.get_ref<const std::string&>());
    }
  }
  QuantisedScheme all;
  const bool packs = read_quark_weight(Fields(f.where() + ".global_quant_config", *global), all);
  bool any = packs;
  if (const Json* const layers = f.get("layer_quant_config");
      layers != nullptr && !layers->is_null()) {
    if (!layers->is_object()) f.refuse("layer_quant_config", *layers, "an object");
    for (const auto& item : layers->items()) {
      const std::string where =
          fmt::format("{}.layer_quant_config.{}", f.where(), clean(item.key()));
      if (!item.value().is_object()) f.refuse("layer_quant_config", *layers, "objects by name");
      QuantisedScheme scheme;
      add_quark(scheme.targets, where, item.key());
      if (!read_quark_weight(Fields(where, item.value()), scheme)) {
        add_quark(out.excluded, where, item.key());
        continue;
      }
      if (!packs) add_quark(out.targets, where, item.key());
      out.schemes.push_back(std::move(scheme));
      any = true;
    }
  }
  if (!any) fail(Status::unsupported, "{}: nothing has a weight that is packed", f.where());
  if (packs || out.schemes.empty()) out.schemes.push_back(std::move(all));
}

}  // namespace shunt
