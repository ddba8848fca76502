// shunt convert: as others see it.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "process.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

TEST(ConvertCommand, PrintsTheErrorOfEachLayerAndExpert) {
  const Folder folder;
  const std::string out = folder.path("out");
  const Outcome outcome = shunt({"convert", tiny_moe, out, "--to", "nvfp4"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "") << "progress without a terminal";
  EXPECT_LE(longest_line(outcome.out), 120);
  for (const char* word : {"layer", "worst", "nvfp4", "12.6 MB -> 3.54 MB"}) {
    EXPECT_TRUE(contains(outcome.out, word)) << outcome.out;
  }
  const Outcome experts =
      shunt({"convert", tiny_moe, folder.path("second"), "--to", "nvfp4", "--experts", "--json"});
  ASSERT_EQ(experts.code, 0) << experts.err;
  const Json json = Json::parse(experts.out);
  ASSERT_EQ(json["experts"].size(), 64u);
  for (const Json& expert : json["experts"]) {
    for (const char* error : {"gate_error", "up_error", "down_error"}) {
      EXPECT_GT(double(expert[error]), 0.08);
      EXPECT_LT(double(expert[error]), 0.11);
    }
  }
  EXPECT_EQ(json["bits_per_weight"], 4.5);
  EXPECT_LT(double(json["bytes_after"]), double(json["bytes_before"]) / 2);
}

// Which experts are pruned in another way than asked for is not passed over in silence.
TEST(ConvertCommand, SaysWhatWasPrunedByMagnitudeInstead) {
  const Folder folder;
  const std::vector<float> one(256, 1.0f);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (int layer = 0; layer < 4; ++layer) {
    tensors.emplace_back("layers." + std::to_string(layer) + ".input", view(one.data(), {1, 256}));
  }
  write_safetensors(folder.path("hidden.safetensors"), tensors, {});
  const Outcome outcome = shunt({"convert", tiny_moe, folder.path("out"), "--to", "bf16", "--prune",
                                 "2:4", "--calibrate", folder.path("hidden.safetensors")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  // One token goes to 4 of a layer's 16.
  EXPECT_TRUE(contains(outcome.out, "2:4 by obs")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "48 of 64 experts by magnitude")) << outcome.out;
}

// A limit on the size of files is a disk that is full: said in one line, and the same command goes
// on where it was.
TEST(ConvertCommand, AFullDiskLeavesNothingHalfWritten) {
  const Folder folder;
  const std::string out = folder.path("out");
  const std::vector<std::string> command = {"convert", tiny_moe, out, "--to", "bf16"};
  const Outcome full = shunt(command, {.environment = {}, .file_limit = 1 << 20});
  expect_failure(full, 1, "shunt convert", "cannot be written");
  EXPECT_EQ(folder.entries(), std::vector<std::string>{});  // its only file was not finished
  const Outcome again = shunt(command);
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"out"});
  EXPECT_EQ(read_text(out + "/model.safetensors"), read_text(tiny_moe + "/model.safetensors"));
}

TEST(ConvertCommand, RefusesByName) {
  const Folder folder;
  const std::string out = folder.path("out"), who = "shunt convert";
  const auto convert = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"convert", tiny_moe});
    return shunt(more);
  };
  expect_failure(convert({out}), 2, who, "--to");
  expect_failure(shunt({"convert", tiny_moe, "--to", "nvfp4"}), 2, who, "out");
  expect_failure(convert({out, "--to", "fp2"}), 2, who,
                 "--to: format is 'fp2': must be one of f32, bf16, f16, fp8_tensor");
  expect_failure(convert({out, "--to", "int4:7"}), 2, who, "--to: format is 'int4:7'");
  expect_failure(convert({out, "--to", "dense3", "--prune", "2:4"}), 2, who,
                 "--to: format is 'dense3': does not hold every 0");
  expect_failure(convert({out, "--to", "bf16", "--prune", "1:4"}), 2, who,
                 "--prune: pruning pattern is '1:4': must be 2:4 or 2:4-pairs");
  expect_failure(convert({out, "--to", "bf16", "--prune", "2:4", "--method", "best"}), 2, who,
                 "--method: pruning method is 'best': must be magnitude, wanda or obs");
  expect_failure(convert({out, "--to", "bf16", "--prune", "2:4", "--method", "obs"}), 2, who,
                 "--calibrate");
  expect_failure(convert({out, "--to", "bf16", "--method", "obs"}), 2, who, "--prune");
  expect_failure(
      convert({out, "--to", "bf16", "--prune", "2:4", "--method", "magnitude", "--calibrate", "x"}),
      2, who, "--calibrate");
  expect_failure(convert({out, "--to", "bf16", "--prune", "2:4", "--calibrate", "x"}), 1, who, "x");
  expect_failure(convert({out, "--to", "bf16", "--calibrate", "x"}), 2, who, "--prune");
  for (const char* report : {"", "/report.json", ".partial", ".partial/report.json"}) {
    expect_failure(convert({out + "/", "--to", "bf16", "--json", out + report}), 2, who,
                   "must lie outside " + out);
  }
  expect_failure(convert({tiny_moe, "--to", "bf16"}), 1, who, "itself");
  expect_failure(convert({folder.path(), "--to", "bf16"}), 1, who, "exists");
  expect_failure(shunt({"convert", folder.path("none"), out, "--to", "bf16"}), 1, who, "none");
  EXPECT_TRUE(folder.entries().empty());
}

}  // namespace
}  // namespace shunt::test
