// ActivationSpec: JSON, and in words.
#include <fmt/core.h>

#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "core/json.hpp"
#include "shunt/activate.hpp"

namespace shunt {
namespace {

const std::vector<std::string_view> kinds = {"identity", "relu",      "relu2", "silu",
                                             "gelu",     "gelu_tanh", "situ"};
const std::vector<std::string_view> sides = {"input", "output"};

std::string_view name(const std::vector<std::string_view>& names, int index) {
  return index >= 0 && index < static_cast<int>(names.size())
             ? names[static_cast<std::size_t>(index)]
             : "?";
}

}  // namespace

std::string to_json(const ActivationSpec& spec) {
  return SpecWriter()
      .add("kind", name(kinds, static_cast<int>(spec.kind)))
      .add("gated", spec.gated)
      .add("alpha", spec.alpha)
      .add("limit", spec.limit)
      .add("limit_on", name(sides, static_cast<int>(spec.limit_on)))
      .add("up_offset", spec.up_offset)
      .add("beta", spec.beta)
      .add("linear_beta", spec.linear_beta)
      .text();
}

ActivationSpec activation_spec_from_json(const std::string& text) {
  SpecReader reader("ActivationSpec", text);
  ActivationSpec spec;
  reader.read("kind", spec.kind, kinds);
  reader.read("gated", spec.gated);
  reader.read("alpha", spec.alpha);
  reader.read("limit", spec.limit);
  reader.read("limit_on", spec.limit_on, sides);
  reader.read("up_offset", spec.up_offset);
  reader.read("beta", spec.beta);
  reader.read("linear_beta", spec.linear_beta);
  reader.finish();
  if (const Support support = supports(spec, Device{}); !support) {
    fail(Status::invalid_argument, "ActivationSpec: {}", support.reason);
  }
  return spec;
}

std::string describe(const ActivationSpec& spec) {
  static const std::vector<std::string_view> gated = {
      "GLU without activation", "ReGLU",   "ReLU^2 GLU", "SwiGLU", "GeGLU (erf)",
      "GeGLU (tanh)",           "SiTU-GLU"};
  static const std::vector<std::string_view> plain = {"identity",   "ReLU",        "ReLU^2", "SiLU",
                                                      "GELU (erf)", "GELU (tanh)", "SiTU"};
  std::string text;
  if (spec.limit > 0) text += "clamped ";
  text += name(spec.gated ? gated : plain, static_cast<int>(spec.kind));
  std::string details;
  const auto add = [&](const std::string& detail) {
    details += (details.empty() ? "" : ", ") + detail;
  };
  if (spec.alpha != 1) add(fmt::format("alpha {}", spec.alpha));
  if (spec.limit > 0) {
    add(fmt::format("limit {} on the {}", spec.limit,
                    spec.limit_on == LimitOn::input ? "input" : "output"));
  }
  if (spec.up_offset != 0) add(fmt::format("up {:+}", spec.up_offset));
  if (spec.kind == Activation::situ) add(fmt::format("beta {}", spec.beta));
  if (spec.linear_beta != 0) add(fmt::format("linear beta {}", spec.linear_beta));
  return details.empty() ? text : fmt::format("{} ({})", text, details);
}

}  // namespace shunt
