// Quantised checkpoints against what other packages decode (tests/data/make_quantised.py).
#include <cmath>
#include <filesystem>
#include <limits>

#include "checkpoint/quantised_changed.hpp"

namespace shunt::test {
namespace {

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
  const std::string path = quantised_folder + "/" + c.name;
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
      {"gptq", "format", "\"gptq_p\"", "format is \"gptq_p\": must be \"gptq\" or \"gptq_v2\""},
      {"gptq_v2", "format", "\"gptq\"",
       "format is \"gptq\": must be \"gptq_v2\", as checkpoint_format is"},
      {"gptq", "rotation", "\"hadamard\"", "rotation is \"hadamard\": must be empty"},
      {"awq", "rotation", "\"random\"", "rotation is \"random\": must be empty"},
      {"int4", "rotation_config", R"({"block_size": 32})", "rotation_config is {"},
      {"nvfp4_modelopt", "spinquant_config", R"({"r1": true})", "spinquant_config is {"},
      {"fp8_block", "transform_config", R"({"config_groups": {}})", "transform_config is {"},
      {"awq", "version", "\"gemv\"", "version is \"gemv\""},
      {"awq", "format", "\"gemv_fast\"", "format is \"gemv_fast\""},
      {"awq", "pack_method", "\"order\"", "pack_method is \"order\""},
      {"fp8_block", "weight_block_size", "[1, 32]", "must be mxfp8, and are fp8_block"},
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

const char* const weights_path = "/config_groups/group_0/weights/";

TEST(QuantisedRefusals, WhatTheConfigSaysIsThere) {
  const std::string actorder = std::string(weights_path) + "actorder";
  const std::string symmetric = std::string(weights_path) + "symmetric";
  const std::string no_zeros = ": '" + gate + ".qzeros' must be there, and is not";
  const std::string no_order = ": '" + gate + ".weight_g_idx' must be there, and is not";
  check_edits({
      {"awq", "", "", ".qzeros", "zero_point is true" + no_zeros},
      {"awq", "/zero_point", "", ".qzeros", "quant_method is \"awq\"" + no_zeros},
      {"awq", "/zero_point", "false", ".qzeros", ""},
      {"awq", "/zero_point", "false", "",
       "zero_point is false: zero points of '" + gate + ".qzeros' must all be 8"},
      {"awq", "/zero_point", "1", "", "zero_point is 1: must be true or false"},
      {"gptq", "", "", ".qzeros", "sym is false" + no_zeros},
      {"gptq", "/sym", "", ".qzeros", ""},
      {"gptq", "/sym", "true", ".qzeros", ""},
      {"gptq", "/sym", "true", "",
       "sym is true: zero points of '" + gate + ".qzeros' must all be 8"},
      {"gptq", "", "", ".g_idx",
       "desc_act is true: '" + gate + ".g_idx' must be there, and is not"},
      {"gptq", "/desc_act", "false", ".g_idx", ""},
      {"gptq", "/desc_act", "", "", ""},
      {"gptq_v2", "/desc_act", "true", "", ""},  // its order is the plain one
      {"int4_zeros", "", "", ".weight_zero_point",
       "weights: symmetric is false: '" + gate + ".weight_zero_point' must be there, and is not"},
      {"int4_zeros", symmetric.c_str(), "true", "",
       "symmetric is true: zero points of '" + gate + ".weight_zero_point' must all be 8"},
      {"int8", symmetric.c_str(), "false", "", "symmetric is false: '" + gate},
      {"int4", actorder.c_str(), "\"group\"", "", "weights: actorder is \"group\"" + no_order},
      {"int4", actorder.c_str(), "\"dynamic\"", "", "actorder is \"dynamic\"" + no_order},
      {"int4", actorder.c_str(), "true", "", "actorder is true" + no_order},
      {"int4", actorder.c_str(), "\"weight\"", "", ""},
      {"int4", actorder.c_str(), "\"static\"", "", ""},
      {"int4", actorder.c_str(), "false", "", ""},
      {"int4", actorder.c_str(), "\"rows\"", "", "actorder is \"rows\": must be \"group\""},
      {"int4_channel", actorder.c_str(), "\"group\"", "", ""},  // one group
  });
}

TEST(QuantisedRefusals, WhatContradictsTheTensors) {
  const auto in_weights = [](const char* field) { return weights_path + std::string(field); };
  const std::string bits = in_weights("num_bits"), type = in_weights("type"),
                    group = in_weights("group_size"), strategy = in_weights("strategy");
  const std::string tensors = ": tensors of '" + gate + "' must be ";
  check_edits({
      {"nvfp4_modelopt", "/quant_algo", "\"FP8\"", "",
       "quant_algo is \"FP8\"" + tensors + "fp8_tensor or fp8_channel or fp8_block, and are nvfp4"},
      {"nvfp4_modelopt", "/quant_algo", "", "", ""},
      {"nvfp4_modelopt", "/quant_algo", "\"W4A16_NVFP4\"", "", ""},
      {"nvfp4_modelopt", "/quant_algo", "\"MIXED_PRECISION\"", "", ""},
      {"nvfp4_modelopt", "/group_size", "16", "", ""},
      {"nvfp4_modelopt", group.c_str(), "16", "", ""},
      {"nvfp4_modelopt", group.c_str(), "32", "",
       "group_0.weights: group_size is 32" + tensors +
           "fp8_tensor or fp8_channel or fp8_block or int8 or int4 or mxfp4 or mxfp8, and are"},
      {"nvfp4_modelopt", "/quant_method", "\"fp8\"", "",
       "quant_method is \"fp8\"" + tensors + "fp8_tensor or"},
      {"fp8_tensor", "/quant_algo", "\"NVFP4\"", "",
       "quant_algo is \"NVFP4\"" + tensors + "nvfp4, and are fp8_tensor"},
      {"fp8_tensor", "/group_size", "0", "", ""},
      {"fp8_block", "/quant_method", "\"compressed-tensors\"", "",
       "tensor '" + gate + ".weight_scale_inv' is there: quant_method compressed-tensors has '" +
           gate + ".weight_scale'"},
      {"fp8_channel", "/quant_method", "\"mxfp4\"", "",
       "quant_method is \"mxfp4\"" + tensors + "mxfp4, and are fp8_channel"},
      {"int4", "/format", "\"nvfp4-pack-quantized\"", "",
       "format is \"nvfp4-pack-quantized\"" + tensors + "nvfp4, and are int4"},
      {"int4", "/format", "\"mixed-precision\"", "", ""},
      {"int4", "/format", "", "", ""},
      {"int4", "/config_groups/group_0/format", "\"int-quantized\"", "",
       "group_0: format is \"int-quantized\"" + tensors + "int8, and are int4"},
      {"int4", bits.c_str(), "8", "", "weights: num_bits is 8" + tensors},
      {"int4", type.c_str(), "\"float\"", "", "weights: type is \"float\"" + tensors},
      {"nvfp4_compressed", bits.c_str(), "8", "", "weights: num_bits is 8" + tensors},
      {"nvfp4_compressed", type.c_str(), "\"int\"", "", "weights: type is \"int\"" + tensors},
      {"nvfp4_compressed", group.c_str(), "32", "", "weights: group_size is 32" + tensors},
      {"nvfp4_compressed", strategy.c_str(), "\"channel\"", "",
       "weights: strategy is \"channel\"" + tensors},
  });
}

TEST(QuantisedRefusals, ExpertsOfDeepSeekV4) {
  const auto message = [](const char* dtype) {
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(changed(at, "mxfp4_deepseek_v4", [&](Json& config) {
        config["expert_dtype"] = Json::parse(dtype);
      })).weights(0);
    });
  };
  EXPECT_EQ(message("\"fp4\""), "");
  EXPECT_EQ(message("null"), "");
  EXPECT_NE(message("\"fp8\"").find("expert_dtype is \"fp8\": tensors of "
                                    "'model.layers.0.ffn.experts.0.w1' must be fp8_block or "
                                    "fp8_channel or fp8_tensor or mxfp8, and are mxfp4"),
            std::string::npos)
      << message("\"fp8\"");
  EXPECT_NE(message("\"bf16\"").find("must be plain, and are mxfp4"), std::string::npos);
}

// A group of config_groups is held to the modules that it names; names go before classes.
TEST(QuantisedRefusals, GroupsOfOtherModules) {
  const Json int4 = {{"num_bits", 4}, {"type", "int"}, {"group_size", 32}};
  const Json fp8 = {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}};
  const auto message = [&](const char* of_int4, const char* of_fp8) {
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(changed(at, "int4", [&](Json& config) {
        config["quantization_config"]["format"] = "mixed-precision";
        config["quantization_config"]["config_groups"] = {
            {"group_0", {{"targets", {of_fp8}}, {"weights", fp8}}},
            {"group_1", {{"targets", {of_int4}}, {"weights", int4}}}};
      })).weights(0);
    });
  };
  EXPECT_EQ(message("re:.*experts.*", "re:.*self_attn.*"), "");
  EXPECT_EQ(message("re:.*experts.*", "Linear"), "");
  for (const char* others : {"re:.*self_attn.*", "Linear"}) {
    const std::string wrong = message(others, "re:.*experts.*_proj$");
    EXPECT_NE(wrong.find("must be 1 groups a row"), std::string::npos) << wrong;
  }
}

TEST(QuantisedRefusals, LayersOfModelOptsMixedPrecision) {
  const auto message = [](const Json& layers) {
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(changed(at, "nvfp4_modelopt", [&](Json& config) {
        config["quantization_config"]["quant_algo"] = "MIXED_PRECISION";
        config["quantization_config"]["quantized_layers"] = layers;
      })).weights(0);
    });
  };
  EXPECT_EQ(message({{gate, {{"quant_algo", "NVFP4"}, {"group_size", 16}}},
                     {"model.layers.0.self_attn.q_proj", {{"quant_algo", "W4A8_AWQ"}}}}),
            "");
  const std::string algorithm = message({{gate, {{"quant_algo", "FP8"}}}});
  EXPECT_NE(algorithm.find("quantized_layers." + gate + ": quant_algo is \"FP8\": tensors of '" +
                           gate + "' must be fp8_tensor"),
            std::string::npos)
      << algorithm;
  const std::string group = message({{gate, {{"quant_algo", "NVFP4"}, {"group_size", 32}}}});
  EXPECT_NE(group.find("group_size is 32: tensors of"), std::string::npos) << group;
}

// What ModelOpt's list of layers names is packed.
TEST(QuantisedRefusals, PlainLayersOfModelOptsMixedPrecision) {
  const std::string from = golden("qwen3_moe"), up = "model.layers.0.mlp.experts.3.up_proj";
  const TemporaryFolder at;
  Json config = Json::parse(read_file(from + "/config.json"));
  config["quantization_config"] = {{"quant_method", "modelopt"},
                                   {"quant_algo", "MIXED_PRECISION"},
                                   {"quantized_layers", {{up, {{"quant_algo", "NVFP4"}}}}}};
  write_file(at / "config.json", config.dump());
  write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
  const std::string message = error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
  EXPECT_NE(message.find("tensors of '" + up +
                         "' are plain: quantization_config.quantized_layers names it"),
            std::string::npos)
      << message;
}

TEST(QuantisedRefusals, DynamicSettingsOfGptq) {
  check_edits({
      {"gptq", "/dynamic", R"({"+:.*shared_expert.*": {"group_size": 64, "sym": true}})", "", ""},
      {"gptq", "/dynamic", R"({"+:.*down_proj": {"group_size": 16}})", "",
       "down_proj.scales' is f16 [1, 64]: must be 2 groups a row"},
      {"gptq", "/dynamic", R"({"+:.*up_proj": {"sym": true}})", "",
       "sym is true: zero points of 'model.layers.0.mlp.experts.0.up_proj.qzeros' must all be 8"},
  });
}

TEST(QuantisedRefusals, TensorsThatContradictEachOther) {
  const std::vector<std::int64_t> shape = {999, 7};
  const float one = 1;
  const auto message = [&](const char* name, const std::string& tensor, const Tensor& value) {
    const TemporaryFolder at;
    rewritten(
        at, name, [](Json&) {}, [&](Tensors& tensors) { tensors[tensor] = value; });
    return error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
  };
  const std::string size = message("int4", gate + ".weight_shape", view(shape.data(), {2}));
  EXPECT_NE(size.find("weight_shape' holds [999, 7]: must hold [32, 64]"), std::string::npos)
      << size;
  const std::string count = message("int4", gate + ".weight_shape", view(&one, {1}));
  EXPECT_NE(count.find("weight_shape' is f32 [1]: must be i64 or i32 [2]"), std::string::npos)
      << count;
  // Codes of another type than is read would be read past their end.
  const std::vector<std::uint8_t> codes(std::size_t{32} * 16);
  const std::string words =
      message("int4", gate + ".weight_packed", view(codes.data(), DType::i8, {32, 16}));
  EXPECT_NE(words.find("weight_packed' is i8 [32, 16]: must be i32 [32, 8] or u8 [32, 32]"),
            std::string::npos)
      << words;
  const Tensor packed =
      SafetensorsFile::open(quantised_folder + "/nvfp4_compressed/model.safetensors")
          .get(gate + ".weight_packed");
  const std::int64_t n = packed.shape[0], half = packed.shape[1];
  const std::string nibbles = message("nvfp4_compressed", gate + ".weight_packed",
                                      view(codes.data(), DType::f4_e2m1, {n, half}));
  EXPECT_NE(nibbles.find(fmt::format("weight_packed' is f4_e2m1 [{0}, {1}]: must be u8 [{0}, {1}]",
                                     n, half)),
            std::string::npos)
      << nibbles;
  const std::string both = message("nvfp4_compressed", gate + ".weight_scale_2", view(&one, {1}));
  EXPECT_NE(both.find("weight_scale_2' and '" + gate + ".weight_global_scale' are both there"),
            std::string::npos)
      << both;
}

// A matrix in two forms, scales under two names, scales that its format has not.
TEST(QuantisedRefusals, TensorsThatAreTooMany) {
  const std::vector<float> ones(std::size_t{2} * 64 * 64, 1);
  const auto message = [&](const char* name, const std::string& tensor,
                           const std::vector<std::int64_t>& shape) {
    const TemporaryFolder at;
    rewritten(
        at, name, [](Json&) {},
        [&](Tensors& tensors) { tensors[tensor] = of_shape(ones.data(), DType::f32, shape); });
    return error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
  };
  const std::string merged = "model.layers.0.mlp.experts.gate_up_proj";
  const std::string v4 = "model.layers.0.ffn.experts.0.w1";
  const struct {
    const char* name;
    std::string tensor;
    std::vector<std::int64_t> shape;
    std::string words;
  } all[] = {
      {"int4", gate + ".weight", {32, 64}, ".weight' and '" + gate + ".weight_packed' are both"},
      {"gptq", gate + ".weight", {32, 64}, ".weight' and '" + gate + ".qweight' are both there"},
      {"mxfp4_gpt_oss", merged, {2, 64, 64}, merged + "' and '" + merged + "_blocks' are both"},
      {"fp8_block",
       gate + ".weight_scale",
       {1, 1},
       ".weight_scale' and '" + gate + ".weight_scale_inv' are both there"},
      {"mxfp4_deepseek_v4", v4 + ".weight_scale", {1}, v4 + ".scale' are both there"},
      {"fp8_tensor", gate + ".weight_scale_2", {1}, ".weight_scale_2' is there: not read with"},
      {"mxfp4_deepseek_v4", v4 + ".weight_scale_2", {1}, ".weight_scale_2' is there: not read"},
      {"int4", gate + ".weight_global_scale", {1}, ".weight_global_scale' is there: not read"},
      {"gptq", gate + ".pre_quant_scale", {64}, ".pre_quant_scale' is there: not read"},
      {"awq", gate + ".pre_quant_scale", {64}, ".pre_quant_scale' is there: not read"},
  };
  for (const auto& [name, tensor, shape, words] : all) {
    const std::string got = message(name, tensor, shape);
    EXPECT_NE(got.find(words), std::string::npos) << tensor << ": " << got;
  }
  // As many scales as rows, but not one for each.
  for (const char* name : {"int8", "int8_packed"}) {
    const std::int64_t n =
        SafetensorsFile::open(quantised_folder + "/" + name + "/model.safetensors")
            .get(gate + ".weight_scale")
            .shape[0];
    for (const auto& [shape, words] :
         {std::pair(std::vector<std::int64_t>{2, n / 2}, fmt::format("f32 [2, {}]", n / 2)),
          {{1, n}, ""}}) {
      const std::string got = message(name, gate + ".weight_scale", shape);
      EXPECT_EQ(got.empty(), words.empty()) << name << ": " << got;
      EXPECT_NE(got.find(words), std::string::npos) << name << ": " << got;
    }
  }
}

// What experts of the fixture decode to must be what the changed checkpoint's decode to.
void expect_same_values(const std::string& changed_folder, const char* name) {
  const Checkpoint here = Checkpoint::open(changed_folder);
  const Checkpoint fixture = Checkpoint::open(quantised_folder + "/" + name);
  const LayerWeights now_all = here.weights(0), then_all = fixture.weights(0);
  const ExpertWeights &now = now_all.experts, &then = then_all.experts;
  ASSERT_EQ(now.packed_down.size(), then.packed_down.size());
  for (std::size_t e = 0; e < then.packed_down.size(); ++e) {
    const PackedMatrix& a = now.packed_down[e];
    const PackedMatrix& b = then.packed_down[e];
    std::vector<float> got(static_cast<std::size_t>(a.n * a.k)), wanted(got.size());
    unpack(a, view(got.data(), {a.n, a.k}));
    unpack(b, view(wanted.data(), {b.n, b.k}));
    EXPECT_EQ(got, wanted);
  }
}

// GPTQModel's word for checkpoint_format is `format`, with which zero points are not one less.
TEST(QuantisedForms, FormatOfGptqModel) {
  for (const bool both : {false, true}) {
    const TemporaryFolder at;
    changed(at, "gptq_v2", [&](Json& config) {
      Json& q = config["quantization_config"];
      q["format"] = "gptq_v2";
      if (!both) q.erase("checkpoint_format");
    });
    expect_same_values(at.path(), "gptq_v2");
  }
}

// DeepSeek-V4.1's blocks of 32 by 32: a scale of 32 rows is one of each of them.
TEST(QuantisedForms, BlocksOf32By32AreMxfp8) {
  std::vector<std::vector<std::uint8_t>> held;
  const auto with = [&](const TemporaryFolder& at, bool blocks) {
    return rewritten(
        at, "mxfp8",
        [&](Json& config) {
          Json& q = config["quantization_config"];
          q["weight_block_size"] = blocks ? Json::array({32, 32}) : Json::array({1, 32});
          q["scale_fmt"] = "ue8m0";
        },
        [&](Tensors& tensors) {
          for (auto& [name, tensor] : tensors) {
            if (!name.ends_with("_scale_inv")) continue;
            const std::int64_t n = tensor.shape[0], groups = tensor.shape[1];
            auto& bytes = held.emplace_back();
            for (std::int64_t row = 0; row < n; row += blocks ? 32 : 1) {
              for (std::int64_t g = 0; g < groups; ++g) {
                bytes.push_back(static_cast<std::uint8_t>(115 + 3 * (row / 32) + g));
              }
            }
            tensor = view(bytes.data(), DType::u8, {blocks ? n / 32 : n, groups});
          }
        });
  };
  const TemporaryFolder whole, rows;
  with(rows, false);
  const Checkpoint a = Checkpoint::open(with(whole, true)), b = Checkpoint::open(rows.path());
  const LayerWeights now = a.weights(0), then = b.weights(0);
  for (std::size_t e = 0; e < 2; ++e) {
    for (const auto list :
         {&ExpertWeights::packed_gate, &ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
      const PackedMatrix &x = (now.experts.*list)[e], &y = (then.experts.*list)[e];
      EXPECT_EQ(x.format, (FormatSpec{Format::mxfp8}));
      std::vector<float> got(static_cast<std::size_t>(x.n * x.k)), wanted(got.size());
      unpack(x, view(got.data(), {x.n, x.k}));
      unpack(y, view(wanted.data(), {y.n, y.k}));
      EXPECT_EQ(got, wanted);
    }
  }
  const TemporaryFolder at;
  const std::string message = error_of([&] {
    Checkpoint::open(changed(at, "mxfp8", [](Json& config) {
      config["quantization_config"]["weight_block_size"] = Json::array({32, 32});
    })).weights(0);
  });
  EXPECT_NE(message.find("e8m0 [1, 2]"), std::string::npos) << message;
  const std::vector<float> ones(2, 1);
  const TemporaryFolder floats;
  with(floats, true);
  const SafetensorsFile file = SafetensorsFile::open(floats / "model.safetensors");
  Tensors tensors;
  for (const std::string& name : file.names()) tensors.emplace(name, file.get(name));
  tensors[gate + ".weight_scale_inv"] = view(ones.data(), {1, 2});
  const TemporaryFolder other;
  write_file(other / "config.json", read_file(floats / "config.json"));
  write_safetensors(other / "model.safetensors", {tensors.begin(), tensors.end()});
  const std::string type = error_of([&] { (void)Checkpoint::open(other.path()).weights(0); });
  EXPECT_NE(type.find("is f32 [1, 2]: must be e8m0 [1, 2]"), std::string::npos) << type;
}

// compressed-tensors' nibbles in bytes are those of its words.
TEST(QuantisedForms, IntegersOfFourBitsInBytes) {
  const TemporaryFolder at;
  rewritten(
      at, "int4", [](Json&) {},
      [](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          if (name.ends_with(".weight_packed"))
            t = view(t.data, DType::u8, {t.shape[0], 4 * t.shape[1]});
        }
      });
  expect_same_values(at.path(), "int4");
}

// Zero points that are stored and are all the usual one are none.
TEST(QuantisedForms, ZeroPointsOfEight) {
  const TemporaryFolder at;
  const std::vector<std::uint32_t> eights(64, 0x88888888U);
  rewritten(
      at, "int4", [](Json&) {},
      [&](Tensors& tensors) {
        const Tensors before = tensors;
        for (const auto& [name, t] : before) {
          if (!name.ends_with(".weight_scale")) continue;
          tensors[name.substr(0, name.size() - 5) + "zero_point"] =
              view(eights.data(), DType::i32, {(t.shape[0] + 7) / 8, t.shape[1]});
        }
      });
  expect_same_values(at.path(), "int4");
  const Checkpoint here = Checkpoint::open(at.path());
  EXPECT_FALSE(here.weights(0).experts.packed_up[0].zeros);
}

// ModelOpt's FP8_PB_WO writes the scales of blocks in four dimensions.
TEST(QuantisedForms, ScalesOfBlocksInFourDimensions) {
  const TemporaryFolder at;
  rewritten(
      at, "fp8_block",
      [](Json& config) {
        config["quantization_config"] = {
            {"quant_method", "modelopt"}, {"quant_algo", "FP8_PB_WO"}, {"ignore", {"*mlp.gate"}}};
      },
      [](Tensors& tensors) {
        const Tensors before = std::exchange(tensors, {});
        for (const auto& [name, t] : before) {
          const bool scales = name.ends_with("_scale_inv");
          tensors[scales ? name.substr(0, name.size() - 4) : name] =
              scales ? view(t.data, DType::f32, {t.shape[0], 1, t.shape[1], 1}) : t;
        }
      });
  expect_same_values(at.path(), "fp8_block");
}

// Older files of ModelOpt: without quant_method, nested, or in a file of their own.
TEST(QuantisedForms, OlderFilesOfModelOpt) {
  const Json algorithm = {
      {"quant_algo", "NVFP4"}, {"group_size", 16}, {"exclude_modules", {"*mlp.gate", "lm_head"}}};
  Json library = algorithm;
  library["quant_library"] = "modelopt";
  const Json nested = {{"producer", {{"name", "modelopt"}, {"version", "0.29"}}},
                       {"quantization", algorithm}};
  Json named = nested;
  named["quant_method"] = "modelopt";
  const auto change = [](const Json& from, const char* pointer, const Json& value) {
    Json result = from;
    result[Json::json_pointer(pointer)] = value;
    return result;
  };
  for (const Json& form : {library, nested, named}) {
    SCOPED_TRACE(form.dump());
    const TemporaryFolder at;
    const auto write = [&](const Json& written, bool beside) {
      changed(at, "nvfp4_modelopt",
              [&](Json& config) { config["quantization_config"] = beside ? Json() : written; });
      if (beside) write_file(at / "hf_quant_config.json", written.dump());
    };
    const std::string inside = form.contains("quantization") ? "/quantization" : "";
    for (const bool beside : {false, true}) {
      write(form, beside);
      expect_same_values(at.path(), "nvfp4_modelopt");
      const struct {
        const char* field;
        Json value;
        std::string message;
      } bad[] = {
          {"/exclude_modules",
           {"*experts*"},
           std::string(beside ? "hf_quant_config.json" : "quantization_config") +
               (inside.empty() ? ""
                : beside       ? ": quantization"
                               : ".quantization") +
               ".exclude_modules leaves it plain, by '*experts*'"},
          {"/quant_algo", "FP8", "quant_algo is \"FP8\": tensors of '" + gate + "' must be fp8"},
          {"/quant_algo", "INT4_AWQ", "quant_algo is \"INT4_AWQ\": must be"},
          {"/group_size", 32, "group_size is 32: tensors of"},
      };
      for (const auto& b : bad) {
        write(change(form, (inside + b.field).c_str(), b.value), beside);
        const std::string message = error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
        EXPECT_NE(message.find(b.message), std::string::npos) << message;
      }
    }
    // Where config.json has its own, that counts.
    changed(at, "nvfp4_modelopt", [](Json&) {});
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(at.path()).weights(0); }), "");
  }
  const TemporaryFolder at;
  changed(at, "nvfp4_modelopt", [&](Json& config) {
    config["quantization_config"] = change(nested, "/producer/name", "another");
  });
  const std::string message = error_of([&] { (void)Checkpoint::open(at.path()); });
  EXPECT_NE(message.find("producer: name is \"another\": must be \"modelopt\""), std::string::npos)
      << message;
}

// A cache of keys and values alone leaves weights plain.
TEST(QuantisedForms, ModelOptsFileOfTheCacheAlone) {
  const TemporaryFolder at;
  const std::string source = golden("qwen3_moe");
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    std::filesystem::copy_file(entry.path(), at / entry.path().filename().string());
  }
  write_file(at / "hf_quant_config.json",
             R"({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}})");
  EXPECT_EQ(error_of([&] { (void)Checkpoint::open(at.path()).weights(0); }), "");
  write_file(at / "hf_quant_config.json", R"({"quantization": {"quant_algo": "FP8"}})");
  const std::string message = error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
  EXPECT_NE(message.find("are plain: hf_quant_config.json: quantization.ignore does not name it"),
            std::string::npos)
      << message;
}

// Methods that pack nothing: a cache of keys and values is somebody else's.
TEST(QuantisedForms, ConfigsOfTheCacheAlone) {
  const std::string from = golden("qwen3_moe");
  for (const char* config :
       {R"({"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"}})",
        R"({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"})",
        R"({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}})"}) {
    SCOPED_TRACE(config);
    const TemporaryFolder at;
    Json json = Json::parse(read_file(from + "/config.json"));
    json["quantization_config"] = Json::parse(config);
    write_file(at / "config.json", json.dump());
    write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(at.path()).weights(0); }), "");
  }
}

// An online transform, or sparsity, is no matter of the cache.
TEST(QuantisedRefusals, WhatIsBesideAnEmptyListOfGroups) {
  const std::string from = golden("qwen3_moe");
  const std::pair<const char*, const char*> fields[] = {
      {R"("transform_config": {"config_groups": {"R4": {"type": "hadamard"}}})",
       "transform_config"},
      {R"("sparsity_config": {"format": "sparse-24-bitmask"})", "sparsity_config"},
      {R"("format": "float-quantized")", "format is \"float-quantized\""}};
  for (const auto& [field, message] : fields) {
    const TemporaryFolder at;
    Json json = Json::parse(read_file(from + "/config.json"));
    json["quantization_config"] =
        Json::parse(std::string(R"({"quant_method": "compressed-tensors", "config_groups": {}, )") +
                    field + "}");
    write_file(at / "config.json", json.dump());
    write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
    const std::string got = error_of([&] { (void)Checkpoint::open(at.path()); });
    EXPECT_NE(got.find(message), std::string::npos) << got;
  }
}

TEST(QuantisedRefusals, ADivisorThatIsNone) {
  for (const float none : {0.0F, std::numeric_limits<float>::infinity()}) {
    const TemporaryFolder at;
    const std::string message = error_of([&] {
      Checkpoint::open(rewritten(
                           at, "nvfp4_compressed", [](Json&) {},
                           [&](Tensors& tensors) {
                             tensors["model.layers.0.mlp.experts.1.up_proj.weight_global_scale"] =
                                 view(&none, {1});
                           }))
          .weights(0);
    });
    EXPECT_NE(message.find(fmt::format("experts.1.up_proj.weight_global_scale' is {}: must be a "
                                       "number that 1 can be divided by",
                                       none)),
              std::string::npos)
        << message;
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

// GPTQ may pack some of a block's modules alone: experts that are not named are plain.
TEST(QuantisedForms, ModulesThatGptqPacks) {
  const auto message = [](const Json& modules) {
    const TemporaryFolder at;
    const std::string from = SHUNT_SOURCE_DIR "/tests/data/goldens/qwen3_moe";
    Json config = Json::parse(read_file(from + "/config.json"));
    config["quantization_config"] = {{"quant_method", "gptq"},
                                     {"bits", 4},
                                     {"group_size", 32},
                                     {"modules_in_block_to_quantize", modules}};
    write_file(at / "config.json", config.dump());
    write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
    return error_of([&] {
      const Checkpoint checkpoint = Checkpoint::open(at.path());
      (void)checkpoint.weights(checkpoint.first_moe_layer());
    });
  };
  const Json attention = Json::array({"self_attn.q_proj", "self_attn.k_proj"});
  EXPECT_EQ(message(Json::array({attention, Json::array({"self_attn.o_proj"})})), "");
  EXPECT_EQ(message(attention), "");
  EXPECT_NE(message(nullptr).find("are plain"), std::string::npos);
  EXPECT_NE(message(Json::array({Json::array({7})})).find("modules_in_block_to_quantize is [[7]]"),
            std::string::npos);
}

// Of the last word of zero points only the nibbles of rows that are there count.
TEST(QuantisedForms, ZeroPointsOfRowsThatAreNoMultipleOfEight) {
  for (const std::uint32_t last : {0x33338888U, 0x33338887U}) {
    const TemporaryFolder at;
    std::vector<std::uint32_t> words(64, 0x88888888U);
    for (int g = 0; g < 2; ++g) words[static_cast<std::size_t>(3 * 2 + g)] = last;
    const std::vector<std::uint32_t> eights(8, 0x88888888U);
    const std::vector<std::int64_t> shape = {28, 64};
    rewritten(
        at, "int4",
        [](Json& config) {
          config["moe_intermediate_size"] = 28;
          config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = false;
        },
        [&](Tensors& tensors) {
          const Tensors before = tensors;
          for (const auto& [name, t] : before) {
            if (name.find("experts.") == std::string::npos) continue;
            if (name.find("down_proj") != std::string::npos) {
              if (name.ends_with("weight_shape")) tensors.erase(name);
              if (name.ends_with(".weight_scale")) {
                tensors[name.substr(0, name.size() - 5) + "zero_point"] =
                    view(eights.data(), DType::i32, {8, 1});
              }
              continue;
            }
            if (name.ends_with("weight_shape")) {
              tensors[name] = view(shape.data(), {2});
            } else {
              tensors[name] = t.rows(0, 28);
            }
            if (!name.ends_with(".weight_scale")) continue;
            tensors[name.substr(0, name.size() - 5) + "zero_point"] =
                view(words.data(), DType::i32, {4, 2});
          }
        });
    const Checkpoint checkpoint = Checkpoint::open(at.path());
    const LayerWeights read = checkpoint.weights(0);
    const PackedMatrix& up = read.experts.packed_up[0];
    EXPECT_EQ(static_cast<bool>(up.zeros), last != 0x33338888U);
    if (up.zeros) {
      EXPECT_EQ(up.zeros.as<const std::uint8_t>()[24 * 2], 7);
      EXPECT_EQ(up.zeros.as<const std::uint8_t>()[25 * 2], 8);
    }
  }
}

TEST(QuantisedRefusals, WordsThatAreNotRead) {
  check_edits({
      {"fp8_block", "/scale_fmt", "\"bf16\"", "", "scale_fmt is \"bf16\""},
      {"fp8_block", "/activation_scheme", "\"none\"", "", "activation_scheme is \"none\""},
      {"awq", "/w_bit", "8", "", "w_bit is 8"},
      {"nvfp4_compressed", "/quantization_status", "\"initialized\"", "",
       "quantization_status is \"initialized\""},
      {"gptq", "/is_marlin_format", "true", "", "is_marlin_format is true"},
  });
}

TEST(QuantisedRefusals, GroupsThatAnOrderDoesNotHave) {
  for (const auto& [name, suffix] : {std::pair("gptq", ".g_idx"), {"int4", ".weight_g_idx"}}) {
    for (const std::int32_t group : {-1, 0, 1, 2}) {
      std::vector<std::int32_t> order(64);
      for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<std::int32_t>(k % 2);
      order[5] = group;
      const TemporaryFolder at;
      const std::string message = error_of([&] {
        (void)Checkpoint::open(
            rewritten(
                at, name, [](Json&) {},
                [&](Tensors& tensors) { tensors[gate + suffix] = view(order.data(), {64}); }))
            .weights(0);
      });
      const bool there = group == 0 || group == 1;
      EXPECT_EQ(message.empty(), there) << message;
      if (there) continue;
      EXPECT_NE(
          message.find(fmt::format("{}{}' holds {} at 5: must be 0 to 1", gate, suffix, group)),
          std::string::npos)
          << message;
    }
  }
}

// -1 everywhere: an order that was never set is the plain one.
TEST(QuantisedForms, AnOrderOfActivationsThatIsNotSet) {
  const std::vector<std::int32_t> unset(64, -1);
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "int4", [](Json&) {},
      [&](Tensors& tensors) { tensors[gate + ".weight_g_idx"] = view(unset.data(), {64}); }));
  EXPECT_FALSE(checkpoint.weights(0).experts.packed_gate[0].group_of);
}

// Both sizes, in integers of either width.
TEST(QuantisedRefusals, AnotherWeightShape) {
  const auto message = [](std::int64_t n, std::int64_t k, bool wide) {
    const std::int64_t shape[] = {n, k};
    const std::int32_t narrow[] = {static_cast<std::int32_t>(n), static_cast<std::int32_t>(k)};
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(rewritten(
                                 at, "int4", [](Json&) {},
                                 [&](Tensors& tensors) {
                                   tensors[gate + ".weight_shape"] =
                                       wide ? view(shape, {2}) : view(narrow, {2});
                                 }))
          .weights(0);
    });
  };
  for (const bool wide : {true, false}) {
    EXPECT_EQ(message(32, 64, wide), "");
    EXPECT_NE(message(32, 65, wide).find("holds [32, 65]: must hold [32, 64]"), std::string::npos);
    EXPECT_NE(message(31, 64, wide).find("holds [31, 64]: must hold [32, 64]"), std::string::npos);
  }
}

// A tensor of one row or column more or less, or of another type, would be read past its end, or as
// other numbers than were written.
class QuantisedTensors : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Dialects, QuantisedTensors, testing::ValuesIn(cases),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(QuantisedTensors, OfAnotherSizeOrTypeAreRefused) {
  const char* const name = GetParam().name;
  const SafetensorsFile file =
      SafetensorsFile::open(quantised_folder + "/" + name + "/model.safetensors");
  const auto refused = [&](const std::string& tensor, DType dtype,
                           const std::vector<std::int64_t>& shape) {
    const Tensor before = file.get(tensor);
    const auto* const bytes = before.as<const char>();
    std::string repeated;  // content that is legal
    while (repeated.size() < 16 * static_cast<std::size_t>(before.bytes()) + 64) {
      repeated.append(bytes, static_cast<std::size_t>(before.bytes()));
    }
    const TemporaryFolder at;
    Status status = Status::ok;
    const std::string message = error_of(
        [&] {
          (void)Checkpoint::open(rewritten(
                                     at, name, [](Json&) {},
                                     [&](Tensors& tensors) {
                                       tensors[tensor] = of_shape(repeated.data(), dtype, shape);
                                     }))
              .weights(0);
        },
        &status);
    // The tensor, or its module.
    EXPECT_NE(message.find(tensor.substr(0, tensor.rfind('.'))), std::string::npos)
        << tensor << " as " << of_shape(nullptr, dtype, shape).describe() << ": " << message;
    EXPECT_TRUE(status == Status::bad_file || status == Status::unsupported) << message;
  };
  for (const std::string& tensor : file.names()) {
    const bool one = tensor.find("experts.0.") != std::string::npos;
    const bool together = tensor.find("experts.gate_up_proj_") != std::string::npos ||
                          tensor.find("experts.down_proj_") != std::string::npos;
    if ((!one && !together) || tensor.ends_with("_bias") || tensor.ends_with("input_scale")) {
      continue;
    }
    const Tensor before = file.get(tensor);
    std::vector<std::int64_t> shape(before.shape.begin(), before.shape.begin() + before.rank);
    refused(tensor, DType::f64, shape);
    for (std::int64_t& size : shape) {
      for (const std::int64_t more : {1, -1}) {
        size += more;
        // One scale may stand for a row, or for all.
        if (more > 0 || size > 1) refused(tensor, before.dtype, shape);
        size -= more;
      }
    }
  }
}

// What is not read with a format changes the weights, and is not left out.
TEST(QuantisedRefusals, TensorsBesideThatAreNotRead) {
  const std::vector<float> ones(64, 1);
  for (const char* name : {"nvfp4_modelopt", "fp8_channel", "int8_packed"}) {
    for (const char* extra : {".pre_quant_scale", ".input_rotation", ".weight_zero_point",
                              ".bitmask", ".row_offsets", ".weight_scale_offset"}) {
      const TemporaryFolder at;
      const std::string message = error_of([&] {
        (void)Checkpoint::open(
            rewritten(
                at, name, [](Json&) {},
                [&](Tensors& tensors) { tensors[gate + extra] = view(ones.data(), {64}); }))
            .weights(0);
      });
      EXPECT_NE(message.find("'" + gate + extra + "' is there: not read with this format"),
                std::string::npos)
          << name << ": " << message;
    }
  }
}

// One scale of integers stands for all rows.
TEST(QuantisedForms, IntegersOfOneScale) {
  const float scale = 0.375F;
  for (const char* name : {"int8", "int8_packed"}) {
    const TemporaryFolder at;
    const Checkpoint checkpoint = Checkpoint::open(rewritten(
        at, name, [](Json&) {},
        [&](Tensors& tensors) { tensors[gate + ".weight_scale"] = view(&scale, {1}); }));
    const LayerWeights weights = checkpoint.weights(0);
    const Tensor& read = weights.experts.packed_gate[0].scales;
    ASSERT_EQ(read.elements(), weights.experts.packed_gate[0].n);
    for (std::int64_t i = 0; i < read.elements(); ++i) EXPECT_EQ(read.as<const float>()[i], scale);
  }
}

// A scale a row without the second dimension.
TEST(QuantisedForms, ScalesOfRowsInOneDimension) {
  const TemporaryFolder at;
  rewritten(
      at, "fp8_channel", [](Json&) {},
      [](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          if (name.ends_with(".weight_scale")) t = view(t.data, t.dtype, {t.shape[0]});
        }
      });
  expect_same_values(at.path(), "fp8_channel");
}

// Words of eight along n need a multiple of eight, the blocks of gpt-oss of 32 k.
TEST(QuantisedRefusals, SizesThatWordsDoNotHold) {
  const std::vector<std::uint8_t> zeros(1 << 14);
  const auto message = [&](const char* name, const char* size, int value,
                           const std::map<std::string, std::vector<std::int64_t>>& shapes) {
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(rewritten(
                                 at, name, [&](Json& config) { config[size] = value; },
                                 [&](Tensors& tensors) {
                                   for (const auto& [tensor, shape] : shapes) {
                                     tensors[tensor] =
                                         of_shape(zeros.data(), tensors.at(tensor).dtype, shape);
                                   }
                                 }))
          .weights(0);
    });
  };
  const std::string gptq = message(
      "gptq", "moe_intermediate_size", 36,
      {{gate + ".qweight", {8, 36}}, {gate + ".scales", {2, 36}}, {gate + ".qzeros", {2, 4}}});
  EXPECT_NE(
      gptq.find(gate + ".qweight' is i32 [8, 36]: must be i32 [8, 36], both sizes multiples of 8"),
      std::string::npos)
      << gptq;
  const std::string awq = message(
      "awq", "moe_intermediate_size", 36,
      {{gate + ".qweight", {64, 4}}, {gate + ".scales", {2, 36}}, {gate + ".qzeros", {2, 4}}});
  EXPECT_NE(awq.find(gate + ".qweight' is i32 [64, 4]: must be i32 [64, 4], 36 a multiple of 8"),
            std::string::npos)
      << awq;
  const std::string block = "model.layers.0.mlp.";
  const std::string gpt_oss = message("mxfp4_gpt_oss", "hidden_size", 48,
                                      {{block + "router.weight", {2, 48}},
                                       {block + "experts.down_proj_bias", {2, 48}},
                                       {block + "experts.down_proj_blocks", {2, 48, 1, 16}},
                                       {block + "experts.down_proj_scales", {2, 48, 1}}});
  EXPECT_NE(gpt_oss.find("gate_up_proj_blocks' is u8 [2, 64, 2, 16]: must be u8 [2, 64, 2, 16], 32 "
                         "k to a block"),
            std::string::npos)
      << gpt_oss;
}

// Of a last byte half is no weight, whatever the word holds there.
TEST(QuantisedForms, NibblesBehindAnOddWidth) {
  const std::vector<std::uint32_t> words(32 * 8, 0xffffffffU);
  const std::vector<std::int64_t> wide = {32, 63}, narrow = {63, 32};
  const std::vector<std::uint16_t> router(2 * 63);
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "int4", [](Json& config) { config["hidden_size"] = 63; },
      [&](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          const bool down = name.find("down_proj") != std::string::npos;
          if (name.ends_with("mlp.gate.weight")) {
            t = view(router.data(), bf16, {2, 63});
          } else if (name.ends_with("weight_shape")) {
            t = view(down ? narrow.data() : wide.data(), {2});
          } else if (down) {
            t = t.rows(0, 63);
          } else if (name.ends_with("weight_packed")) {
            t = view(words.data(), DType::i32, {32, 8});
          }
        }
      }));
  const LayerWeights weights = checkpoint.weights(0);
  const Tensor& read = weights.experts.packed_gate[0].values;
  ASSERT_EQ(read.describe(), "u8 [32, 32]");
  for (std::int64_t row = 0; row < 32; ++row) {
    EXPECT_EQ(read.as<const std::uint8_t>()[row * 32 + 30], 0xff);
    EXPECT_EQ(read.as<const std::uint8_t>()[row * 32 + 31], 0x0f);
  }
}

#if defined(__x86_64__)
// Who reads may flush denormals: 2^-127 is one.
TEST(QuantisedForms, ScalesDoNotDependOnHowTheCallerFlushesSmallNumbers) {
  const std::uint8_t bytes[] = {0, 0};
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "fp8_block_ue8m0", [](Json&) {},
      [&](Tensors& tensors) {
        tensors[gate + ".weight_scale_inv"] = view(bytes, DType::f8_e8m0, {1, 2});
      }));
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  const LayerWeights weights = checkpoint.weights(0);
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(weights.experts.packed_gate[0].scales.as<const float>()[0], 0x1p-127F);
}
#endif

// 2^(byte - 127), the least of which is no normal f32; 255 is NaN.
TEST(QuantisedForms, ScalesThatAreExponents) {
  const std::pair<std::uint8_t, float> scales[] = {
      {0, 0x1p-127F}, {1, 0x1p-126F}, {126, 0.5F},     {127, 1.0F},
      {128, 2.0F},    {200, 0x1p73F}, {254, 0x1p127F}, {255, std::nanf("")}};
  for (const auto& [byte, value] : scales) {
    for (const DType dtype : {DType::f8_e8m0, DType::u8}) {
      const std::uint8_t bytes[] = {byte, 127};
      const TemporaryFolder at;
      const Checkpoint checkpoint = Checkpoint::open(rewritten(
          at, "fp8_block_ue8m0", [](Json&) {},
          [&](Tensors& tensors) {
            tensors[gate + ".weight_scale_inv"] = view(bytes, dtype, {1, 2});
          }));
      const LayerWeights weights = checkpoint.weights(0);
      const Tensor& read = weights.experts.packed_gate[0].scales;
      ASSERT_EQ(read.describe(), "f32 [1, 2]");
      EXPECT_EQ(std::isnan(read.as<const float>()[0]), std::isnan(value));
      if (!std::isnan(value)) {
        EXPECT_EQ(read.as<const float>()[0], value);
      }
      EXPECT_EQ(read.as<const float>()[1], 1);
    }
  }
}

}  // namespace
}  // namespace shunt::test
