// Packed experts of every family, whatever its own checkpoints call them.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "convert/conversion.hpp"
#include "convert/expert.hpp"
#include "convert/values.hpp"
#include "models.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

// nvfp4's divisor in checkpoints is a reciprocal: a rounding of f32.
void expect_near(const std::vector<float>& got, const std::vector<float>& wanted, float rounding) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], wanted[i], std::fabs(wanted[i]) * rounding) << i;
  }
}

void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t e = 0; e < got.size(); ++e) EXPECT_EQ(values_of(got[e]), values_of(wanted[e]));
}

class PackedFamilies : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Goldens, PackedFamilies, testing::ValuesIn(small_golden_families()),
                         [](const auto& p) { return p.param; });

// What is read of the new checkpoint is what was packed, biases and all; and what is read of a
// plain one that is made of that again.
TEST_P(PackedFamilies, AreReadBack) {
  const std::string in = golden(GetParam());
  const Checkpoint source = Checkpoint::open(in);
  const LayerSpec spec = source.spec(source.first_moe_layer());
  const LayerWeights before = source.weights(source.first_moe_layer());
  for (const char* name : {"nvfp4", "int4:32", "fp8_channel", "dense3"}) {
    SCOPED_TRACE(name);
    const ConversionSpec to = conversion_from_string(name);
    const TemporaryFolder folder;
    const std::string out = folder / "out", again = folder / "again";
    convert_checkpoint(cpu(), in, out, {.spec = to, .calibrate = {}});
    const Checkpoint made = Checkpoint::open(out);
    EXPECT_EQ(made.spec(made.first_moe_layer()), spec);
    const LayerWeights read = made.weights(made.first_moe_layer());
    const ExpertWeights &was = before.experts, &is = read.experts;
    EXPECT_TRUE(is.up.empty());
    ASSERT_EQ(is.packed_up.size(), static_cast<std::size_t>(spec.experts.experts));
    ASSERT_EQ(is.packed_down.size(), is.packed_up.size());
    ASSERT_EQ(is.packed_gate.size(), was.gate.size());
    const float rounding = to.format.format == Format::nvfp4 ? 0x1p-22f : 0;
    for (int e = 0; e < spec.experts.experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const ConvertedExpert wrote = convert_expert(cpu(), to, spec, before, e);
      if (!was.gate.empty()) {
        expect_near(values_of(is.packed_gate[at]), wrote.matrices[0].values, rounding);
      }
      expect_near(values_of(is.packed_up[at]), wrote.matrices[1].values, rounding);
      expect_near(values_of(is.packed_down[at]), wrote.matrices[2].values, rounding);
    }
    expect_same(is.gate_bias, was.gate_bias);
    expect_same(is.up_bias, was.up_bias);
    expect_same(is.down_bias, was.down_bias);
    EXPECT_EQ(values_of(read.router), values_of(before.router));

    convert_checkpoint(cpu(), out, again, {.spec = conversion_from_string("f32"), .calibrate = {}});
    const Checkpoint plain = Checkpoint::open(again);
    const ExpertWeights back = plain.weights(plain.first_moe_layer()).experts;
    ASSERT_EQ(back.up.size(), is.packed_up.size());
    for (std::size_t e = 0; e < back.up.size(); ++e) {
      EXPECT_EQ(values_of(back.up[e]), values_of(is.packed_up[e]));
      EXPECT_EQ(values_of(back.down[e]), values_of(is.packed_down[e]));
    }
    expect_same(back.up_bias, was.up_bias);
    expect_same(back.down_bias, was.down_bias);
  }
}

// gpt-oss as AutoRound writes it: a bias beside every matrix.
TEST(PackedExperts, MayHaveBiasesOfTheirOwn) {
  const TemporaryFolder folder, apart;
  const std::string out = folder / "out", file = "model.safetensors";
  convert_checkpoint(cpu(), golden("gpt_oss"), out,
                     {.spec = conversion_from_string("nvfp4"), .calibrate = {}});
  const Checkpoint merged = Checkpoint::open(out);
  const SafetensorsFile tensors = SafetensorsFile::open(out + "/" + file);
  std::vector<std::pair<std::string, Tensor>> all;
  for (const std::string& name : tensors.names()) {
    if (!name.ends_with("_proj_bias")) all.emplace_back(name, tensors.get(name));
  }
  std::vector<std::vector<float>> memory;
  for (const CheckpointLayer& layer : merged.layers()) {
    const ExpertWeights of = merged.weights(layer.index).experts;
    for (const auto& [name, list] : {std::pair("gate_proj", &of.gate_bias),
                                     {"up_proj", &of.up_bias},
                                     {"down_proj", &of.down_bias}}) {
      for (std::size_t e = 0; e < list->size(); ++e) {
        memory.push_back(values_of((*list)[e]));
        all.emplace_back(layer.module + ".experts." + std::to_string(e) + "." + name + ".bias",
                         view(memory.back().data(), {(*list)[e].shape[0]}));
      }
    }
  }
  write_safetensors(apart / file, all);
  write_file(apart / "config.json", read_file(out + "/config.json"));
  const Checkpoint own = Checkpoint::open(apart.path());
  const int layer = merged.first_moe_layer();
  const ExpertWeights is = own.weights(layer).experts, was = merged.weights(layer).experts;
  ASSERT_EQ(was.gate_bias.size(), 16U);
  expect_same(is.gate_bias, was.gate_bias);
  expect_same(is.up_bias, was.up_bias);
  expect_same(is.down_bias, was.down_bias);
  EXPECT_EQ(values_of(is.packed_up[3]), values_of(was.packed_up[3]));
}

}  // namespace
}  // namespace shunt::test
