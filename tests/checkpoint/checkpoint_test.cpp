// Opening folders: shards, missing files, lying indexes and shapes.
#include "shunt/checkpoint.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "checkpoint/golden.hpp"
#include "checkpoint/quantised_changed.hpp"
#include "checkpoint/temporary.hpp"

namespace shunt {
namespace {

using test::error_of;
using test::read_file;
using test::TemporaryFolder;
using test::write_file;

// A copy of a golden checkpoint, to be damaged.
class Damaged : public testing::Test {
 protected:
  void copy(const std::string& name) {
    for (const auto& entry : std::filesystem::directory_iterator(test::golden(name))) {
      std::filesystem::copy(entry.path(), folder_.path());
    }
  }
  void edit(const std::string& file, const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json json = nlohmann::json::parse(read_file(folder_ / file));
    change(json);
    write_file(folder_ / file, json.dump());
  }
  std::string open_error(Status* status = nullptr) {
    return error_of([&] { Checkpoint::open(folder_.path()); }, status);
  }
  std::string weights_error(int layer, Status* status = nullptr) {
    return error_of([&] { Checkpoint::open(folder_.path()).weights(layer); }, status);
  }
  TemporaryFolder folder_;
};

constexpr const char* index_file = "model.safetensors.index.json";

TEST_F(Damaged, ShardsAreReadThroughTheIndex) {
  copy("qwen3_moe_merged");
  ASSERT_TRUE(std::filesystem::exists(folder_ / index_file));
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_EQ(checkpoint.family(), "qwen3_moe");
  EXPECT_EQ(checkpoint.model_name(), "Qwen3MoeForCausalLM");
  ASSERT_EQ(checkpoint.layers().size(), 3u);
  EXPECT_TRUE(checkpoint.layers()[0].moe);
  EXPECT_FALSE(checkpoint.layers()[1].moe);
  EXPECT_EQ(checkpoint.layers()[1].note, "dense MLP");
  EXPECT_EQ(checkpoint.layers()[2].module, "model.layers.2.mlp");
  EXPECT_EQ(checkpoint.first_moe_layer(), 0);
  EXPECT_TRUE(checkpoint.contains("model.layers.1.mlp.up_proj.weight"));
  EXPECT_EQ(checkpoint.weights(2).experts.up.size(), 12u);
  EXPECT_NE(error_of([&] { checkpoint.weights(1); }).find("layer 1 has no experts: dense MLP"),
            std::string::npos);
}

TEST_F(Damaged, MissingShard) {
  copy("qwen3_moe_merged");
  std::filesystem::remove(folder_ / "model-00002-of-00007.safetensors");
  Status status = Status::ok;
  const std::string message = open_error(&status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("model-00002-of-00007.safetensors: shard is missing"), std::string::npos)
      << message;
}

// As Grok 2 is published.
TEST_F(Damaged, SlicesOfRanksAreNotTensors) {
  copy("grok2");
  std::filesystem::rename(folder_ / "model.safetensors",
                          folder_ / "pytorch_model-00006-TP-000.safetensors");
  Status status = Status::ok;
  const std::string message = open_error(&status);
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("pytorch_model-00006-TP-000.safetensors: holds what one rank of several"),
            std::string::npos)
      << message;
}

TEST_F(Damaged, TheIndexMayNotLeaveTheFolder) {
  copy("qwen3_moe_merged");
  for (const char* file : {"../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b"}) {
    edit(index_file, [&](nlohmann::json& json) {
      json["weight_map"]["model.layers.0.mlp.gate.weight"] = file;
    });
    const std::string message = open_error();
    EXPECT_NE(message.find("must be the name of a file of the same folder"), std::string::npos)
        << message;
  }
}

TEST_F(Damaged, AnIndexThatLies) {
  copy("qwen3_moe_merged");
  edit(index_file, [](nlohmann::json& json) {
    json["weight_map"]["no.such.tensor"] = "model-00001-of-00007.safetensors";
  });
  EXPECT_NE(open_error().find("has no tensor 'no.such.tensor'"), std::string::npos);
  edit(index_file, [](nlohmann::json& json) { json["weight_map"] = 3; });
  EXPECT_NE(open_error().find("weight_map is 3"), std::string::npos);
  edit(index_file, [](nlohmann::json& json) { json.erase("weight_map"); });
  EXPECT_NE(open_error().find("weight_map is missing"), std::string::npos);
  write_file(folder_ / index_file, "nonsense");
  EXPECT_NE(open_error().find("not JSON"), std::string::npos);
}

TEST_F(Damaged, APipeIsRefusedNotWaitedFor) {
  copy("mixtral");
  std::filesystem::remove(folder_ / "model.safetensors");
  ASSERT_EQ(::mkfifo((folder_ / "model.safetensors").c_str(), 0600), 0);
  EXPECT_NE(open_error().find("is a device or pipe, must be a regular file"), std::string::npos);
  EXPECT_NE(error_of([] { Checkpoint::open(""); }).find("folder is ''"), std::string::npos);
}

TEST_F(Damaged, MoreLayersThanAreStored) {
  copy("mixtral");
  edit("config.json", [](nlohmann::json& json) { json["num_hidden_layers"] = 5; });
  const std::string message = open_error();
  EXPECT_NE(message.find("config.json: layer 2 of 5 has experts, but no tensor 'model.layers.2.*'"),
            std::string::npos)
      << message;
}

TEST_F(Damaged, MissingFiles) {
  Status status = Status::ok;
  EXPECT_NE(open_error(&status).find("config.json: No such file"), std::string::npos);
  EXPECT_EQ(status, Status::io);
  copy("mixtral");
  std::filesystem::remove(folder_ / "model.safetensors");
  EXPECT_NE(open_error(&status).find("model.safetensors: No such file"), std::string::npos);
  EXPECT_EQ(status, Status::io);
}

TEST_F(Damaged, ConfigAndTensorsMustAgree) {
  copy("mixtral");
  struct Case {
    const char* field;
    nlohmann::json value;
    const char* message;
  };
  const Case cases[] = {
      {"hidden_size", 32, "is bf16 [8, 64]: config.json asks for [8, 32]"},
      {"num_local_experts", 7, "config.json asks for [7, 64]"},
      {"intermediate_size", 95, "config.json asks for [95, 64]"},
      {"model_type", "dbrx", "ffn_config is missing"},
  };
  const std::string original = read_file(folder_ / "config.json");
  for (const Case& c : cases) {
    SCOPED_TRACE(c.field);
    write_file(folder_ / "config.json", original);
    edit("config.json", [&](nlohmann::json& json) { json[c.field] = c.value; });
    const std::string message = open_error() + weights_error(0);
    EXPECT_NE(message.find(c.message), std::string::npos) << message;
  }
}

TEST_F(Damaged, SharedExpertsThatTheConfigDoesNotHave) {
  copy("deepseek_v3");
  edit("config.json", [](nlohmann::json& json) { json["n_shared_experts"] = 0; });
  const std::string message = weights_error(Checkpoint::open(folder_.path()).first_moe_layer());
  EXPECT_NE(message.find("config.json says nothing of shared experts"), std::string::npos)
      << message;
}

TEST_F(Damaged, AnActivationOfSharedExpertsAlone) {
  for (const char* name : {"hy_v4", "glm5_next"}) {
    std::filesystem::remove_all(folder_.path());
    std::filesystem::create_directory(folder_.path());
    copy(name);
    edit("config.json", [](nlohmann::json& json) {
      (json.contains("text_config") ? json["text_config"] : json)["hidden_act"] = "gelu";
    });
    EXPECT_NE(open_error().find("hidden_act is \"gelu\": only \"silu\""), std::string::npos)
        << open_error();
  }
}

// One more tensor in the block that would make another model of it.
TEST_F(Damaged, TensorsThatTheConfigDoesNotAccountFor) {
  copy("qwen3_moe");
  const SafetensorsFile file = SafetensorsFile::open(test::golden("qwen3_moe/model.safetensors"));
  const std::vector<float> ones(64, 1), zeros(64, 0);
  const std::string block = "model.layers.1.mlp.";
  const auto with = [&](const std::string& name, const std::vector<float>& values) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& each : file.names()) tensors.emplace_back(each, file.get(each));
    tensors.emplace_back(block + name, view(values.data(), {1, 64}));
    write_safetensors(folder_ / "model.safetensors", tensors);
    return weights_error(1);
  };
  for (const auto& [name, what] : {std::pair("gate.bias", "it"),
                                   {"gate.e_score_correction_bias", "it"},
                                   {"image_gate.weight", "it"},
                                   {"image_router.weight", "it"},
                                   {"shared_expert_gate.weight", "shared experts"},
                                   {"shared_mlp.up_proj.weight", "shared experts"},
                                   {"experts.16.up_proj.weight", "more than 16 experts"},
                                   {"chunk_experts.0.up_proj.weight", "other experts"},
                                   {"experts.gate_up_proj_bias", "biases"},
                                   {"experts.3.up_proj.bias", "biases"},
                                   {"experts.3.up_proj.lora_A.weight", "adapters"},
                                   {"gate.lora_B.default.weight", "adapters"}}) {
    const std::string message = with(name, ones);
    EXPECT_NE(
        message.find("tensor '" + block + name + "' is there: config.json says nothing of " + what),
        std::string::npos)
        << name << ": " << message;
  }
  // The same experts under another name, and scales of weights that have none.
  for (const auto& [name, what] :
       {std::pair("experts.gate_up_proj", "are both there: must be one of them"),
        {"experts.gate_up_proj_blocks", "are both there: must be one of them"},
        {"experts.3.up_proj.weight_packed", "are both there: must be one of them"},
        {"experts.3.up_proj.scale", "is there: its weight is bf16, which has no scales"},
        {"experts.3.up_proj.weight_scale", "is there: its weight is bf16, which has no scales"},
        {"experts.3.up_proj.weight_scale_inv", "is there: its weight is bf16, which has no scales"},
        {"experts.3.up_proj.weight_global_scale",
         "is there: its weight is bf16, which has no scales"},
        {"experts.3.up_proj.weight_g_idx",
         "is there: its weight is bf16, which has nothing beside it"},
        {"experts.3.up_proj.weight_zero_point",
         "is there: its weight is bf16, which has nothing beside it"},
        {"experts.3.up_proj.weight_shape",
         "is there: its weight is bf16, which has nothing beside it"}}) {
    const std::string message = with(name, ones);
    EXPECT_NE(message.find(block + name), std::string::npos) << name << ": " << message;
    EXPECT_NE(message.find(what), std::string::npos) << name << ": " << message;
  }
  for (const char* name : {"experts.3.up_proj.bias", "experts.3.down_proj.bias"}) {
    EXPECT_EQ(with(name, zeros), "") << name;  // as GPTQ's first writers left them
  }
  EXPECT_EQ(with("experts.3.up_proj.input_scale", ones), "");
}

// Biases of matrices that have none, whatever folder they lie in.
TEST_F(Damaged, BiasesBesideMatrices) {
  struct Case {
    const char *golden, *bias;
  };
  for (const Case& c : {Case{"granitemoe", "block_sparse_moe.input_linear.bias"},
                        {"granitemoe", "block_sparse_moe.output_linear.bias"},
                        {"jetmoe", "mlp.output_linear.bias"},
                        {"step3p7", "moe.down_proj.bias"},
                        {"kimi_k3", "block_sparse_moe.routed_expert_down_proj.bias"},
                        {"nemotron_h_latent", "mixer.fc1_latent_proj.bias"},
                        {"qwen2_moe", "mlp.shared_expert_gate.bias"},
                        {"ernie4_5_vl_moe", "mlp.gate.bias"}}) {
    SCOPED_TRACE(std::string(c.golden) + ": " + c.bias);
    std::filesystem::remove_all(folder_.path());
    std::filesystem::create_directory(folder_.path());
    copy(c.golden);
    const Checkpoint whole = Checkpoint::open(test::golden(c.golden));
    std::vector<std::pair<std::string, Tensor>> tensors;
    // Beside its matrix, which is there under that name.
    std::string weight = c.bias;
    weight.replace(weight.rfind("bias"), 4, "weight");
    std::string bias;
    for (const std::string& name : whole.tensor_names()) {
      tensors.emplace_back(name, whole.tensor(name));
      const std::size_t at = name.find("." + weight);
      if (at != std::string::npos && bias.empty()) bias = name.substr(0, at + 1) + c.bias;
    }
    ASSERT_NE(bias, "");
    const std::vector<float> ones(4, 1), zeros(4, 0);
    const auto with = [&](const std::vector<float>& values) {
      std::vector<std::pair<std::string, Tensor>> all = tensors;
      all.emplace_back(bias, view(values.data(), {4}));
      for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
        if (entry.path().string().find("model") != std::string::npos) {
          std::filesystem::remove(entry.path());
        }
      }
      write_safetensors(folder_ / "model.safetensors", all);
      return weights_error(whole.first_moe_layer());
    };
    EXPECT_NE(with(ones).find("'" + bias + "' is there: config.json says nothing of biases"),
              std::string::npos)
        << with(ones);
    EXPECT_EQ(with(zeros), "");
  }
}

TEST_F(Damaged, WhatLiesBehindTheLastLayerIsSaid) {
  copy("mixtral");
  EXPECT_EQ(Checkpoint::open(folder_.path()).summary().find("behind"), std::string::npos);
  edit("config.json", [](nlohmann::json& json) { json["num_hidden_layers"] = 1; });
  EXPECT_NE(Checkpoint::open(folder_.path())
                .summary()
                .find("behind the last layer and not read: model.layers.1.*"),
            std::string::npos);
}

// Programs that read whole shards have what the index does not name, or names elsewhere.
TEST_F(Damaged, TensorsOfShardsThatTheIndexDoesNotName) {
  copy("qwen3_moe_merged");
  const std::vector<float> ones(64, 1);
  const std::string block = "model.layers.2.mlp.";
  const nlohmann::json index = nlohmann::json::parse(read_file(folder_ / index_file));
  const Checkpoint whole =
      Checkpoint::open(test::golden("qwen3_moe_merged"));  // the copy is overwritten
  const auto with = [&](const std::string& name, const Tensor& tensor) {
    edit(index_file, [&](nlohmann::json& json) {
      json = index;
      json["weight_map"]["more"] = "more.safetensors";
    });
    write_safetensors(folder_ / "more.safetensors",
                      {{"more", view(ones.data(), {1})}, {name, tensor}});
    return weights_error(2);
  };
  const Tensor one = view(ones.data(), {8, 8});
  EXPECT_EQ(with("model.layers.2.self_attn.q_proj.bias", one), "");
  EXPECT_EQ(with("model.layers.2.input_layernorm.weight", one), "");
  EXPECT_EQ(with("model.layers.1.mlp.gate.weight", one), "");  // another layer
  for (const char* name : {"experts.gate_up_proj_bias", "experts.3.up_proj.g_idx", "gate.bias"}) {
    EXPECT_NE(with(block + name, one)
                  .find("more.safetensors: tensor '" + block + name +
                        "' is there: the index does not name it"),
              std::string::npos)
        << with(block + name, one);
  }
  const std::string router = block + "gate.weight";
  EXPECT_EQ(with(router, whole.tensor(router)), "");
  const std::string message = with(router, one);
  EXPECT_NE(message.find("more.safetensors: tensor '" + router + "' is there: in "),
            std::string::npos)
      << message;
  EXPECT_NE(message.find(", where the index has it, is another"), std::string::npos) << message;
}

// What has two names in a family is there under one of them.
TEST_F(Damaged, TensorsUnderTwoNames) {
  for (const auto& [family, one, other] :
       {std::tuple("mixtral", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        {"exaone_moe", "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"},
        {"hy_v3", "mlp.shared_mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight"}}) {
    SCOPED_TRACE(family);
    std::filesystem::remove_all(folder_.path());
    std::filesystem::create_directory(folder_.path());
    copy(family);
    const int layer = Checkpoint::open(folder_.path()).first_moe_layer();
    const SafetensorsFile file =
        SafetensorsFile::open(test::golden(std::string(family) + "/model.safetensors"));
    const std::string start = fmt::format("model.layers.{}.", layer);
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& each : file.names()) tensors.emplace_back(each, file.get(each));
    const std::string from = start + (file.contains(start + one) ? one : other);
    const std::string to = start + (file.contains(start + one) ? other : one);
    tensors.emplace_back(to, file.get(from));
    write_safetensors(folder_ / "model.safetensors", tensors);
    const std::string message = weights_error(layer);
    EXPECT_NE(message.find("are both there: must be one of them"), std::string::npos) << message;
    for (const std::string& name : {from, to}) {
      EXPECT_NE(message.find("'" + name + "'"), std::string::npos) << message;
    }
  }
}

// Whatever is read of a layer (what may not be missing) has one size and type, however its family
// stores it.
TEST_F(Damaged, TensorsOfAnotherSizeOrType) {
  for (const char* family : {"axk1",
                             "dbrx",
                             "deepseek_v4",
                             "deepseek_v4_merged",
                             "ernie4_5_vl_moe",
                             "gemma4",
                             "gpt_oss",
                             "granitemoe",
                             "inkling",
                             "inkling_merged",
                             "jetmoe",
                             "kimi_k3",
                             "llama4",
                             "longcat_flash",
                             "longcat_flash_merged",
                             "mixtral",
                             "mixtral_merged",
                             "muse_spark",
                             "nemotron_h_latent",
                             "nemotron_h_latent_merged",
                             "qwen2_moe",
                             "qwen3_vl_moe",
                             "step3p7"}) {
    std::filesystem::remove_all(folder_.path());
    std::filesystem::create_directory(folder_.path());
    const std::string source = test::golden(family);
    write_file(folder_ / "config.json", read_file(source + "/config.json"));
    const int layer = Checkpoint::open(source).first_moe_layer();
    const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
    const auto with = [&](const std::string& name, const Tensor& tensor) {
      std::vector<std::pair<std::string, Tensor>> tensors;
      for (const std::string& each : file.names()) {
        if (each != name) tensors.emplace_back(each, file.get(each));
      }
      if (tensor.rank > 0) tensors.emplace_back(name, tensor);
      write_safetensors(folder_ / "model.safetensors", tensors);
      return weights_error(layer);
    };
    int read = 0;
    for (const std::string& name : file.names()) {
      if (name.find("." + std::to_string(layer) + ".") == std::string::npos) continue;
      const std::size_t list = name.find("experts.");
      const std::string behind = list == std::string::npos ? "" : name.substr(list + 8, 2);
      const bool numbered = !behind.empty() && behind[0] >= '0' && behind[0] <= '9';
      if (numbered && behind != "1.") continue;  // one stands for all
      if (with(name, Tensor{}).empty()) continue;
      ++read;
      const Tensor before = file.get(name);
      std::string bytes;  // its own, repeated
      while (bytes.size() < 8 * static_cast<std::size_t>(before.bytes()) + 64) {
        bytes.append(before.as<const char>(), static_cast<std::size_t>(before.bytes()));
      }
      std::vector<std::int64_t> shape(before.shape.begin(), before.shape.begin() + before.rank);
      const auto refused = [&](DType dtype) {
        const Tensor other = test::of_shape(bytes.data(), dtype, shape);
        const std::string message = with(name, other);
        EXPECT_NE(message.find(name), std::string::npos)
            << name << " as " << other.describe() << ": " << message;
      };
      refused(DType::f64);
      for (std::size_t d = 0; d < shape.size(); ++d) {
        // A row a token id, or one of another block.
        const bool any = name.ends_with("tid2eid") || name.ends_with("e_score_correction_bias");
        if (d == 0 && any && shape.size() == 2) continue;
        for (const std::int64_t more : {1, -1}) {
          shape[d] += more;
          refused(before.dtype);
          shape[d] -= more;
        }
      }
    }
    EXPECT_GE(read, 3) << family;
  }
}

// Of shared experts too, whatever a family calls them.
TEST_F(Damaged, BiasesOfSharedExperts) {
  for (const auto& [family, module] : {std::pair("qwen2_moe", "mlp.shared_expert"),
                                       {"deepseek_v3", "mlp.shared_experts"},
                                       {"hunyuan_v1_moe", "mlp.shared_mlp"}}) {
    std::filesystem::remove_all(folder_.path());
    std::filesystem::create_directory(folder_.path());
    copy(family);
    const std::string source = test::golden(family);
    const Checkpoint plain = Checkpoint::open(source);
    const int layer = plain.first_moe_layer();
    const std::string name =
        "model.layers." + std::to_string(layer) + "." + module + ".down_proj.bias";
    const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
    for (const float value : {0.0F, 1.0F}) {
      const std::vector<float> bias(static_cast<std::size_t>(plain.spec(layer).hidden), value);
      std::vector<std::pair<std::string, Tensor>> tensors;
      for (const std::string& each : file.names()) tensors.emplace_back(each, file.get(each));
      tensors.emplace_back(name, view(bias.data(), {plain.spec(layer).hidden}));
      write_safetensors(folder_ / "model.safetensors", tensors);
      const std::string message = weights_error(layer);
      EXPECT_EQ(message.find("tensor '" + name +
                             "' is there: config.json says nothing of biases") != std::string::npos,
                value != 0)
          << message;
      EXPECT_EQ(message.empty(), value == 0) << message;
    }
  }
}

TEST_F(Damaged, ARouterInALayerThatIsToHaveNone) {
  copy("qwen3_moe");
  edit("config.json", [](nlohmann::json& json) { json["mlp_only_layers"] = {1}; });
  EXPECT_NE(open_error().find("tensor 'model.layers.1.mlp.gate.weight' is there: config.json says "
                              "that layer 1 has no experts (dense MLP)"),
            std::string::npos)
      << open_error();
}

// A text model that says no type of its own, under a whole model that does.
TEST_F(Damaged, TextModelsByTheTypeOfTheWhole) {
  copy("unlimited_ocr");
  edit("config.json", [](nlohmann::json& json) {
    nlohmann::json whole = {{"model_type", "unlimited-ocr"}};
    for (const char* key : {"text_config", "language_config"}) {
      if (json.contains(key)) json = nlohmann::json(json[key]);
    }
    json.erase("model_type");
    whole["language_config"] = json;
    json = whole;
  });
  EXPECT_EQ(open_error(), "");
  edit("config.json", [](nlohmann::json& json) { json["model_type"] = "deepseek_vl_v2"; });
  EXPECT_EQ(Checkpoint::open(folder_.path()).family(), "deepseek_v2");
}

TEST_F(Damaged, TensorsOfAnotherDtypeAreRefused) {
  copy("mixtral");
  const SafetensorsFile file = SafetensorsFile::open(folder_ / "model.safetensors");
  const std::string name = "model.layers.0.block_sparse_moe.experts.3.w2.weight";
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& each : file.names()) tensors.emplace_back(each, file.get(each));
  const std::vector<std::uint8_t> bytes(std::size_t{64} * 96);
  for (auto& [each, tensor] : tensors) {
    if (each == name) tensor = view(bytes.data(), DType::f8_e4m3, {64, 96});
  }
  write_safetensors(folder_ / "model.safetensors", tensors);
  Status status = Status::ok;
  const std::string message = weights_error(0, &status);
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("'" + name + "' is f8_e4m3 [64, 96]"), std::string::npos) << message;
}

TEST_F(Damaged, TruncatedWeights) {
  copy("mixtral");
  const std::string bytes = read_file(folder_ / "model.safetensors");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{5}, std::size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    write_file(folder_ / "model.safetensors", std::string_view(bytes).substr(0, size));
    Status status = Status::ok;
    EXPECT_NE(open_error(&status), "");
    EXPECT_EQ(status, Status::bad_file);
  }
}

// Qwen3-VL's experts lie either way. Where one of their two tensors is square, the other tells.
TEST(Checkpoint, SquareTensorsLieAsTheOtherSays) {
  constexpr std::int64_t experts = 2, hidden = 8;
  for (const std::int64_t inner : {4, 8}) {  // gate and up are square, or down is
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(std::to_string(inner) + (transposed ? ", transposed" : ""));
      const auto number = [](std::int64_t e, std::int64_t row, std::int64_t k) {
        return static_cast<float>(e * 10000 + row * 100 + k);
      };
      const auto stored = [&](std::int64_t rows, std::int64_t columns) {
        std::vector<float> values;
        for (std::int64_t e = 0; e < experts; ++e) {
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            values.push_back(transposed ? number(e, i % rows, i / rows)
                                        : number(e, i / columns, i % columns));
          }
        }
        return values;
      };
      const std::vector<float> up = stored(2 * inner, hidden), down = stored(hidden, inner),
                               router(experts * hidden, 1);
      const auto shaped = [&](const std::vector<float>& values, std::int64_t rows,
                              std::int64_t columns) {
        return transposed ? view(values.data(), {experts, columns, rows})
                          : view(values.data(), {experts, rows, columns});
      };
      const TemporaryFolder folder;
      const std::string block = "model.layers.0.mlp.";
      write_safetensors(folder / "model.safetensors",
                        {{block + "gate.weight", view(router.data(), {experts, hidden})},
                         {block + "experts.gate_up_proj", shaped(up, 2 * inner, hidden)},
                         {block + "experts.down_proj", shaped(down, hidden, inner)}});
      const nlohmann::json config = {{"model_type", "qwen3_vl_moe_text"},
                                     {"hidden_size", hidden},
                                     {"num_hidden_layers", 1},
                                     {"moe_intermediate_size", inner},
                                     {"num_experts", experts},
                                     {"num_experts_per_tok", 1}};
      write_file(folder / "config.json", config.dump());
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      const ExpertWeights read = checkpoint.weights(0).experts;
      const auto at = [](const Tensor& t, std::int64_t row, std::int64_t k) {
        return t.as<const float>()[row * t.strides[0] + k * t.strides[1]];
      };
      EXPECT_EQ(at(read.gate[1], 2, 3), number(1, 2, 3));
      EXPECT_EQ(at(read.up[1], 2, 3), number(1, inner + 2, 3));
      EXPECT_EQ(at(read.down[1], 2, 3), number(1, 2, 3));
    }
  }
}

TEST(Checkpoint, TinyMoe) {
  const Checkpoint checkpoint = Checkpoint::open(test::tiny_moe);
  EXPECT_EQ(checkpoint.family(), "qwen3_moe");
  ASSERT_EQ(checkpoint.layers().size(), 4u);
  EXPECT_EQ(checkpoint.spec(0).hidden, 256);
  EXPECT_NE(checkpoint.summary().find("4 of 4 layers with experts"), std::string::npos);
}

}  // namespace
}  // namespace shunt
