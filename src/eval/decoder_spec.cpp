#include "eval/decoder_spec.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "checkpoint/config.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

constexpr std::size_t max_config_bytes = 64u << 20;
constexpr std::int64_t widest = std::int64_t{1} << 24;

// What transformers' classes say where a config says nothing (5.24).
struct Absent {
  std::int64_t key_heads;
  double theta, epsilon;
  std::int64_t positions;
};
Absent absent_of(const std::string& family) {
  if (family == "mixtral") return {8, 1e6, 1e-5, 131072};
  return {family == "qwen2_moe" ? 16 : 4, 1e4, 1e-6, 32768};
}

// rope_parameters of transformers 5, or rope_theta and rope_scaling as published before. Where both
// objects are there, programs differ in which they read: both are held to what is computed.
float read_rope_theta(Config& config, double absent) {
  double theta = config.number_or({"rope_theta"}, absent, 1.0, 1e12);
  const double outer = config.number_or({"partial_rotary_factor"}, 1.0, 0.0, 1.0);
  std::vector<double> rotated;
  bool said = false;
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* parameters = config.object(name);
    if (parameters == nullptr) continue;
    Config rope(config.where() + ": " + name, *parameters);
    const double own = rope.number_or({"rope_theta"}, theta, 1.0, 1e12);
    if (said && own != theta) {
      fail(Status::bad_file, "{}: rope_theta is {}: rope_parameters say {}", rope.where(), own,
           theta);
    }
    said = said || rope.has("rope_theta");
    theta = own;
    const std::string type = rope.text_or({"rope_type", "type"}, "default");
    if (type != "default") {
      fail(Status::unsupported, "{}: rope_type is '{}': only 'default' is computed", rope.where(),
           clean(type));
    }
    rotated.push_back(rope.number_or({"partial_rotary_factor"}, outer, 0.0, 1.0));
  }
  if (rotated.empty()) rotated.push_back(outer);
  for (const double factor : rotated) {
    if (factor == 1.0) continue;
    fail(Status::unsupported, "{}: partial_rotary_factor is {}: only 1 is computed", config.where(),
         factor);
  }
  return static_cast<float>(theta);
}

}  // namespace

std::vector<std::string> decoder_families() { return {"mixtral", "qwen2_moe", "qwen3_moe"}; }

DecoderSpec decoder_spec(const Checkpoint& checkpoint) {
  const std::string& family = checkpoint.family();
  const std::vector<std::string> families = decoder_families();
  if (std::find(families.begin(), families.end(), family) == families.end()) {
    fail(Status::unsupported,
         "{}: family is '{}': its attention is not computed, only that of {}; its MoE layers are "
         "('shunt run')",
         checkpoint.folder(), family, fmt::join(families, ", "));
  }
  const std::string where = checkpoint.folder() + "/config.json";
  Config config = Config::parse(where, read_text(where, max_config_bytes));
  DecoderSpec spec;
  spec.vocabulary = config.integer({"vocab_size"}, 1, widest);
  spec.hidden = config.integer({"hidden_size"}, 1, widest);
  spec.layers = static_cast<int>(checkpoint.layers().size());
  spec.heads = static_cast<int>(config.integer({"num_attention_heads"}, 1, 65536));
  const Absent absent = absent_of(family);
  spec.key_heads = static_cast<int>(
      config.integer_if({"num_key_value_heads"}, 1, 65536)
          .value_or(config.is_null("num_key_value_heads") ? spec.heads : absent.key_heads));
  spec.head_dim = config.integer_if({"head_dim"}, 1, widest).value_or(spec.hidden / spec.heads);
  if (spec.heads % spec.key_heads != 0) {
    config.refuse("num_key_value_heads", "a divisor of num_attention_heads");
  }
  if (spec.head_dim % 2 != 0) config.refuse("head_dim", "even");
  spec.epsilon = static_cast<float>(config.number_or({"rms_norm_eps"}, absent.epsilon, 0.0, 1.0));
  spec.rope_theta = read_rope_theta(config, absent.theta);
  spec.tied = config.flag_or({"tie_word_embeddings"}, false);
  spec.max_positions = config.integer_or({"max_position_embeddings"}, absent.positions, 1, widest);
  if (family == "qwen3_moe") {
    spec.head_norm = true;
    spec.qkv_bias = spec.output_bias = config.flag_or({"attention_bias"}, false);
  } else if (family == "qwen2_moe") {
    spec.qkv_bias = config.flag_or({"qkv_bias"}, true);
  }
  if (family == "mixtral") {
    spec.sliding_window = config.integer_or({"sliding_window"}, 0, 0, widest);
  } else {
    config.expect_false({"use_sliding_window"});
  }
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    if (!layer.moe) {
      fail(Status::unsupported,
           "{}: layer {} has a {}: only models whose layers all have experts "
           "are evaluated",
           checkpoint.folder(), layer.index, layer.note);
    }
  }
  return spec;
}

}  // namespace shunt
