// Checkpoints whose experts are one packed tensor: every shape of scales that is published, against
// the formula.
#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint/fused_checkpoint.hpp"
#include "checkpoint/golden.hpp"

namespace shunt::test {
namespace {

using fused::experts;
using fused::Form;
using fused::forms;
using fused::FusedCheckpoint;

class Fused : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(Forms, Fused, testing::ValuesIn(forms),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(Fused, ReadsWhatTheFormulaSays) {
  const Form& form = GetParam();
  const TemporaryFolder folder;
  const FusedCheckpoint made(form, folder.path());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const ExpertWeights read = checkpoint.weights(0).experts;
  ASSERT_EQ(read.packed_gate.size(), static_cast<std::size_t>(experts));
  const std::int64_t intermediate = form.intermediate, hidden = 136;
  for (std::size_t e = 0; e < static_cast<std::size_t>(experts); ++e) {
    // Rows first, first + step, .. of `all`.
    const auto check = [&](const PackedMatrix& m, const std::vector<float>& all, std::size_t first,
                           std::size_t step) {
      check_packed("matrix", m, Device{});
      EXPECT_EQ(m.format.format, form.format);
      std::vector<float> got(static_cast<std::size_t>(m.n * m.k));
      unpack(m, view(got.data(), {m.n, m.k}));
      for (std::int64_t row = 0; row < m.n; ++row) {
        const auto from =
            (first + static_cast<std::size_t>(row) * step) * static_cast<std::size_t>(m.k);
        EXPECT_TRUE(std::equal(got.begin() + row * m.k, got.begin() + (row + 1) * m.k,
                               all.begin() + static_cast<std::ptrdiff_t>(from)));
      }
    };
    const auto half = static_cast<std::size_t>(intermediate);
    const std::size_t up = form.inkling ? 1 : half, step = form.inkling ? 2 : 1;
    check(read.packed_gate[e], made.gate_up, 2 * e * half, step);
    check(read.packed_up[e], made.gate_up, 2 * e * half + up, step);
    check(read.packed_down[e], made.down, e * static_cast<std::size_t>(hidden), 1);
  }
  // And computes.
  const Context context = cpu({.threads = 1});
  const Layer layer(checkpoint, 0, context, {.dtype = f32});
  std::vector<float> x(static_cast<std::size_t>(hidden), 0.01F), y(x.size());
  const Buffer workspace = context.allocate(layer.workspace_bytes(1));
  layer.forward(view(x.data(), {1, hidden}), view(y.data(), {1, hidden}), workspace);
  EXPECT_TRUE(std::isfinite(y[0]));
}

TEST(FusedRefusals, BlocksThatGateAndUpShare) {
  const TemporaryFolder folder;
  Form form = forms[0];
  form.intermediate = 100;  // 200 rows in two blocks
  const FusedCheckpoint made(form, folder.path());
  Status status = Status::ok;
  const std::string message =
      error_of([&] { (void)Checkpoint::open(folder.path()).weights(0); }, &status);
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("gate_up_proj_scale_inv' has blocks of 128 rows that gate and up share"),
            std::string::npos)
      << message;
}

TEST(FusedRefusals, AnotherMethod) {
  const TemporaryFolder folder;
  const FusedCheckpoint made(forms[9], folder.path());
  nlohmann::json config = nlohmann::json::parse(read_file(folder / "config.json"));
  config["quantization_config"]["quant_method"] = "fp8";
  write_file(folder / "config.json", config.dump());
  const std::string message = error_of([&] { (void)Checkpoint::open(folder.path()).weights(0); });
  EXPECT_NE(message.find("quant_method is \"fp8\": tensors of "
                         "'model.layers.0.mlp.experts.gate_up_proj' must be fp8_tensor or "
                         "fp8_channel or fp8_block or mxfp8 or mxfp4, and are nvfp4"),
            std::string::npos)
      << message;
}

TEST(FusedRefusals, ScalesOfAnotherShape) {
  const TemporaryFolder folder;
  Form form = forms[3];
  form.shape = [](std::int64_t, std::int64_t) { return std::vector<std::int64_t>{5}; };
  form.at = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
    return std::int64_t{0};
  };
  const FusedCheckpoint made(form, folder.path());
  const std::string message = error_of([&] { (void)Checkpoint::open(folder.path()).weights(0); });
  EXPECT_NE(message.find("gate_up_proj_scale_inv' is f32 [5]: must be one number"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace shunt::test
