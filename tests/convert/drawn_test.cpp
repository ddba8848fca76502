// Checkpoints drawn at random and converted, twice in a row: what is read of the new one is what
// was written, and what the source means decides what that is. What is refused leaves nothing.
//
// SHUNT_DRAWN=first:count takes other seeds than the few of every run.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "convert/conversion.hpp"
#include "convert/expert.hpp"
#include "convert/values.hpp"
#include "core/convert.hpp"
#include "drawn.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A checkpoint of Qwen3's, Mixtral's or gpt-oss's names (whose experts are one tensor, with
// biases), in one file or in two with an index.
class Source {
 public:
  Source(Draw& draw, unsigned seed, const std::string& folder) : random_(seed), folder_(folder) {
    fs::create_directory(folder);
    dtype_ = draw.dtype();
    hidden_ = draw.width(200), inner_ = draw.width(140);
    experts_ = draw.between(1, 5);
    layers_ = draw.between(1, 2);
    deviation_ = draw.any({0.02F, 0.02F, 1.0F, 1e-4F, 200.0F});
    usual_ = deviation_ == 0.02F || deviation_ == 1;
    zeros_ = draw.one_in(3);
    const std::string family = draw.any<std::string>({"qwen3_moe", "mixtral", "gpt_oss"});
    Json config = {{"model_type", family},
                   {"hidden_size", hidden_},
                   {"num_experts_per_tok", draw.between(1, experts_)},
                   {"num_hidden_layers", layers_},
                   {"hidden_act", "silu"}};
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
      const std::string base = "model.layers." + std::to_string(layer) + ".";
      if (family == "qwen3_moe") {
        separate(base + "mlp.", {"gate_proj", "up_proj", "down_proj"});
      } else if (family == "mixtral") {
        separate(base + "block_sparse_moe.", {"w1", "w3", "w2"});
      } else {
        together(base + "mlp.");
      }
    }
    if (family == "qwen3_moe") {
      config.update({{"moe_intermediate_size", inner_},
                     {"num_experts", experts_},
                     {"norm_topk_prob", true},
                     {"decoder_sparse_step", 1},
                     {"mlp_only_layers", Json::array()},
                     {"intermediate_size", 64}});
    } else {
      config.update({{"intermediate_size", inner_}, {"num_local_experts", experts_}});
    }
    write_file(folder + "/config.json", config.dump());
    write(draw.one_in(2) ? 2 : 1);
    std::vector<std::pair<std::string, Tensor>> recorded;
    const std::int64_t tokens = draw.between(1, 40);
    deviation_ = draw.any({1.0F, 0.01F});
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
      recorded.emplace_back("layers." + std::to_string(layer) + ".input",
                            matrix({tokens, hidden_}));
    }
    write_safetensors(recordings(), recorded, {});
  }
  // Hidden states for every layer.
  std::string recordings() const { return folder_ + ".recorded.safetensors"; }
  bool usual() const { return usual_; }

 private:
  Tensor matrix(std::vector<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t size : shape) elements *= size;
    std::vector<unsigned char>& bytes =
        memory_.emplace_back(static_cast<std::size_t>(elements * bits(dtype_) / 8));
    std::normal_distribution<float> normal(0, deviation_);
    const std::int64_t row = shape.back();
    for (std::int64_t i = 0; i < elements; ++i) {
      // Whole rows, and single numbers.
      const bool zero = zeros_ && (i / row % 5 == 3 || random_() % 9 == 0);
      store_f32(bytes.data(), dtype_, i, zero ? 0 : normal(random_));
    }
    Tensor made = view(bytes.data(), dtype_, {elements});
    made.rank = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (int d = made.rank - 1; d >= 0; --d) {
      const auto at = static_cast<std::size_t>(d);
      made.shape[at] = shape[at], made.strides[at] = stride;
      stride *= shape[at];
    }
    return made;
  }
  void separate(const std::string& base, const std::array<const char*, 3>& names) {
    tensors_.emplace_back(base + "gate.weight", matrix({experts_, hidden_}));
    for (std::int64_t e = 0; e < experts_; ++e) {
      const std::string expert = base + "experts." + std::to_string(e) + ".";
      for (std::size_t m = 0; m < 3; ++m) {
        tensors_.emplace_back(expert + names[m] + ".weight",
                              m == 2 ? matrix({hidden_, inner_}) : matrix({inner_, hidden_}));
      }
    }
  }
  void together(const std::string& base) {
    tensors_.emplace_back(base + "router.weight", matrix({experts_, hidden_}));
    tensors_.emplace_back(base + "router.bias", matrix({experts_}));
    const std::string expert = base + "experts.";
    tensors_.emplace_back(expert + "gate_up_proj", matrix({experts_, hidden_, 2 * inner_}));
    tensors_.emplace_back(expert + "gate_up_proj_bias", matrix({experts_, 2 * inner_}));
    tensors_.emplace_back(expert + "down_proj", matrix({experts_, inner_, hidden_}));
    tensors_.emplace_back(expert + "down_proj_bias", matrix({experts_, hidden_}));
  }
  void write(std::size_t files) const {
    std::vector<std::vector<std::pair<std::string, Tensor>>> shards(files);
    Json map = Json::object();
    const auto name_of = [](std::size_t file) {
      return "model-0000" + std::to_string(file + 1) + "-of-00002.safetensors";
    };
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      shards[i % files].push_back(tensors_[i]);
      map[tensors_[i].first] = name_of(i % files);
    }
    if (files == 1) {
      write_safetensors(folder_ + "/model.safetensors", tensors_, {{"format", "pt"}});
      return;
    }
    for (std::size_t f = 0; f < files; ++f) {
      write_safetensors(folder_ + "/" + name_of(f), shards[f], {{"format", "pt"}});
    }
    write_file(folder_ + "/model.safetensors.index.json",
               Json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
  }

  std::mt19937 random_;
  std::string folder_;
  DType dtype_ = DType::f32;
  std::int64_t hidden_ = 0, inner_ = 0, experts_ = 0, layers_ = 0;
  float deviation_ = 1;
  bool zeros_ = false, usual_ = false;
  std::deque<std::vector<unsigned char>> memory_;
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

ConversionSpec draw_conversion(Draw& draw) {
  ConversionSpec spec;
  spec.dtype = draw.dtype();
  if (!draw.one_in(5)) spec.format = draw.format(0);
  spec.prune = spec.format.format == Format::sparse_nvfp4 ||
               (draw.one_in(4) && spec.format.format != Format::dense3);
  if (!spec.prune) return spec;
  if (draw.one_in(3)) spec.pruning.pattern = PrunePattern::pairs;
  spec.pruning.method = draw.any({PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs});
  return spec;
}

// Of a format's weights, for normal numbers that it reaches.
double most_error(const ConversionSpec& spec) {
  if (spec.prune) return 0.75;
  return spec.format == FormatSpec{} ? 0.005 : bits_per_weight(spec) < 6 ? 0.25 : 0.08;
}

bool calibrates(const ConversionSpec& spec) {
  return spec.prune && spec.pruning.method != PruneMethod::magnitude;
}

// Whether it was done: a refusal names its reason and leaves nothing.
bool convert(const std::string& in, const std::string& out, const ConversionSpec& spec,
             const std::string& recordings) {
  try {
    convert_checkpoint(cpu(), in, out,
                       {.spec = spec, .calibrate = calibrates(spec) ? recordings : ""});
    return true;
  } catch (const Error& error) {
    EXPECT_TRUE(error.status() == Status::unsupported || error.status() == Status::invalid_argument)
        << error.what();
    EXPECT_GT(std::string(error.what()).size(), 20U);
    EXPECT_FALSE(fs::exists(out)) << error.what();
    return false;
  }
}

void check_conversion(const std::string& in, const std::string& out, const ConversionSpec& spec,
                      const std::string& recordings, bool usual) {
  const SafetensorsFile recorded = SafetensorsFile::open(recordings);
  const Checkpoint before = Checkpoint::open(in), after = Checkpoint::open(out);
  ASSERT_EQ(before.layers().size(), after.layers().size());
  for (const CheckpointLayer& layer : before.layers()) {
    if (!layer.moe) continue;
    const LayerSpec was = before.spec(layer.index);
    EXPECT_EQ(after.spec(layer.index), was);
    const LayerWeights from = before.weights(layer.index), made = after.weights(layer.index);
    EXPECT_EQ(values_of(made.router), values_of(from.router));
    std::optional<LayerCalibration> calibration;
    if (calibrates(spec)) {
      calibration.emplace(cpu(), was, from,
                          recorded.get("layers." + std::to_string(layer.index) + ".input"));
    }
    for (int e = 0; e < was.experts.experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const ConvertedExpert wanted =
          convert_expert(cpu(), spec, was, from, e, calibration ? &*calibration : nullptr);
      const ExpertWeights& w = made.experts;
      const std::array<std::vector<float>, 3> got = {values_of(w.gate, w.packed_gate, at),
                                                     values_of(w.up, w.packed_up, at),
                                                     values_of(w.down, w.packed_down, at)};
      // nvfp4's divisor in checkpoints is a reciprocal: a rounding of f32.
      const bool reciprocal =
          spec.format.format == Format::nvfp4 || spec.format.format == Format::sparse_nvfp4;
      for (std::size_t m = 0; m < 3; ++m) {
        const ConvertedMatrix& matrix = wanted.matrices[m];
        ASSERT_EQ(got[m].size(), matrix.values.size());
        for (std::size_t i = 0; i < got[m].size(); ++i) {
          const float rounding = reciprocal ? std::fabs(matrix.values[i]) * 0x1p-22F : 0;
          ASSERT_NEAR(got[m][i], matrix.values[i], rounding)
              << "layer " << layer.index << ", expert " << e << ", matrix " << m << ", " << i;
        }
        if (usual) {
          EXPECT_LT(matrix.error.relative(), most_error(spec)) << "matrix " << m;
        }
      }
      for (const auto bias :
           {&ExpertWeights::gate_bias, &ExpertWeights::up_bias, &ExpertWeights::down_bias}) {
        ASSERT_EQ((made.experts.*bias).size(), (from.experts.*bias).size());
        if ((from.experts.*bias).empty()) continue;
        EXPECT_EQ(values_of((made.experts.*bias)[at]), values_of((from.experts.*bias)[at]));
      }
    }
  }
}

TEST(DrawnConversion, IsReadBackAndConvertedAgain) {
  int converted = 0, again = 0;
  each_seed(40, [&](unsigned seed) {
    Draw draw(seed);
    const TemporaryFolder folder;
    const std::string in = folder / "in", out = folder / "out", second = folder / "second";
    const Source source(draw, seed, in);
    const ConversionSpec first = draw_conversion(draw), next = draw_conversion(draw);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_string(first) + ", then " +
                 to_string(next));
    if (!convert(in, out, first, source.recordings())) return;
    ++converted;
    // What calibration keeps is nearer in results, not in weights.
    const bool usual = source.usual() && !calibrates(first);
    check_conversion(in, out, first, source.recordings(), usual);
    if (!convert(out, second, next, source.recordings())) return;
    ++again;
    check_conversion(out, second, next, source.recordings(), false);
  });
  std::printf("converted %d, and again %d\n", converted, again);
  if (!SHUNT_SANITIZED && std::getenv("SHUNT_DRAWN") == nullptr) {
    EXPECT_GT(converted, 25);
    EXPECT_GT(again, 20);
  }
}

}  // namespace
}  // namespace shunt::test
