// Checkpoints and layers behind the handles of the C ABI.
#pragma once

#include <string>
#include <vector>

#include "shunt/checkpoint.hpp"
#include "shunt/layer.hpp"
#include "shunt/safetensors.hpp"

struct shunt_checkpoint {
  shunt::Checkpoint checkpoint;
  std::vector<std::string> tensor_names;  // held, so that pointers into them last
};
struct shunt_safetensors {
  shunt::SafetensorsFile file;
};
struct shunt_layer {
  shunt::Layer layer;
};
