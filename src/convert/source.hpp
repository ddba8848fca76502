// Which matrices of experts lie in which tensors and files of a checkpoint.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/family.hpp"
#include "convert/expert.hpp"
#include "convert/shard_writer.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {

// One matrix of an expert within a tensor of a file. Of a packed one it says where the matrix would
// stand were the checkpoint plain.
struct SourceMatrix {
  int layer = 0, expert = 0;
  ExpertMatrix which{};
  bool packed = false;
  std::string tensor;
  std::vector<std::int64_t> shape;  // of the plain tensor
  Tensor view{};                    // [n, k], strides as they are there; no data where it is packed
  std::int64_t offset = 0;          // elements from the tensor's beginning
  DType scales = DType::bf16;       // of int4: what those of the new matrix are stored as
};

// Another linear layer that is packed: [n, k].
struct PackedModule {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  std::int64_t n = 0, k = 0;
};

struct SourceFile {
  std::string name;                    // within the folder
  std::vector<std::string> tensors;    // all of them, sorted
  std::vector<std::string> experts;    // of these, what routed experts are made of
  std::vector<SourceMatrix> matrices;  // of tensors in it, by layer, expert and matrix
  std::vector<PackedModule> modules;   // whose codes lie in it
  std::vector<std::string> packed;     // tensors that packed modules are made of
  std::int64_t bytes = 0;              // of the file
  // Of the new file: the source's, and the format that readers ask for.
  ShardMetadata metadata;
};

// Every file of the checkpoint, by name. Throws Error{unsupported} for a packed tensor whose sizes
// are not known. `see`: is shown every packed matrix, while there is memory of its layer.
std::vector<SourceFile> source_files(
    const Checkpoint& checkpoint,
    const std::function<void(SourceMatrix&, const PackedMatrix&)>& see = nullptr);

// Says of every matrix that it becomes part of the family's tensors of all experts, each of them in
// the file that has its first matrix. The family must have such tensors.
void merge_experts(const Checkpoint& checkpoint, std::vector<SourceFile>& files);

// "model.layers.7.mlp.experts.3.gate_proj", by the family's naming of single experts
// (single_experts() of family.hpp).
std::string expert_module(const Checkpoint& checkpoint, int layer, int expert, ExpertMatrix which);

}  // namespace shunt
