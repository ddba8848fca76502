// How a packed matrix is written into a checkpoint: which tensors, under which names, and what
// config.json says of them.
//
//   fp8_block               weight F8_E4M3 [N, K], weight_scale_inv F32 [N / 128, K / 128], rounded
//                           up: DeepSeek-V3 (quant_method fp8)
//   fp8_tensor, fp8_channel weight F8_E4M3, weight_scale F32 [1] or [N, 1]
//   mxfp8                   weight F8_E4M3, weight_scale U8 [N, K / 32]
//   int8                    weight I8, weight_scale F32 [N, 1]
//   nvfp4                   weight_packed U8 [N, K / 2], weight_scale F8_E4M3 [N, K / 16],
//                           weight_global_scale F32 [1], which divides
//   mxfp4                   weight_packed U8 [N, K / 2], weight_scale U8 [N, K / 32]
//   int4                    weight_packed I32 [N, K / 8], weight_scale [N, K / group],
//                           weight_shape I64 [2]; what was INT4 may keep more: scales that are
//                           F16 or F32, weight_zero_point I32 [N / 8, K / group], eight n to a
//                           word, weight_g_idx I32 [K]
//                           all of these as compressed-tensors 0.12 and newer name them
//   dense3, sparse_nvfp4    Shunt's own (quant_method shunt): weight_packed U8, weight_scale and
//                           weight_positions as PackedMatrix has them, weight_scale_2 F32 [1], the
//                           global scale, which multiplies
//
// nvfp4 is written as ModelOpt names it (weight U8, weight_scale, weight_scale_2 F32, which
// multiplies; quant_method modelopt) where a global scale that is kept is the reciprocal of no f32.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "convert/shard_writer.hpp"
#include "shunt/format.hpp"

namespace shunt {

// Whether a global scale that multiplies is the reciprocal of an f32: of its own, then, for no
// other comes nearer.
bool has_divisor(float scale);

// One tensor of a packed matrix, beside "<expert>.<projection>.".
struct DialectTensor {
  PlannedTensor plan;               // its name is the last part: "weight_scale"
  std::vector<std::uint8_t> bytes;  // empty where only the plan was asked for
};

// What config.json says once and holds for every matrix.
struct Dialect {
  FormatSpec format{};
  bool zeros = false;       // int4: every matrix has zero points, of which some are not 8
  bool ordered = false;     // int4: every matrix has an order of activations
  bool multiplies = false;  // nvfp4: the global scale does, as ModelOpt has it
  // Makes room for what a matrix has that is to be kept as it is.
  void add(const PackedMatrix& kept);
};

// The tensors of a matrix [n, k], without their bytes. `scales`: the dtype of int4's.
std::vector<PlannedTensor> dialect_plan(const Dialect& dialect, std::int64_t n, std::int64_t k,
                                        DType scales = DType::bf16);
// The same, of a matrix of the dialect's format, with them.
std::vector<DialectTensor> dialect_tensors(const Dialect& dialect, const PackedMatrix& matrix);

// quantization_config of config.json. `ignore`: modules with a matrix that stays what it was.
nlohmann::ordered_json dialect_config(const Dialect& dialect,
                                      const std::vector<std::string>& ignore);
// Says in it how the cache of keys and values is stored: kv_cache_scheme, as compressed-tensors and
// ModelOpt have it.
void set_cache_scheme(nlohmann::ordered_json& config, nlohmann::ordered_json scheme);

}  // namespace shunt
