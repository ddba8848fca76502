// Packed checkpoints converted into other formats: what their weights mean is what is converted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/fused_checkpoint.hpp"
#include "convert/packed_checkpoint.hpp"
#include "convert/values.hpp"
#include "models.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/layer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

ConversionOptions maybe_pruned(const std::string& format, bool prune) {
  return prune ? pruned(format, PruneMethod::magnitude) : to(format);
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
    EXPECT_TRUE(name.ends_with("weight") || name.ends_with("_proj") || name.ends_with("bias") ||
                name.find(".gate.") != std::string::npos)
        << name;
  }
  EXPECT_EQ(decoded.weights(0).experts.up_bias.size(), source.weights(0).experts.up_bias.size());

  const bool gpt_oss = source.family() == "gpt_oss";
  for (const bool prune : {false, true}) {
    const std::string format = gpt_oss ? "mxfp4" : prune ? "sparse_nvfp4" : "int4:16";
    const std::string out = folder / (format + (prune ? "_pruned" : ""));
    const ConversionReport report = convert_checkpoint(cpu(), in, out, maybe_pruned(format, prune));
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

// Every packed matrix of layer 0: gate, up, down of each expert.
std::vector<PackedMatrix> all_packed(const LayerWeights& weights) {
  const ExpertWeights& w = weights.experts;
  std::vector<PackedMatrix> result;
  for (std::size_t e = 0; e < w.packed_up.size(); ++e) {
    result.insert(result.end(), {w.packed_gate[e], w.packed_up[e], w.packed_down[e]});
  }
  return result;
}

void expect_kept(const PackedMatrix& got, const PackedMatrix& wanted) {
  EXPECT_EQ(bytes_of(got.values), bytes_of(wanted.values));
  EXPECT_EQ(bytes_of(got.scales), bytes_of(wanted.scales));
  EXPECT_EQ(got.scales.dtype, wanted.scales.dtype);
  EXPECT_EQ(bytes_of(got.group_of), bytes_of(wanted.group_of));
  if (got.zeros && wanted.zeros) {
    EXPECT_EQ(bytes_of(got.zeros), bytes_of(wanted.zeros));
  }
  EXPECT_EQ(got.global_scale, wanted.global_scale);
  EXPECT_EQ(values_of(got), values_of(wanted));
}

// A checkpoint in the format that it has: codes, scales, zero points and order stay.
void check_kept(const std::string& in, const std::string& format) {
  const TemporaryFolder folder;
  const std::string out = folder / "out", again = folder / "again";
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to(format));
  for (const ConvertedExpertReport& expert : report.experts) {
    for (const WeightError& error : expert.errors) {
      EXPECT_EQ(error.difference, 0);
      EXPECT_GT(error.magnitude, 0);
    }
  }
  const Checkpoint before = Checkpoint::open(in), after = Checkpoint::open(out);
  const LayerWeights source = before.weights(0), made = after.weights(0);
  const std::vector<PackedMatrix> wanted = all_packed(source), got = all_packed(made);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(i);
    expect_kept(got[i], wanted[i]);
  }
  convert_checkpoint(cpu(), out, again, to(format));
  for (const char* file : {"/model.safetensors", "/config.json"}) {
    EXPECT_EQ(read_file(again + file), read_file(out + file));
  }
}

TEST(ConvertPacked, ItsOwnFormatIsKept) {
  for (const auto& entry : fs::directory_iterator(quantised)) {
    SCOPED_TRACE(entry.path().filename().string());
    const std::string in = entry.path().string();
    const Checkpoint source = Checkpoint::open(in);
    check_kept(in, to_string(source.weights(0).experts.packed_gate[0].format));
  }
}

TEST(ConvertPacked, ItsOwnFormatInOneTensorIsKept) {
  for (const fused::Form& form : fused::forms) {
    SCOPED_TRACE(form.name);
    const TemporaryFolder folder;
    const fused::FusedCheckpoint made(form, folder.path());
    const Checkpoint source = Checkpoint::open(folder.path());
    check_kept(folder.path(), to_string(source.weights(0).experts.packed_up[0].format));
  }
}

// Of what is written as it was read, not a byte of the tensors changes.
TEST(ConvertPacked, TheSameDialectKeepsItsTensors) {
  for (const char* name : {"int4", "int4_zeros", "mxfp4_gpt_oss"}) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const std::string in = quantised + "/" + name;
    const std::string format =
        to_string(Checkpoint::open(in).weights(0).experts.packed_up[0].format);
    convert_checkpoint(cpu(), in, folder / "out", to(format));
    const SafetensorsFile before = SafetensorsFile::open(in + "/model.safetensors"),
                          after = SafetensorsFile::open(folder / "out/model.safetensors");
    EXPECT_EQ(after.names(), before.names());
    for (const std::string& tensor : before.names()) {
      EXPECT_EQ(bytes_of(after.get(tensor)), bytes_of(before.get(tensor))) << tensor;
    }
  }
}

// What convert itself has made.
TEST(ConvertPacked, EveryFormatIsKeptAgain) {
  const std::string in = golden("qwen3_moe");
  for (const FormatSpec& format : known_formats()) {
    SCOPED_TRACE(to_string(format));
    const TemporaryFolder folder;
    convert_checkpoint(cpu(), in, folder / "out", to(to_string(format)));
    const ConversionReport report =
        convert_checkpoint(cpu(), folder / "out", folder / "again", to(to_string(format)));
    for (const ConvertedExpertReport& expert : report.experts) {
      for (const WeightError& error : expert.errors) EXPECT_EQ(error.difference, 0);
    }
    EXPECT_EQ(read_file(folder / "again/model.safetensors"),
              read_file(folder / "out/model.safetensors"));
  }
}

Json weights_of_config(const std::string& folder) {
  const Json config = Json::parse(read_file(folder + "/config.json"));
  return config["quantization_config"]["config_groups"]["group_0"]["weights"];
}

// What the new config.json says is true of every matrix.
TEST(ConvertPacked, ConfigSaysWhatIsKept) {
  struct Case {
    const char* name;
    const char* format;
    bool zeros, order;
  };
  for (const Case& c : {Case{"int4", "int4:32", false, false},
                        {"int4_zeros", "int4:32", true, false},
                        {"awq", "int4:32", true, false},
                        {"gptq_v2", "int4:16", true, false},
                        {"gptq", "int4:32", true, true},
                        {"gptq", "int4:16", false, false}}) {
    SCOPED_TRACE(std::string(c.name) + " to " + c.format);
    const TemporaryFolder folder;
    convert_checkpoint(cpu(), quantised + "/" + c.name, folder / "out", to(c.format));
    const Json weights = weights_of_config(folder / "out");
    EXPECT_EQ(weights["symmetric"], !c.zeros);
    EXPECT_EQ(weights.contains("actorder"), c.order);
    const SafetensorsFile file = SafetensorsFile::open(folder / "out/model.safetensors");
    for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string base = std::string("model.layers.0.mlp.experts.1.") + matrix;
      EXPECT_EQ(file.contains(base + ".weight_zero_point"), c.zeros);
      EXPECT_EQ(file.contains(base + ".weight_g_idx"), c.order);
    }
  }
}

// GPTQ's zero point of 16 has no place in four bits: that matrix is rounded again, and says so.
TEST(ConvertPacked, AZeroPointOf16IsRounded) {
  const TemporaryFolder folder;
  const std::string in =
      changed(folder, quantised + "/gptq", "model.layers.0.mlp.experts.1.up_proj.qzeros",
              [](char* bytes, std::size_t) { bytes[0] = '\xff'; });
  const ConversionReport report = convert_checkpoint(cpu(), in, folder / "out", to("int4:32"));
  const Checkpoint before = Checkpoint::open(in), after = Checkpoint::open(folder / "out");
  const std::vector<std::vector<float>> was = all_values(before), is = all_values(after);
  for (std::size_t i = 0; i < was.size(); ++i) {
    const double error = report.experts[i / 3].errors[i % 3].relative();
    EXPECT_EQ(error > 0, i == 4) << i;
    EXPECT_NEAR(error, error_of_weights(is[i], was[i]), 1e-6);
  }
  const LayerWeights made = after.weights(0);
  const PackedMatrix& rounded = made.experts.packed_up[1];
  EXPECT_TRUE(std::all_of(rounded.zeros.as<const std::uint8_t>(),
                          rounded.zeros.as<const std::uint8_t>() + rounded.zeros.elements(),
                          [](std::uint8_t zero) { return zero == 8; }));
}

// compressed-tensors divides: where a global scale is no reciprocal, all keep ModelOpt's form.
TEST(ConvertPacked, GlobalScalesAreKeptWhetherTheyHaveADivisorOrNot) {
  const auto has_divisor = [](float scale) {
    float divisor = 1 / scale;
    for (int i = 0; i < 8; ++i) divisor = std::nextafter(divisor, 0.0F);
    for (int i = 0; i < 16; ++i, divisor = std::nextafter(divisor, 1e9F)) {
      if (1 / divisor == scale) return true;
    }
    return false;
  };
  float none = 0x1.8p-13F;
  while (has_divisor(none)) none = std::nextafter(none, 1.0F);
  const std::string experts = "model.layers.0.mlp.experts.";
  for (const bool divides : {true, false}) {
    SCOPED_TRACE(divides);
    const TemporaryFolder folder;
    std::string in = quantised + "/nvfp4_compressed";
    if (!divides) {
      in = changed(folder, quantised + "/nvfp4_modelopt", experts + "1.up_proj.weight_scale_2",
                   [&](char* bytes, std::size_t) { std::memcpy(bytes, &none, sizeof none); });
    }
    check_kept(in, "nvfp4");
    convert_checkpoint(cpu(), in, folder / "out", to("nvfp4"));
    const SafetensorsFile file = SafetensorsFile::open(folder / "out/model.safetensors");
    const Json config = Json::parse(read_file(folder / "out/config.json"));
    EXPECT_EQ(config["quantization_config"]["quant_method"],
              divides ? "compressed-tensors" : "modelopt");
    EXPECT_EQ(file.contains(experts + "0.up_proj.weight_global_scale"), divides);
    EXPECT_EQ(file.contains(experts + "0.up_proj.weight_scale_2"), !divides);
  }
}

// Whatever the target, what is no number is refused by its place, and nothing is left.
TEST(ConvertPacked, WhatIsNotFiniteIsRefused) {
  const std::string module = "model.layers.0.mlp.experts.1.";
  struct Case {
    const char* name;
    std::string tensor;
    std::vector<unsigned char> bytes;  // its first
    const char* which;
  };
  const std::vector<unsigned char> nan = {0, 0, 0xc0, 0x7f}, infinity = {0, 0, 0x80, 0x7f};
  const Case bad[] = {
      {"fp8_block", module + "gate_proj.weight", {0x7f}, "gate"},
      {"fp8_block", module + "down_proj.weight_scale_inv", nan, "down"},
      {"fp8_block_ue8m0", module + "up_proj.weight_scale_inv", {0xff}, "up"},
      {"fp8_tensor", module + "up_proj.weight_scale", infinity, "up"},
      {"mxfp8", module + "up_proj.weight_scale_inv", {0xff}, "up"},
      {"nvfp4_modelopt", module + "gate_proj.weight_scale", {0xff}, "gate"},
      {"nvfp4_modelopt", module + "down_proj.weight_scale_2", nan, "down"},
      {"int8", module + "down_proj.weight_scale", {0x80, 0x7f}, "down"},
      {"gptq", module + "up_proj.scales", {0, 0x7e}, "up"},
      {"mxfp4_deepseek_v4", "model.layers.0.ffn.experts.1.w2.scale", {0xff}, "down"},
      {"mxfp4_gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_scales", {0xff}, "gate"},
  };
  for (const Case& c : bad) {
    const TemporaryFolder folder;
    const std::string in = changed(
        folder, quantised + "/" + c.name, c.tensor,
        [&](char* bytes, std::size_t) { std::memcpy(bytes, c.bytes.data(), c.bytes.size()); });
    const std::string own = to_string(
        Checkpoint::open(quantised + "/" + c.name).weights(0).experts.packed_up[0].format);
    const bool gpt_oss = c.name == std::string("mxfp4_gpt_oss");
    for (const std::string& format : {std::string("f32"), std::string("bf16"), own,
                                      std::string("int4:32"), std::string("sparse_nvfp4")}) {
      SCOPED_TRACE(c.tensor + " to " + format);
      const std::string message = error_of([&] {
        convert_checkpoint(cpu(), in, folder / "out",
                           maybe_pruned(format, format == "sparse_nvfp4"));
      });
      const std::string place =
          in + ": layer 0, expert " + (gpt_oss ? "0, " : "1, ") + c.which + ": ";
      EXPECT_TRUE(message.starts_with(place)) << message;
      EXPECT_NE(message.find("finite"), std::string::npos) << message;
      EXPECT_FALSE(fs::exists(folder / "out"));
      EXPECT_FALSE(fs::exists(folder / "out.partial"));
    }
  }
}

// Numbers of a plain model that are none, and one that becomes none.
TEST(ConvertPacked, PlainWeightsThatAreNotFiniteAreRefused) {
  const std::string source = golden("qwen3_moe");
  const std::string tensor = "model.layers.1.mlp.experts.2.down_proj.weight";
  for (const std::vector<unsigned char>& bytes :
       {std::vector<unsigned char>{0xc0, 0x7f}, {0x80, 0xff}}) {
    for (const char* format : {"f32", "f16", "fp8_channel", "nvfp4"}) {
      const TemporaryFolder folder;
      const std::string in = changed(folder, source, tensor, [&](char* first, std::size_t) {
        std::memcpy(first + 6, bytes.data(), bytes.size());
      });
      const std::string message =
          error_of([&] { convert_checkpoint(cpu(), in, folder / "out", to(format)); });
      EXPECT_TRUE(message.starts_with(in + ": layer 1, expert 2, down: weight [0, 3] is "))
          << message;
      EXPECT_FALSE(fs::exists(folder / "out.partial"));
    }
  }
  const TemporaryFolder folder;
  convert_checkpoint(cpu(), source, folder / "f32", to("f32"));
  const std::string in = changed(folder, folder / "f32", tensor, [](char* bytes, std::size_t) {
    const float most = 3.4028235e38F;
    std::memcpy(bytes, &most, sizeof most);
  });
  EXPECT_NE(error_of([&] {
              convert_checkpoint(cpu(), in, folder / "out", to("bf16"));
            }).find("layer 1, expert 2, down: weight [0, 0] is inf"),
            std::string::npos);
}

TEST(ConvertPacked, ExpertsInOneTensor) {
  for (const fused::Form& form : fused::forms) {
    SCOPED_TRACE(form.name);
    const TemporaryFolder folder;
    const fused::FusedCheckpoint made(form, folder.path());
    check_conversions(folder.path());
    // Decoded, the tensors stand as they were.
    const TemporaryFolder decoded;
    convert_checkpoint(cpu(), folder.path(), decoded / "out", to("bf16"));
    const std::string layer = form.inkling ? "model.llm.layers.0." : "model.layers.0.";
    const std::string gate_up = form.inkling ? "w13_weight" : "gate_up_proj";
    const std::int64_t rows = 2 * form.intermediate, hidden = 136;
    EXPECT_EQ(SafetensorsFile::open(decoded / "out/model.safetensors")
                  .get(layer + "mlp.experts." + gate_up)
                  .describe(),
              form.transposed ? fmt::format("bf16 [3, {}, {}]", hidden, rows)
                              : fmt::format("bf16 [3, {}, {}]", rows, hidden));
  }
}

// Experts of shared slots are in tensors of their own.
TEST(ConvertPacked, SharedSlotsInOneTensor) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", from = golden("inkling_real");
  fs::create_directory(in);
  fs::copy_file(from + "/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(from + "/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::vector<std::vector<std::uint8_t>> codes;
  const float scale = 1.0F / 64;
  for (const std::string& name : file.names()) {
    const Tensor t = file.get(name);
    if (!name.ends_with("w13_weight") && !name.ends_with("w2_weight")) {
      tensors.emplace_back(name, t);
      continue;
    }
    codes.emplace_back(static_cast<std::size_t>(t.elements()));
    for (std::int64_t i = 0; i < t.elements(); ++i) {
      codes.back()[static_cast<std::size_t>(i)] = to_e4m3(load_f32(t.data, t.dtype, i) / scale);
    }
    tensors.emplace_back(
        name, view(codes.back().data(), DType::f8_e4m3, {t.shape[0], t.shape[1], t.shape[2]}));
    tensors.emplace_back(name + "_scale", view(&scale, {1}));
  }
  ASSERT_EQ(codes.size() % 4, 0U);
  write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
  ASSERT_FALSE(Checkpoint::open(in).weights(0).experts.packed_up.empty());
  check_conversions(in);
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

// What a model of several modalities says two levels down.
TEST(ConvertPacked, WordsThatAreNestedAreForgotten) {
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(quantised + "/nvfp4_modelopt/model.safetensors", in + "/model.safetensors");
  const Json inner = Json::parse(read_file(quantised + "/nvfp4_modelopt/config.json"));
  const Json config = {{"model_type", "qwen3_omni_moe"},
                       {"thinker_config", {{"text_config", inner}}}};
  write_file(in + "/config.json", config.dump());
  ASSERT_FALSE(Checkpoint::open(in).weights(0).experts.packed_up.empty());
  for (const char* format : {"bf16", "nvfp4", "mxfp8"}) {
    SCOPED_TRACE(format);
    const std::string out = folder / format;
    convert_checkpoint(cpu(), in, out, to(format));
    const Json made = Json::parse(read_file(out + "/config.json"));
    EXPECT_FALSE(made["thinker_config"]["text_config"].contains("quantization_config"));
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(out).weights(0); }), "");
  }
}

// Gate and up packed, down as it was: every matrix is converted.
TEST(ConvertPacked, OneOfThreeMatricesIsPlain) {
  const TemporaryFolder folder;
  for (const bool down_is_plain : {true, false}) {
    SCOPED_TRACE(down_is_plain);
    const std::string in = folder / (down_is_plain ? "down" : "gate_and_up");
    fs::create_directory(in);
    const std::string from = quantised + "/nvfp4_compressed";
    const Checkpoint packed = Checkpoint::open(from);
    const LayerWeights weights = packed.weights(0);
    const SafetensorsFile file = SafetensorsFile::open(from + "/model.safetensors");
    std::vector<std::pair<std::string, Tensor>> tensors;
    std::vector<std::vector<float>> plain;
    for (const std::string& name : file.names()) {
      const bool down = name.find(".down_proj.") != std::string::npos;
      const bool expert = name.find(".experts.") != std::string::npos;
      if (!expert || down != down_is_plain) tensors.emplace_back(name, file.get(name));
    }
    std::vector<std::vector<std::uint16_t>> memory;
    for (std::size_t e = 0; e < weights.experts.packed_up.size(); ++e) {
      const auto add = [&](const char* which, const PackedMatrix& m) {
        memory.emplace_back(static_cast<std::size_t>(m.n * m.k));
        const Tensor values = view(memory.back().data(), DType::bf16, {m.n, m.k});
        unpack(m, values);
        tensors.emplace_back(fmt::format("model.layers.0.mlp.experts.{}.{}_proj.weight", e, which),
                             values);
      };
      if (down_is_plain) {
        add("down", weights.experts.packed_down[e]);
      } else {
        add("gate", weights.experts.packed_gate[e]);
        add("up", weights.experts.packed_up[e]);
      }
    }
    write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
    Json config = Json::parse(read_file(from + "/config.json"));
    for (const char* which : {"gate", "up", "down"}) {
      if ((std::string(which) == "down") != down_is_plain) continue;
      config["quantization_config"]["ignore"].push_back(fmt::format("re:.*{}_proj$", which));
    }
    write_file(in + "/config.json", config.dump());
    check_conversions(in);
    const Checkpoint mixed = Checkpoint::open(in);
    const std::string message = error_of([&] { (void)Layer(mixed, 0, cpu()); });
    EXPECT_EQ(message,
              fmt::format("{}, layer 0: layer: experts.{} is plain and others of its matrices are "
                          "packed: must be packed alike, as `shunt convert` makes them",
                          in, down_is_plain ? "down" : "gate"));
  }
}

// Codes are found by comparing magnitudes with the scale, which has to be positive; with one below
// 0 every code became the largest, of the other sign.
TEST(ConvertPacked, AGlobalScaleBelowZeroIsNotKept) {
  for (const auto& [name, part] : {std::pair("nvfp4_modelopt", "weight_scale_2"),
                                   {"nvfp4_compressed", "weight_global_scale"}}) {
    for (const auto& [format, prune] :
         {std::pair("sparse_nvfp4", false), {"sparse_nvfp4", true}, {"nvfp4", true}}) {
      SCOPED_TRACE(fmt::format("{} to {}, pruned: {}", name, format, prune));
      const TemporaryFolder folder;
      const std::string in = changed(folder, quantised + "/" + name,
                                     std::string("model.layers.0.mlp.experts.1.up_proj.") + part,
                                     [](char* bytes, std::size_t) {
                                       float scale = 0;
                                       std::memcpy(&scale, bytes, sizeof scale);
                                       scale = -scale;
                                       std::memcpy(bytes, &scale, sizeof scale);
                                     });
      const auto before = all_values(Checkpoint::open(in));
      convert_checkpoint(cpu(), in, folder / "out", maybe_pruned(format, prune));
      const auto now = all_values(Checkpoint::open(folder / "out"));
      // The others' error is what two of four cost.
      EXPECT_LT(error_of_weights(now[4], before[4]), 1.2 * error_of_weights(now[1], before[1]));
    }
  }
}

// Block scales below 0, which other writers need not avoid: the same.
TEST(ConvertPacked, BlockScalesBelowZeroAreNotKept) {
  const TemporaryFolder folder;
  const std::string in = changed(folder, quantised + "/nvfp4_modelopt",
                                 "model.layers.0.mlp.experts.1.up_proj.weight_scale",
                                 [](char* bytes, std::size_t size) {
                                   for (std::size_t i = 0; i < size; i += 3) bytes[i] ^= '\x80';
                                 });
  const auto before = all_values(Checkpoint::open(in));
  convert_checkpoint(cpu(), in, folder / "out", to("sparse_nvfp4"));
  const auto now = all_values(Checkpoint::open(folder / "out"));
  EXPECT_LT(error_of_weights(now[4], before[4]), 1.2 * error_of_weights(now[1], before[1]));
}

// gate and up share a global scale: that of the larger, whichever it is.
TEST(ConvertPacked, TheGlobalScaleIsOfTheLargerOfGateAndUp) {
  for (const char* larger : {"gate_proj", "up_proj"}) {
    for (const char* format : {"nvfp4", "sparse_nvfp4", "dense3"}) {
      SCOPED_TRACE(fmt::format("{} is larger, to {}", larger, format));
      const TemporaryFolder folder;
      const std::string in =
          changed(folder, quantised + "/fp8_tensor",
                  fmt::format("model.layers.0.mlp.experts.1.{}.weight_scale", larger),
                  [](char* bytes, std::size_t) {
                    float scale = 0;
                    std::memcpy(&scale, bytes, sizeof scale);
                    scale *= 100;
                    std::memcpy(bytes, &scale, sizeof scale);
                  });
      const auto before = all_values(Checkpoint::open(in));
      convert_checkpoint(cpu(), in, folder / "out", to(format));
      const auto now = all_values(Checkpoint::open(folder / "out"));
      for (const std::size_t m : {3U, 4U}) {  // expert 1's gate and up, beside expert 0's
        EXPECT_LT(error_of_weights(now[m], before[m]),
                  1.3 * error_of_weights(now[m - 3], before[m - 3]));
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
