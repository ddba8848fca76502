// Inputs of experts, from recorded hidden states, against the layer's plain computation.
#include "prune/calibration.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "activate/reference.hpp"
#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "models.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

double at(const Tensor& matrix, std::int64_t i, std::int64_t j) {
  return static_cast<double>(
      load_f32(matrix.data, matrix.dtype, i * matrix.strides[0] + j * matrix.strides[1]));
}

double dot(const Tensor& w, std::int64_t n, const Tensor& x, std::int64_t t) {
  double sum = 0;
  for (std::int64_t k = 0; k < x.shape[1]; ++k) sum += at(w, n, k) * at(x, t, k);
  return sum;
}

TEST(Calibration, SumsOverTheTokensThatAreRoutedToAnExpert) {
  const Context context = cpu();
  const Checkpoint checkpoint = Checkpoint::open(tiny_moe);
  const SafetensorsFile file = SafetensorsFile::open(tiny_moe + "/activations.safetensors");
  const Tensor hidden = file.get("layers.1.input"), ids = file.get("layers.1.gate_out2");
  const LayerSpec spec = checkpoint.spec(1);
  const LayerWeights weights = checkpoint.weights(1);
  const LayerCalibration calibration(context, spec, weights, hidden);
  std::int64_t all = 0;
  for (int e = 0; e < 16; ++e) all += calibration.tokens(e);
  EXPECT_EQ(all, 256 * 4);

  const int expert = 3;
  const Tensor gate = weights.experts.gate[expert], up = weights.experts.up[expert];
  const auto inputs = calibration.inputs(expert, gate, up, true);
  std::vector<double> squares(256), products(256), down(128), down_products(128);
  std::int64_t rows = 0;
  for (std::int64_t t = 0; t < 256; ++t) {
    bool routed = false;
    for (int s = 0; s < 4; ++s) routed |= ids.as<const std::int64_t>()[t * 4 + s] == expert;
    if (!routed) continue;
    ++rows;
    for (std::int64_t k = 0; k < 256; ++k) {
      squares[static_cast<std::size_t>(k)] += at(hidden, t, k) * at(hidden, t, k);
      products[static_cast<std::size_t>(k)] += at(hidden, t, 200) * at(hidden, t, k);
    }
    std::vector<double> h(128);
    for (std::int64_t i = 0; i < 128; ++i) {
      h[static_cast<std::size_t>(i)] = activate_reference(
          spec.experts.activation, dot(gate, i, hidden, t), dot(up, i, hidden, t));
    }
    for (std::size_t i = 0; i < 128; ++i) {
      down[i] += h[i] * h[i];
      down_products[i] += h[100] * h[i];
    }
  }
  EXPECT_EQ(calibration.tokens(expert), rows);
  EXPECT_EQ(inputs.gate_up.rows(), rows);
  EXPECT_EQ(inputs.down.rows(), rows);
  for (std::size_t k = 0; k < 256; ++k) {  // f32 inputs, sums in double on both sides
    EXPECT_NEAR(inputs.gate_up.squares()[k], squares[k], 1e-12 * (1 + squares[k]));
  }
  for (std::size_t k = 0; k <= 200; ++k) {
    EXPECT_NEAR(inputs.gate_up.products()[200 * 256 + k], products[k],
                1e-12 * (1 + std::sqrt(squares[200] * squares[k])));
  }
  for (std::size_t i = 0; i < 128; ++i) {  // activations are f32 here
    EXPECT_NEAR(inputs.down.squares()[i], down[i], 1e-5 * (1e-3 + down[i]));
  }
  for (std::size_t i = 0; i <= 100; ++i) {
    EXPECT_NEAR(inputs.down.products()[100 * 128 + i], down_products[i],
                1e-5 * (1e-3 + std::sqrt(down[100] * down[i])));
  }
}

TEST(Calibration, IsTheSameForAnyNumberOfThreads) {
  const Checkpoint checkpoint = Checkpoint::open(tiny_moe);
  const SafetensorsFile file = SafetensorsFile::open(tiny_moe + "/activations.safetensors");
  const LayerWeights weights = checkpoint.weights(0);
  std::vector<double> first;
  for (const int threads : {1, 3}) {
    const LayerCalibration calibration(cpu({.threads = threads}), checkpoint.spec(0), weights,
                                       file.get("layers.0.input"));
    const auto inputs = calibration.inputs(5, weights.experts.gate[5], weights.experts.up[5], true);
    if (first.empty()) first = inputs.down.products();
    EXPECT_EQ(inputs.down.products(), first);
  }
}

TEST(Calibration, OfNoTokensIsEmpty) {
  const Checkpoint checkpoint = Checkpoint::open(tiny_moe);
  const LayerWeights weights = checkpoint.weights(0);
  const float nothing = 0;
  const LayerCalibration calibration(cpu(), checkpoint.spec(0), weights, view(&nothing, {0, 256}));
  const auto inputs = calibration.inputs(0, weights.experts.gate[0], weights.experts.up[0], false);
  EXPECT_EQ(calibration.tokens(0), 0);
  EXPECT_EQ(inputs.gate_up.rows(), 0);
  EXPECT_EQ(inputs.down.squares(), std::vector<double>(128, 0.0));
}

TEST(Calibration, RefusesLayersWhoseExpertsSeeSomethingElse) {
  LayerSpec spec = Checkpoint::open(tiny_moe).spec(0);
  EXPECT_TRUE(supports_calibration(spec));
  spec.latent = 64;
  EXPECT_FALSE(supports_calibration(spec));
  spec.latent = 0;
  spec.route.weight_on_input = true;
  const Support support = supports_calibration(spec);
  EXPECT_NE(support.reason.find("weights"), std::string::npos) << support.reason;
  const float nothing = 0;
  EXPECT_NE(error_of([&] {
              LayerCalibration(cpu(), spec, {}, view(&nothing, {0, 256}));
            }).find("calibration"),
            std::string::npos);
}

// Biases of gate and up that take turns, as gpt-oss stores them, and hidden states that lie apart.
TEST(Calibration, OfExpertsWithBiases) {
  const Checkpoint checkpoint = Checkpoint::open(tiny_moe);
  const SafetensorsFile file = SafetensorsFile::open(tiny_moe + "/activations.safetensors");
  LayerSpec spec = checkpoint.spec(1);
  spec.experts.gate_up_bias = true;
  LayerWeights weights = checkpoint.weights(1);
  std::vector<float> both(std::size_t{2} * 128);  // gate's at even places, up's at odd ones
  for (std::size_t i = 0; i < both.size(); ++i) {
    both[i] = (i % 2 == 0 ? 0.5F : -2.0F) + 0.01F * static_cast<float>(i);
  }
  Tensor gate_bias = view(both.data(), {128}), up_bias = view(both.data() + 1, {128});
  gate_bias.strides[0] = up_bias.strides[0] = 2;
  weights.experts.gate_bias.assign(16, gate_bias);
  weights.experts.up_bias.assign(16, up_bias);

  const Tensor dense = file.get("layers.1.input"), ids = file.get("layers.1.gate_out2");
  std::vector<float> apart(std::size_t{256} * 300, 1e3F);
  for (std::int64_t t = 0; t < 256; ++t) {
    for (std::int64_t k = 0; k < 256; ++k) {
      apart[static_cast<std::size_t>(t * 300 + k)] = static_cast<float>(at(dense, t, k));
    }
  }
  Tensor hidden = view(apart.data(), {256, 256});
  hidden.strides[0] = 300;
  const int expert = 3;
  const Tensor gate = weights.experts.gate[expert], up = weights.experts.up[expert];
  const LayerCalibration calibration(cpu(), spec, weights, hidden);
  const auto inputs = calibration.inputs(expert, gate, up, false);
  std::vector<double> squares(256), down(128);
  for (std::int64_t t = 0; t < 256; ++t) {
    bool routed = false;
    for (int s = 0; s < 4; ++s) routed |= ids.as<const std::int64_t>()[t * 4 + s] == expert;
    for (std::int64_t k = 0; k < 256 && routed; ++k) {
      squares[static_cast<std::size_t>(k)] += at(dense, t, k) * at(dense, t, k);
    }
    for (std::size_t i = 0; i < 128 && routed; ++i) {
      const auto n = static_cast<std::int64_t>(i);
      const double h = activate_reference(
          spec.experts.activation, dot(gate, n, dense, t) + static_cast<double>(both[2 * i]),
          dot(up, n, dense, t) + static_cast<double>(both[2 * i + 1]));
      down[i] += h * h;
    }
  }
  for (std::size_t k = 0; k < 256; ++k) {
    EXPECT_NEAR(inputs.gate_up.squares()[k], squares[k], 1e-12 * (1 + squares[k]));
  }
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_NEAR(inputs.down.squares()[i], down[i], 1e-5 * (1e-3 + down[i])) << i;
  }
}

// Zero-compute experts multiply nothing: their tokens are nobody's.
TEST(Calibration, ZeroComputeExpertsHaveNoTokens) {
  const Checkpoint checkpoint = Checkpoint::open(tiny_moe);
  const SafetensorsFile file = SafetensorsFile::open(tiny_moe + "/activations.safetensors");
  const LayerCalibration all(cpu(), checkpoint.spec(1), checkpoint.weights(1),
                             file.get("layers.1.input"));
  LayerSpec spec = checkpoint.spec(1);
  spec.zero_experts = 6;
  spec.experts.experts = 10;
  const LayerCalibration some(cpu(), spec, checkpoint.weights(1), file.get("layers.1.input"));
  for (int e = 0; e < 10; ++e) EXPECT_EQ(some.tokens(e), all.tokens(e)) << e;
  EXPECT_THROW(some.tokens(10), std::out_of_range);
}

// Each of what stands between hidden states and experts.
TEST(Calibration, RefusesEachForItself) {
  const LayerSpec plain = Checkpoint::open(tiny_moe).spec(0);
  LayerSpec input = plain, router = plain, shared = plain;
  input.input_norm.enabled = true;
  router.router_norm.enabled = true;
  shared.route.shared.count = 1;
  EXPECT_NE(supports_calibration(input).reason.find("experts' input is normalised"),
            std::string::npos);
  EXPECT_NE(supports_calibration(router).reason.find("router's input is normalised"),
            std::string::npos);
  EXPECT_NE(supports_calibration(shared).reason.find("shared experts"), std::string::npos);
}

}  // namespace
}  // namespace shunt::test
