// One expert's matrices pruned and rounded to a format, and what that cost.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "prune/calibration.hpp"
#include "prune/prune.hpp"
#include "shunt/format.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// What experts become.
struct ConversionSpec {
  FormatSpec format{};        // plain: `dtype`
  DType dtype = DType::bf16;  // f32 | bf16 | f16; of a plain format
  bool prune = false;         // to 2:4; in pairs, nvfp4 and sparse_nvfp4 have a scale for 32
  PruneSpec pruning{};
  bool operator==(const ConversionSpec&) const = default;
};
// Whether a matrix is in the format already, so that its codes and scales stay what they are: not
// where it is to be pruned, and not with a zero point of 16, which GPTQ has and no other dialect.
// int4 with one group a row is int4 of any group that takes the row, and fp8_tensor of one block
// is fp8_block.
bool keeps(const ConversionSpec& spec, const PackedMatrix& matrix);
// Throws Error{invalid_argument} for pruning to a format that does not hold what is pruned, which
// is 0; it names those that do.
void check_prunable(const ConversionSpec& spec);
std::string to_string(const ConversionSpec& spec);  // "nvfp4", "bf16, 2:4 by wanda"
// "f32", "bf16", "f16" or a format's name. Throws Error{invalid_argument} naming what there is.
ConversionSpec conversion_from_string(const std::string& text);
// Scales included, of a large matrix. What pruning alone leaves out of a format is still stored.
double bits_per_weight(const ConversionSpec& spec);

// Sums over the weights of one or more matrices.
struct WeightError {
  double difference = 0;  // sum of (w - w')^2
  double magnitude = 0;   // sum of w^2
  void add(const WeightError& other);
  // ||w - w'|| / ||w||; 0 for zeros that stayed.
  double relative() const;
};

// Throws Error{invalid_argument} naming the first number of a matrix [n, k] that is not finite.
void check_finite(const Tensor& matrix);

enum class ExpertMatrix : std::int32_t { gate = 0, up = 1, down = 2 };
inline constexpr int expert_matrices = 3;
const char* to_string(ExpertMatrix matrix);

// One matrix [n, k] of an expert, converted; it owns its memory.
struct ConvertedMatrix {
  std::int64_t n = 0, k = 0;
  std::vector<float> values;  // [n, k]: what the stored bytes mean, exactly in f32
  Buffer memory;
  PackedMatrix packed{};  // in `memory`; not of a plain format
  WeightError error{};
  PruneMethod pruned_by = PruneMethod::magnitude;  // what was done, where pruning was asked for
  Tensor view() const { return shunt::view(values.data(), {n, k}); }
};

struct ConvertedExpert {
  std::array<ConvertedMatrix, expert_matrices> matrices;  // gate is empty where there is none
  std::int64_t tokens = -1;  // that calibration routed to it; -1: not calibrated
};

// Whether a matrix was pruned by magnitude where `spec` asks for another method, for want of
// inputs.
bool fell_back(const ConversionSpec& spec, const ConvertedMatrix& matrix);

// `weights` are those of the layer, plain or packed on the host. wanda and obs need `calibration`.
// What spec `keeps` is copied, each matrix with its own global scale. Otherwise gate and up share
// the global scale of a format that has one, as those who serve checkpoints want it. obs prunes
// `down` by the activations of gate and up as they have become. Throws Error for weights that are
// not finite, or are not any more, by their place: "expert 3, gate: ..".
ConvertedExpert convert_expert(const Context& context, const ConversionSpec& spec,
                               const LayerSpec& layer, const LayerWeights& weights, int expert,
                               const LayerCalibration* calibration = nullptr);

}  // namespace shunt
