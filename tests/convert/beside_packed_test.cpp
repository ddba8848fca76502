// What lies beside a checkpoint's packed experts: attention and shared experts become plain, the
// cache's scales and scheme stay.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "convert/packed_checkpoint.hpp"
#include "convert/values.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// An fp8 model's attention and shared expert: plain in the new checkpoint, which says so.
TEST(BesidePackedExperts, WhatIsPackedBesideTheExpertsBecomesPlain) {
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
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to("nvfp4"));
  EXPECT_EQ(report.unpacked_modules, 1);
  EXPECT_EQ(report.unpacked_dtype, DType::bf16);

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

  // It has to be finite as well.
  const TemporaryFolder bad;
  const std::string nan =
      changed(bad, in, attention + "weight", [](char* bytes, std::size_t) { bytes[137] = 0x7f; });
  EXPECT_EQ(error_of([&] { convert_checkpoint(cpu(), nan, bad / "out", to("nvfp4")); }),
            nan + ": model.layers.0.self_attn.q_proj: weight [1, 1] is nan: must be finite");
}

// Scales of the cache of keys and values lie beside attention's weights and are none of them.
TEST(BesidePackedExperts, ScalesOfTheCacheStay) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", layer = "model.layers.0.";
  fs::create_directory(in);
  const SafetensorsFile file = SafetensorsFile::open(quantised + "/fp8_tensor/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.get(name));
  const std::vector<float> numbers = {0.5F, 0.25F, 0.125F, 2, 3, 4};
  const std::vector<std::string> scales = {"q_proj.q_scale", "k_proj.k_scale",
                                           "v_proj.v_scale", "k_proj.output_scale",
                                           "k_scale",        "v_scale"};
  for (const std::string module : {"q_proj", "k_proj", "v_proj"}) {
    const std::string attention = layer + "self_attn." + module + ".";
    for (const char* part : {"weight", "weight_scale"}) {
      tensors.emplace_back(attention + part, file.get(layer + "mlp.experts.1.up_proj." + part));
    }
    tensors.emplace_back(attention + "input_scale", view(numbers.data(), {1}));
  }
  for (std::size_t i = 0; i < scales.size(); ++i) {
    tensors.emplace_back(layer + "self_attn." + scales[i], view(&numbers[i], {1}));
  }
  write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
  fs::copy_file(quantised + "/fp8_tensor/config.json", in + "/config.json");
  for (const char* format : {"bf16", "nvfp4", "fp8_tensor"}) {
    SCOPED_TRACE(format);
    convert_checkpoint(cpu(), in, folder / format, to(format));
    const SafetensorsFile made = SafetensorsFile::open((folder / format) + "/model.safetensors");
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const std::string name = layer + "self_attn." + scales[i];
      ASSERT_TRUE(made.contains(name)) << name;
      EXPECT_EQ(values_of(made.get(name)), std::vector<float>{numbers[i]}) << name;
    }
    for (const char* module : {"q_proj", "k_proj", "v_proj"}) {
      EXPECT_EQ(made.get(layer + "self_attn." + module + ".weight").dtype, DType::bf16);
      for (const char* part : {".weight_scale", ".input_scale"}) {
        EXPECT_FALSE(made.contains(layer + "self_attn." + module + part));
      }
    }
  }
}

// How the cache is stored stays where there is a method to say it, and is named where there is not.
TEST(BesidePackedExperts, TheSchemeOfTheCacheStaysOrIsNamed) {
  const Json modelopt = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  Json compressed = modelopt;
  compressed["strategy"] = "tensor";
  compressed["symmetric"] = true;
  Json by_head = compressed;
  by_head["strategy"] = "attn_head";
  struct Case {
    const char* name;
    Json fields;  // of quantization_config
    std::vector<std::string> named;
    Json scheme;  // in compressed-tensors
    std::vector<std::string> unread;
  };
  const std::string of_config = " of config.json";
  for (const Case& c :
       std::vector<Case>{{"fp8_tensor",
                          {{"kv_cache_scheme", modelopt}, {"kv_cache_quant_algo", "FP8"}},
                          {"kv_cache_quant_algo" + of_config, "kv_cache_scheme" + of_config},
                          compressed,
                          {}},
                         {"fp8_tensor",
                          {{"kv_cache_quant_algo", "FP8"}},
                          {"kv_cache_quant_algo" + of_config},
                          compressed,
                          {}},
                         {"fp8_tensor",
                          {{"kv_cache_quant_algo", "NVFP4"}},
                          {"kv_cache_quant_algo" + of_config},
                          nullptr,
                          {"kv_cache_quant_algo" + of_config}},
                         {"nvfp4_compressed",
                          {{"kv_cache_scheme", by_head}},
                          {"kv_cache_scheme" + of_config},
                          by_head,
                          {}},
                         {"nvfp4_compressed", {{"kv_cache_scheme", nullptr}}, {}, nullptr, {}}}) {
    SCOPED_TRACE(std::string(c.name) + c.fields.dump());
    const TemporaryFolder folder;
    const std::string in = folder / "in";
    fs::create_directory(in);
    fs::copy_file(quantised + "/" + c.name + "/model.safetensors", in + "/model.safetensors");
    Json config = Json::parse(read_file(quantised + "/" + c.name + "/config.json"));
    config["quantization_config"].update(c.fields);
    write_file(in + "/config.json", config.dump());
    EXPECT_EQ(convert_checkpoint(cpu(), in, folder / "plain", to("bf16")).left_out, c.named);
    for (const char* format : {"int8", "fp8_block"}) {
      const ConversionReport report = convert_checkpoint(cpu(), in, folder / format, to(format));
      EXPECT_EQ(report.left_out, c.unread);
      const Json made = Json::parse(read_file((folder / format) + "/config.json"));
      const bool own = format == std::string("fp8_block");
      const Json& method = made["quantization_config"];
      const Json given = c.scheme == compressed && own ? modelopt : c.scheme;
      EXPECT_EQ(method.value("kv_cache_scheme", Json()), given);
      EXPECT_EQ(Checkpoint::open(folder / format).layers().size(), 1U);
    }
  }

  // A method of the cache alone packs nothing: a plain checkpoint keeps it, and not the file
  // beside.
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/model.safetensors", in + "/model.safetensors");
  Json config = Json::parse(read_file(golden("qwen3_moe") + "/config.json"));
  write_file(in + "/config.json", config.dump());
  write_file(in + "/hf_quant_config.json",
             R"({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}})");
  EXPECT_EQ(convert_checkpoint(cpu(), in, folder / "beside", to("f16")).left_out,
            std::vector<std::string>{"kv_cache_quant_algo of hf_quant_config.json"});
  convert_checkpoint(cpu(), in, folder / "beside_nvfp4", to("nvfp4"));
  config["quantization_config"] = {{"quant_method", "modelopt"}, {"kv_cache_scheme", modelopt}};
  write_file(in + "/config.json", config.dump());
  EXPECT_TRUE(convert_checkpoint(cpu(), in, folder / "f16", to("f16")).left_out.empty());
  convert_checkpoint(cpu(), in, folder / "nvfp4", to("nvfp4"));
  const auto method_in = [&](const char* made) {
    return Json::parse(read_file((folder / made) + "/config.json"))["quantization_config"];
  };
  EXPECT_EQ(method_in("f16"), config["quantization_config"]);
  EXPECT_EQ(method_in("nvfp4")["kv_cache_scheme"], compressed);
  EXPECT_EQ(method_in("beside_nvfp4")["kv_cache_scheme"], compressed);
}

// Attention that is packed as the experts are, in every dialect.
TEST(BesidePackedExperts, AttentionOfEveryDialectBecomesPlain) {
  for (const char* name : {"gptq", "gptq_v2", "awq", "int4", "int4_zeros", "int4_channel", "int8",
                           "int8_packed", "nvfp4_compressed", "nvfp4_modelopt", "mxfp8"}) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const std::string in = folder / "in";
    fs::create_directory(in);
    fs::copy_file(quantised + "/" + name + "/config.json", in + "/config.json");
    const SafetensorsFile file =
        SafetensorsFile::open(quantised + "/" + name + "/model.safetensors");
    std::vector<std::pair<std::string, Tensor>> tensors;
    const std::string layer = "model.layers.0.", expert = layer + "mlp.experts.1.";
    for (const std::string& tensor : file.names()) {
      tensors.emplace_back(tensor, file.get(tensor));
      for (const auto& [from, to_name] :
           {std::pair("up_proj.", "self_attn.q_proj."), {"down_proj.", "self_attn.o_proj."}}) {
        if (!tensor.starts_with(expert + from)) continue;
        tensors.emplace_back(layer + to_name + tensor.substr((expert + from).size()),
                             file.get(tensor));
      }
    }
    write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
    convert_checkpoint(cpu(), in, folder / "out", to("f32"));
    const SafetensorsFile made = SafetensorsFile::open(folder / "out/model.safetensors");
    for (const auto& [attention, wanted] :
         {std::pair("self_attn.q_proj.weight", "mlp.experts.1.up_proj.weight"),
          {"self_attn.o_proj.weight", "mlp.experts.1.down_proj.weight"}}) {
      ASSERT_TRUE(made.contains(layer + attention));
      EXPECT_EQ(values_of(made.get(layer + attention)), values_of(made.get(layer + wanted)));
    }
    for (const std::string& tensor : made.names()) {
      if (tensor.find("self_attn") != std::string::npos) {
        EXPECT_TRUE(tensor.ends_with("_proj.weight")) << tensor;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
