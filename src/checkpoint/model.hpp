// A config.json understood: which family, and its plan.
#pragma once

#include <string>

#include "checkpoint/family.hpp"
#include "checkpoint/quantised.hpp"

namespace shunt {

struct Model {
  const Family* family = nullptr;
  std::string name;  // the architecture
  Plan plan;
  QuantisedConfig quantised;

  bool moe(int layer) const;
  LayerSpec spec(int layer) const;  // throws Error{invalid_argument} for a layer without experts
};

// `where` begins every message: the path of the file.
Model read_model(const std::string& where, const std::string& text);

}  // namespace shunt
