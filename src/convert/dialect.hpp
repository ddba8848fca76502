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
//                           weight_shape I64 [2]
//                           all of these as compressed-tensors 0.12 and newer name them
//   dense3, sparse_nvfp4    Shunt's own (quant_method shunt): weight_packed U8, weight_scale and
//                           weight_positions as PackedMatrix has them, weight_scale_2 F32 [1], the
//                           global scale, which multiplies
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "convert/shard_writer.hpp"
#include "shunt/format.hpp"

namespace shunt {

// One tensor of a packed matrix, beside "<expert>.<projection>.".
struct DialectTensor {
  PlannedTensor plan;               // its name is the last part: "weight_scale"
  std::vector<std::uint8_t> bytes;  // empty where only the plan was asked for
};

// The tensors of a matrix [n, k] in `format`, without their bytes.
std::vector<PlannedTensor> dialect_plan(const FormatSpec& format, std::int64_t n, std::int64_t k);
// The same, of a matrix, with them.
std::vector<DialectTensor> dialect_tensors(const PackedMatrix& matrix);

// quantization_config of config.json. `ignore`: modules with a matrix that stays what it was.
nlohmann::ordered_json dialect_config(const FormatSpec& format,
                                      const std::vector<std::string>& ignore);

}  // namespace shunt
