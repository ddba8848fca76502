// shunt run over every golden checkpoint and the model that ships with the project, in f32, in 16
// bits and with experts in fp8; and what an engine refuses. On either engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <future>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "engine.hpp"
#include "process.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/format.hpp"
#include "shunt/layer.hpp"

namespace shunt::test {
namespace {

using Json = nlohmann::json;

// What the command is asked for, and the same for the library.
struct Way {
  const char* name;
  LayerOptions options;
  // Of the largest error over the largest output: of all models' layers in the mean at least, or
  // they were not computed so; of each at most.
  double low, high;
};

void PrintTo(const Way& way, std::ostream* to) { *to << way.name; }

std::vector<std::string> words_of(const LayerOptions& options) {
  std::vector<std::string> words = {"--dtype", to_string(options.dtype)};
  if (options.format != FormatSpec{}) {
    words.insert(words.end(), {"--format", to_string(options.format)});
  }
  if (options.rows != RowFormat::as_dtype) {
    words.insert(words.end(), {"--rows", to_string(options.rows)});
  }
  return words;
}

// f32 and 16 bits have the limits of tests/checkpoint/goldens_test.cpp. Of fp8 the squared error
// over the power is 5e-3 at most (tests/layer/format_limits.hpp): 0.07 of the output in the mean,
// and half as much again where it is largest; rows in fp8, a GPU's, err as the weights do, so that
// both together are worse by the root of 2. The CPU engine has 0.0075 of bf16, 0.001 of f16 and
// 0.097 of fp8 at most.
std::vector<Way> ways() {
  const RowFormat rows = on_gpu() ? RowFormat::fp8_block : RowFormat::as_dtype;
  return {
      {"f32", {.dtype = f32}, 0, 1e-5},
      {"bf16", {.dtype = bf16}, 5e-4, 1e-2},
      {"f16", {.dtype = f16}, 5e-5, 2e-3},
      {"fp8",
       {.dtype = bf16, .format = {Format::fp8_block}, .rows = rows},
       1e-2,
       on_gpu() ? 0.15 : 0.11},
  };
}

// Each `shunt run` of a list on the engine of the tests. On a GPU several at a time: a process
// takes longer to open the GPU than to compute.
std::vector<Outcome> run_each(const std::vector<std::vector<std::string>>& commands) {
  std::vector<Outcome> outcomes(commands.size());
  std::atomic<std::size_t> next{0};
  std::vector<std::future<void>> workers;
  for (int i = 0; i < (on_gpu() ? 8 : 1); ++i) {
    workers.push_back(std::async(std::launch::async, [&] {
      for (std::size_t c = next++; c < commands.size(); c = next++) {
        std::vector<std::string> words = {"run", "--no-timing"};
        words.insert(words.end(), commands[c].begin(), commands[c].end());
        if (on_gpu()) words.insert(words.end(), {"--device", "cuda"});
        outcomes[c] = shunt(words);
      }
    }));
  }
  for (auto& worker : workers) worker.get();
  return outcomes;
}

std::vector<std::string> command(const std::string& model, const LayerOptions& options) {
  std::vector<std::string> words = words_of(options);
  words.insert(words.begin(), {"--model", model, "--json"});
  return words;
}

Support supported(const LayerSpec& spec, const LayerOptions& options) {
  return supports(spec, options, on_gpu() ? Device{DeviceType::cuda, 0} : Device{});
}

// Why the engine does not compute a checkpoint's experts so; empty: it does.
std::string refusal(const std::string& model, const LayerOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(model);
  const int layer = checkpoint.first_moe_layer();
  const LayerWeights weights = checkpoint.weights(layer);
  LayerOptions wanted = options;
  if (!weights.experts.packed_up.empty()) {
    const FormatSpec packed = weights.experts.packed_up[0].format.of_matrix();
    if (options.format != FormatSpec{} && resolved(options.format) != packed) {
      return "LayerOptions.format is " + to_string(options.format) +
             ": weights are packed already, as " + to_string(packed);
    }
    if (on_gpu()) wanted.format = packed;
  }
  return supported(checkpoint.spec(layer), wanted).reason;
}

// The errors of a model's layers, as reported.
std::vector<double> check(const Way& way, const std::string& model, const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << model << " in " << way.name << ": " << outcome.err;
  const Json json = Json::parse(outcome.out, nullptr, false);
  if (!json.is_object() || !json.contains("layers") || json["layers"].empty()) {
    ADD_FAILURE() << model << " in " << way.name << ": " << outcome.out << outcome.err;
    return {};
  }
  EXPECT_EQ(json["dtype"], to_string(way.options.dtype));
  EXPECT_EQ(json["format"], to_string(way.options.format));
  EXPECT_EQ(json["device"], on_gpu() ? "cuda" : "cpu");
  std::vector<double> errors;
  for (const Json& layer : json["layers"]) {
    // What is no number is null.
    errors.push_back(layer["error"].is_number() ? double{layer["error"]} : HUGE_VAL);
    EXPECT_LE(errors.back(), way.high)
        << model << " in " << way.name << ", layer " << layer["layer"];
    EXPECT_TRUE(layer["ids_differ"].is_null() || layer["ids_differ"] == 0)
        << model << " in " << way.name << ", layer " << layer["layer"] << ": "
        << layer["ids_differ"] << " ids differ";
  }
  return errors;
}

// In the mean of many.
void expect_computed(const Way& way, const std::vector<double>& errors) {
  ASSERT_FALSE(errors.empty());
  double sum = 0;
  for (const double error : errors) sum += error;
  EXPECT_GE(sum / static_cast<double>(errors.size()), way.low) << "not computed in " << way.name;
}

class RunInEveryWay : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, RunInEveryWay, ::testing::ValuesIn(ways()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST_P(RunInEveryWay, ChecksEveryGoldenCheckpoint) {
  const Way& way = GetParam();
  std::vector<std::string> families = golden_families();
  EXPECT_GT(families.size(), 60U);
  if (!on_gpu() && way.options.format != FormatSpec{}) {  // whose sizes take time to pack
    std::erase_if(families, [](const std::string& name) { return name.ends_with("_real"); });
  }
  std::vector<std::vector<std::string>> commands;
  for (const std::string& family : families) {
    commands.push_back(command(golden(family), way.options));
  }
  const std::vector<Outcome> outcomes = run_each(commands);
  std::vector<double> errors;
  double worst = -1;
  std::string worst_family;
  for (std::size_t f = 0; f < families.size(); ++f) {
    SCOPED_TRACE(families[f]);
    const std::string why = refusal(golden(families[f]), way.options);
    if (!why.empty()) {
      expect_failure(outcomes[f], 1, "shunt run", why);
      continue;
    }
    for (const double error : check(way, families[f], outcomes[f])) {
      if (error > worst) worst = error, worst_family = families[f];
      errors.push_back(error);
    }
  }
  expect_computed(way, errors);
  std::printf("%-5s %zu layers, worst %.6f, of %s\n", way.name, errors.size(), worst,
              worst_family.c_str());
}

TEST_P(RunInEveryWay, ChecksEveryLayerOfTinyMoe) {
  const Way& way = GetParam();
  const std::string why = refusal(tiny_moe, way.options);
  const Outcome outcome = run_each({command(tiny_moe, way.options)})[0];
  if (!why.empty()) return expect_failure(outcome, 1, "shunt run", why);
  const std::vector<double> errors = check(way, "tiny-moe", outcome);
  EXPECT_EQ(errors.size(), 4U);
  expect_computed(way, errors);
}

// Without --dtype: what the recordings are in, and where the engine has packed experts, what it has
// them in.
TEST(Run, TakesADtypeThatTheEngineHas) {
  const std::vector<std::string> models = {golden("mixtral"), golden("kimi_k3_mxfp4")};
  std::vector<std::vector<std::string>> commands;
  for (const std::string& model : models) commands.push_back({model, "--json"});
  const std::vector<Outcome> outcomes = run_each(commands);
  for (std::size_t m = 0; m < models.size(); ++m) {
    EXPECT_EQ(outcomes[m].code, 0) << models[m] << ": " << outcomes[m].err;
    const Json json = Json::parse(outcomes[m].out, nullptr, false);
    EXPECT_EQ(json.value("dtype", ""), on_gpu() && m == 1 ? "bf16" : "f32") << models[m];
  }
}

// By the words of supports(), before anything is computed.
TEST(Run, RefusesByNameWhatTheEngineDoesNotCompute) {
  const LayerSpec spec = Checkpoint::open(tiny_moe).spec(0);
  std::vector<FormatSpec> formats = known_formats();
  formats.emplace_back();
  std::vector<std::vector<std::string>> commands;
  std::vector<std::string> reasons;
  for (const FormatSpec& format : formats) {
    for (const RowFormat rows :
         {RowFormat::as_dtype, RowFormat::fp8_token, RowFormat::fp8_block, RowFormat::nvfp4}) {
      for (const DType dtype : {f32, bf16}) {
        const LayerOptions options{.dtype = dtype, .format = format, .rows = rows};
        const Support support = supported(spec, options);
        if (support) continue;
        commands.push_back(command(tiny_moe, options));
        reasons.push_back(support.reason);
      }
    }
  }
  // Rows in fp8 are a GPU's, and there those that go with the format.
  EXPECT_GE(commands.size(), 20U);
  const std::vector<Outcome> outcomes = run_each(commands);
  for (std::size_t c = 0; c < commands.size(); ++c) {
    SCOPED_TRACE(::testing::PrintToString(commands[c]));
    expect_failure(outcomes[c], 1, "shunt run", reasons[c]);
  }
  if (on_gpu()) return;
  expect_failure(
      run_each({command(
          tiny_moe,
          {.dtype = bf16, .format = {Format::fp8_block}, .rows = RowFormat::fp8_block})})[0],
      1, "shunt run", "LayerOptions.rows is fp8_block with format fp8_block: must be as_dtype");
}

}  // namespace
}  // namespace shunt::test
