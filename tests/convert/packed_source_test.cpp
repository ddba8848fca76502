// Packed checkpoints converted into other formats: what their weights mean is what is converted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/fused_checkpoint.hpp"
#include "checkpoint/temporary.hpp"
#include "convert/conversion.hpp"
#include "convert/values.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::string quantised = SHUNT_SOURCE_DIR "/tests/data/quantised";

ConversionOptions to(const std::string& format, bool prune = false) {
  ConversionOptions options{.spec = conversion_from_string(format), .calibrate = {}};
  options.spec.prune = prune;
  return options;
}

// Every matrix of layer 0: gate, up, down of each expert.
std::vector<std::vector<float>> all_values(const Checkpoint& checkpoint) {
  const ExpertWeights w = checkpoint.weights(0).experts;
  std::vector<std::vector<float>> result;
  for (std::size_t e = 0; e < std::max(w.up.size(), w.packed_up.size()); ++e) {
    result.push_back(values_of(w.gate, w.packed_gate, e));
    result.push_back(values_of(w.up, w.packed_up, e));
    result.push_back(values_of(w.down, w.packed_down, e));
  }
  return result;
}

double error_of_weights(const std::vector<float>& got, const std::vector<float>& wanted) {
  WeightError sum;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto was = static_cast<double>(wanted[i]), difference = was - static_cast<double>(got[i]);
    sum.difference += difference * difference;
    sum.magnitude += was * was;
  }
  return sum.relative();
}

void check_conversions(const std::string& in) {
  const Checkpoint source = Checkpoint::open(in);
  const std::vector<std::vector<float>> before = all_values(source);
  const TemporaryFolder folder;
  const ConversionReport plain = convert_checkpoint(cpu(), in, folder / "f32", to("f32"));
  EXPECT_EQ(plain.experts.size(), before.size() / 3);
  for (const ConvertedExpertReport& expert : plain.experts) {
    for (const WeightError& error : expert.errors) EXPECT_EQ(error.difference, 0);
  }
  const Checkpoint decoded = Checkpoint::open(folder / "f32");
  EXPECT_EQ(all_values(decoded), before);
  const Json config = Json::parse(read_file(folder / "f32/config.json"));
  EXPECT_FALSE(config.contains("quantization_config"));
  // Nothing of the packed form stays, and biases do.
  for (const std::string& name : decoded.tensor_names()) {
    EXPECT_TRUE(name.ends_with("weight") || name.ends_with("_proj") || name.ends_with("bias"))
        << name;
  }
  EXPECT_EQ(decoded.weights(0).experts.up_bias.size(), source.weights(0).experts.up_bias.size());

  const bool gpt_oss = source.family() == "gpt_oss";
  for (const bool prune : {false, true}) {
    const std::string format = gpt_oss ? "mxfp4" : prune ? "sparse_nvfp4" : "int4:16";
    const std::string out = folder / (format + (prune ? "_pruned" : ""));
    const ConversionReport report = convert_checkpoint(cpu(), in, out, to(format, prune));
    const Checkpoint after = Checkpoint::open(out);
    const std::vector<std::vector<float>> now = all_values(after);
    ASSERT_EQ(now.size(), before.size());
    for (std::size_t i = 0; i < now.size(); ++i) {
      // The error is over what the packed source means.
      EXPECT_NEAR(report.experts[i / 3].errors[i % 3].relative(),
                  error_of_weights(now[i], before[i]), 1e-6);
      if (!prune) continue;
      for (std::size_t k = 0; k < now[i].size(); k += 4) {
        ASSERT_LE(4 - std::count(now[i].begin() + static_cast<std::ptrdiff_t>(k),
                                 now[i].begin() + static_cast<std::ptrdiff_t>(k + 4), 0.0F),
                  2);
      }
    }
  }
}

TEST(ConvertPacked, EveryDialectBecomesEveryKind) {
  for (const auto& entry : fs::directory_iterator(quantised)) {
    SCOPED_TRACE(entry.path().filename().string());
    check_conversions(entry.path().string());
  }
}

TEST(ConvertPacked, ExpertsInOneTensor) {
  for (const fused::Form& form : fused::forms) {
    SCOPED_TRACE(form.name);
    const TemporaryFolder folder;
    const fused::FusedCheckpoint made(form, folder.path());
    check_conversions(folder.path());
  }
}

// What the source said of its own packing must not contradict the result.
TEST(ConvertPacked, WordsOfTheSourceAreForgotten) {
  const TemporaryFolder folder;
  const std::string deepseek = folder / "deepseek";
  convert_checkpoint(cpu(), quantised + "/mxfp4_deepseek_v4", deepseek, to("fp8_block"));
  EXPECT_FALSE(Json::parse(read_file(deepseek + "/config.json")).contains("expert_dtype"));
  EXPECT_FALSE(Checkpoint::open(deepseek).weights(0).experts.packed_up.empty());

  const std::string in = folder / "in", out = folder / "out";
  fs::create_directory(in);
  fs::copy_file(quantised + "/nvfp4_modelopt/model.safetensors", in + "/model.safetensors");
  Json config = Json::parse(read_file(quantised + "/nvfp4_modelopt/config.json"));
  config.erase("quantization_config");
  write_file(in + "/config.json", config.dump());
  write_file(in + "/hf_quant_config.json",
             R"({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*gate"]}})");
  convert_checkpoint(cpu(), in, out, to("mxfp8"));
  EXPECT_FALSE(fs::exists(out + "/hf_quant_config.json"));
  EXPECT_EQ(Checkpoint::open(out).weights(0).experts.packed_up[0].format.format, Format::mxfp8);
}

// An fp8 model's attention and shared expert: plain in the new checkpoint, which says so.
TEST(ConvertPacked, WhatIsPackedBesideTheExpertsBecomesPlain) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  fs::create_directory(in);
  fs::copy_file(quantised + "/fp8_block/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(quantised + "/fp8_block/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.get(name));
  const std::string expert = "model.layers.0.mlp.experts.0.up_proj.";
  const std::string attention = "model.layers.0.self_attn.q_proj.";
  for (const char* part : {"weight", "weight_scale_inv"}) {
    tensors.emplace_back(attention + part, file.get(expert + part));
  }
  const std::vector<float> norm(136, 1.0F);
  tensors.emplace_back("model.norm.weight", view(norm.data(), {136}));
  write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
  convert_checkpoint(cpu(), in, out, to("nvfp4"));

  const SafetensorsFile made = SafetensorsFile::open(out + "/model.safetensors");
  EXPECT_FALSE(made.contains(attention + "weight_scale_inv"));
  EXPECT_TRUE(made.contains("model.norm.weight"));
  const Tensor weight = made.get(attention + "weight");
  ASSERT_EQ(weight.describe(), "bf16 [24, 136]");
  const Checkpoint before = Checkpoint::open(in);
  const LayerWeights source = before.weights(0);
  std::vector<std::uint16_t> wanted(std::size_t{24} * 136);
  unpack(source.experts.packed_up[0], view(wanted.data(), DType::bf16, {24, 136}));
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), weight.as<const std::uint16_t>()));
  const Json config = Json::parse(read_file(out + "/config.json"));
  EXPECT_EQ(config["quantization_config"]["quant_method"], "compressed-tensors");
  const std::set<std::string> ignored(config["quantization_config"]["ignore"].begin(),
                                      config["quantization_config"]["ignore"].end());
  EXPECT_TRUE(ignored.contains("model.layers.0.self_attn.q_proj"));
  EXPECT_EQ(Checkpoint::open(out).weights(0).experts.packed_up[0].format.format, Format::nvfp4);
}

}  // namespace
}  // namespace shunt::test
