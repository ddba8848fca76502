// Layers of packed experts on the CPU: against the same numbers as plain weights, and what each
// format costs on recorded models.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>

#include "checkpoint/golden.hpp"
#include "checkpoint/unpack_experts.hpp"
#include "layer/format_limits.hpp"
#include "shunt/layer.hpp"

namespace shunt::test {
namespace {

std::vector<float> forward(const Layer& layer, const Context& context, const Tensor& hidden) {
  std::vector<float> out(static_cast<std::size_t>(hidden.elements()));
  const Buffer workspace = context.allocate(layer.workspace_bytes(hidden.shape[0]));
  layer.forward(hidden, view(out.data(), {hidden.shape[0], hidden.shape[1]}), workspace);
  return out;
}

// tiny-moe's recording has names of its own.
std::vector<Recorded> layers_of(const SafetensorsFile& file) {
  std::vector<Recorded> result = recorded(file);
  for (int i = 0; result.size() < 8; ++i) {
    const std::string name = "layers." + std::to_string(i);
    if (!file.contains(name + ".input")) break;
    result.push_back({.module = name,
                      .layer = i,
                      .input = file.get(name + ".input"),
                      .output = file.get(name + ".output")});
  }
  return result;
}

void check_recorded(const std::string& folder, const std::string& recording) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const auto file = SafetensorsFile::open(folder + "/" + recording);
  const Context context = cpu({.threads = 2});
  for (const FormatSpec& format : known_formats()) {
    SCOPED_TRACE(folder + " as " + to_string(format));
    const Limits& limit = format_limits().at(to_string(format));
    double sum = 0;
    int layers = 0;
    for (const Recorded& r : layers_of(file)) {
      if (r.token_ids || layers == 2) continue;
      const Layer layer(checkpoint, r.layer, context, {.dtype = f32, .format = format});
      const Tensor input = r.input.shape[0] > 64 ? r.input.rows(0, 64) : r.input;
      std::vector<float> wanted = floats(r.output);
      wanted.resize(static_cast<std::size_t>(input.elements()));
      const double error = relative_power(forward(layer, context, input), wanted);
      EXPECT_LE(error, limit.high) << r.module;
      sum += error;
      ++layers;
    }
    ASSERT_GT(layers, 0);
    EXPECT_GE(sum / layers, limit.low);
    std::printf("%-14s %-14s error %.6f\n", folder.substr(folder.rfind('/') + 1).c_str(),
                to_string(format).c_str(), sum / layers);
  }
}

TEST(PackedLayer, TinyMoeInEveryFormat) { check_recorded(tiny_moe, "activations.safetensors"); }

class PackedGolden : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, PackedGolden,
                         testing::Values("deepseek_v3", "gpt_oss", "llama4", "mixtral", "qwen2_moe",
                                         "qwen3_next", "longcat_flash", "nemotron_h"),
                         [](const auto& p) { return p.param; });
TEST_P(PackedGolden, InEveryFormat) {
  const std::string folder = golden(GetParam());
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder;
  check_recorded(folder, "golden.safetensors");
}

TEST(PackedLayer, QuantisedCheckpointsAreWhatTheyUnpackTo) {
  for (const auto& entry :
       std::filesystem::directory_iterator(SHUNT_SOURCE_DIR "/tests/data/quantised")) {
    const std::string name = entry.path().filename().string();
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = Checkpoint::open(entry.path().string());
    const Context one = cpu({.threads = 1}), three = cpu({.threads = 3});
    const LayerSpec spec = checkpoint.spec(0);
    LayerWeights weights = checkpoint.weights(0);
    std::vector<std::vector<float>> memory;
    memory.reserve(64);
    std::vector<float> hidden(static_cast<std::size_t>(9 * spec.hidden));
    for (std::size_t i = 0; i < hidden.size(); ++i) {
      hidden[i] = std::sin(static_cast<float>(i) * 0.7F);
    }
    const Tensor x = view(hidden.data(), {9, spec.hidden});
    const Layer layer(spec, weights, one, {.dtype = f32});
    const std::vector<float> packed = forward(layer, one, x);
    EXPECT_EQ(packed, forward(layer, one, x));
    EXPECT_EQ(packed, forward(Layer(spec, weights, three, {.dtype = f32}), three, x));
    unpack_experts(weights.experts, memory);
    const std::vector<float> plain = forward(Layer(spec, weights, one, {.dtype = f32}), one, x);
    EXPECT_LE(relative_power(packed, plain), 1e-11);
  }
}

TEST(PackedLayer, RefusesFormatsThatDisagree) {
  const Checkpoint checkpoint =
      Checkpoint::open(SHUNT_SOURCE_DIR "/tests/data/quantised/nvfp4_modelopt");
  const Context context = cpu({.threads = 1});
  const auto message = [&](const LayerOptions& options,
                           const std::function<void(LayerWeights&)>& change) -> std::string {
    LayerWeights weights = checkpoint.weights(0);
    change(weights);
    try {
      const Layer layer(checkpoint.spec(0), weights, context, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  const auto nothing = [](LayerWeights&) {};
  EXPECT_EQ(message({}, nothing), "(none)");
  EXPECT_EQ(message({.format = {Format::nvfp4}}, nothing), "(none)");
  EXPECT_NE(message({.format = {Format::mxfp4}}, nothing).find("packed already, as nvfp4"),
            std::string::npos);
  EXPECT_NE(message({.in_place = true}, nothing).find("in_place"), std::string::npos);
  EXPECT_NE(message({}, [](LayerWeights& w) { w.experts.packed_gate.pop_back(); })
                .find("packed_gate has 1 matrices"),
            std::string::npos);
  EXPECT_NE(message({}, [](LayerWeights& w) { w.experts.packed_up.clear(); })
                .find("packed_up has 0 matrices"),
            std::string::npos);
  EXPECT_NE(message({}, [](LayerWeights& w) { w.experts.up.push_back(w.router); })
                .find("experts.up has 1 tensors"),
            std::string::npos);
  EXPECT_NE(
      message({},
              [](LayerWeights& w) { std::swap(w.experts.packed_down[1], w.experts.packed_up[1]); })
          .find("must be [32, 64]"),
      std::string::npos);
}

}  // namespace
}  // namespace shunt::test
