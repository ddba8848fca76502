// Which matrices of experts lie in which tensors and files of a checkpoint.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/family.hpp"
#include "convert/expert.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {

// One matrix of an expert within a tensor of a file.
struct SourceMatrix {
  int layer = 0, expert = 0;
  ExpertMatrix which{};
  std::string tensor;
  Tensor view{};            // [n, k], strides as they are there
  std::int64_t offset = 0;  // elements from the tensor's beginning
};

struct SourceFile {
  std::string name;                    // within the folder
  std::vector<std::string> tensors;    // all of them, sorted
  std::vector<SourceMatrix> matrices;  // of tensors in it, by layer, expert and matrix
  std::int64_t bytes = 0;              // of the file
};

// Every file of the checkpoint, by name. Throws Error{unsupported} for experts that are packed.
std::vector<SourceFile> source_files(const Checkpoint& checkpoint);

// "model.layers.7.mlp.experts.3.gate_proj", by the family's naming of single experts. Empty: the
// family has none.
std::string expert_module(const Checkpoint& checkpoint, int layer, int expert, ExpertMatrix which);

}  // namespace shunt
