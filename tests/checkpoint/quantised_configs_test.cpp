// Where quantised checkpoints say how they are: config.json, ModelOpt's file beside it, and what
// neither says of the modules that are packed.
#include "checkpoint/access.hpp"
#include "checkpoint/quantised_changed.hpp"

namespace shunt::test {
namespace {

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

}  // namespace
}  // namespace shunt::test
