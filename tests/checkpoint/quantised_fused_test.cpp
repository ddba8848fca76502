// Checkpoints whose experts are one packed tensor: every shape of scales that is published, against
// the formula.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>

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

// A copy of `from` in which `change` has changed the tensors.
std::string error_with(const std::string& from,
                       const std::function<void(std::map<std::string, Tensor>&)>& change) {
  const TemporaryFolder at;
  const SafetensorsFile file = SafetensorsFile::open(from + "/model.safetensors");
  std::map<std::string, Tensor> tensors;
  for (const std::string& name : file.names()) tensors.emplace(name, file.get(name));
  change(tensors);
  write_safetensors(at / "model.safetensors", {tensors.begin(), tensors.end()});
  write_file(at / "config.json", read_file(from + "/config.json"));
  return error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
}

const Form& form_of(std::string_view name) {
  return *std::find_if(std::begin(forms), std::end(forms),
                       [&](const Form& form) { return form.name == name; });
}

// [E, 2, 1] may be gate's number and up's, or those of two blocks of 128 rows that they share.
TEST(FusedRefusals, TwoNumbersThatMayBeBlocks) {
  Form form = form_of("a_number_for_gate_and_one_for_up");
  form.scales = "_scale_inv";
  form.intermediate = 96;
  form.shape = [](std::int64_t rows, std::int64_t) {
    return rows == 192 ? std::vector<std::int64_t>{experts, 2, 1}
                       : std::vector<std::int64_t>{experts};
  };
  const auto message = [&](const char* config) {
    const TemporaryFolder folder;
    const FusedCheckpoint made(form, folder.path(), 128);
    nlohmann::json json = nlohmann::json::parse(read_file(folder.path() + "/config.json"));
    json["quantization_config"] = nlohmann::json::parse(config);
    if (json["quantization_config"].is_null()) json.erase("quantization_config");
    write_file(folder.path() + "/config.json", json.dump());
    return error_of([&] { (void)Checkpoint::open(folder.path()).weights(0); });
  };
  EXPECT_NE(message(R"({"quant_method": "fp8", "weight_block_size": [128, 128]})")
                .find("blocks of 128 rows that gate and up share"),
            std::string::npos);
  EXPECT_EQ(message(R"({"quant_method": "modelopt", "quant_algo": "FP8"})"), "");
  for (const char* neither : {"null", R"({"quant_method": "fp8"})"}) {
    const std::string unclear = message(neither);
    EXPECT_NE(unclear.find("quantization_config must say which"), std::string::npos) << unclear;
  }
}

// Read as another's they would be other numbers, or lie behind the end.
TEST(FusedRefusals, ScalesThatFitAlmost) {
  struct Case {
    const char* form;
    std::int64_t intermediate;
    const char* part;  // gate and up, or down, with what follows its name
    DType dtype;
    std::vector<std::int64_t> shape;
    const char* message = "must be";
  };
  const char* const gate_up = "experts.gate_up_proj_scale_inv";
  const Case cases[] = {
      {"a_number_an_expert", 24, gate_up, DType::f32, {1, experts}},
      {"blocks", 128, gate_up, DType::f32, {experts - 1, 2, 2}},
      {"blocks", 128, "experts.down_proj_scale_inv", DType::f32, {experts, 2, 2}},
      {"blocks", 128, "experts.down_proj_scale_inv", DType::f32, {experts, 3, 1}},
      {"blocks_transposed", 128, gate_up, DType::f32, {experts, 1, 2}},
      {"mxfp8", 32, gate_up, DType::u8, {experts, 64, 4}},
      {"nvfp4_transposed", 32, "experts.gate_up_proj_weight_scale", DType::u8, {experts, 9, 64}},
      {"nvfp4_transposed",
       32,
       "experts.gate_up_proj_weight_scale",
       DType::f8_e4m3,
       {experts, 8, 64}},
      // Rows of gate and up take turns: each block, and either half of two numbers, has both's.
      {"interleaved_channels",
       128,
       "experts.w13_weight_scale",
       DType::f32,
       {experts, 2, 2},
       "has blocks of 128 rows that gate and up share"},
      {"interleaved_channels", 24, "experts.w13_weight_scale", DType::f32, {experts, 2, 2}},
      {"interleaved_channels", 24, "experts.w13_weight_scale", DType::f32, {experts, 2}},
  };
  const std::vector<float> ones(4096, 1);
  for (const Case& c : cases) {
    Form form = form_of(c.form);
    form.intermediate = c.intermediate;
    const TemporaryFolder folder;
    const FusedCheckpoint made(form, folder.path());
    std::string name;
    const std::string message = error_with(folder.path(), [&](auto& tensors) {
      for (auto& [each, tensor] : tensors) {
        if (!each.ends_with(c.part)) continue;
        name = each;
        tensor = c.shape.size() == 2 ? view(static_cast<const void*>(ones.data()), c.dtype,
                                            {c.shape[0], c.shape[1]})
                                     : view(static_cast<const void*>(ones.data()), c.dtype,
                                            {c.shape[0], c.shape[1], c.shape[2]});
      }
    });
    ASSERT_FALSE(name.empty());
    EXPECT_NE(message.find("'" + name + "'"), std::string::npos) << c.form << ": " << message;
    EXPECT_NE(message.find(c.message), std::string::npos) << c.form << ": " << message;
  }
}

// Scales under two names, and what would change the values.
TEST(FusedRefusals, TensorsThatAreTooMany) {
  const TemporaryFolder blocks, nvfp4;
  const FusedCheckpoint of_blocks(form_of("blocks"), blocks.path());
  const FusedCheckpoint of_nvfp4(forms[9], nvfp4.path());
  const std::string gate_up = "model.layers.0.mlp.experts.gate_up_proj";
  const float one = 1;
  for (const auto& [folder, extra, words] :
       {std::tuple(&blocks, "_scale", "_scale_inv' and '" + gate_up + "_scale' are both there"),
        {&blocks, "_weight_scale_2", "_weight_scale_2' is there: not read with this format"},
        {&blocks, "_pre_quant_scale", "_pre_quant_scale' is there: not read with this format"},
        {&nvfp4, "_pre_quant_scale", "_pre_quant_scale' is there: not read with this format"}}) {
    const std::string message = error_with(
        folder->path(), [&, name = gate_up + extra](auto& all) { all[name] = view(&one, {1}); });
    EXPECT_NE(message.find("'" + gate_up + words), std::string::npos) << extra << ": " << message;
  }
}

TEST(FusedRefusals, FewerExpertsThanTheConfigSays) {
  const TemporaryFolder folder;
  const FusedCheckpoint made(form_of("one_number"), folder.path());
  const std::string name = "model.layers.0.mlp.experts.down_proj";
  const std::string message = error_with(
      folder.path(), [&](auto& tensors) { tensors[name] = tensors[name].rows(0, experts - 1); });
  EXPECT_NE(message.find("'" + name + "' is f8_e4m3 [2, 24, 136]: must be [3, 24, 136]"),
            std::string::npos)
      << message;
}

// Either tensor is held to the list, and to the other.
TEST(FusedRefusals, OneOfTheTwoThatIsPlain) {
  const std::string experts_module = "model.layers.0.mlp.experts.";
  const TemporaryFolder folder;
  const FusedCheckpoint made(form_of("a_number_an_expert"), folder.path());
  const std::string original = read_file(folder / "config.json");
  for (const char* part : {"gate_up_proj", "down_proj"}) {
    nlohmann::json config = nlohmann::json::parse(original);
    config["quantization_config"]["modules_to_not_convert"].push_back(experts_module + part);
    write_file(folder / "config.json", config.dump());
    const std::string message = error_of([&] { (void)Checkpoint::open(folder.path()).weights(0); });
    EXPECT_NE(message.find("'" + experts_module + part +
                           "' are packed: quantization_config.modules_to_not_convert leaves it"),
              std::string::npos)
        << message;
  }
  write_file(folder / "config.json", original);
  const std::vector<float> plain(static_cast<std::size_t>(experts * 136 * 24), 1);
  const std::string message = error_with(folder.path(), [&](auto& tensors) {
    tensors[experts_module + "down_proj"] = view(plain.data(), {experts, 136, 24});
  });
  EXPECT_NE(message.find("down_proj' is f32 [3, 136, 24]: config.json asks for the packed form"),
            std::string::npos)
      << message;
}

// Nibbles in signed bytes, and one more name of scales.
TEST(Fused, OtherTypesAndNames) {
  const TemporaryFolder nibbles, blocks;
  const FusedCheckpoint nvfp4(form_of("nvfp4_transposed"), nibbles.path());
  EXPECT_EQ(error_with(nibbles.path(),
                       [](auto& tensors) {
                         for (auto& [name, tensor] : tensors) {
                           if (name.ends_with("_proj")) tensor.dtype = DType::i8;
                         }
                       }),
            "");
  const FusedCheckpoint fp8(form_of("blocks"), blocks.path());
  EXPECT_EQ(error_with(blocks.path(),
                       [](auto& tensors) {
                         for (const char* part : {"gate_up_proj", "down_proj"}) {
                           const std::string base =
                               std::string("model.layers.0.mlp.experts.") + part;
                           auto scales = tensors.extract(base + "_scale_inv");
                           scales.key() = base + "_weight_scale_inv";
                           tensors.insert(std::move(scales));
                         }
                       }),
            "");
}

// Inkling 2 Loop's global scale is a quotient.
TEST(FusedRefusals, AQuotientThatIsNone) {
  const TemporaryFolder folder;
  const FusedCheckpoint made(form_of("inkling_2_loop_nvfp4"), folder.path());
  const std::string name = "model.llm.layers.0.mlp.experts.w2_weight", amax = name + "_amax",
                    under = name + "_outer_scale_denominator";
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const auto with = [&](const std::string& tensor, float value) {
    return error_with(folder.path(), [&](auto& tensors) { tensors[tensor] = view(&value, {1}); });
  };
  for (const float bad : {0.0F, -0.0F, infinity, std::nanf("")}) {
    const std::string message = with(under, bad);
    EXPECT_NE(message.find(fmt::format("{}' holds {}: must be finite and not 0", under, bad)),
              std::string::npos)
        << message;
  }
  for (const float bad : {infinity, std::nanf("")}) {
    const std::string message = with(amax, bad);
    EXPECT_NE(message.find(fmt::format("{}' holds {}: must be finite", amax, bad)),
              std::string::npos)
        << message;
  }
  EXPECT_EQ(with(amax, 0), "");  // an expert of zeros
  for (const std::string& gone : {amax, under}) {
    const std::string message =
        error_with(folder.path(), [&](auto& tensors) { tensors.erase(gone); });
    EXPECT_NE(message.find("has no tensor '" + gone + "'"), std::string::npos) << message;
  }
  const std::string both = with(name + "_weight_scale_2", 1);
  EXPECT_NE(both.find("must be one of them"), std::string::npos) << both;
}

// Either order, where one of the two tensors is square and tells nothing.
TEST(Fused, SquareTensorsLieAsTheOtherSays) {
  for (const char* name : {"one_number", "a_number_an_expert"}) {
    for (const std::int64_t intermediate : {68, 136}) {  // gate and up are square, or down is
      SCOPED_TRACE(fmt::format("{}, {}", name, intermediate));
      Form form = form_of(name);
      form.intermediate = intermediate;
      const TemporaryFolder folder;
      const FusedCheckpoint made(form, folder.path());
      nlohmann::json config = nlohmann::json::parse(read_file(folder / "config.json"));
      config["model_type"] = "qwen3_vl_moe_text";
      write_file(folder / "config.json", config.dump());
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      const ExpertWeights read = checkpoint.weights(0).experts;
      for (const auto& [m, all] : {std::pair(&read.packed_gate[0], &made.gate_up),
                                   std::pair(&read.packed_down[0], &made.down)}) {
        std::vector<float> got(static_cast<std::size_t>(m->n * m->k));
        unpack(*m, view(got.data(), {m->n, m->k}));
        EXPECT_TRUE(std::equal(got.begin(), got.end(), all->begin()));
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
