// Whole language models against what transformers computes (tests/data/make_logits.py).
#include "eval/language_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "models.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

const std::string data = SHUNT_SOURCE_DIR "/tests/data/";

std::string folder_of(const std::string& model) {
  return model == "tiny_moe" ? tiny_moe : golden(model);
}

struct Recorded {
  explicit Recorded(const std::string& model)
      : file(SafetensorsFile::open(data + "logits/" + model + ".safetensors")),
        tokens(file.get("tokens")),
        logits(file.get("logits")) {}
  std::span<const std::int32_t> all() const {
    return {tokens.as<const std::int32_t>(), static_cast<std::size_t>(tokens.elements())};
  }
  SafetensorsFile file;
  Tensor tokens, logits;
};

class LanguageModels : public ::testing::TestWithParam<const char*> {};

// transformers and Shunt both sum in f32, in different orders: over 256 products and 4 layers,
// whose hidden states are some tens, logits of some tens differ by about 1e-5 of the largest.
TEST_P(LanguageModels, LogitsAreThoseOfTransformers) {
  const Recorded recorded(GetParam());
  LanguageModel model(Checkpoint::open(folder_of(GetParam())), cpu(), engine(), {.dtype = f32});
  const std::vector<std::int64_t> lengths(2, recorded.tokens.shape[1]);
  std::vector<float> logits(static_cast<std::size_t>(recorded.logits.elements()));
  model.forward(recorded.all(), lengths, logits);
  const float* theirs = recorded.logits.as<const float>();
  float largest = 0, error = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_TRUE(std::isfinite(logits[i]));
    largest = std::max(largest, std::fabs(theirs[i]));
    error = std::max(error, std::fabs(logits[i] - theirs[i]));
  }
  EXPECT_GT(largest, 0.1f);
  EXPECT_LE(error, 3e-5f * largest);
}

TEST_P(LanguageModels, BitsDependOnNeitherBatchNorThreads) {
  const Recorded recorded(GetParam());
  const Checkpoint checkpoint = Checkpoint::open(folder_of(GetParam()));
  const std::int64_t length = recorded.tokens.shape[1];
  const auto one = static_cast<std::size_t>(recorded.logits.elements() / 2);
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    LanguageModel model(checkpoint, cpu({.threads = threads}), engine(threads),
                        {.dtype = f32, .batch_invariant = true});
    std::vector<float> both(2 * one), alone(one);
    model.forward(recorded.all(), std::vector<std::int64_t>{length, length}, both);
    model.forward(recorded.all().subspan(static_cast<std::size_t>(length)),
                  std::vector<std::int64_t>{length}, alone);
    EXPECT_EQ(std::memcmp(alone.data(), both.data() + one, one * sizeof(float)), 0);
    if (first.empty()) first = both;
    EXPECT_EQ(std::memcmp(first.data(), both.data(), 2 * one * sizeof(float)), 0) << threads;
  }
}

// A prefix does not see what follows it.
TEST_P(LanguageModels, AreCausal) {
  const Recorded recorded(GetParam());
  LanguageModel model(Checkpoint::open(folder_of(GetParam())), cpu(), engine(),
                      {.dtype = f32, .batch_invariant = true});
  const auto vocabulary = static_cast<std::size_t>(model.spec().vocabulary);
  std::vector<float> whole(90 * vocabulary), part(37 * vocabulary);
  model.forward(recorded.all().subspan(0, 90), std::vector<std::int64_t>{90}, whole);
  model.forward(recorded.all().subspan(0, 37), std::vector<std::int64_t>{37}, part);
  EXPECT_EQ(std::memcmp(part.data(), whole.data(), part.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Recorded, LanguageModels,
                         ::testing::Values("tiny_moe", "mixtral", "qwen2_moe", "qwen3_moe"),
                         [](const auto& test) { return std::string(test.param); });

TEST(LanguageModel, RefusesFamiliesWhoseAttentionItDoesNotCompute) {
  SHUNT_ON_CPU_ONLY();
  for (const std::string family : {"deepseek_v3", "gpt_oss", "llama4", "qwen3_next"}) {
    Status status = Status::ok;
    const Checkpoint checkpoint = Checkpoint::open(folder_of(family));
    const std::string message = error_of([&] { decoder_spec(checkpoint); }, &status);
    EXPECT_EQ(status, Status::unsupported) << family;
    EXPECT_NE(message.find("'" + family), std::string::npos) << message;
    EXPECT_NE(message.find("qwen3_moe"), std::string::npos) << message;
  }
}

// What changes the mathematics of attention and is not computed is refused by the field's name.
TEST(LanguageModel, RefusesFieldsThatItDoesNotCompute) {
  SHUNT_ON_CPU_ONLY();
  const std::string source = folder_of("qwen3_moe");
  const std::string config = read_file(source + "/config.json");
  const auto with = [&](const std::string& from, const std::string& to) {
    const TemporaryFolder folder;
    std::filesystem::copy_file(source + "/model.safetensors", folder / "model.safetensors");
    std::string text = config;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    write_file(folder / "config.json", text);
    return error_of([&] { decoder_spec(Checkpoint::open(folder.path())); });
  };
  EXPECT_NE(with("\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"").find("yarn"),
            std::string::npos);
  for (const char* place : {"\"rope_type\": \"default\"", "\"head_dim\": 16"}) {  // within, without
    const std::string factor = std::string(place) + ", \"partial_rotary_factor\": ";
    EXPECT_EQ(with(place, factor + "1.0"), "");
    EXPECT_NE(with(place, factor + "0.5").find("partial_rotary_factor is 0.5: only 1 is computed"),
              std::string::npos);
  }
  // rope_scaling as published before, beside rope_parameters.
  const std::string rope = "\"rope_parameters\": {";
  const auto beside = [&](const std::string& scaling) {
    return with(rope, "\"rope_scaling\": {" + scaling + "}, " + rope);
  };
  EXPECT_NE(beside("\"type\": \"yarn\", \"factor\": 4").find("rope_scaling: rope_type is 'yarn'"),
            std::string::npos);
  EXPECT_NE(beside("\"partial_rotary_factor\": 0.5").find("partial_rotary_factor is 0.5"),
            std::string::npos);
  EXPECT_NE(beside("\"rope_theta\": 20000.0").find("rope_scaling: rope_theta is 20000"),
            std::string::npos);
  EXPECT_EQ(beside("\"type\": \"default\", \"rope_theta\": 10000.0"), "");
  EXPECT_NE(with("\"use_sliding_window\": false", "\"use_sliding_window\": true")
                .find("use_sliding_window"),
            std::string::npos);
  EXPECT_NE(
      with("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3").find("num_key_value_heads"),
      std::string::npos);
  EXPECT_NE(with("\"head_dim\": 16", "\"head_dim\": 17").find("head_dim"), std::string::npos);
  EXPECT_NE(with("\"mlp_only_layers\": []", "\"mlp_only_layers\": [1]").find("layer 1"),
            std::string::npos);
}

// A bias that config.json denies is not left out in silence, but for one that adds nothing.
TEST(LanguageModel, RefusesBiasesThatItDoesNotRead) {
  SHUNT_ON_CPU_ONLY();
  const Context host = cpu({.threads = 1});
  const auto with = [&](const std::string& family, const std::string& name, std::int64_t size,
                        float value) {
    const TemporaryFolder folder;
    const std::string source = folder_of(family);
    const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const auto& each : file.names()) tensors.emplace_back(each, file.get(each));
    std::vector<float> bias(static_cast<std::size_t>(size));
    bias.back() = value;
    tensors.emplace_back(name, view(bias.data(), {size}));
    write_safetensors(folder / "model.safetensors", tensors);
    std::filesystem::copy_file(source + "/config.json", folder / "config.json");
    Status status = Status::ok;
    const std::string message = error_of(
        [&] { LanguageModel(Checkpoint::open(folder.path()), host, host, {.dtype = f32}); },
        &status);
    EXPECT_EQ(status, message.empty() ? Status::ok : Status::bad_file);
    return message;
  };
  for (const std::string part : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    const std::string name = "model.layers.1.self_attn." + part + ".bias";
    EXPECT_EQ(with("qwen3_moe", name, 64, -0.0F), "");
    const std::string message = with("qwen3_moe", name, 64, 0.5F);
    EXPECT_NE(message.find("model.safetensors: tensor '" + name +
                           "' is there: config.json says nothing of biases"),
              std::string::npos)
        << message;
  }
  EXPECT_NE(with("qwen2_moe", "model.layers.0.self_attn.o_proj.bias", 64, 1).find("o_proj"),
            std::string::npos);
}

TEST(LanguageModel, RefusesTokensAndSizesOutOfRange) {
  SHUNT_ON_CPU_ONLY();
  const Context host = cpu({.threads = 1});
  LanguageModel model(Checkpoint::open(folder_of("qwen3_moe")), host, host, {.dtype = f32});
  std::vector<float> logits(3 * 64);
  const auto message = [&](std::vector<std::int32_t> tokens, std::vector<std::int64_t> lengths) {
    return error_of([&] { model.forward(tokens, lengths, logits); });
  };
  EXPECT_EQ(message({1, 2, 3}, {3}), "");
  EXPECT_EQ(message({1, 2, 3}, {1, 0, 2}), "");
  EXPECT_NE(message({1, 64, 3}, {3}).find("token 64"), std::string::npos);
  EXPECT_NE(message({1, -1, 3}, {3}).find("token -1"), std::string::npos);
  EXPECT_NE(message({1, 2, 3}, {2}).find("lengths"), std::string::npos);
  EXPECT_NE(message({1, 2}, {2}).find("logits"), std::string::npos);
}

// A window of w positions over a longer text equals each window alone.
TEST(LanguageModel, SlidingWindowEndsWhatAPositionSees) {
  SHUNT_ON_CPU_ONLY();
  const TemporaryFolder folder;
  const std::string source = folder_of("mixtral");
  std::filesystem::copy_file(source + "/model.safetensors", folder / "model.safetensors");
  const auto logits_of = [&](const std::string& window, std::span<const std::int32_t> tokens) {
    std::string text = read_file(source + "/config.json");
    const std::string field = "\"sliding_window\": null";
    text.replace(text.find(field), field.size(), "\"sliding_window\": " + window);
    write_file(folder / "config.json", text);
    const Context host = cpu();
    LanguageModel model(Checkpoint::open(folder.path()), host, host, {.dtype = f32});
    std::vector<float> logits(tokens.size() * 64);
    model.forward(tokens, std::vector<std::int64_t>{static_cast<std::int64_t>(tokens.size())},
                  logits);
    return logits;
  };
  const Recorded recorded("mixtral");
  const auto tokens = recorded.all().subspan(0, 40);
  const auto none = logits_of("null", tokens), wide = logits_of("40", tokens);
  EXPECT_EQ(none, wide);
  const auto narrow = logits_of("8", tokens);
  // The first 8 positions see all that came before; later ones do not.
  EXPECT_TRUE(std::equal(none.begin(), none.begin() + 8 * 64, narrow.begin()));
  EXPECT_NE(none, narrow);
  // Over two layers a position is reached by the 14 before it, and by nothing earlier.
  std::vector<std::int32_t> changed(tokens.begin(), tokens.end());
  changed[0] = (changed[0] + 1) % 64;
  const auto other = logits_of("8", changed);
  EXPECT_TRUE(std::equal(narrow.begin() + 15 * 64, narrow.end(), other.begin() + 15 * 64));
  EXPECT_FALSE(std::equal(narrow.begin() + 14 * 64, narrow.end(), other.begin() + 14 * 64));
}

// What a config leaves out is what transformers' class says (5.24), of each family its own.
TEST(LanguageModel, AbsentFieldsAreThoseOfTheFamily) {
  const struct {
    const char* family;
    float theta, epsilon;
    std::int64_t positions;
  } cases[] = {{"mixtral", 1e6F, 1e-5F, 131072},
               {"qwen2_moe", 1e4F, 1e-6F, 32768},
               {"qwen3_moe", 1e4F, 1e-6F, 32768}};
  for (const auto& c : cases) {
    const test::TemporaryFolder at;
    const std::string from = std::string(SHUNT_SOURCE_DIR "/tests/data/goldens/") + c.family;
    nlohmann::json config = nlohmann::json::parse(test::read_file(from + "/config.json"));
    for (const char* field : {"rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps",
                              "max_position_embeddings"}) {
      config.erase(field);
    }
    test::write_file(at / "config.json", config.dump());
    test::write_file(at / "model.safetensors", test::read_file(from + "/model.safetensors"));
    const DecoderSpec spec = decoder_spec(Checkpoint::open(at.path()));
    EXPECT_EQ(spec.rope_theta, c.theta) << c.family;
    EXPECT_EQ(spec.epsilon, c.epsilon) << c.family;
    EXPECT_EQ(spec.max_positions, c.positions) << c.family;
  }
}

}  // namespace
}  // namespace shunt::test
