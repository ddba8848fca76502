// What a benchmark compares a layer with: a right result passes, one that is off by more than
// rounding does not.
#include "layer_check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "shunt/format.hpp"

namespace shunt::tool {
namespace {

constexpr std::int64_t hidden = 64, intermediate = 96, tokens = 5;
constexpr int experts = 8, k = 2;

// A layer with random weights on the CPU, and what it gave.
class Checked {
 public:
  explicit Checked(const std::function<void(LayerSpec&)>& change = {}, const char* format = "") {
    spec_.hidden = hidden;
    spec_.route.experts = experts, spec_.route.top_k = k;
    spec_.experts = {.experts = experts, .hidden = hidden, .intermediate = intermediate};
    if (change) change(spec_);
    weights_.router = matrix(spec_.route.experts, hidden);
    for (int e = 0; e < spec_.experts.experts; ++e) {
      add(weights_.experts, format);
    }
    if (spec_.shared.intermediate > 0) add(weights_.shared, "");
    if (spec_.shared.sigmoid_gate) weights_.shared_gate = matrix(1, hidden)[0];
    const Layer layer(spec_, weights_, context_, {.dtype = DType::bf16});
    call_ = {.hidden = matrix(tokens, hidden, 1), .valid = tokens};
    output_.resize(tokens * hidden), ids_.resize(tokens * k), slots_.resize(tokens * k);
    call_.output = view(output_.data(), {tokens, hidden});
    call_.ids = view(ids_.data(), {tokens, std::int64_t{k}});
    call_.weights = view(slots_.data(), {tokens, std::int64_t{k}});
    const Buffer workspace = context_.allocate(layer.workspace_bytes(tokens));
    layer.forward({.hidden = call_.hidden},
                  {.output = call_.output, .ids = call_.ids, .weights = call_.weights}, workspace);
  }

  void check() const { check_layer("T5", spec_, weights_, context_, call_, rounded_to_16_bits); }
  // What check() says; empty: nothing.
  std::string complaint() const {
    try {
      check();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::internal);
      return error.what();
    }
    return "";
  }
  float& output(std::int64_t token, std::int64_t column) {
    return output_[static_cast<std::size_t>(token * hidden + column)];
  }
  std::vector<float>& outputs() { return output_; }
  std::int32_t& id(std::int64_t token, int slot) {
    return ids_[static_cast<std::size_t>(token * k + slot)];
  }
  std::int64_t& valid() { return call_.valid; }

 private:
  Tensor matrix(std::int64_t rows, std::int64_t columns, float deviation = 0.1F) {
    std::vector<float>& values = memory_.emplace_back(static_cast<std::size_t>(rows * columns));
    std::normal_distribution<float> normal(0, deviation);
    for (float& x : values) x = normal(random_);
    return view(values.data(), {rows, columns});
  }
  void add(ExpertWeights& to, const std::string& format) {
    const auto one = [&](std::vector<Tensor>& plain, std::vector<PackedMatrix>& packed,
                         std::int64_t rows, std::int64_t columns) {
      const Tensor values = matrix(rows, columns);
      if (format.empty()) return plain.push_back(values);
      const FormatSpec spec = format_from_string(format);
      const Buffer& memory =
          buffers_.emplace_back(context_.allocate(packed_bytes(spec, rows, columns)));
      packed.push_back(pack(spec, values, memory));
    };
    one(to.gate, to.packed_gate, intermediate, hidden);
    one(to.up, to.packed_up, intermediate, hidden);
    one(to.down, to.packed_down, hidden, intermediate);
  }

  Context context_ = cpu({.threads = 1});
  std::mt19937 random_{1};
  std::deque<std::vector<float>> memory_;
  std::deque<Buffer> buffers_;
  LayerSpec spec_;
  LayerWeights weights_;
  LayerCall call_;
  std::vector<float> output_, slots_;
  std::vector<std::int32_t> ids_;
};

TEST(LayerCheck, RightResultsPass) {
  EXPECT_EQ(Checked().complaint(), "");
  for (const char* format : {"nvfp4", "int4:32", "sparse_nvfp4", "fp8_block", "dense3"}) {
    EXPECT_EQ(Checked({}, format).complaint(), "") << format;
  }
  EXPECT_EQ(Checked([](LayerSpec& spec) { spec.route.weight_on_input = true; }).complaint(), "");
  EXPECT_EQ(Checked([](LayerSpec& spec) {
              spec.shared = {.intermediate = intermediate, .sigmoid_gate = true};
            }).complaint(),
            "");
  // Half of the experts return what they are given.
  EXPECT_EQ(Checked([](LayerSpec& spec) {
              spec.zero_experts = experts, spec.route.experts = 2 * experts;
            }).complaint(),
            "");
}

TEST(LayerCheck, WrongOnesDoNot) {
  Checked zeros;
  for (float& x : zeros.outputs()) x = 0;
  EXPECT_NE(zeros.complaint().find("T5: the result is not the CPU engine's: token 0, column 0"),
            std::string::npos)
      << zeros.complaint();

  Checked last;
  float largest = 0;
  for (std::int64_t i = 0; i < hidden; ++i) {
    largest = std::max(largest, std::abs(last.output(tokens - 1, i)));
  }
  last.output(tokens - 1, 7) += 0.1F * largest;
  EXPECT_NE(last.complaint().find("token 4, column 7"), std::string::npos) << last.complaint();
  last.valid() = tokens - 1;  // which makes it padding
  EXPECT_EQ(last.complaint(), "");

  Checked other;
  other.id(0, 0) = (other.id(0, 0) + 1) % experts;
  EXPECT_NE(other.complaint().find("token 0"), std::string::npos) << other.complaint();

  Checked nan;
  nan.output(0, 3) = std::nanf("");
  EXPECT_NE(nan.complaint().find("token 0, column 3 is nan"), std::string::npos);
}

}  // namespace
}  // namespace shunt::tool
