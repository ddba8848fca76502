// Files that are missing, broken or not what was asked for: one line that names what, exit code 1.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <vector>

#include "process.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;

const std::string recorded = tiny_moe + "/activations.safetensors";

Outcome run_on(const std::string& model, const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"run", "--model", model, "--no-timing"};
  args.insert(args.end(), more.begin(), more.end());
  return shunt(args);
}
Outcome run_input(const std::string& input, const std::string& name,
                  const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"--input", input, "--input-name", name};
  args.insert(args.end(), more.begin(), more.end());
  return run_on(tiny_moe, args);
}

void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_text(path);
  const auto at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  write_text(path, text.replace(at, from.size(), to));
}

TEST(BadModel, MissingFolderOrFiles) {
  expect_failure(run_on("/nowhere/at/all"), 1, "shunt run", "/nowhere/at/all");
  expect_failure(shunt({"inspect", "--model", "/nowhere"}), 1, "shunt inspect", "/nowhere");
  const Folder folder;
  expect_failure(run_on(folder.path()), 1, "shunt run", "config.json");
  const std::string model = folder.copy_of(golden("mixtral"));
  fs::remove(model + "/model.safetensors");
  expect_failure(run_on(model), 1, "shunt run", "model.safetensors");
}

TEST(BadModel, WithoutRecordings) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  fs::remove(model + "/golden.safetensors");
  expect_failure(run_on(model), 1, "shunt run", "--input");
}

TEST(BadModel, RecordingsThatAreNotWhole) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  const SafetensorsFile file = SafetensorsFile::open(golden("mixtral") + "/golden.safetensors");
  const std::string block = "model.layers.0.mlp";
  const auto without = [&](const std::string& left_out) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const auto& name : file.names()) {
      if (name != left_out) tensors.emplace_back(name, file.get(name));
    }
    write_safetensors(model + "/golden.safetensors", tensors);
  };
  without(block + ".input");
  expect_failure(run_on(model), 1, "shunt run", "an output '" + block + ".output' but no input");
  without(block + ".output");
  expect_failure(run_on(model), 1, "shunt run", "an input '" + block + ".input' but no output");
  EXPECT_EQ(run_on(model, {"--layer", "1"}).code, 0);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& name : file.names()) tensors.emplace_back(name, file.get(name).rows(0, 0));
  write_safetensors(model + "/golden.safetensors", tensors);
  expect_failure(run_on(model), 1, "shunt run", "has no tokens, so that nothing is compared");
}

TEST(BadModel, LayerOutOfRange) {
  expect_failure(run_on(tiny_moe, {"--layer", "4"}), 1, "shunt run", "4");
  expect_failure(run_on(tiny_moe, {"--layer", "999999"}), 1, "shunt run", "999999");
}

TEST(BadModel, Configs) {
  const std::vector<std::pair<std::string, std::string>> edits = {
      {"\"model_type\": \"mixtral\"", "\"model_type\": \"no_such_family\""},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 99"},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": -2"},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": \"two\""},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1e300"},
      {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": NaN"},
      {"\"hidden_size\": 64", "\"hidden_size\": 65"},
      {"{", "["},
  };
  for (const auto& [from, to] : edits) {
    SCOPED_TRACE(to);
    const Folder folder;
    const std::string model = folder.copy_of(golden("mixtral"));
    replace_in(model + "/config.json", from, to);
    const Outcome outcome = run_on(model);
    expect_failure(outcome, 1, "shunt run", "");
    expect_failure(shunt({"inspect", "--model", model}), 1, "shunt inspect", "");
  }
}

TEST(BadModel, TruncatedWeights) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  const std::string path = model + "/model.safetensors";
  const auto whole = fs::file_size(path);
  for (const std::uintmax_t size : {std::uintmax_t{0}, std::uintmax_t{7}, std::uintmax_t{8},
                                    std::uintmax_t{100}, whole / 2, whole - 1}) {
    fs::resize_file(path, size);
    expect_failure(run_on(model), 1, "shunt run", "model.safetensors");
  }
}

TEST(BadModel, MissingShard) {
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  fs::rename(model + "/model.safetensors", model + "/model-00001-of-00002.safetensors");
  std::string index = R"({"metadata": {}, "weight_map": {)";
  const auto names = SafetensorsFile::open(model + "/model-00001-of-00002.safetensors").names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    index += (i ? ", \"" : "\"") + names[i] + "\": \"model-0000" + (i % 2 ? "2" : "1") +
             "-of-00002.safetensors\"";
  }
  write_text(model + "/model.safetensors.index.json", index + "}}");
  expect_failure(run_on(model), 1, "shunt run", "model-00002-of-00002.safetensors");
}

TEST(BadModel, NoPermission) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const Folder folder;
  const std::string model = folder.copy_of(golden("mixtral"));
  ::chmod((model + "/model.safetensors").c_str(), 0);
  expect_failure(run_on(model), 1, "shunt run", "model.safetensors");
}

TEST(BadInput, FilesAndNames) {
  const Folder folder;
  expect_failure(run_input("/nowhere/x.safetensors", "x"), 1, "shunt run",
                 "/nowhere/x.safetensors");
  expect_failure(run_input(recorded, "layers.9.input"), 1, "shunt run", "'layers.9.input'");
  expect_failure(run_input(folder.path(), "x"), 1, "shunt run", "");
  // Several could be meant: the caller must say which.
  expect_failure(run_on(tiny_moe, {"--input", recorded}), 2, "shunt run", "--input-name");
  const std::string broken = folder.path("broken.safetensors");
  const std::string whole = read_text(recorded);
  for (const std::size_t size : {std::size_t{0}, std::size_t{4}, std::size_t{8}, std::size_t{64},
                                 whole.size() / 2, whole.size() - 1}) {
    write_text(broken, whole.substr(0, size));
    expect_failure(run_input(broken, "layers.0.input"), 1, "shunt run", "broken.safetensors");
  }
  write_text(broken, "\xff\xff\xff\xff\xff\xff\xff\x7f{}");
  expect_failure(run_input(broken, "layers.0.input"), 1, "shunt run", "broken.safetensors");
}

TEST(BadInput, Shapes) {
  const Folder folder;
  std::vector<float> x(4 * 256, 0.5f);
  std::vector<std::int32_t> integers(4 * 256, 1);
  const std::string file = folder.path("x");
  write_safetensors(file, {{"narrow", view(x.data(), {4, 255})},
                           {"wide", view(x.data(), {2, 512})},
                           {"flat", view(x.data(), {4 * 256})},
                           {"integers", view(integers.data(), {4, 256})}});
  for (const std::string name : {"narrow", "wide", "flat"}) {
    expect_failure(run_input(file, name), 1, "shunt run", "must be [T, 256] or [.., T, 256]");
  }
  expect_failure(run_input(file, "integers"), 1, "shunt run", "must be f32");
}

TEST(BadInput, NaNAndInfinity) {
  const Folder folder;
  const std::string file = folder.path("x");
  const std::string output = folder.path("y");
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(4 * 256, 0.5f);
    x[2 * 256 + 17] = bad;
    write_safetensors(file, {{"x", view(x.data(), {4, 256})}});
    expect_failure(run_input(file, "x", {"--output", output}), 1, "shunt run", "[2, 17]");
    EXPECT_FALSE(fs::exists(output));
    // On request they are computed: the other tokens are none the worse, and ids stay legal.
    const Outcome outcome = run_input(file, "x", {"--output", output, "--allow-nonfinite"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const SafetensorsFile result = SafetensorsFile::open(output);
    const auto* y = result.get("output").as<const float>();
    for (int i = 0; i < 256; ++i) EXPECT_TRUE(std::isfinite(y[i]) && y[i] == y[256 + i]) << i;
    const auto* ids = result.get("topk_ids").as<const std::int32_t>();
    for (int i = 0; i < 16; ++i) EXPECT_TRUE(ids[i] >= 0 && ids[i] < 16) << i;
    fs::remove(output);
  }
}

TEST(BadOutput, PlacesThatCannotBeWritten) {
  const Folder folder;
  const auto writing_to = [&](const std::string& output) {
    return run_input(recorded, "layers.0.input", {"--output", output});
  };
  expect_failure(writing_to("/nowhere/y.safetensors"), 1, "shunt run", "/nowhere/y.safetensors");
  expect_failure(writing_to(folder.path()), 1, "shunt run", folder.path());
  expect_failure(writing_to("/dev/full"), 1, "shunt run", "/dev/full");
  struct stat full {};
  ASSERT_EQ(::stat("/dev/full", &full), 0);
  EXPECT_TRUE(S_ISCHR(full.st_mode)) << "the device was replaced by a file";
  if (::geteuid() != 0) {
    ::chmod(folder.path().c_str(), 0500);
    expect_failure(writing_to(folder.path("y")), 1, "shunt run", folder.path("y"));
    ::chmod(folder.path().c_str(), 0700);
  }
}

// A limit on the size of files stands for a full disk: writes fail half way.
// What is read must not be written over, by whatever name.
TEST(BadOutput, WhatIsReadStays) {
  const Folder folder;
  const std::string model = folder.copy_of(tiny_moe), weights = model + "/model.safetensors";
  const std::string link = folder.path("link.safetensors");
  fs::create_symlink(weights, link);
  const std::string before = read_text(weights);
  for (const std::string& output :
       {weights, link,
        model + "/../" + fs::path(model).filename().string() + "/model.safetensors"}) {
    expect_failure(
        run_on(model, {"--input", recorded, "--input-name", "layers.0.input", "--output", output}),
        2, "shunt run", "must be no file that the model's folder has");
  }
  for (const std::string& file : {weights, model + "/config.json"}) {
    const std::string part = "must be no file that the model's folder has";
    expect_failure(shunt({"inspect", model, "--json", file}), 2, "shunt inspect", part);
    expect_failure(shunt({"bench", "layer", "--model", model, "--json", file}), 2, "shunt bench",
                   part);
  }
  EXPECT_EQ(read_text(weights), before);
  const std::string input = folder.path("input.safetensors"), both = folder.path("both");
  fs::copy_file(recorded, input);
  expect_failure(
      run_on(model, {"--input", input, "--input-name", "layers.0.input", "--output", input}), 2,
      "shunt run", "must be another file than --input's");
  expect_failure(run_on(model, {"--input", input, "--input-name", "layers.0.input", "--output",
                                both, "--json", both}),
                 2, "shunt run", "must be another file than --json's");
  expect_failure(shunt({"convert", "--to", "nvfp4", model, model + "/inside"}), 1, "shunt convert",
                 "name a folder outside it");
  expect_failure(run_on(""), 1, "shunt run", "folder is ''");
}

TEST(BadModel, WeightsThatAreNoNumbers) {
  const Folder folder;
  const std::string model = folder.copy_of(tiny_moe), output = folder.path("out.safetensors");
  const SafetensorsFile file = SafetensorsFile::open(tiny_moe + "/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  const std::string name = "model.layers.0.mlp.experts.1.up_proj.weight";
  const Tensor sound = file.get(name);
  std::vector<char> broken(sound.as<char>(), sound.as<char>() + sound.bytes());
  std::fill(broken.begin(), broken.begin() + 4, static_cast<char>(0xff));
  for (const std::string& each : file.names()) {
    Tensor tensor = file.get(each);
    if (each == name) tensor.data = broken.data();
    tensors.emplace_back(each, tensor);
  }
  write_safetensors(model + "/model.safetensors", tensors);
  expect_failure(run_on(model, {"--input", recorded, "--input-name", "layers.0.input", "--layer",
                                "0", "--output", output}),
                 1, "shunt run", "weights are not finite");
  EXPECT_FALSE(fs::exists(output));
  expect_failure(shunt({"eval", model, "--tokens", "600"}), 1, "shunt eval",
                 "weights are not finite");
}

TEST(BadOutput, AFullDiskLeavesNothing) {
  const Folder folder;
  const std::string output = folder.path("y");
  const std::vector<std::string> args = {"run",    "--model",      tiny_moe,         "--input",
                                         recorded, "--input-name", "layers.0.input", "--output",
                                         output,   "--no-timing"};
  expect_failure(shunt(args, {.file_limit = 100000}), 1, "shunt run", output);
  EXPECT_EQ(folder.entries(), std::vector<std::string>{});
  // What stood there before still stands.
  write_text(output, "before");
  expect_failure(shunt(args, {.file_limit = 100000}), 1, "shunt run", output);
  EXPECT_EQ(read_text(output), "before");
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"y"});
}

TEST(BadOutput, StandardOutputThatIsFull) {
  const Outcome outcome =
      shunt({"run", "--model", tiny_moe, "--no-timing"}, {.stdout_path = "/dev/full"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.err, "standard output")) << outcome.err;
  const Outcome version = shunt({"--version"}, {.stdout_path = "/dev/full"});
  EXPECT_EQ(version.code, 1);
  EXPECT_TRUE(contains(version.err, "standard output")) << version.err;
}

// What cannot be told changes no exit code; nor does it end in a file that got the number of a
// closed stream.
TEST(BadOutput, StandardErrorThatIsFullOrClosed) {
  for (const Surroundings& around :
       {Surroundings{.stderr_path = "/dev/full"}, Surroundings{.streams_closed = true}}) {
    EXPECT_EQ(shunt({"run", "--model", "/nonexistent"}, around).code, 1);
    EXPECT_EQ(shunt({"run", "--bogus"}, around).code, 2);
    EXPECT_EQ(shunt({}, around).code, 2);
  }
  const Folder folder;
  const std::vector<std::string> args = {"convert", tiny_moe, folder.path("out"), "--to", "nvfp4"};
  EXPECT_EQ(shunt(args, {.stderr_path = "/dev/full"}).code, 0);
  const std::string weights = read_text(folder.path("out/model.safetensors"));
  std::filesystem::remove_all(folder.path("out"));
  EXPECT_EQ(shunt(args, {.streams_closed = true}).code, 1);  // standard output is missed
  EXPECT_EQ(read_text(folder.path("out/model.safetensors")), weights);
}

TEST(BadOutput, Json) {
  expect_failure(run_on(tiny_moe, {"--json", "/nowhere/x.json"}), 1, "shunt run",
                 "/nowhere/x.json");
  expect_failure(shunt({"bench", "--experts", "4", "--top-k", "1", "--hidden", "32",
                        "--intermediate", "32", "--json", "/nowhere/x.json"}),
                 1, "shunt bench", "/nowhere/x.json");
}

TEST(BadDevice, CudaIsRefusedWhereItWasNotBuilt) {
  const Outcome outcome = run_on(tiny_moe, {"--device", "cuda"});
  if (outcome.code == 0) GTEST_SKIP() << "built with a CUDA engine";
  expect_failure(outcome, 1, "shunt run", "CUDA");
}

TEST(BadBench, ValidTokensOfACpu) {
  expect_failure(shunt({"bench", "--valid", "3", "--tokens", "4"}), 2, "shunt bench",
                 "--valid is about the layer of a GPU");
}

TEST(BadBench, StagesThatTheGridHasNot) {
  expect_failure(shunt({"bench", "indexed", "--grid", "--device", "cuda"}), 1, "shunt bench",
                 "--grid has no rows of indexed");
}

TEST(BadBench, Models) {
  expect_failure(shunt({"bench", "--model", "no-such-model"}), 1, "shunt bench", "--list-models");
  expect_failure(shunt({"bench", "--model", "mixtral-8x7b", "--top-k", "9"}), 1, "shunt bench",
                 "top_k");
  // More than any memory: said before anything is allocated.
  expect_failure(shunt({"bench", "--experts", "4096", "--top-k", "1", "--hidden", "65536",
                        "--intermediate", "65536", "--dtype", "f32"}),
                 1, "shunt bench", "available");
}

}  // namespace
}  // namespace shunt::test
