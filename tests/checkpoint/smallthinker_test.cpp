// SmallThinker: a router that reads another input than its experts, so that calls give its logits.
// What its own code computes (modeling_smallthinker.py of PowerInfer/SmallThinker-4BA0.6B-Instruct)
// is written here in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"
#include "prune/calibration.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

using test::error_of;
using test::TemporaryFolder;

constexpr std::int64_t tokens = 9, hidden = 24, intermediate = 20;
constexpr int experts = 12, top_k = 4;

using Matrix = std::vector<float>;

class SmallThinker : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    router_ = drawn(experts, hidden, 1.5F / std::sqrt(float{hidden}));
    store("primary_router", router_, experts, hidden);
    for (int e = 0; e < experts; ++e) {
      gate_.push_back(drawn(intermediate, hidden, 1 / std::sqrt(float{hidden})));
      up_.push_back(drawn(intermediate, hidden, 1 / std::sqrt(float{hidden})));
      down_.push_back(drawn(hidden, intermediate, 1 / std::sqrt(float{intermediate})));
    }
    for (int e = 0; e < experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const std::string expert = "experts." + std::to_string(e) + ".";
      store(expert + "gate", gate_[at], intermediate, hidden);
      store(expert + "up", up_[at], intermediate, hidden);
      store(expert + "down", down_[at], hidden, intermediate);
    }
    write_safetensors(folder_ / "model.safetensors", stored_);
    nlohmann::json config = {{"model_type", "smallthinker"},
                             {"hidden_size", hidden},
                             {"num_hidden_layers", 1},
                             {"moe_num_primary_experts", experts},
                             {"moe_num_active_primary_experts", top_k},
                             {"moe_ffn_hidden_size", intermediate}};
    if (GetParam()) config["moe_primary_router_apply_softmax"] = true;
    test::write_file(folder_ / "config.json", config.dump());
    x_ = drawn(tokens, hidden, 1);
    router_input_ = drawn(tokens, hidden, 1);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t e = 0; e < experts; ++e) {
        logits_.push_back(static_cast<float>(dot(router_, e, router_input_, t, hidden)));
      }
    }
  }

  // Row t of the block's output.
  std::vector<double> computed(std::int64_t t) const {
    const auto logit = [&](int e) {
      return static_cast<double>(logits_[static_cast<std::size_t>(t * experts + e)]);
    };
    std::vector<int> ids(experts);
    std::iota(ids.begin(), ids.end(), 0);
    std::sort(ids.begin(), ids.end(),
              [&](int a, int b) { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; });
    ids.resize(top_k);
    std::vector<double> weights;
    for (const int e : ids) {
      weights.push_back(GetParam() ? std::exp(logit(e)) : 1 / (1 + std::exp(-logit(e))));
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<double> y(hidden);
    for (std::size_t k = 0; k < ids.size(); ++k) {
      const auto e = static_cast<std::size_t>(ids[k]);
      for (std::int64_t i = 0; i < intermediate; ++i) {
        const double h =
            std::max(0.0, dot(gate_[e], i, x_, t, hidden)) * dot(up_[e], i, x_, t, hidden);
        for (std::int64_t c = 0; c < hidden; ++c) {
          y[static_cast<std::size_t>(c)] +=
              weights[k] / sum * h *
              static_cast<double>(down_[e][static_cast<std::size_t>(c * intermediate + i)]);
        }
      }
    }
    return y;
  }

  std::vector<float> forward(const Layer& layer, const Context& context,
                             const LayerInputs& given) const {
    std::vector<float> y(x_.size());
    LayerInputs in = given;
    in.hidden = view(x_.data(), {tokens, hidden});
    const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
    layer.forward(in, {.output = view(y.data(), {tokens, hidden})}, workspace);
    return y;
  }

  TemporaryFolder folder_;
  Matrix router_, x_, router_input_, logits_;
  std::vector<Matrix> gate_, up_, down_;

 private:
  Matrix drawn(std::int64_t rows, std::int64_t columns, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    Matrix values(static_cast<std::size_t>(rows * columns));
    for (float& value : values) value = normal(random_);
    return values;
  }
  static double dot(const Matrix& matrix, std::int64_t row, const Matrix& rows, std::int64_t t,
                    std::int64_t width) {
    double sum = 0;
    for (std::int64_t i = 0; i < width; ++i) {
      sum += static_cast<double>(matrix[static_cast<std::size_t>(row * width + i)]) *
             static_cast<double>(rows[static_cast<std::size_t>(t * width + i)]);
    }
    return sum;
  }
  void store(const std::string& name, const Matrix& values, std::int64_t rows,
             std::int64_t columns) {
    stored_.emplace_back("model.layers.0.block_sparse_moe." + name + ".weight",
                         view(values.data(), {rows, columns}));
  }
  std::mt19937 random_{7};
  std::vector<std::pair<std::string, Tensor>> stored_;
};

TEST_P(SmallThinker, IsComputedFromTheCallersLogits) {
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_NE(checkpoint.summary().find("calls give its logits"), std::string::npos);
  EXPECT_FALSE(checkpoint.weights(0).router);
  const Context context = cpu({.threads = 1});
  const Layer layer(checkpoint, 0, context, {.dtype = f32});
  const std::vector<float> y =
      forward(layer, context, {.logits = view(logits_.data(), {tokens, experts})});
  std::vector<double> wanted;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<double> row = computed(t);
    wanted.insert(wanted.end(), row.begin(), row.end());
  }
  EXPECT_LE(test::relative_error(y, wanted), 1e-5);
}

// Never by what the block's own input would route to.
TEST_P(SmallThinker, IsNotComputedWithoutThem) {
  const Context context = cpu({.threads = 1});
  const Layer layer(Checkpoint::open(folder_.path()), 0, context, {.dtype = f32});
  const std::string message = error_of([&] { forward(layer, context, {}); });
  EXPECT_NE(message.find("the layer has no router, so that ids and weights, or logits, must be"),
            std::string::npos)
      << message;
}

TEST_P(SmallThinker, IsNotCalibratedByTheBlocksInput) {
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  const std::string message = error_of([&] {
    const Tensor x = view(x_.data(), {tokens, hidden});
    const LayerCalibration calibration(cpu(), checkpoint.spec(0), checkpoint.weights(0), x);
  });
  EXPECT_NE(message.find("calibration: weights.router is missing"), std::string::npos) << message;
}

// It is looked for all the same: who gives logits needs it.
TEST_P(SmallThinker, HasARouter) {
  const SafetensorsFile file = SafetensorsFile::open(folder_ / "model.safetensors");
  std::vector<std::pair<std::string, Tensor>> others;
  for (const std::string& name : file.names()) {
    if (name.find("router") == std::string::npos) others.emplace_back(name, file.get(name));
  }
  write_safetensors(folder_ / "model.safetensors", others);
  const std::string message = error_of([&] { Checkpoint::open(folder_.path()); });
  EXPECT_NE(message.find("block_sparse_moe.primary_router.weight"), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(Scores, SmallThinker, testing::Bool(),
                         [](const auto& p) { return p.param ? "softmax" : "sigmoid"; });

}  // namespace
}  // namespace shunt
