// shunt convert: in how much memory, which its checkpoints have many times over.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "process.hpp"
#include "sanitizer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Tensors = std::vector<std::pair<std::string, Tensor>>;

// What a process has that converts next to nothing, 2 MB, and room. With one thread: the stack of
// another is 8 MB.
constexpr std::int64_t process_bytes = 8 << 20;
// Of an expert: its weights twice in f32, packed, and as they are written.
constexpr std::int64_t work_bytes(std::int64_t weights) { return 10 * weights; }

// bf16 of 2^-7 to 2^-5, of both signs; as codes of any kind as good as others.
std::vector<std::uint16_t> drawn(std::int64_t count) {
  std::vector<std::uint16_t> numbers(static_cast<std::size_t>(count));
  std::uint32_t random = 1;
  for (std::uint16_t& number : numbers) {
    random = random * 1664525 + 1013904223;
    number = static_cast<std::uint16_t>(0x3C00 + (random >> 16 & 0x80FF));
  }
  return numbers;
}

std::string write_model(const Folder& folder, const Json& config, const Tensors& tensors) {
  const std::string in = folder.path("in");
  fs::create_directory(in);
  write_text(in + "/config.json", config.dump());
  write_safetensors(in + "/model.safetensors", tensors, {});
  return in;
}

// Plain experts, which all have the same numbers.
std::string plain_model(const Folder& folder, std::int64_t hidden, std::int64_t inner,
                        int experts) {
  const std::vector<std::uint16_t> numbers = drawn(hidden * std::max<std::int64_t>(inner, experts));
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    return view(numbers.data(), DType::bf16, {rows, columns});
  };
  const std::string module = "model.layers.0.block_sparse_moe.";
  Tensors tensors = {{module + "gate.weight", matrix(experts, hidden)}};
  for (int e = 0; e < experts; ++e) {
    const std::string expert = module + "experts." + std::to_string(e) + ".";
    tensors.emplace_back(expert + "w1.weight", matrix(inner, hidden));
    tensors.emplace_back(expert + "w3.weight", matrix(inner, hidden));
    tensors.emplace_back(expert + "w2.weight", matrix(hidden, inner));
  }
  return write_model(folder,
                     {{"model_type", "mixtral"},
                      {"hidden_size", hidden},
                      {"intermediate_size", inner},
                      {"num_local_experts", experts},
                      {"num_experts_per_tok", 2},
                      {"num_hidden_layers", 1},
                      {"hidden_act", "silu"}},
                     tensors);
}

class ConvertMemory : public ::testing::Test {
  void SetUp() override {
    if (SHUNT_SANITIZED) GTEST_SKIP() << "what a sanitizer maps for itself is memory too";
  }
};

// However many a layer has: 6 MB each in f32, of 100 MB in bf16.
TEST_F(ConvertMemory, IsThatOfOneExpert) {
  constexpr std::int64_t hidden = 512, inner = 1024;
  const Folder folder;
  const std::string in = plain_model(folder, hidden, inner, 32);
  for (const char* format : {"nvfp4", "fp8_block"}) {
    const std::vector<std::string> command = {"convert",   in, folder.path(format), "--to", format,
                                              "--threads", "2"};
    const Outcome outcome = shunt(command, {.environment = {}, .data_limit = 64 << 20});
    EXPECT_EQ(outcome.code, 0) << format << ": " << outcome.err;
  }
}

// obs also takes sums of products of all inputs of gate and up, and of down, in double, and for
// the inverse of one of the two as much twice more; wanda none of it.
TEST_F(ConvertMemory, OfCalibration) {
  constexpr std::int64_t hidden = 1280, inner = 64, tokens = 64;
  const Folder folder;
  const std::string in = plain_model(folder, hidden, inner, 2), states = folder.path("states");
  const std::vector<std::uint16_t> numbers = drawn(tokens * hidden);
  write_safetensors(states,
                    {{"layers.0.input", view(numbers.data(), DType::bf16, {tokens, hidden})}});
  // Gate and up once more, as they are multiplied, and the rows that meet them.
  constexpr std::int64_t calibration = 4 * (2 * inner * hidden + tokens * (hidden + 4 * inner)),
                         square = 8 * hidden * hidden;
  constexpr std::int64_t limit = process_bytes + work_bytes(3 * hidden * inner) + calibration;
  static_assert(limit < square, "or obs's sums would fit unseen");
  for (const auto& [method, bytes] : {std::pair<const char*, std::int64_t>{"wanda", limit},
                                      {"obs", limit + 3 * square + 8 * inner * inner}}) {
    const Outcome outcome =
        shunt({"convert", in, folder.path(method), "--to", "sparse_nvfp4", "--prune", "2:4",
               "--method", method, "--calibrate", states, "--threads", "1"},
              {.environment = {}, .data_limit = bytes});
    EXPECT_EQ(outcome.code, 0) << method << ": " << outcome.err;
  }
}

// Two layers of packed experts whose bytes a conversion puts in order: one at a time.
class PackedSource {
 public:
  static constexpr std::int64_t hidden = 256, inner = 512, group = 128, experts = 96;
  static constexpr int layers = 2;
  static constexpr std::int64_t weights = 3 * hidden * inner;  // of an expert

  // GPTQ's tensors, or AWQ's.
  std::string of_int4(const Folder& folder, bool awq) {
    Tensors tensors;
    for (int l = 0; l < layers; ++l) {
      const std::string module = "model.layers." + std::to_string(l) + ".mlp.";
      tensors.emplace_back(module + "gate.weight",
                           of(numbers_.data(), DType::bf16, {experts, hidden}));
      for (int e = 0; e < experts; ++e) {
        const std::string expert = module + "experts." + std::to_string(e) + ".";
        add_int4(tensors, expert + "gate_proj.", inner, hidden, awq);
        add_int4(tensors, expert + "up_proj.", inner, hidden, awq);
        add_int4(tensors, expert + "down_proj.", hidden, inner, awq);
      }
    }
    Json method = {{"quant_method", awq ? "awq" : "gptq"}, {"bits", 4}, {"group_size", group}};
    if (awq) {
      method["zero_point"] = true;
      method["version"] = "gemm";
    } else {
      method["sym"] = false;
      method["desc_act"] = true;
    }
    return write_model(folder,
                       {{"model_type", "qwen3_moe"},
                        {"hidden_size", hidden},
                        {"moe_intermediate_size", inner},
                        {"num_experts", experts},
                        {"num_experts_per_tok", 1},
                        {"num_hidden_layers", layers},
                        {"norm_topk_prob", true},
                        {"hidden_act", "silu"},
                        {"quantization_config", method}},
                       tensors);
  }
  // Codes, a scale of 16 bits and a zero point for a group, and a group for each k.
  static constexpr std::int64_t int4_layer =
      experts * (weights / 2 + 3 * weights / group + 4 * (2 * hidden + inner));

  std::string of_gpt_oss(const Folder& folder) {
    const std::vector<std::uint16_t> zeros(experts * 2 * inner);
    const std::vector<std::uint8_t> scales(experts * 2 * inner * hidden / 32, 120);
    Tensors tensors;
    for (int l = 0; l < layers; ++l) {
      const std::string module = "model.layers." + std::to_string(l) + ".mlp.",
                        gate_up = module + "experts.gate_up_proj_",
                        down = module + "experts.down_proj_";
      const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
        tensors.emplace_back(name + "blocks",
                             of(codes_.data(), DType::u8, {experts, rows, columns / 32, 16}));
        tensors.emplace_back(name + "scales",
                             of(scales.data(), DType::u8, {experts, rows, columns / 32}));
        tensors.emplace_back(name + "bias", of(zeros.data(), DType::bf16, {experts, rows}));
      };
      tensors.emplace_back(module + "router.weight",
                           of(numbers_.data(), DType::bf16, {experts, hidden}));
      tensors.emplace_back(module + "router.bias", of(zeros.data(), DType::bf16, {experts}));
      add(gate_up, 2 * inner, hidden);
      add(down, hidden, inner);
    }
    return write_model(folder,
                       {{"model_type", "gpt_oss"},
                        {"hidden_size", hidden},
                        {"intermediate_size", inner},
                        {"num_local_experts", experts},
                        {"num_experts_per_tok", 1},
                        {"num_hidden_layers", layers},
                        {"hidden_act", "silu"},
                        {"swiglu_limit", 7.0},
                        {"quantization_config", {{"quant_method", "mxfp4"}}}},
                       tensors);
  }
  // Rows of gate and up take turns; down is as it lies.
  static constexpr std::int64_t gpt_oss_layer = experts * (weights / 3 * 2) * 17 / 32;

 private:
  static Tensor of(const void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return view(data, dtype, shape);
  }
  void add_int4(Tensors& tensors, const std::string& module, std::int64_t n, std::int64_t k,
                bool awq) const {
    const std::int64_t groups = k / group;
    tensors.emplace_back(module + "qweight", awq ? of(codes_.data(), DType::i32, {k, n / 8})
                                                 : of(codes_.data(), DType::i32, {k / 8, n}));
    tensors.emplace_back(module + "qzeros", of(codes_.data(), DType::i32, {groups, n / 8}));
    tensors.emplace_back(module + "scales", of(scales_.data(), DType::f16, {groups, n}));
    if (!awq) tensors.emplace_back(module + "g_idx", of(group_of_.data(), DType::i32, {k}));
  }

  const std::vector<std::uint16_t> numbers_ = drawn(experts * hidden);
  const std::vector<std::uint16_t> codes_ = drawn(experts * 2 * inner * hidden / 4);
  const std::vector<std::uint16_t> scales_ =
      std::vector<std::uint16_t>(hidden * inner / group, f32_to_f16(0.01F));
  const std::vector<std::int32_t> group_of_ = [] {
    std::vector<std::int32_t> all;
    for (std::int32_t i = 0; i < inner; ++i) all.push_back(i / static_cast<std::int32_t>(group));
    return all;
  }();
};

void expect_one_layer(const Folder& folder, const std::string& in, std::int64_t layer) {
  const std::int64_t limit = process_bytes + work_bytes(PackedSource::weights) + layer;
  ASSERT_GT(2 * layer, limit) << "or two layers would fit unseen";
  const Outcome outcome =
      shunt({"convert", in, folder.path("out"), "--to", "int8", "--threads", "1"},
            {.environment = {}, .data_limit = limit});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST_F(ConvertMemory, IsThatOfALayerInGptqsOrder) {
  const Folder folder;
  expect_one_layer(folder, PackedSource().of_int4(folder, false), PackedSource::int4_layer);
}
TEST_F(ConvertMemory, IsThatOfALayerInAwqsOrder) {
  const Folder folder;
  expect_one_layer(folder, PackedSource().of_int4(folder, true), PackedSource::int4_layer);
}
TEST_F(ConvertMemory, IsThatOfALayerInGptOsssOrder) {
  const Folder folder;
  expect_one_layer(folder, PackedSource().of_gpt_oss(folder), PackedSource::gpt_oss_layer);
}

}  // namespace
}  // namespace shunt::test
