// Quantised checkpoints that are refused by name: what their config says is not what is there.
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "checkpoint/quantised_changed.hpp"

namespace shunt::test {
namespace {

const char* const weights_path = "/config_groups/group_0/weights/";

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
      {"int8", "/config_groups", "[[1]]", "", "config_groups is [[1]]"},
      {"int8", "/config_groups/group_0", "\"x\"", "", "group_0 is \"x\": must be an object"},
      {"int8", "/config_groups/group_0/weights", "\"x\"", "", "weights is \"x\""},
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

// A strategy says how many scales a matrix has.
TEST(QuantisedRefusals, StrategiesThatScalesContradict) {
  const std::string strategy = std::string(weights_path) + "strategy";
  const auto must = [](int wanted, int there) {
    return fmt::format(": tensor '{}.weight_scale' must hold {} numbers, and holds {}", gate,
                       wanted, there);
  };
  check_edits({
      {"int8", strategy.c_str(), "\"channel\"", "", ""},
      {"int8", strategy.c_str(), "\"tensor\"", "", "strategy is \"tensor\"" + must(1, 32)},
      {"int8_packed", strategy.c_str(), "\"tensor\"", "", "strategy is \"tensor\"" + must(1, 32)},
      {"int4", strategy.c_str(), "\"group\"", "", ""},
      {"int4", strategy.c_str(), "\"channel\"", "", "must be 1 groups a row"},
      {"int4_channel", strategy.c_str(), "\"channel\"", "", ""},
      {"fp8_tensor", "/quant_algo", "\"FP8_PER_CHANNEL_PER_TOKEN\"", "",
       "quant_algo is \"FP8_PER_CHANNEL_PER_TOKEN\"" + must(32, 1)},
      {"fp8_tensor", "/quant_algo", "\"FP8_PB_WO\"", "", ""},  // one block of 128 x 128
      {"awq", "/q_group_size", "64", "", "q_group_size is 64: must be 32"},
      {"awq", "/q_group_size", "32", "", ""},
  });
  const TemporaryFolder at;  // groups of 32 in a row of one scale
  const std::string message = error_of([&] {
    (void)Checkpoint::open(changed(at, "int8", [](Json& config) {
      Json& weights = config["quantization_config"]["config_groups"]["group_0"]["weights"];
      weights["strategy"] = "group";
      weights["group_size"] = 32;
    })).weights(0);
  });
  EXPECT_NE(message.find("strategy is \"group\"" + must(64, 32)), std::string::npos) << message;
}

// What is packed must be of a group's targets; names of classes may be any module's.
TEST(QuantisedRefusals, TargetsThatNameOtherModules) {
  const auto message = [](const Json& targets) {
    const TemporaryFolder at;
    return error_of([&] {
      (void)Checkpoint::open(changed(at, "int4", [&](Json& config) {
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets;
      })).weights(0);
    });
  };
  EXPECT_EQ(message({"re:.*_proj$"}), "");
  EXPECT_EQ(message({"FusedMoE"}), "");
  EXPECT_EQ(message({gate, "Linear"}), "");
  const std::string other = message({"re:.*down_proj$"});
  EXPECT_NE(other.find("tensors of '" + gate +
                       "' are packed: no targets of quantization_config.config_groups name it"),
            std::string::npos)
      << other;
  const std::string none = message(Json::array());
  EXPECT_NE(none.find("targets is []: must be a list of modules"), std::string::npos) << none;
}

// One expert packed and another plain, whichever comes first.
TEST(QuantisedRefusals, ExpertsPackedUnlikeEachOther) {
  for (const int plain : {0, 1}) {
    const TemporaryFolder at;
    const std::vector<float> zeros(std::size_t{32} * 64);
    const std::string expert = fmt::format("model.layers.0.mlp.experts.{}.gate_proj", plain);
    const std::string message = error_of([&] {
      (void)Checkpoint::open(
          rewritten(
              at, "int4",
              [&](Json& config) { config["quantization_config"]["ignore"].push_back(expert); },
              [&](Tensors& tensors) {
                std::erase_if(tensors, [&](const auto& t) { return t.first.starts_with(expert); });
                tensors[expert + ".weight"] = view(zeros.data(), {32, 64});
              }))
          .weights(0);
    });
    const char* const how = plain == 0 ? "are packed and those of" : "are plain and those of";
    EXPECT_NE(message.find(how), std::string::npos) << message;
    EXPECT_NE(message.find("experts.1.gate_proj'"), std::string::npos) << message;
  }
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

// What only a layer finds out about its weights is said with the checkpoint's folder and the layer.
TEST(Quantised, ALayersErrorsNameTheCheckpoint) {
  const TemporaryFolder at;
  std::vector<std::uint16_t> scales(32, f32_to_bf16(1));
  scales[1] = f32_to_bf16(std::nanf(""));
  const std::string folder = rewritten(
      at, "fp8_channel", [](Json&) {},
      [&](Tensors& tensors) {
        tensors.at(gate + ".weight_scale") = of_shape(scales.data(), DType::bf16, {32, 1});
      });
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const std::string message =
      error_of([&] { const Layer layer(checkpoint, 0, cpu({.threads = 1})); });
  EXPECT_TRUE(message.starts_with(folder + ", layer 0: ")) << message;
  EXPECT_NE(message.find("[0], or its up, holds a NaN"), std::string::npos) << message;
  EXPECT_NE(error_of([&] {
              const Layer layer(checkpoint, 9, cpu({.threads = 1}));
            }).find("layer is 9: must be 0 to"),
            std::string::npos);
}

}  // namespace
}  // namespace shunt::test
