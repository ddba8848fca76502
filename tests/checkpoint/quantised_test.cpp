// Quantised checkpoints against what other packages decode (tests/data/make_quantised.py).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"

namespace shunt::test {
namespace {

const std::string folder = SHUNT_SOURCE_DIR "/tests/data/quantised";

struct Case {
  const char* name;
  FormatSpec format;
  bool zeros = false, order = false;
  bool rounds = false;  // the package rounds a quotient of scales, and then the product
};
const Case cases[] = {
    {"fp8_block", {Format::fp8_block}},
    {"fp8_block_bf16", {Format::fp8_block}},
    {"fp8_block_ue8m0", {Format::fp8_block}},
    {"fp8_channel", {Format::fp8_channel}},
    {"fp8_tensor", {Format::fp8_tensor}},
    {"mxfp8", {Format::mxfp8}},
    {"nvfp4_modelopt", {Format::nvfp4}},
    {"nvfp4_compressed", {Format::nvfp4}, false, false, true},
    {"mxfp4_gpt_oss", {Format::mxfp4}},
    {"mxfp4_deepseek_v4", {Format::mxfp4}},
    {"int4", {Format::int4, 32}},
    {"int4_zeros", {Format::int4, 32}, true},
    {"int4_channel", {Format::int4, 48}},
    {"int8", {Format::int8}},
    {"int8_packed", {Format::int8}},
    {"gptq", {Format::int4, 32}, true, true},
    {"gptq_v2", {Format::int4, 16}, true},
    {"awq", {Format::int4, 32}, true},
};

class Quantised : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Dialects, Quantised, testing::ValuesIn(cases),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(Quantised, DecodesAsItsOwnPackage) {
  const Case& c = GetParam();
  const std::string path = folder + "/" + c.name;
  const auto expected = SafetensorsFile::open(path + "/expected.safetensors");
  ExpertWeights experts;
  {
    const Checkpoint checkpoint = Checkpoint::open(path);
    experts = checkpoint.weights(0).experts;
    ASSERT_EQ(experts.packed_up.size(), 2U);
    for (int e = 0; e < 2; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const struct {
        const char* name;
        const PackedMatrix& matrix;
      } parts[] = {{"gate", experts.packed_gate[at]},
                   {"up", experts.packed_up[at]},
                   {"down", experts.packed_down[at]}};
      for (const auto& [name, matrix] : parts) {
        const std::string full = std::string(name) + "." + std::to_string(e);
        SCOPED_TRACE(full);
        check_packed(full, matrix, Device{});
        const bool last = std::string(name) == "down";
        // The whole row in one group: as wide as each matrix is.
        FormatSpec format = c.format;
        if (std::string(c.name) == "int4_channel" && last) format.group = 16;
        // A matrix of one block of 128 x 128 has one scale: the same numbers.
        if (format.format == Format::fp8_block && matrix.scales.elements() == 0) {
          format.format = Format::fp8_tensor;
        }
        EXPECT_EQ(to_string(matrix.format), to_string(format));
        EXPECT_EQ(static_cast<bool>(matrix.zeros), c.zeros);
        EXPECT_EQ(static_cast<bool>(matrix.group_of), c.order && !last);
        const std::vector<float> wanted = floats(expected.get(full));
        std::vector<float> got(wanted.size());
        unpack(matrix, view(got.data(), {matrix.n, matrix.k}));
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (c.rounds) {
            ASSERT_NEAR(got[i], wanted[i], 3e-7F * std::fabs(wanted[i])) << i;
          } else {
            ASSERT_EQ(got[i], wanted[i]) << i;
          }
        }
      }
      if (!experts.gate_bias.empty()) {
        EXPECT_EQ(floats(expected.get("up_bias." + std::to_string(e)))[3],
                  bf16_to_f32(
                      experts.up_bias[at].as<std::uint16_t>()[3 * experts.up_bias[at].strides[0]]));
        EXPECT_EQ(
            floats(expected.get("gate_bias." + std::to_string(e)))[3],
            bf16_to_f32(
                experts.gate_bias[at].as<std::uint16_t>()[3 * experts.gate_bias[at].strides[0]]));
      }
    }
    EXPECT_TRUE(experts.up.empty());
  }
}

// A copy of `name` whose config.json `change` has changed.
std::string changed(const TemporaryFolder& at, const char* name,
                    const std::function<void(nlohmann::json&)>& change) {
  const std::string from = folder + "/" + name;
  nlohmann::json config = nlohmann::json::parse(read_file(from + "/config.json"));
  change(config);
  write_file(at / "config.json", config.dump());
  write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
  return at.path();
}

TEST(QuantisedRefusals, ByName) {
  const struct {
    const char* name;
    const char* field;
    const char* value;
    const char* message;
  } bad[] = {
      {"gptq", "quant_method", "\"bitsandbytes\"", "quant_method is \"bitsandbytes\": not read"},
      {"gptq", "quant_method", "7", "quant_method is 7: must be"},
      {"gptq", "bits", "3", "bits is 3: must be 4"},
      {"gptq", "group_size", "24", "group_size is 24: must be -1 or a multiple of 16"},
      {"gptq", "group_size", "64", "scales' is f16 [2, 32]: must be 1 groups a row"},
      {"gptq", "checkpoint_format", "\"marlin\"", "checkpoint_format is \"marlin\""},
      {"awq", "version", "\"gemv\"", "version is \"gemv\""},
      {"fp8_block", "weight_block_size", "[64, 64]",
       "weight_block_size is [64,64]: must be [128,128]"},
      {"fp8_block", "fmt", "\"e5m2\"", "fmt is \"e5m2\""},
      {"nvfp4_modelopt", "quant_algo", "\"W4A8_AWQ\"", "quant_algo is \"W4A8_AWQ\""},
      {"int4", "format", "\"marlin-24\"", "format is \"marlin-24\""},
      {"int4", "transform_config", R"({"config_groups": {}})", "transform_config is"},
      {"int4", "sparsity_config", R"({"format": "sparse-24-bitmask"})", "sparsity_config is"},
  };
  for (const auto& b : bad) {
    SCOPED_TRACE(b.message);
    const TemporaryFolder at;
    const std::string message = error_of([&] {
      Checkpoint::open(changed(at, b.name, [&](nlohmann::json& config) {
        config["quantization_config"][b.field] = nlohmann::json::parse(b.value);
      })).weights(0);
    });
    EXPECT_NE(message.find(b.message), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

TEST(QuantisedRefusals, SizesThatDoNotFit) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const TemporaryFolder at;
    const std::string message = error_of([&] {
      Checkpoint::open(changed(at, c.name, [&](nlohmann::json& config) {
        for (const char* field : {"moe_intermediate_size", "intermediate_size"}) {
          if (config.contains(field)) config[field] = 160;
        }
      })).weights(0);
    });
    EXPECT_TRUE(message.find("must be") != std::string::npos ||
                message.find("asks for") != std::string::npos)
        << message;
  }
}

}  // namespace
}  // namespace shunt::test
