// Hidden states that were recorded as they entered a checkpoint's MoE blocks, to calibrate by.
#pragma once

#include <map>
#include <string>

#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {

// Of one layer: views of the file.
struct RecordedLayer {
  Tensor hidden;       // [T, H] f32 | bf16 | f16, T > 0, finite
  Tensor token_ids{};  // [T] i32 | i64, of the vocabulary; iff routing is hashed
};

class RecordedInputs {
 public:
  // Finds what every MoE layer of `checkpoint` needs in a safetensors file: "<module>.input", as
  // `shunt eval --record` writes it, or "layers.<N>.input", and "token_ids" under the same name.
  // Throws Error{bad_file} naming the first tensor that is missing or not as RecordedLayer says,
  // and what supports_calibration() refuses.
  RecordedInputs(const std::string& path, const Checkpoint& checkpoint);

  const RecordedLayer& of(int layer) const { return layers_.at(layer); }

 private:
  SafetensorsFile file_;
  std::map<int, RecordedLayer> layers_;
};

}  // namespace shunt
