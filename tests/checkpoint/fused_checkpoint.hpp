// Checkpoints whose experts are one packed tensor, for tests: every shape of scales that is
// published, and the weights by the formula.
#pragma once

#include <cmath>
#include <list>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "format/codes.hpp"
#include "shunt/format.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test::fused {

inline constexpr std::int64_t experts = 3;

// One of the two tensors, and its scales.
struct Part {
  std::int64_t rows = 0, k = 0;
  std::vector<std::uint8_t> values;  // [E, rows, k] e4m3, or e2m1 two to a byte
  std::vector<float> scales;
  std::vector<std::uint8_t> scale_bytes;  // e4m3 of nvfp4, e8m0 of mxfp8
  float second = 1;
};

struct Form {
  const char* name;
  Format format;
  const char* scales;  // what follows the tensor's name
  std::int64_t intermediate;
  bool transposed;  // [E, k, rows], as Llama 4 and Qwen3-VL are published
  // Shape of the scales for a part of `rows`, and which of them is that of a weight.
  std::vector<std::int64_t> (*shape)(std::int64_t rows, std::int64_t k);
  std::int64_t (*at)(std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows,
                     std::int64_t width);
  // Inkling 2's names; rows of gate and up take turns, and a global scale is amax / denominator.
  bool inkling = false;
  bool exponents = false;  // scales of fp8 are e8m0
};

inline std::int64_t up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline std::vector<std::int64_t> block_shape(std::int64_t rows, std::int64_t k) {
  return {experts, up(rows, 128), up(k, 128)};
}
inline std::int64_t block_at(std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows,
                             std::int64_t width) {
  return (e * up(rows, 128) + row / 128) * up(width, 128) + k / 128;
}

inline const Form forms[] = {
    {"blocks", Format::fp8_block, "_scale_inv", 128, false, block_shape, block_at},
    {"blocks_transposed", Format::fp8_block, "_scale_inv", 128, true,
     [](std::int64_t rows, std::int64_t k) {
       return std::vector<std::int64_t>{experts, up(k, 128), up(rows, 128)};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * up(width, 128) + k / 128) * up(rows, 128) + row / 128;
     }},
    {"one_block_of_gate_and_up", Format::fp8_block, "_scale_inv", 24, false, block_shape, block_at},
    {"a_number_an_expert", Format::fp8_tensor, "_scale_inv", 24, false,
     [](std::int64_t, std::int64_t) {
       return std::vector<std::int64_t>{experts, 1, 1};
     },
     [](std::int64_t e, std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return e; }},
    {"one_number", Format::fp8_tensor, "_weight_scale", 24, true,
     [](std::int64_t, std::int64_t) { return std::vector<std::int64_t>{}; },
     [](std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
       return std::int64_t{0};
     }},
    {"a_number_for_gate_and_one_for_up", Format::fp8_tensor, "_weight_scale", 24, false,
     [](std::int64_t rows, std::int64_t) {
       return rows == 48 ? std::vector<std::int64_t>{experts, 2}
                         : std::vector<std::int64_t>{experts};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t, std::int64_t rows, std::int64_t) {
       return rows == 48 ? 2 * e + row / 24 : e;
     }},
    {"blocks_of_gate_and_then_of_up", Format::fp8_block, "_scale_inv", 24, false,
     [](std::int64_t, std::int64_t k) {
       return std::vector<std::int64_t>{experts, 2, up(k, 128)};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * 2 + row / (rows == 48 ? 24 : 128)) * up(width, 128) + k / 128;
     }},
    {"channels_transposed", Format::fp8_channel, "_scale", 24, true,
     [](std::int64_t rows, std::int64_t k) {
       // Llama 4 has [E, 1, rows] of one tensor and [E, rows, 1] of the other.
       return k == 136 ? std::vector<std::int64_t>{experts, 1, rows}
                       : std::vector<std::int64_t>{experts, rows, 1};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t, std::int64_t rows, std::int64_t) {
       return e * rows + row;
     }},
    {"mxfp8", Format::mxfp8, "_scale_inv", 32, false,
     [](std::int64_t rows, std::int64_t k) {
       return std::vector<std::int64_t>{experts, rows, up(k, 32)};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * rows + row) * up(width, 32) + k / 32;
     }},
    {"nvfp4_transposed", Format::nvfp4, "_weight_scale", 32, true,
     [](std::int64_t rows, std::int64_t k) {
       return std::vector<std::int64_t>{experts, up(k, 16), rows};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * up(width, 16) + k / 16) * rows + row;
     }},
    {"inkling_2_mxfp8", Format::mxfp8, "_scale", 32, false,
     [](std::int64_t rows, std::int64_t k) {
       return std::vector<std::int64_t>{experts, rows, up(k, 32)};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * rows + row) * up(width, 32) + k / 32;
     },
     true},
    {"inkling_2_loop_nvfp4", Format::nvfp4, "_scale", 32, false,
     [](std::int64_t rows, std::int64_t k) {
       return std::vector<std::int64_t>{experts, rows, up(k, 16)};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t k, std::int64_t rows, std::int64_t width) {
       return (e * rows + row) * up(width, 16) + k / 16;
     },
     true},
    {"interleaved_channels", Format::fp8_channel, "_scale", 24, false,
     [](std::int64_t rows, std::int64_t) {
       return std::vector<std::int64_t>{experts, rows};
     },
     [](std::int64_t e, std::int64_t row, std::int64_t, std::int64_t rows, std::int64_t) {
       return e * rows + row;
     },
     true},
    {"blocks_of_exponents", Format::fp8_block, "_scale_inv", 128, false, block_shape, block_at,
     false, true},
};

// What every Qwen3 of this size says.
inline nlohmann::json fused_config(const Form& form, std::int64_t hidden) {
  nlohmann::json config = {
      {"model_type", form.transposed ? "qwen3_vl_moe_text" : "qwen3_moe"},
      {"hidden_size", hidden},
      {"moe_intermediate_size", form.intermediate},
      {"num_experts_per_tok", 1},
      {"num_hidden_layers", 1},
      {"hidden_act", "silu"},
      {"quantization_config",
       form.format == Format::nvfp4
           ? nlohmann::json{{"quant_method", "modelopt"}, {"ignore", {"lm_head"}}}
           : nlohmann::json{
                 {"quant_method", form.inkling && form.format == Format::mxfp8 ? "mxfp8" : "fp8"},
                 {"modules_to_not_convert", {"lm_head"}}}}};
  if (form.inkling) {
    config.update({{"model_type", "inkling2_text"}, {"n_routed_experts", experts}});
  } else {
    config.update({{"num_experts", experts},
                   {"norm_topk_prob", true},
                   {"decoder_sparse_step", 1},
                   {"mlp_only_layers", nlohmann::json::array()},
                   {"intermediate_size", 128}});
  }
  return config;
}

// Writes a checkpoint of a form; the weights of gate_up and down in f32 are returned, [E, rows, k].
class FusedCheckpoint {
 public:
  FusedCheckpoint(const Form& form, const std::string& folder, std::int64_t hidden = 136)
      : form_(form), hidden_(hidden), random_(7) {
    write_file(folder + "/config.json", fused_config(form, hidden_).dump());
    const std::string base = form.inkling ? "model.llm.layers.0.mlp." : "model.layers.0.mlp.";
    const std::vector<float> router(static_cast<std::size_t>(experts * hidden_), 0.5F);
    tensors_.emplace_back(base + "gate.weight", view(router.data(), {experts, hidden_}));
    if (form.inkling) tensors_.emplace_back(base + "gate.bias", view(router.data(), {experts}));
    gate_up = add(base + (form.inkling ? "experts.w13_weight" : "experts.gate_up_proj"),
                  2 * form.intermediate, hidden_);
    down = add(base + (form.inkling ? "experts.w2_weight" : "experts.down_proj"), hidden_,
               form.intermediate);
    write_safetensors(folder + "/model.safetensors", tensors_, {{"format", "pt"}});
  }
  std::vector<float> gate_up, down;

 private:
  std::vector<float> add(const std::string& name, std::int64_t rows, std::int64_t k) {
    const bool nibbles = form_.format == Format::nvfp4;
    const std::int64_t width = nibbles ? k / 2 : k;
    const auto value = [&](std::int64_t e, std::int64_t row, std::int64_t i) {
      return static_cast<std::size_t>(form_.transposed ? (e * width + i) * rows + row
                                                       : (e * rows + row) * width + i);
    };
    auto& bytes = bytes_.emplace_back(static_cast<std::size_t>(experts * rows * width));
    for (auto& byte : bytes) {
      do {
        byte = static_cast<std::uint8_t>(random_());
      } while (!nibbles && (byte & 0x7f) == 0x7f);
    }
    const std::vector<std::int64_t> shape = form_.shape(rows, k);
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    auto& numbers = numbers_.emplace_back();
    auto& codes = bytes_.emplace_back();
    std::vector<float> scale;
    for (std::int64_t i = 0; i < count; ++i) {
      numbers.push_back(0.01F + 0.001F * static_cast<float>(random_() % 100));
      codes.push_back(
          static_cast<std::uint8_t>(nibbles ? 0x30 + random_() % 32 : 120 + random_() % 10));
      scale.push_back(nibbles                                            ? e4m3_to_f32(codes.back())
                      : form_.format == Format::mxfp8 || form_.exponents ? e8m0_to_f32(codes.back())
                                                                         : numbers.back());
    }
    const auto shaped = [&](const void* data, DType dtype) {
      Tensor t = view(data, dtype, {count});
      t.rank = static_cast<int>(shape.size());
      std::int64_t stride = 1;
      for (int d = t.rank - 1; d >= 0; --d) {
        const auto at = static_cast<std::size_t>(d);
        t.shape[at] = shape[at];
        t.strides[at] = stride;
        stride *= shape[at];
      }
      return t;
    };
    const DType dtype = nibbles ? DType::u8 : DType::f8_e4m3;
    tensors_.emplace_back(
        name, form_.transposed
                  ? view(static_cast<const void*>(bytes.data()), dtype, {experts, width, rows})
                  : view(static_cast<const void*>(bytes.data()), dtype, {experts, rows, width}));
    tensors_.emplace_back(name + form_.scales,
                          nibbles                         ? shaped(codes.data(), DType::f8_e4m3)
                          : form_.format == Format::mxfp8 ? shaped(codes.data(), DType::u8)
                          : form_.exponents               ? shaped(codes.data(), DType::f8_e8m0)
                                                          : shaped(numbers.data(), DType::f32));
    if (nibbles && form_.inkling) {
      tensors_.emplace_back(name + "_amax", view(amax, {experts}));
      tensors_.emplace_back(name + "_outer_scale_denominator", view(&denominator, {1}));
    } else if (nibbles) {
      tensors_.emplace_back(name + "_weight_scale_2", view(&second, {1}));
    }
    std::vector<float> weights;
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < k; ++i) {
          const float factor = scale[static_cast<std::size_t>(form_.at(e, row, i, rows, k))];
          const std::uint8_t byte = bytes[value(e, row, nibbles ? i / 2 : i)];
          const auto nibble = static_cast<std::size_t>(i % 2 == 0 ? byte & 15 : byte >> 4);
          const double code =
              static_cast<double>(nibbles ? e2m1_values[nibble] : e4m3_to_f32(byte));
          const float global = !nibbles ? 1.0F : form_.inkling ? amax[e] / denominator : second;
          weights.push_back(
              static_cast<float>(code * static_cast<double>(factor) * static_cast<double>(global)));
        }
      }
    }
    return weights;
  }

  const Form& form_;
  std::int64_t hidden_;
  std::mt19937 random_;
  float second = 0.125F;
  float amax[experts] = {1.75F, 0.8125F, 3};  // not powers of two over the next
  float denominator = 2688;
  std::list<std::vector<std::uint8_t>> bytes_;
  std::list<std::vector<float>> numbers_;
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

}  // namespace shunt::test::fused
