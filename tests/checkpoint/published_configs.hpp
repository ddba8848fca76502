// What published config.json files say about experts, and the specs that they must become.
#pragma once

#include <vector>

#include "shunt/layer.hpp"

namespace shunt::test {

struct Published {
  const char* name;
  const char* config;  // the fields about experts of the published config.json
  int layer;           // one with experts
  int moe_layers;      // how many there are
  LayerSpec expected;
};

std::vector<Published> published_configs();

}  // namespace shunt::test
