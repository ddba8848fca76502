// shunt eval: bits per byte as a table and as JSON, hidden states recorded, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "process.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

using Json = nlohmann::json;

std::vector<std::string> eval(const std::vector<std::string>& more) {
  std::vector<std::string> args = {"eval", tiny_moe, "--tokens", "700"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Eval, PredictsTheTextThatComesWithTheModel) {
  const Outcome outcome = shunt(eval({"--json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "") << "progress without a terminal";
  const Json json = Json::parse(outcome.out);
  ASSERT_EQ(json["rows"].size(), 1u);
  const Json& row = json["rows"][0];
  EXPECT_EQ(row["experts"], "bf16");
  EXPECT_EQ(row["bytes_scored"], 699);
  EXPECT_EQ(row["bits_per_weight"], 16);
  EXPECT_EQ(row["bytes_per_token"], 4 * 4 * 3 * 256 * 128 * 2);
  // English of which the model has seen the like: far below 8, above what is possible.
  EXPECT_GT(row["bits_per_byte"], 0.8);
  EXPECT_LT(row["bits_per_byte"], 2.5);
  EXPECT_EQ(json["context"], 512);
  EXPECT_EQ(json["stride"], 256);
}

TEST(Eval, IsTheSameForAnyNumberOfThreads) {
  double first = 0;
  for (const std::string threads : {"1", "3"}) {
    const Outcome outcome = shunt(eval({"--json", "--threads", threads, "--format", "nvfp4"}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const double score = Json::parse(outcome.out)["rows"][1]["bits_per_byte"];
    if (first == 0) first = score;
    EXPECT_EQ(score, first);
  }
}

TEST(Eval, FewerBitsCostMoreAndAreSmaller) {
  const Outcome outcome =
      shunt(eval({"--format", "fp8_block", "nvfp4", "bf16/magnitude", "--json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json rows = Json::parse(outcome.out)["rows"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_TRUE(rows[0]["weight_error"].is_null());
  EXPECT_EQ(rows[3]["experts"], "bf16, 2:4 by magnitude");
  for (std::size_t i = 1; i < 4; ++i) {
    EXPECT_GT(rows[i]["weight_error"], i == 1 ? 0.01 : 1.5 * double(rows[i - 1]["weight_error"]));
  }
  EXPECT_NEAR(double(rows[2]["bytes_per_token"]), double(rows[0]["bytes_per_token"]) * 4.5 / 16, 1);
  EXPECT_LT(std::abs(double(rows[1]["bits_per_byte"]) / double(rows[0]["bits_per_byte"]) - 1),
            0.01);
  EXPECT_GT(double(rows[3]["bits_per_byte"]), 1.01 * double(rows[0]["bits_per_byte"]));
}

TEST(Eval, TableFitsAPage) {
  const Outcome outcome = shunt(eval({"--format", "sparse_nvfp4/magnitude"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_LE(longest_line(outcome.out), 120);
  EXPECT_TRUE(contains(outcome.out, "sparse_nvfp4, 2:4 by magnitude"));
  EXPECT_TRUE(contains(outcome.out, "699 bytes scored"));
  const Json timed = Json::parse(shunt(eval({"--speed", "--json"})).out)["rows"][0];
  EXPECT_GT(timed["alone_us"], timed["batch_us"]) << "a token alone takes longer than one of many";
  const Outcome markdown = shunt(eval({"--markdown"}));
  const Outcome some = shunt(eval({"--markdown", "--format", "nvfp4", "--context", "64"}));
  EXPECT_TRUE(contains(some.out, "--context 64 --format nvfp4 --markdown")) << some.out;
  EXPECT_TRUE(contains(markdown.out, "| bf16 | 16 |")) << markdown.out;
}

// A converted checkpoint costs what its format does over the one that it was made from.
TEST(Eval, TakesConvertedCheckpoints) {
  const Folder folder;
  for (const std::string format : {"nvfp4", "dense3", "sparse_nvfp4"}) {
    const std::string out = folder.path(format);
    ASSERT_EQ(shunt({"convert", tiny_moe, out, "--to", format}).code, 0);
    const Outcome made = shunt({"eval", out, "--tokens", "700", "--json"});
    const Outcome meant = shunt(eval({"--format", format, "--json"}));
    ASSERT_EQ(made.code, 0) << made.err;
    const Json a = Json::parse(made.out)["rows"][0], b = Json::parse(meant.out)["rows"][1];
    EXPECT_EQ(a["experts"], format);
    EXPECT_EQ(a["bits_per_weight"], b["bits_per_weight"]);
    EXPECT_NEAR(double(a["bits_per_byte"]), double(b["bits_per_byte"]), 1e-5);
  }
}

// What is recorded is what calibrates, and what `shunt run` takes.
TEST(Eval, RecordsTheHiddenStatesOfEachByteOnce) {
  const Folder folder;
  const std::string file = folder.path("hidden.safetensors");
  ASSERT_EQ(shunt(eval({"--record", file})).code, 0);
  const SafetensorsFile recorded = SafetensorsFile::open(file);
  ASSERT_EQ(recorded.names().size(), 4u);
  for (int layer = 0; layer < 4; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer) + ".mlp.input";
    EXPECT_EQ(recorded.get(name).describe(), "bf16 [700, 256]");
  }
  const Outcome outcome = shunt(eval({"--format", "bf16/obs", "--calibrate", file, "--json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Outcome run = shunt({"run", "--model", tiny_moe, "--layer", "1", "--no-timing", "--input",
                             file, "--input-name", "model.layers.1.mlp.input"});
  EXPECT_EQ(run.code, 0) << run.err;
}

std::string write_hidden(const Folder& folder, std::int64_t tokens, float last, int layers = 4) {
  std::vector<float> rows(static_cast<std::size_t>(tokens * 256) + 1, 1.0F);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (int layer = 0; layer < layers; ++layer) {
    tensors.emplace_back("model.layers." + std::to_string(layer) + ".mlp.input",
                         view(rows.data(), {tokens, 256}));
  }
  std::vector<float> other = rows;
  if (tokens > 0) other[7] = last;
  tensors.back().second = view(other.data(), {tokens, 256});
  write_safetensors(folder.path("hidden.safetensors"), tensors, {});
  return folder.path("hidden.safetensors");
}

// As `shunt convert` says it.
TEST(Eval, SaysWhatWasPrunedByMagnitudeInstead) {
  const Folder folder;
  const std::string file = write_hidden(folder, 1, 1);
  const std::vector<std::string> args = {"--format", "bf16/obs", "--calibrate", file};
  const Outcome outcome = shunt(eval(args));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::string text = outcome.out;
  std::replace(text.begin(), text.end(), '\n', ' ');
  EXPECT_TRUE(contains(text, "bf16, 2:4 by obs: 48 of 64 experts by magnitude")) << outcome.out;
  std::vector<std::string> more = args;
  more.emplace_back("--json");
  const Json rows = Json::parse(shunt(eval(more)).out)["rows"];
  EXPECT_EQ(rows[0]["fell_back"], 0);
  EXPECT_EQ(rows[1]["fell_back"], 48);
  more.back() = "--markdown";
  EXPECT_TRUE(contains(shunt(eval(more)).out, "48 of 64 experts by magnitude"));
}

// Before anything is computed, and in the names that --record writes.
TEST(Eval, RefusesHiddenStatesThatDoNotCalibrate) {
  const Folder folder;
  const auto refused = [&](const std::string& file, const std::string& part) {
    expect_failure(shunt(eval({"--format", "bf16/wanda", "--calibrate", file})), 1, "shunt eval",
                   part);
  };
  const std::string name = "'model.layers.3.mlp.input'";
  refused(write_hidden(folder, 0, 0), "holds no hidden states");
  refused(write_hidden(folder, 2, std::nanf("")), name + " has nan at [0, 7]: must be finite");
  refused(write_hidden(folder, 2, 1, 3), "has no tensor " + name + " or 'layers.3.input'");
  refused(golden("qwen3_moe") + "/golden.safetensors", "must be f32, bf16 or f16 [T, 256]");
}

TEST(Eval, SkipsAndCuts) {
  const Folder folder;
  const std::string text = folder.path("text");
  write_text(text, std::string(100, 'x') + read_text(tiny_moe + "/heldout.txt").substr(0, 300));
  const Outcome all =
      shunt({"eval", tiny_moe, "--text", text, "--skip", "100", "--json", "--context", "128"});
  const Outcome same = shunt({"eval", tiny_moe, "--tokens", "300", "--json", "--context", "128"});
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(Json::parse(all.out)["rows"][0]["bits_per_byte"],
            Json::parse(same.out)["rows"][0]["bits_per_byte"]);
  EXPECT_EQ(Json::parse(all.out)["skipped"], 100);
}

// A list of formats ends where the model stands.
TEST(Eval, TheModelMayStandBehindTheFormats) {
  const Outcome usual = shunt(eval({"--format", "nvfp4", "bf16/magnitude", "--json"}));
  ASSERT_EQ(usual.code, 0) << usual.err;
  const Outcome last = shunt(
      {"eval", "--tokens", "700", "--json", "{}", "--format", "nvfp4", "bf16/magnitude", tiny_moe});
  ASSERT_EQ(last.code, 0) << last.err;
  EXPECT_EQ(Json::parse(last.out)["rows"].size(), 3u);
  const Outcome between =
      shunt({"eval", "--format", "nvfp4", tiny_moe, "--tokens", "700", "--json"});
  ASSERT_EQ(between.code, 0) << between.err;
  EXPECT_EQ(Json::parse(between.out)["rows"][1]["bits_per_byte"],
            Json::parse(usual.out)["rows"][1]["bits_per_byte"]);
  for (const std::vector<std::string>& without :
       {std::vector<std::string>{"eval", "--format", "nvfp4"},
        {"eval", "--format", "nvfp4", "bf16/magnitude"},
        {"eval", "--format", tiny_moe}}) {
    expect_failure(shunt(without), 2, "shunt eval", "--model is required");
  }
}

TEST(Eval, RefusesByName) {
  const Folder folder;
  const std::string who = "shunt eval";
  expect_failure(shunt({"eval"}), 2, who, "model");
  expect_failure(shunt(eval({"--format", "fp2"})), 2, who,
                 "--format: format is 'fp2': must be one of f32, bf16, f16, fp8_tensor");
  expect_failure(shunt(eval({"--format", "bf16/best"})), 2, who,
                 "--format bf16/best: pruning method is 'best': must be magnitude, wanda or obs, "
                 "with or without :pairs");
  expect_failure(shunt(eval({"--format", "nvfp4", "dense3/magnitude"})), 2, who,
                 "--format: format is 'dense3': does not hold every 0");
  expect_failure(shunt(eval({"--format", "bf16/wanda"})), 2, who, "--calibrate");
  expect_failure(shunt(eval({"--stride", "512"})), 1, who, "stride is 512");
  expect_failure(shunt(eval({"--context", "2000"})), 1, who, "context is 2000");
  expect_failure(shunt(eval({"--skip", "65536"})), 1, who, "65536 bytes");
  expect_failure(shunt(eval({"--text", folder.path("none")})), 1, who, "none");
  expect_failure(shunt(eval({"--calibrate", folder.path("none")})), 1, who, "none");
  expect_failure(shunt({"eval", golden("deepseek_v3")}), 1, who, "attention");
  expect_failure(shunt({"eval", golden("mixtral")}), 2, who, "--text");
  expect_failure(
      shunt({"eval", golden("mixtral"), "--context", "16", "--text", tiny_moe + "/heldout.txt"}), 1,
      who, "64 tokens");
  write_text(folder.path("one"), "x");
  expect_failure(shunt({"eval", tiny_moe, "--text", folder.path("one")}), 1, who, "1 bytes");
}

// Where there is a GPU: near what the CPU says of the same formats, from the packed form.
// Elsewhere: refused as `shunt run` refuses it.
TEST(Eval, OnAGpu) {
  const std::vector<std::string> gpu = {"--device", "cuda", "--json"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), gpu.begin(), gpu.end());
    return shunt(eval(more));
  };
  const Outcome outcome = with({"--format", "nvfp4", "int8"});
  const Outcome run = shunt({"run", "--model", tiny_moe, "--device", "cuda", "--no-timing"});
  if (run.code != 0) {
    expect_failure(outcome, 1, "shunt eval", run.err.substr(std::string("shunt run").size()));
    return;
  }
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Outcome cpu = shunt(eval({"--format", "nvfp4", "int8", "--dtype", "bf16", "--json"}));
  ASSERT_EQ(cpu.code, 0) << cpu.err;
  const Json there = Json::parse(outcome.out), here = Json::parse(cpu.out);
  EXPECT_EQ(there["dtype"], "bf16");
  ASSERT_EQ(there["rows"].size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(there["rows"][i]["computed"], "packed");
    const double score = here["rows"][i]["bits_per_byte"];
    EXPECT_NEAR(double(there["rows"][i]["bits_per_byte"]), score, 3e-3 * score);
  }
  expect_failure(with({"--format", "nvfp4", "--dtype", "f32"}), 1, "shunt eval", "dtype is f32");
  const Outcome all = with({"--all-formats"});
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(Json::parse(all.out)["left_out"].size(), 0u);
}

}  // namespace
}  // namespace shunt::test
