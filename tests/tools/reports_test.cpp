// inspect, bench and info; and the JSON of all of them.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "process.hpp"

namespace shunt::test {
namespace {

using Json = nlohmann::json;

Json parsed(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << text;
  return json;
}

// The form that `run --json` and `bench --json` share.
void check_form(const Json& json) {
  for (const char* key : {"machine", "ceilings", "rows"}) ASSERT_TRUE(json.contains(key)) << key;
  EXPECT_GT(json["ceilings"].value("read_GBps", 0.0), 0);
  EXPECT_GT(json["machine"].value("threads", 0), 0);
  EXPECT_FALSE(json["machine"].value("isa", "").empty());
  ASSERT_FALSE(json["rows"].empty());
  for (const auto& row : json["rows"]) {
    std::set<std::string> keys;
    for (const auto& [key, value] : row.items()) keys.insert(key);
    EXPECT_EQ(keys,
              (std::set<std::string>{"op", "case", "dtype", "device", "us", "us_min", "us_max",
                                     "bytes", "flops", "floor_us", "share", "peers"}));
    EXPECT_TRUE(row["op"].is_string());
    EXPECT_TRUE(row["peers"].is_object());
    EXPECT_GT(row["us"], 0) << row;
    EXPECT_LE(row["us_min"], row["us"]) << row;
    EXPECT_LE(row["us"], row["us_max"]) << row;
    EXPECT_GT(row["bytes"], 0) << row;
    EXPECT_GT(row["share"], 0) << row;
  }
}

TEST(Json, OfRunHasARowAStage) {
  const Outcome outcome = shunt({"run", "--model", tiny_moe, "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json json = parsed(outcome.out);
  check_form(json);
  ASSERT_EQ(json["layers"].size(), 4u);
  for (const auto& layer : json["layers"]) {
    EXPECT_EQ(layer["pass"], true);
    EXPECT_EQ(layer["tokens"], 256);
    EXPECT_EQ(layer["ids_differ"], 0);
    EXPECT_LE(layer["error"], 1e-5);
    std::int64_t pairs = 0;
    for (const auto& load : layer["load"]) pairs += load.get<std::int64_t>();
    EXPECT_EQ(pairs, 256 * 4);
  }
}

TEST(Json, GoesIntoAFileBesideTheTables) {
  const Folder folder;
  const std::string file = folder.path("run.json");
  const Outcome outcome = shunt({"run", "--model", tiny_moe, "--layer", "1", "--json", file});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "checked against"));
  check_form(parsed(read_text(file)));
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"run.json"});
}

// The word behind --json is FILE only where the command has its arguments without it.
TEST(Json, StandsAnywhere) {
  const Folder folder;
  const std::string file = folder.path("r.json"), out = folder.path("out");
  const std::vector<std::string> quick = {"--tokens", "3",      "--seconds",      "0.01",
                                          "--wait",   "0",      "--rotate-bytes", "1M",
                                          "--model",  tiny_moe, "order"};
  const auto into_file = [&](std::vector<std::string> args) {
    const Outcome outcome = shunt(args);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(parsed(read_text(file)).is_object()) << ::testing::PrintToString(args);
    std::filesystem::remove(file);
    std::filesystem::remove_all(out);
  };
  std::vector<std::string> bench = {"bench", "--json", file};
  bench.insert(bench.end(), quick.begin(), quick.end());
  into_file(bench);
  into_file({"run", "--json", file, tiny_moe, "--no-timing"});
  into_file({"run", "--json=" + file, tiny_moe, "--no-timing"});
  into_file({"inspect", "--json", file, tiny_moe});
  into_file({"eval", "--json", file, tiny_moe, "--tokens", "64"});
  into_file({"convert", "--json", file, tiny_moe, out, "--to", "nvfp4"});
  into_file({"convert", tiny_moe, "--json", file, out, "--to", "nvfp4"});
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"run", "--json", tiny_moe, "--no-timing"},
        {"run", "--no-timing", "--json", tiny_moe},
        {"run", "--json", "-", tiny_moe, "--no-timing"},
        {"inspect", "--json", tiny_moe, "--threads", "1"},
        {"eval", "--json", tiny_moe, "--tokens", "64"},
        {"convert", "--json", tiny_moe, out, "--to", "nvfp4"},
        {"convert", "--to", "nvfp4", "--json", tiny_moe, out},
        {"convert", tiny_moe, "--json", out, "--to", "nvfp4"}}) {
    const Outcome outcome = shunt(args);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(parsed(outcome.out).is_object()) << ::testing::PrintToString(args);
    std::filesystem::remove_all(out);
  }
  expect_failure(shunt({"run", "--json", file, "--no-timing"}), 2, "shunt run",
                 "--model is required");
  expect_failure(shunt({"convert", tiny_moe, "--json", file, "--to", "nvfp4"}), 2, "shunt convert",
                 "out is required");
  EXPECT_TRUE(folder.entries().empty());
}

TEST(Json, IsUtf8WhateverNamesAre) {
  const Folder folder;
  const std::string model = folder.path("m\xff");
  std::filesystem::copy(tiny_moe, model, std::filesystem::copy_options::recursive);
  const Outcome outcome = shunt({"run", model, "--no-timing", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(parsed(outcome.out)["model"], folder.path("m\xef\xbf\xbd"));
}

TEST(Inspect, SaysFamilyRuleShapesAndBytes) {
  const Outcome outcome = shunt({"inspect", "--model", tiny_moe});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* word : {"qwen3_moe", "hidden 256", "intermediate 128", "16 experts", "top 4",
                           "softmax", "bf16", "0-3"}) {
    EXPECT_TRUE(contains(outcome.out, word)) << word << "\n" << outcome.out;
  }
  const Json json = parsed(shunt({"inspect", "--model", tiny_moe, "--json"}).out);
  EXPECT_EQ(json["family"], "qwen3_moe");
  ASSERT_EQ(json["layers"].size(), 4u);
  // gate, up and down of one expert, two bytes an element
  EXPECT_EQ(json["layers"][0]["expert_bytes"], 3 * 256 * 128 * 2);
  EXPECT_EQ(json["layers"][0]["routed_bytes"], 16 * 3 * 256 * 128 * 2);
  EXPECT_EQ(json["layers"][0]["bytes_per_token"], 4 * 3 * 256 * 128 * 2 + 16 * 256 * 2);
  EXPECT_GT(json["floor_us_per_token"], 0);
}

TEST(Inspect, TellsDenseLayersFromMoE) {
  const Json json =
      parsed(shunt({"inspect", "--model", golden("deepseek_v3_merged"), "--json"}).out);
  EXPECT_EQ(json["layers"][0]["moe"], false);
  EXPECT_NE(json["layers"][0]["note"], "");
  EXPECT_EQ(json["layers"][1]["moe"], true);
}

TEST(Bench, EveryStageOfASmallShape) {
  const Outcome outcome = shunt({"bench", "all", "--experts", "12", "--top-k", "3", "--hidden",
                                 "96", "--intermediate", "40", "--tokens", "1,17", "--seconds",
                                 "0.01", "--wait", "0", "--rotate-bytes", "2M", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json json = parsed(outcome.out);
  check_form(json);
  std::set<std::string> ops;
  for (const auto& row : json["rows"]) ops.insert(row["op"]);
  EXPECT_EQ(
      ops, (std::set<std::string>{"route", "gate", "order", "shuffle", "gather", "grouped_gemm",
                                  "indexed_gemm", "activate", "combine", "layer",
                                  "combine_shuffling", "split_shuffling", "scatter_add", "chain"}));
  EXPECT_EQ(json["rows"].size(), 32u);  // grouped_gemm, indexed_gemm: gate_up and down
}

TEST(Bench, PacksAnExpertsMatrices) {
  const Outcome outcome =
      shunt({"bench", "pack", "--format", "dense3", "--hidden", "96", "--intermediate", "64",
             "--seconds", "0.01", "--wait", "0", "--rotate-bytes", "1M", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json json = parsed(outcome.out);
  check_form(json);
  ASSERT_EQ(json["rows"].size(), 2u);
  EXPECT_EQ(json["rows"][0]["case"], "gate dense3 N64 K96");
  EXPECT_EQ(json["rows"][1]["case"], "down dense3 N96 K64");
  for (const Json& row : json["rows"]) {
    EXPECT_EQ(row["op"], "pack");
    EXPECT_GE(row["bytes"], 64 * 96 * (2 + 3.25 / 8));
  }
}

// A token's row meets the matrices of gate and up that its ids name, then each pair's row one of
// down: these matrices, rows, results and ids cross memory.
void expect_indexed(const std::string& device) {
  for (const std::string format : {"", "sparse_nvfp4"}) {
    std::vector<std::string> words = {
        "bench",          "indexed", "--experts", "12",       "--top-k",   "3",
        "--hidden",       "96",      "--tokens",  "5",        "--routing", "one-hot",
        "--intermediate", "64",      "--wait",    "0",        "--seconds", "0.01",
        "--rotate-bytes", "1M",      "--json",    "--device", device};
    if (!format.empty()) words.insert(words.end(), {"--format", format});
    const Outcome outcome = shunt(words);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json json = parsed(outcome.out);
    check_form(json);
    const double weight = format.empty() ? 2 : 3.5 / 8;
    ASSERT_EQ(json["rows"].size(), 2u);
    const std::string tokens = device == "cpu" ? "T5 one-hot" : "T5",
                      end = device == "cpu" || format.empty() ? "" : " " + format;
    const Json &gate_up = json["rows"][0], &down = json["rows"][1];
    EXPECT_EQ(gate_up["op"], "indexed_gemm");
    EXPECT_EQ(gate_up["case"], tokens + " G12 R15 N128 K96" + end);
    EXPECT_EQ(gate_up["device"], device);
    EXPECT_NEAR(gate_up["bytes"], weight * 3 * 128 * 96 + 2 * (5 * 96 + 15 * 128) + 4 * 15, 1e-3);
    EXPECT_NEAR(gate_up["flops"], 2 * 15 * 128 * 96, 1e-3);
    EXPECT_EQ(down["case"], tokens + " G12 R15 N96 K64" + end);
    EXPECT_NEAR(down["bytes"], weight * 3 * 96 * 64 + 2 * (15 * 64 + 15 * 96) + 4 * 15, 1e-3);
  }
}

TEST(Bench, IndexedProducts) { expect_indexed("cpu"); }

TEST(BenchOnAGpu, IndexedProducts) {
  if (const Outcome gpu = shunt({"info", "--device", "cuda"}); gpu.code != 0) {
    GTEST_SKIP() << gpu.err;
  }
  expect_indexed("cuda");
}

// Slots of zero-compute experts have no rows.
TEST(Bench, GathersBesideZeroComputeExperts) {
  for (const char* rule : {"softmax", "sigmoid-on-input"}) {
    const Outcome outcome =
        shunt({"bench", "gather", "--model", golden("longcat_flash"), "--rule", rule, "--tokens",
               "1,4", "--seconds", "0.01", "--wait", "0", "--rotate-bytes", "1M", "--json"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json json = parsed(outcome.out);
    check_form(json);
    ASSERT_EQ(json["rows"].size(), 2u);
    // bf16 [tokens and rows, 48] and the permutation, of fewer than 4 * 4 rows
    EXPECT_LT(json["rows"][1]["bytes"], 2 * (4 + 16) * 48 + 4 * 16);
  }
}

TEST(Bench, PackedExpertsAndBatchInvariantRouting) {
  const auto row = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "bench");
    for (const char* more :
         {"--experts", "12", "--top-k", "3", "--hidden", "96", "--intermediate", "64", "--tokens",
          "5", "--seconds", "0.01", "--wait", "0", "--rotate-bytes", "2M", "--json"}) {
      arguments.emplace_back(more);
    }
    const Outcome outcome = shunt(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Json json = parsed(outcome.out);
    check_form(json);
    return json;
  };
  const double plain = row({"layer"})["rows"][0]["bytes"];
  const double packed = row({"layer", "--format", "nvfp4"})["rows"][0]["bytes"];
  EXPECT_LT(packed, plain * 0.45) << "4.5 bits a weight, not 16";
  const Json routed = row({"route", "--batch-invariant"});
  EXPECT_EQ(routed["spec"]["route"]["batch_invariant"], true);
}

// Stages that see neither rows nor weights take a shape without them, and any rule.
TEST(Bench, GatesAndShufflesTakeARule) {
  const auto row = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "bench");
    for (const char* more : {"--experts", "64", "--top-k", "4", "--tokens", "9", "--seconds",
                             "0.01", "--wait", "0", "--json"}) {
      arguments.emplace_back(more);
    }
    const Outcome outcome = shunt(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Json json = parsed(outcome.out);
    check_form(json);
    return json["rows"][0];
  };
  const Json gate = row({"gate", "--rule", "biased-sigmoid", "--groups", "8,4", "--dtype", "f32"});
  EXPECT_EQ(gate["case"], "T9 E64 k4 g8/4");
  EXPECT_NEAR(gate["bytes"], 4 * 9 * 64 + 4 * 64 + 8 * 9 * 4, 1e-6);
  const Json shuffle = row({"shuffle", "--rule", "none"});
  EXPECT_EQ(shuffle["op"], "shuffle");
  EXPECT_NEAR(shuffle["bytes"], 2 * 9 * 64 + 8 * 9 * 4 + 8 * 9 * 4 + 4 * 65, 1e-6);
}

// --json takes the word behind it for a file, but for one that a positional argument lacks.
TEST(Bench, JsonBeforeTheStage) {
  const Outcome outcome = shunt({"bench", "--json", "activate", "--model", tiny_moe, "--tokens",
                                 "3", "--seconds", "0.01", "--wait", "0", "--rotate-bytes", "1M"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(parsed(outcome.out)["rows"][0]["op"], "activate");
  EXPECT_FALSE(std::filesystem::exists("activate"));
}

TEST(Bench, ListsModelsForMachines) {
  const Json list = parsed(shunt({"bench", "--list-models", "--json"}).out);
  ASSERT_GT(list.size(), 10U);
  EXPECT_EQ(list[0]["spec"]["hidden"].is_number(), true);
}

// Without a GPU an error that says so; with one, every case of a stage.
TEST(Bench, OnAGpuOrNotAtAll) {
  const Outcome outcome = shunt({"bench", "order", "--grid", "--device", "cuda", "--json"});
  if (outcome.code != 0) {
    EXPECT_EQ(outcome.code, 1);
    EXPECT_TRUE(contains(outcome.err, "cuda") || contains(outcome.err, "CUDA")) << outcome.err;
    GTEST_SKIP() << outcome.err;
  }
  const Json json = parsed(outcome.out);
  check_form(json);
  for (const auto& row : json["rows"]) EXPECT_EQ(row["device"], "cuda");
  EXPECT_GT(json["ceilings"]["launch_us"], 0);
}

TEST(Bench, RoutingsHitAsManyExpertsAsTheySay) {
  const auto flops_and_bytes = [](const std::string& routing) {
    const Outcome outcome = shunt(
        {"bench",          "layer", "--experts", "32",    "--top-k",   "2",    "--hidden", "128",
         "--intermediate", "64",    "--tokens",  "64",    "--seconds", "0.01", "--wait",   "0",
         "--rotate-bytes", "4M",    "--routing", routing, "--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Json row = parsed(outcome.out)["rows"][0];
    return std::pair<double, double>(row["flops"], row["bytes"]);
  };
  const auto uniform = flops_and_bytes("uniform");
  const auto zipf = flops_and_bytes("zipf");
  const auto one_hot = flops_and_bytes("one-hot");
  EXPECT_EQ(flops_and_bytes("skewed").first, uniform.first);
  EXPECT_EQ(uniform.first, one_hot.first);
  EXPECT_LT(one_hot.second, zipf.second);
  EXPECT_LT(zipf.second, uniform.second);
  // Two experts, the router, and tokens in and out; bf16.
  EXPECT_EQ(one_hot.second, 2.0 * (2 * 3 * 128 * 64 + 32 * 128 + 2 * 64 * 128));
}

// The shared expert has the experts' format, or one of its own.
TEST(Bench, TheSharedExpertsFormatCounts) {
  const auto bytes = [](const std::string& format, const std::string& shared) {
    std::vector<std::string> words{"bench",     "layer",
                                   "--experts", "4",
                                   "--top-k",   "1",
                                   "--hidden",  "128",
                                   "--shared",  "64",
                                   "--tokens",  "1",
                                   "--wait",    "0",
                                   "--seconds", "0.01",
                                   "--json",    "--intermediate",
                                   "64",        "--rotate-bytes",
                                   "1",         "--format",
                                   format};
    if (!shared.empty()) words.insert(words.end(), {"--shared-format", shared});
    const Outcome outcome = shunt(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? double{parsed(outcome.out)["rows"][0]["bytes"]} : 0;
  };
  constexpr double weights = 3 * 64 * 128, nvfp4 = 4.5 / 8 * weights;
  const double besides = 2.0 * (4 * 128 + 2 * 128);  // the router, a token in and out
  EXPECT_NEAR(bytes("nvfp4", ""), 2 * nvfp4 + besides, 1);
  EXPECT_NEAR(bytes("nvfp4", "plain"), nvfp4 + 2 * weights + besides, 1);
  EXPECT_NEAR(bytes("plain", "nvfp4"), nvfp4 + 2 * weights + besides, 1);
}

TEST(BenchOnAGpu, RoutingsHitAsManyExpertsAsTheySay) {
  const auto bytes = [](const std::string& from, const std::string& rule,
                        const std::string& routing) -> double {
    const Outcome outcome = shunt(
        {"bench",    "layer", "--experts",      "64",   "--top-k",   "2",    "--rule", rule,
         "--hidden", "128",   "--intermediate", "64",   "--tokens",  "32",   "--wait", "0",
         "--from",   from,    "--device",       "cuda", "--seconds", "0.01", "--json", "--routing",
         routing});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? double{parsed(outcome.out)["rows"][0]["bytes"]} : 0;
  };
  if (const Outcome gpu = shunt({"info", "--device", "cuda"}); gpu.code != 0) {
    GTEST_SKIP() << gpu.err;
  }
  for (const std::string from : {"hidden", "logits", "ids"}) {
    for (const std::string rule : {"softmax", "biased-sigmoid"}) {
      const double uniform = bytes(from, rule, "uniform"), skewed = bytes(from, rule, "skewed"),
                   zipf = bytes(from, rule, "zipf"), one_hot = bytes(from, rule, "one-hot");
      SCOPED_TRACE(from + " " + rule);
      EXPECT_LT(one_hot, zipf);
      EXPECT_LT(zipf, skewed);
      EXPECT_LT(skewed, uniform);
      // Of 64 experts 64 draws hit all but some 23.
      EXPECT_NEAR((uniform - one_hot) / (3 * 128 * 64 * 2), 41 - 2, 4);
    }
  }
}

TEST(Bench, DtypesAndCheckpoints) {
  for (const std::string dtype : {"f32", "bf16", "f16"}) {
    const Outcome outcome =
        shunt({"bench", "--model", tiny_moe, "--tokens", "3", "--dtype", dtype, "--seconds", "0.01",
               "--wait", "0", "--rotate-bytes", "1M", "--threads", "1", "--json", "-"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json json = parsed(outcome.out);
    check_form(json);
    EXPECT_EQ(json["rows"][0]["dtype"], dtype);
    EXPECT_EQ(json["machine"]["threads"], 1);
  }
}

TEST(Bench, KnowsModels) {
  const Outcome outcome = shunt({"bench", "--list-models"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_LE(longest_line(outcome.out), 100);
  for (const char* name :
       {"mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "deepseek-v3", "deepseek-v4-pro",
        "deepseek-v4-flash", "kimi-k2", "glm-4.5-air", "glm-5", "mimo-v2.5-pro", "nemotron-3-super",
        "minimax-m3", "gpt-oss-20b", "gpt-oss-120b", "llama-4-scout", "llama-4-maverick",
        "hunyuan-large", "mistral-large-3"}) {
    EXPECT_TRUE(contains(outcome.out, name)) << name;
  }
  // Every rule of the table runs, on a shape that is small.
  std::istringstream lines(outcome.out);
  std::string line;
  std::getline(lines, line);
  int models = 0;
  while (std::getline(lines, line) && !contains(line, "weights of one layer")) {
    const std::string name = line.substr(0, line.find(' '));
    const Outcome run =
        shunt({"bench",    "layer", "--model",        name, "--experts", "16", "--top-k",   "2",
               "--hidden", "128",   "--intermediate", "64", "--tokens",  "2",  "--seconds", "0.01",
               "--wait",   "0",     "--rotate-bytes", "0",  "--json"});
    EXPECT_EQ(run.code, 0) << name << ": " << run.err;
    ++models;
  }
  EXPECT_GE(models, 40);
}

TEST(Info, SaysWhatThisMachineIs) {
  const Outcome outcome = shunt({"info"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_LE(longest_line(outcome.out), 100) << outcome.out;
  for (const char* word : {"CPU", "reads", "f32 FMA", "GPU", "fmt"}) {
    EXPECT_TRUE(contains(outcome.out, word)) << word;
  }
  const Json json = parsed(shunt({"info", "--json"}).out);
  EXPECT_GT(json["ceilings"]["read_GBps"], 0);
  EXPECT_GT(json["ceilings"]["f32_GFLOPs"], 0);
  EXPECT_TRUE(json["gpus"].is_array());
}

TEST(Info, NamesAnUnknownInstructionSet) {
  expect_failure(shunt({"info"}, {.environment = {{"SHUNT_ISA", "mmx"}}}), 1, "shunt info", "mmx");
  expect_failure(shunt({"info"}, {.environment = {{"SHUNT_CPU_TUNING", "zen"}}}), 1, "shunt info",
                 "SHUNT_CPU_TUNING is 'zen': must be common or zen5");
}

}  // namespace
}  // namespace shunt::test
