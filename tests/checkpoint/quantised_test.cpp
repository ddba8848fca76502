// Quantised checkpoints against what packages decode: compressed-tensors, transformers, ModelOpt or
// GPTQModel (tests/data/make_quantised.py).
#include <cmath>
#include <filesystem>

#include "checkpoint/access.hpp"
#include "checkpoint/quantised_changed.hpp"

namespace shunt::test {
namespace {

struct Case {
  const char* name;
  FormatSpec format;
  bool zeros = false, order = false;
  bool rounds = false;  // the package rounds a quotient of scales, and then the product
};
const Case cases[] = {
    {"fp8_block", {Format::fp8_block}},
    {"fp8_block_bf16", {Format::fp8_block}},
    {"fp8_block_ue8m0", {Format::fp8_block}},
    {"fp8_channel", {Format::fp8_channel}},
    {"fp8_tensor", {Format::fp8_tensor}},
    {"mxfp8", {Format::mxfp8}},
    {"nvfp4_modelopt", {Format::nvfp4}},
    {"nvfp4_compressed", {Format::nvfp4}, false, false, true},
    {"mxfp4_gpt_oss", {Format::mxfp4}},
    {"mxfp4_deepseek_v4", {Format::mxfp4}},
    {"int4", {Format::int4, 32}},
    {"int4_zeros", {Format::int4, 32}, true},
    {"int4_channel", {Format::int4, 48}},
    {"int8", {Format::int8}},
    {"int8_packed", {Format::int8}},
    {"gptq", {Format::int4, 32}, true, true},
    {"gptq_v2", {Format::int4, 16}, true},
    {"awq", {Format::int4, 32}, true},
};

class Quantised : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Dialects, Quantised, testing::ValuesIn(cases),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(Quantised, DecodesToTheExpectedNumbers) {
  const Case& c = GetParam();
  const std::string path = quantised_folder + "/" + c.name;
  const auto expected = SafetensorsFile::open(path + "/expected.safetensors");
  ExpertWeights experts;
  {
    const Checkpoint checkpoint = Checkpoint::open(path);
    experts = checkpoint.weights(0).experts;
    ASSERT_EQ(experts.packed_up.size(), 2U);
    for (int e = 0; e < 2; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const struct {
        const char* name;
        const PackedMatrix& matrix;
      } parts[] = {{"gate", experts.packed_gate[at]},
                   {"up", experts.packed_up[at]},
                   {"down", experts.packed_down[at]}};
      for (const auto& [name, matrix] : parts) {
        const std::string full = std::string(name) + "." + std::to_string(e);
        SCOPED_TRACE(full);
        check_packed(full, matrix, Device{});
        const bool last = std::string(name) == "down";
        // The whole row in one group: as wide as each matrix is.
        FormatSpec format = c.format;
        if (std::string(c.name) == "int4_channel" && last) format.group = 16;
        // A matrix of one block of 128 x 128 has one scale: the same numbers.
        if (format.format == Format::fp8_block && matrix.scales.elements() == 0) {
          format.format = Format::fp8_tensor;
        }
        EXPECT_EQ(to_string(matrix.format), to_string(format));
        EXPECT_EQ(static_cast<bool>(matrix.zeros), c.zeros);
        EXPECT_EQ(static_cast<bool>(matrix.group_of), c.order && !last);
        const std::vector<float> wanted = floats(expected.get(full));
        std::vector<float> got(wanted.size());
        unpack(matrix, view(got.data(), {matrix.n, matrix.k}));
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (c.rounds) {
            ASSERT_NEAR(got[i], wanted[i], 3e-7F * std::fabs(wanted[i])) << i;
          } else {
            ASSERT_EQ(got[i], wanted[i]) << i;
          }
        }
      }
      if (!experts.gate_bias.empty()) {
        EXPECT_EQ(floats(expected.get("up_bias." + std::to_string(e)))[3],
                  bf16_to_f32(
                      experts.up_bias[at].as<std::uint16_t>()[3 * experts.up_bias[at].strides[0]]));
        EXPECT_EQ(
            floats(expected.get("gate_bias." + std::to_string(e)))[3],
            bf16_to_f32(
                experts.gate_bias[at].as<std::uint16_t>()[3 * experts.gate_bias[at].strides[0]]));
      }
    }
    EXPECT_TRUE(experts.up.empty());
  }
}

// For who asks for formats and sizes alone.
TEST_P(Quantised, FormatsAndSizesAreThereBeforeNumbers) {
  const Checkpoint checkpoint = Checkpoint::open(quantised_folder + "/" + GetParam().name);
  const ExpertWeights filled = checkpoint.weights(0).experts;
  const ExpertWeights experts = CheckpointAccess::unfilled_weights(checkpoint, 0).experts;
  for (const auto list :
       {&ExpertWeights::packed_gate, &ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
    ASSERT_FALSE((filled.*list).empty());
    ASSERT_EQ((experts.*list).size(), (filled.*list).size());
    for (std::size_t e = 0; e < (experts.*list).size(); ++e) {
      EXPECT_EQ((experts.*list)[e].format, (filled.*list)[e].format);
      EXPECT_EQ((experts.*list)[e].bytes(), (filled.*list)[e].bytes());
    }
  }
}

// GPTQModel's word for checkpoint_format is `format`, with which zero points are not one less.
TEST(QuantisedForms, FormatOfGptqModel) {
  for (const bool both : {false, true}) {
    const TemporaryFolder at;
    changed(at, "gptq_v2", [&](Json& config) {
      Json& q = config["quantization_config"];
      q["format"] = "gptq_v2";
      if (!both) q.erase("checkpoint_format");
    });
    expect_same_values(at.path(), "gptq_v2");
  }
}

// DeepSeek-V4.1's blocks of 32 by 32: a scale of 32 rows is one of each of them.
TEST(QuantisedForms, BlocksOf32By32AreMxfp8) {
  std::vector<std::vector<std::uint8_t>> held;
  const auto with = [&](const TemporaryFolder& at, bool blocks) {
    return rewritten(
        at, "mxfp8",
        [&](Json& config) {
          Json& q = config["quantization_config"];
          q["weight_block_size"] = blocks ? Json::array({32, 32}) : Json::array({1, 32});
          q["scale_fmt"] = "ue8m0";
        },
        [&](Tensors& tensors) {
          for (auto& [name, tensor] : tensors) {
            if (!name.ends_with("_scale_inv")) continue;
            const std::int64_t n = tensor.shape[0], groups = tensor.shape[1];
            auto& bytes = held.emplace_back();
            for (std::int64_t row = 0; row < n; row += blocks ? 32 : 1) {
              for (std::int64_t g = 0; g < groups; ++g) {
                bytes.push_back(static_cast<std::uint8_t>(115 + 3 * (row / 32) + g));
              }
            }
            tensor = view(bytes.data(), DType::u8, {blocks ? n / 32 : n, groups});
          }
        });
  };
  const TemporaryFolder whole, rows;
  with(rows, false);
  const Checkpoint a = Checkpoint::open(with(whole, true)), b = Checkpoint::open(rows.path());
  const LayerWeights now = a.weights(0), then = b.weights(0);
  for (std::size_t e = 0; e < 2; ++e) {
    for (const auto list :
         {&ExpertWeights::packed_gate, &ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
      const PackedMatrix &x = (now.experts.*list)[e], &y = (then.experts.*list)[e];
      EXPECT_EQ(x.format, (FormatSpec{Format::mxfp8}));
      std::vector<float> got(static_cast<std::size_t>(x.n * x.k)), wanted(got.size());
      unpack(x, view(got.data(), {x.n, x.k}));
      unpack(y, view(wanted.data(), {y.n, y.k}));
      EXPECT_EQ(got, wanted);
    }
  }
  const TemporaryFolder at;
  const std::string message = error_of([&] {
    Checkpoint::open(changed(at, "mxfp8", [](Json& config) {
      config["quantization_config"]["weight_block_size"] = Json::array({32, 32});
    })).weights(0);
  });
  EXPECT_NE(message.find("e8m0 [1, 2]"), std::string::npos) << message;
  const std::vector<float> ones(2, 1);
  const TemporaryFolder floats;
  with(floats, true);
  const SafetensorsFile file = SafetensorsFile::open(floats / "model.safetensors");
  Tensors tensors;
  for (const std::string& name : file.names()) tensors.emplace(name, file.get(name));
  tensors[gate + ".weight_scale_inv"] = view(ones.data(), {1, 2});
  const TemporaryFolder other;
  write_file(other / "config.json", read_file(floats / "config.json"));
  write_safetensors(other / "model.safetensors", {tensors.begin(), tensors.end()});
  const std::string type = error_of([&] { (void)Checkpoint::open(other.path()).weights(0); });
  EXPECT_NE(type.find("is f32 [1, 2]: must be e8m0 [1, 2]"), std::string::npos) << type;
}

// compressed-tensors' nibbles in bytes are those of its words.
TEST(QuantisedForms, IntegersOfFourBitsInBytes) {
  const TemporaryFolder at;
  rewritten(
      at, "int4", [](Json&) {},
      [](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          if (name.ends_with(".weight_packed"))
            t = view(t.data, DType::u8, {t.shape[0], 4 * t.shape[1]});
        }
      });
  expect_same_values(at.path(), "int4");
}

// Zero points that are stored and are all the usual one are none.
TEST(QuantisedForms, ZeroPointsOfEight) {
  const TemporaryFolder at;
  const std::vector<std::uint32_t> eights(64, 0x88888888U);
  rewritten(
      at, "int4", [](Json&) {},
      [&](Tensors& tensors) {
        const Tensors before = tensors;
        for (const auto& [name, t] : before) {
          if (!name.ends_with(".weight_scale")) continue;
          tensors[name.substr(0, name.size() - 5) + "zero_point"] =
              view(eights.data(), DType::i32, {(t.shape[0] + 7) / 8, t.shape[1]});
        }
      });
  expect_same_values(at.path(), "int4");
  const Checkpoint here = Checkpoint::open(at.path());
  EXPECT_FALSE(here.weights(0).experts.packed_up[0].zeros);
}

// ModelOpt's FP8_PB_WO writes the scales of blocks in four dimensions.
TEST(QuantisedForms, ScalesOfBlocksInFourDimensions) {
  const TemporaryFolder at;
  rewritten(
      at, "fp8_block",
      [](Json& config) {
        config["quantization_config"] = {
            {"quant_method", "modelopt"}, {"quant_algo", "FP8_PB_WO"}, {"ignore", {"*mlp.gate"}}};
      },
      [](Tensors& tensors) {
        const Tensors before = std::exchange(tensors, {});
        for (const auto& [name, t] : before) {
          const bool scales = name.ends_with("_scale_inv");
          tensors[scales ? name.substr(0, name.size() - 4) : name] =
              scales ? view(t.data, DType::f32, {t.shape[0], 1, t.shape[1], 1}) : t;
        }
      });
  expect_same_values(at.path(), "fp8_block");
}

// Of the last word of zero points only the nibbles of rows that are there count.
TEST(QuantisedForms, ZeroPointsOfRowsThatAreNoMultipleOfEight) {
  for (const std::uint32_t last : {0x33338888U, 0x33338887U}) {
    const TemporaryFolder at;
    std::vector<std::uint32_t> words(64, 0x88888888U);
    for (int g = 0; g < 2; ++g) words[static_cast<std::size_t>(3 * 2 + g)] = last;
    const std::vector<std::uint32_t> eights(8, 0x88888888U);
    const std::vector<std::int64_t> shape = {28, 64};
    rewritten(
        at, "int4",
        [](Json& config) {
          config["moe_intermediate_size"] = 28;
          config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = false;
        },
        [&](Tensors& tensors) {
          const Tensors before = tensors;
          for (const auto& [name, t] : before) {
            if (name.find("experts.") == std::string::npos) continue;
            if (name.find("down_proj") != std::string::npos) {
              if (name.ends_with("weight_shape")) tensors.erase(name);
              if (name.ends_with(".weight_scale")) {
                tensors[name.substr(0, name.size() - 5) + "zero_point"] =
                    view(eights.data(), DType::i32, {8, 1});
              }
              continue;
            }
            if (name.ends_with("weight_shape")) {
              tensors[name] = view(shape.data(), {2});
            } else {
              tensors[name] = t.rows(0, 28);
            }
            if (!name.ends_with(".weight_scale")) continue;
            tensors[name.substr(0, name.size() - 5) + "zero_point"] =
                view(words.data(), DType::i32, {4, 2});
          }
        });
    const Checkpoint checkpoint = Checkpoint::open(at.path());
    const LayerWeights read = checkpoint.weights(0);
    const PackedMatrix& up = read.experts.packed_up[0];
    EXPECT_EQ(static_cast<bool>(up.zeros), last != 0x33338888U);
    if (up.zeros) {
      EXPECT_EQ(up.zeros.as<const std::uint8_t>()[24 * 2], 7);
      EXPECT_EQ(up.zeros.as<const std::uint8_t>()[25 * 2], 8);
    }
  }
}

// -1 everywhere: an order that was never set is the plain one.
TEST(QuantisedForms, AnOrderOfActivationsThatIsNotSet) {
  const std::vector<std::int32_t> unset(64, -1);
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "int4", [](Json&) {},
      [&](Tensors& tensors) { tensors[gate + ".weight_g_idx"] = view(unset.data(), {64}); }));
  EXPECT_FALSE(checkpoint.weights(0).experts.packed_gate[0].group_of);
}

// A tensor of one row or column more or less, or of another type, would be read past its end, or as
// other numbers than were written.
class QuantisedTensors : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Dialects, QuantisedTensors, testing::ValuesIn(cases),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(QuantisedTensors, OfOtherSizesThanTheConfigsAreRefused) {
  const char* const name = GetParam().name;
  const TemporaryFolder at;
  const std::string message = error_of([&] {
    Checkpoint::open(changed(at, name, [&](nlohmann::json& config) {
      for (const char* field : {"moe_intermediate_size", "intermediate_size"}) {
        if (config.contains(field)) config[field] = 160;
      }
    })).weights(0);
  });
  EXPECT_TRUE(message.find("must be") != std::string::npos ||
              message.find("asks for") != std::string::npos)
      << message;
}

TEST_P(QuantisedTensors, OfAnotherSizeOrTypeAreRefused) {
  const char* const name = GetParam().name;
  const SafetensorsFile file =
      SafetensorsFile::open(quantised_folder + "/" + name + "/model.safetensors");
  const auto refused = [&](const std::string& tensor, DType dtype,
                           const std::vector<std::int64_t>& shape) {
    const Tensor before = file.get(tensor);
    const auto* const bytes = before.as<const char>();
    std::string repeated;  // content that is legal
    while (repeated.size() < 16 * static_cast<std::size_t>(before.bytes()) + 64) {
      repeated.append(bytes, static_cast<std::size_t>(before.bytes()));
    }
    const TemporaryFolder at;
    Status status = Status::ok;
    const std::string message = error_of(
        [&] {
          (void)Checkpoint::open(rewritten(
                                     at, name, [](Json&) {},
                                     [&](Tensors& tensors) {
                                       tensors[tensor] = of_shape(repeated.data(), dtype, shape);
                                     }))
              .weights(0);
        },
        &status);
    // The tensor, or its module.
    EXPECT_NE(message.find(tensor.substr(0, tensor.rfind('.'))), std::string::npos)
        << tensor << " as " << of_shape(nullptr, dtype, shape).describe() << ": " << message;
    EXPECT_TRUE(status == Status::bad_file || status == Status::unsupported) << message;
  };
  for (const std::string& tensor : file.names()) {
    const bool one = tensor.find("experts.0.") != std::string::npos;
    const bool together = tensor.find("experts.gate_up_proj_") != std::string::npos ||
                          tensor.find("experts.down_proj_") != std::string::npos;
    if ((!one && !together) || tensor.ends_with("_bias") || tensor.ends_with("input_scale")) {
      continue;
    }
    const Tensor before = file.get(tensor);
    std::vector<std::int64_t> shape(before.shape.begin(), before.shape.begin() + before.rank);
    refused(tensor, DType::f64, shape);
    for (std::int64_t& size : shape) {
      for (const std::int64_t more : {1, -1}) {
        size += more;
        // One scale may stand for a row, or for all.
        if (more > 0 || size > 1) refused(tensor, before.dtype, shape);
        size -= more;
      }
    }
  }
}

// One scale of integers stands for all rows.
TEST(QuantisedForms, IntegersOfOneScale) {
  const float scale = 0.375F;
  for (const char* name : {"int8", "int8_packed"}) {
    const TemporaryFolder at;
    const Checkpoint checkpoint = Checkpoint::open(rewritten(
        at, name,
        [](Json& config) {
          config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] =
              "tensor";
        },
        [&](Tensors& tensors) {
          for (auto& [each, t] : tensors) {
            if (each.ends_with(".weight_scale")) t = view(&scale, {1});
          }
        }));
    const LayerWeights weights = checkpoint.weights(0);
    const Tensor& read = weights.experts.packed_gate[0].scales;
    ASSERT_EQ(read.elements(), weights.experts.packed_gate[0].n);
    for (std::int64_t i = 0; i < read.elements(); ++i) EXPECT_EQ(read.as<const float>()[i], scale);
  }
}

// A scale a row without the second dimension.
TEST(QuantisedForms, ScalesOfRowsInOneDimension) {
  const TemporaryFolder at;
  rewritten(
      at, "fp8_channel", [](Json&) {},
      [](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          if (name.ends_with(".weight_scale")) t = view(t.data, t.dtype, {t.shape[0]});
        }
      });
  expect_same_values(at.path(), "fp8_channel");
}

// Of a last byte half is no weight, whatever the word holds there.
TEST(QuantisedForms, NibblesBehindAnOddWidth) {
  const std::vector<std::uint32_t> words(32 * 8, 0xffffffffU);
  const std::vector<std::int64_t> wide = {32, 63}, narrow = {63, 32};
  const std::vector<std::uint16_t> router(2 * 63);
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "int4", [](Json& config) { config["hidden_size"] = 63; },
      [&](Tensors& tensors) {
        for (auto& [name, t] : tensors) {
          const bool down = name.find("down_proj") != std::string::npos;
          if (name.ends_with("mlp.gate.weight")) {
            t = view(router.data(), bf16, {2, 63});
          } else if (name.ends_with("weight_shape")) {
            t = view(down ? narrow.data() : wide.data(), {2});
          } else if (down) {
            t = t.rows(0, 63);
          } else if (name.ends_with("weight_packed")) {
            t = view(words.data(), DType::i32, {32, 8});
          }
        }
      }));
  const LayerWeights weights = checkpoint.weights(0);
  const Tensor& read = weights.experts.packed_gate[0].values;
  ASSERT_EQ(read.describe(), "u8 [32, 32]");
  for (std::int64_t row = 0; row < 32; ++row) {
    EXPECT_EQ(read.as<const std::uint8_t>()[row * 32 + 30], 0xff);
    EXPECT_EQ(read.as<const std::uint8_t>()[row * 32 + 31], 0x0f);
  }
}

#if defined(__x86_64__)
// Who reads may flush denormals: 2^-127 is one.
TEST(QuantisedForms, ScalesDoNotDependOnHowTheCallerFlushesSmallNumbers) {
  const std::uint8_t bytes[] = {0, 0};
  const TemporaryFolder at;
  const Checkpoint checkpoint = Checkpoint::open(rewritten(
      at, "fp8_block_ue8m0", [](Json&) {},
      [&](Tensors& tensors) {
        tensors[gate + ".weight_scale_inv"] = view(bytes, DType::f8_e8m0, {1, 2});
      }));
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  const LayerWeights weights = checkpoint.weights(0);
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(weights.experts.packed_gate[0].scales.as<const float>()[0], 0x1p-127F);
}
#endif

// 2^(byte - 127), the least of which is no normal f32; 255 is NaN.
TEST(QuantisedForms, ScalesThatAreExponents) {
  const std::pair<std::uint8_t, float> scales[] = {
      {0, 0x1p-127F}, {1, 0x1p-126F}, {126, 0.5F},     {127, 1.0F},
      {128, 2.0F},    {200, 0x1p73F}, {254, 0x1p127F}, {255, std::nanf("")}};
  for (const auto& [byte, value] : scales) {
    for (const DType dtype : {DType::f8_e8m0, DType::u8}) {
      const std::uint8_t bytes[] = {byte, 127};
      const TemporaryFolder at;
      const Checkpoint checkpoint = Checkpoint::open(rewritten(
          at, "fp8_block_ue8m0", [](Json&) {},
          [&](Tensors& tensors) {
            tensors[gate + ".weight_scale_inv"] = view(bytes, dtype, {1, 2});
          }));
      const LayerWeights weights = checkpoint.weights(0);
      const Tensor& read = weights.experts.packed_gate[0].scales;
      ASSERT_EQ(read.describe(), "f32 [1, 2]");
      EXPECT_EQ(std::isnan(read.as<const float>()[0]), std::isnan(value));
      if (!std::isnan(value)) {
        EXPECT_EQ(read.as<const float>()[0], value);
      }
      EXPECT_EQ(read.as<const float>()[1], 1);
    }
  }
}

}  // namespace
}  // namespace shunt::test
