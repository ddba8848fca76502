// shunt run: what it computes and writes, which is what others check Shunt by. On either engine.
// run_goldens_test.cpp has it compare every recording.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "process.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

const std::string recorded = tiny_moe + "/activations.safetensors";

// max |a - b| / max |b| of two dense float tensors.
double error_of(const Tensor& a, const Tensor& b) {
  double difference = 0;
  double magnitude = 0;
  EXPECT_EQ(a.elements(), b.elements());
  for (std::int64_t i = 0; i < std::min(a.elements(), b.elements()); ++i) {
    const double x = load_f32(a.data, a.dtype, i);
    const double y = load_f32(b.data, b.dtype, i);
    const double off = std::fabs(x - y);
    difference = std::max(difference, std::isnan(off) ? HUGE_VAL : off);
    magnitude = std::max(magnitude, std::fabs(y));
  }
  return difference / magnitude;
}

// `shunt run` on the engine of the tests.
Outcome run(std::vector<std::string> args) {
  args.insert(args.begin(), "run");
  if (on_gpu()) args.insert(args.end(), {"--device", "cuda"});
  return shunt(args);
}

std::vector<std::string> given(const std::string& model, int layer, const std::string& input,
                               const std::string& name, const std::string& output,
                               const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"--model",  model,  "--layer",      std::to_string(layer),
                                   "--input",  input,  "--input-name", name,
                                   "--output", output, "--no-timing"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Run, WritesTheThreeTensorsOfTheContract) {
  const Folder folder;
  const SafetensorsFile reference = SafetensorsFile::open(recorded);
  for (int layer = 0; layer < 4; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer);
    const std::string file = folder.path("y.safetensors");
    const Outcome outcome = run(given(tiny_moe, layer, recorded, prefix + ".input", file));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const SafetensorsFile result = SafetensorsFile::open(file);
    EXPECT_EQ(result.names(), (std::vector<std::string>{"output", "topk_ids", "topk_weights"}));
    EXPECT_EQ(result.get("output").describe(), "f32 [256, 256]");
    EXPECT_EQ(result.get("topk_ids").describe(), "i32 [256, 4]");
    EXPECT_EQ(result.get("topk_weights").describe(), "f32 [256, 4]");
    EXPECT_LE(error_of(result.get("output"), reference.get(prefix + ".output")), 1e-5);

    // Recorded weights and ids are in the order of selection here.
    const Tensor weights = result.get("topk_weights");
    EXPECT_LE(error_of(weights, reference.get(prefix + ".gate_out1")), 1e-5);
    const Tensor ids = result.get("topk_ids");
    const Tensor theirs = reference.get(prefix + ".gate_out2");
    for (std::int64_t i = 0; i < ids.elements(); ++i) {
      ASSERT_EQ(ids.as<const std::int32_t>()[i], theirs.as<const std::int64_t>()[i]) << i;
    }
    for (std::int64_t t = 0; t < 256; ++t) {
      for (int j = 1; j < 4; ++j) {
        const float* row = weights.as<const float>() + t * 4;
        ASSERT_GE(row[j - 1], row[j]) << "token " << t;
      }
    }
  }
}

TEST(Run, BitsDoNotDependOnThreads) {
  SHUNT_ON_CPU_ONLY();
  const Folder folder;
  for (const std::string threads : {"1", "2", "3", "0"}) {
    for (const std::string dtype : {"f32", "bf16"}) {
      const std::string file = folder.path(dtype + threads);
      const Outcome outcome = run(given(tiny_moe, 2, recorded, "layers.2.input", file,
                                        {"--threads", threads, "--dtype", dtype}));
      ASSERT_EQ(outcome.code, 0) << outcome.err;
      EXPECT_EQ(read_text(file), read_text(folder.path(dtype + "1"))) << threads << dtype;
    }
  }
}

TEST(Run, ShorterDtypesStayWithinOnePercent) {
  const Folder folder;
  const SafetensorsFile reference = SafetensorsFile::open(recorded);
  for (const std::string dtype : {"bf16", "f16"}) {
    const std::string file = folder.path(dtype);
    const Outcome outcome =
        run(given(tiny_moe, 1, recorded, "layers.1.input", file, {"--dtype", dtype}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const SafetensorsFile result = SafetensorsFile::open(file);
    const double error = error_of(result.get("output"), reference.get("layers.1.output"));
    EXPECT_LE(error, 1e-2) << dtype;
    EXPECT_GT(error, 1e-6) << dtype << " was not used";
  }
}

// Any float dtype is read; what f64 and f16 hold exactly gives the same bits as f32. (A GPU's
// router may take another path for another dtype.)
TEST(Run, ReadsEveryFloatDtype) {
  const Folder folder;
  constexpr std::int64_t tokens = 5;
  constexpr std::int64_t width = 256;
  std::vector<float> x(tokens * width);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(static_cast<int>(i * 37 % 64) - 32) / 16;  // exact in bf16 and f16
  }
  std::string first;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    std::vector<char> bytes_of(x.size() * 8);
    for (std::size_t i = 0; i < x.size(); ++i) {
      store_f32(bytes_of.data(), dtype, static_cast<std::int64_t>(i), x[i]);
    }
    const std::string input = folder.path("x");
    write_safetensors(input, {{"x", view(bytes_of.data(), dtype, {tokens, width})}});
    const std::string output = folder.path("y");
    const Outcome outcome = run(given(tiny_moe, 0, input, "x", output));
    ASSERT_EQ(outcome.code, 0) << to_string(dtype) << outcome.err;
    if (first.empty()) {
      first = folder.path("first");
      std::filesystem::copy_file(output, first);
    }
    const SafetensorsFile ours = SafetensorsFile::open(output);
    const SafetensorsFile theirs = SafetensorsFile::open(first);
    EXPECT_LE(error_of(ours.get("output"), theirs.get("output")), 1e-5) << to_string(dtype);
    if (!on_gpu()) {
      EXPECT_EQ(read_text(output), read_text(first)) << to_string(dtype);
    }
  }
}

// A framework's dump has a batch in front: [B, T, H] are B times T tokens.
TEST(Run, SequencesAreTokensOneAfterTheOther) {
  const Folder folder;
  const SafetensorsFile reference = SafetensorsFile::open(recorded);
  Tensor flat = reference.get("layers.1.input").rows(0, 6), batches = flat;
  batches.rank = 3;
  batches.shape = {2, 3, 256};
  batches.strides = {3 * 256, 256, 1};
  std::vector<std::string> outputs;
  for (const Tensor& x : {flat, batches}) {
    const std::string input = folder.path("in" + std::to_string(x.rank));
    outputs.push_back(folder.path("out" + std::to_string(x.rank)));
    // What cannot be hidden states need not be told apart by a name.
    write_safetensors(input, {{"x", x}, {"weights", flat.rows(0, 1)[0].rows(0, 8)}});
    const Outcome outcome = run({"--model", tiny_moe, "--layer", "1", "--input", input, "--output",
                                 outputs.back(), "--no-timing"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  EXPECT_EQ(read_text(outputs[0]), read_text(outputs[1]));
}

TEST(Run, NoTokensGiveEmptyTensors) {
  const Folder folder;
  const float nothing = 0;
  const std::string input = folder.path("x");
  write_safetensors(input, {{"x", view(&nothing, {0, 256})}});
  for (const std::string timing : {"--no-timing", "--explain"}) {
    const std::string output = folder.path("y");
    const Outcome outcome = run(
        {"--model", tiny_moe, "--input", input, "--input-name", "x", "--output", output, timing});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const SafetensorsFile result = SafetensorsFile::open(output);
    EXPECT_EQ(result.get("output").describe(), "f32 [0, 256]");
    EXPECT_EQ(result.get("topk_ids").describe(), "i32 [0, 4]");
    EXPECT_EQ(result.get("topk_weights").describe(), "f32 [0, 4]");
  }
}

TEST(Run, AnExistingOutputIsReplaced) {
  const Folder folder;
  const std::string file = folder.path("y");
  write_text(file, std::string(1 << 20, 'x'));
  const Outcome outcome = run(given(tiny_moe, 0, recorded, "layers.0.input", file));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NO_THROW(SafetensorsFile::open(file));
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"y"});
}

TEST(Run, LayersRoutedByTokenIdsTakeThem) {
  const Folder folder;
  const std::string model = golden("deepseek_v4");
  const std::string file = model + "/golden.safetensors";
  const std::string prefix = "model.layers.0.mlp";
  const std::string output = folder.path("y");
  const Outcome outcome = run(given(model, 0, file, prefix + ".input", output,
                                    {"--token-ids-name", prefix + ".token_ids"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const SafetensorsFile result = SafetensorsFile::open(output);
  const SafetensorsFile reference = SafetensorsFile::open(file);
  EXPECT_LE(error_of(result.get("output"), reference.get(prefix + ".output")), 1e-5);
  expect_failure(run(given(model, 0, file, prefix + ".input", output)), 1, "shunt run",
                 "--token-ids-name");
  const std::string plain = golden("qwen3_moe");
  expect_failure(run(given(plain, 0, plain + "/golden.safetensors", prefix + ".input", output,
                           {"--token-ids-name", "nothing"})),
                 2, "shunt run", "--token-ids-name: layer 0 is not routed by token ids");
}

TEST(Run, ChecksTheModelThatShipsWithTheProject) {
  const Outcome outcome = run({"--model", tiny_moe});
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_LE(longest_line(outcome.out), 100);
  EXPECT_FALSE(contains(outcome.out, "\033")) << "colour without a terminal";
  EXPECT_FALSE(contains(outcome.out, "FAIL"));
  if (on_gpu()) {
    EXPECT_TRUE(contains(outcome.out, "driver for CUDA")) << outcome.out;
  }
  for (const char* word : {"layer 3", "route", "down", "combine", "floor", "share", "ok"}) {
    EXPECT_TRUE(contains(outcome.out, word)) << word;
  }
}

TEST(Run, AMismatchIsExitCode1) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  const std::string path = model + "/golden.safetensors";
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::vector<float> wrong;
  {
    const SafetensorsFile file = SafetensorsFile::open(golden("mixtral") + "/golden.safetensors");
    for (const auto& name : file.names()) {
      Tensor tensor = file.get(name);
      if (name == "model.layers.1.mlp.output") {
        wrong.assign(tensor.as<const float>(), tensor.as<const float>() + tensor.elements());
        wrong[7] += 1;
        tensor.data = wrong.data();
      }
      tensors.emplace_back(name, tensor);
    }
    write_safetensors(path, tensors);
  }
  const Outcome outcome = run({"--model", model, "--no-timing"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.out, "FAIL")) << outcome.out;
  EXPECT_EQ(run({"--model", model, "--no-timing", "--layer", "0"}).code, 0);
  EXPECT_EQ(run({"--model", model, "--no-timing", "--layer", "1"}).code, 1);
  EXPECT_EQ(run({"--model", model, "--no-timing", "--tolerance", "1e6"}).code, 0);
}

// As --input takes it.
TEST(Run, ChecksARecordingInDouble) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  const SafetensorsFile file = SafetensorsFile::open(golden("mixtral") + "/golden.safetensors");
  std::vector<std::vector<double>> wide;
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& name : file.names()) {
    Tensor tensor = file.get(name);
    if (is_float(tensor.dtype)) {
      std::vector<double>& values = wide.emplace_back();
      for (std::int64_t i = 0; i < tensor.elements(); ++i) {
        values.push_back(load_f32(tensor.data, tensor.dtype, i));
      }
      tensor.data = values.data();
      tensor.dtype = DType::f64;
    }
    tensors.emplace_back(name, tensor);
  }
  write_safetensors(model + "/golden.safetensors", tensors);
  const Outcome outcome = run({"--model", model, "--no-timing"});
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_FALSE(contains(outcome.out, "FAIL")) << outcome.out;
}

TEST(Run, ExplainsItsPlan) {
  const Outcome outcome = run({tiny_moe, "--layer", "0", "--explain"});  // with --model or without
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "plan of layer 0"));
}

// Experts may be packed on the way, and what that costs is stated.
TEST(Run, PacksTheExpertsIntoAnyFormat) {
  const std::vector<std::string> packed = {"--model",     tiny_moe,  "--layer", "0",
                                           "--no-timing", "--dtype", "bf16",    "--format"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), packed.begin(), packed.end());
    return run(more);
  };
  const Outcome outcome = with({"nvfp4"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "experts in nvfp4")) << outcome.out;
  const Outcome json = with({"int4:64", "--json"});
  ASSERT_EQ(json.code, 0) << json.err;
  const auto layer = nlohmann::json::parse(json.out)["layers"][0];
  EXPECT_GT(double(layer["error"]), 0.01);
  EXPECT_LT(double(layer["error"]), 0.5);
  EXPECT_EQ(layer["ids_differ"], 0);
  EXPECT_EQ(with({"nvfp4", "--tolerance", "0.01"}).code, 1);
  expect_failure(with({"fp5"}), 2, "shunt run", "'fp5'");
  const Outcome rounded = with({"fp8_block", "--rows", "fp8_block"});
  if (on_gpu()) {
    EXPECT_EQ(rounded.code, 0) << rounded.err;
  } else {
    expect_failure(rounded, 1, "shunt run", "rows");
  }
}

}  // namespace
}  // namespace shunt::test
