// What quantization_config says of packed tensors, held to them.
#include <algorithm>

#include "checkpoint/quantised.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "core/shape.hpp"

namespace shunt {

namespace {

// Why tensors of a module are not what fields say; empty: they are.
std::string against(const std::vector<QuantisedClaim>& claims, const std::string& module,
                    Format format) {
  for (const QuantisedClaim& claim : claims) {
    if (std::find(claim.formats.begin(), claim.formats.end(), format) != claim.formats.end()) {
      continue;
    }
    std::string list;
    for (const Format legal : claim.formats) {
      list += (list.empty() ? "" : " or ") + to_string(FormatSpec{legal});
    }
    if (claim.unread) {
      return fmt::format("{}: not read for experts, and tensors of '{}' are {}", claim.field,
                         clean(module), to_string(FormatSpec{format}));
    }
    return fmt::format("{}: tensors of '{}' must be {}, and are {}", claim.field, clean(module),
                       list.empty() ? "plain" : list, to_string(FormatSpec{format}));
  }
  return {};
}

}  // namespace

std::vector<const QuantisedScheme*> QuantisedConfig::schemes_of(const std::string& module) const {
  // Names go before classes, which say "perhaps" of any; where no list names it, any may be meant.
  std::vector<const QuantisedScheme*> result;
  Listed best = Listed::no;
  for (const QuantisedScheme& scheme : schemes) {
    const Listed here = scheme.targets.empty() || schemes.size() == 1 ? Listed::perhaps
                                                                      : scheme.targets.find(module);
    if (here < best) continue;
    if (here > best) result.clear();
    best = here;
    result.push_back(&scheme);
  }
  return result;
}

void QuantisedReader::check_listed(const std::string& module, bool packed) const {
  if (config_.method.empty()) return;
  std::string by;
  const bool named = config_.named.find(module) == Listed::yes;
  const Listed excluded = named ? Listed::no : config_.excluded.find(module, &by);
  if (packed && excluded == Listed::yes) {
    fail(Status::bad_file, "{}: tensors of '{}' are packed: {}.{} leaves it plain, by '{}'",
         store_.folder(), clean(module), config_.holder, config_.list, clean(by));
  }
  if (!packed && config_.layers.contains(module)) {
    fail(Status::bad_file, "{}: tensors of '{}' are plain: {}.quantized_layers names it",
         store_.folder(), clean(module), config_.holder);
  }
  if (packed && config_.method == "compressed-tensors" && !config_.targets.empty() &&
      config_.targets.find(module) == Listed::no) {
    fail(Status::bad_file, "{}: tensors of '{}' are packed: no targets of {}.config_groups name it",
         store_.folder(), clean(module), config_.holder);
  }
  const Listed meant = config_.targets.empty() ? Listed::yes : config_.targets.find(module);
  if (!packed && excluded == Listed::no && meant == Listed::yes) {
    fail(Status::bad_file,
         "{}: tensors of '{}' are plain: {}.{} does not name it, so that method {} packs it",
         store_.folder(), clean(module), config_.holder, config_.list, config_.method);
  }
}

// Why a strategy cannot be that of scales of 8 bits; empty: it can. Of fewer bits, shapes tell.
std::string QuantisedReader::other_scales(const QuantisedScheme& scheme, const std::string& module,
                                          const PackedMatrix& m) const {
  const Format format = m.format.format;
  const std::string name = module + ".weight_scale";
  if (scheme.strategy.empty() || !store_.contains(name)) return {};
  if (format != Format::int8 && format != Format::fp8_tensor && format != Format::fp8_channel &&
      format != Format::fp8_block) {
    return {};
  }
  std::int64_t wanted = 1;
  if (scheme.strategy == "channel") wanted = m.n;
  if (scheme.strategy == "block") wanted = groups_of(m.n, 128) * groups_of(m.k, 128);
  if (scheme.strategy == "group") {
    if (scheme.groups.empty()) return {};
    const int size = scheme.groups.back();
    wanted = m.n * (size == -1 ? 1 : groups_of(m.k, size));
  }
  const std::int64_t count = tensor(name).elements();
  if (count == wanted) return {};
  return fmt::format("{}: tensor '{}' must hold {} numbers, and holds {}", scheme.strategy_field,
                     clean(name), wanted, count);
}

// Why this scheme cannot be that of the matrix; empty: it can.
std::string QuantisedReader::contradiction(const QuantisedScheme& scheme, const std::string& module,
                                           const PackedMatrix& m) const {
  if (auto why = against(scheme.claims, module, m.format.format); !why.empty()) return why;
  if (auto why = other_scales(scheme, module, m); !why.empty()) return why;
  const bool gptq_names = store_.contains(module + ".qweight");
  const std::string zeros = module + (gptq_names ? ".qzeros" : ".weight_zero_point");
  if (scheme.zeros == true && !store_.contains(zeros)) {
    return fmt::format("{}: '{}' must be there, and is not", scheme.zeros_field, clean(zeros));
  }
  if (scheme.zeros == false && m.zeros) {
    return fmt::format("{}: zero points of '{}' must all be 8, and are not", scheme.zeros_field,
                       clean(zeros));
  }
  const std::string order = module + (gptq_names ? ".g_idx" : ".weight_g_idx");
  // Of one group there is no order.
  const bool grouped = m.format.format == Format::int4 && m.k > m.format.group;
  if (scheme.order && grouped && !store_.contains(order)) {
    return fmt::format("{}: '{}' must be there, and is not", scheme.order_field, clean(order));
  }
  return {};
}

// Throws where quantization_config says otherwise of a packed matrix.
void QuantisedReader::check_described(const std::string& module, const PackedMatrix& m) const {
  if (config_.named.find(module) != Listed::yes && config_.excluded.find(module) == Listed::yes) {
    return;
  }
  std::string why;
  if (const auto layer = config_.layers.find(module); layer != config_.layers.end()) {
    why = against(layer->second, module, m.format.format);
  } else if (module.find(".experts.") != std::string::npos) {
    why = against(config_.experts, module, m.format.format);
  }
  if (why.empty()) {
    for (const QuantisedScheme* const scheme : config_.schemes_of(module)) {
      std::string here = contradiction(*scheme, module, m);
      if (here.empty()) return;
      if (why.empty()) why = std::move(here);
    }
  }
  if (!why.empty()) fail(Status::bad_file, "{}", why);
}

// compressed-tensors' word on what is packed: [n, k].
void QuantisedReader::check_weight_shape(const std::string& base, std::int64_t n,
                                         std::int64_t k) const {
  const std::string name = base + ".weight_shape";
  if (!store_.contains(name)) return;
  const Tensor t = tensor(name);
  if ((t.dtype != DType::i64 && t.dtype != DType::i32) || t.elements() != 2) {
    mismatch(name, "i64 or i32 [2]");
  }
  const auto size = [&](int i) {
    return t.dtype == DType::i64 ? t.as<const std::int64_t>()[i]
                                 : std::int64_t{t.as<const std::int32_t>()[i]};
  };
  if (size(0) == n && size(1) == k) return;
  fail(Status::bad_file, "{}: tensor '{}' holds [{}, {}]: must hold [{}, {}]", store_.file_of(name),
       clean(name), size(0), size(1), n, k);
}

}  // namespace shunt
