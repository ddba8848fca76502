// Help texts, and command lines that nothing could make right: exit code 2.
#include <gtest/gtest.h>

#include "process.hpp"

namespace shunt::test {
namespace {

TEST(Help, NamesEverySubcommandAndTheExitCodes) {
  const Outcome help = shunt({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.err, "");
  for (const char* word :
       {"run", "inspect", "convert", "eval", "bench", "info", "Exit codes", "Example"}) {
    EXPECT_TRUE(contains(help.out, word)) << word;
  }
}

TEST(Help, OfEachSubcommandEndsWithAnExample) {
  for (const std::string name : {"run", "inspect", "convert", "eval", "bench", "info"}) {
    const Outcome help = shunt({name, "--help"});
    EXPECT_EQ(help.code, 0) << name;
    EXPECT_EQ(help.err, "") << name;
    const auto example = help.out.rfind("Example");
    ASSERT_NE(example, std::string::npos) << name;
    EXPECT_TRUE(contains(help.out.substr(example), "  shunt " + name)) << name;
    EXPECT_LE(longest_line(help.out), 100) << help.out;
  }
}

TEST(Help, EveryOptionOfTheContractIsThere) {
  const std::string help = shunt({"run", "--help"}).out;
  for (const char* option : {"--model", "--layer", "--device", "--dtype", "--input", "--input-name",
                             "--output", "--threads", "--explain", "--json"}) {
    EXPECT_TRUE(contains(help, option)) << option;
  }
}

TEST(Help, VersionGoesToStandardOutput) {
  const Outcome version = shunt({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out, "shunt " SHUNT_VERSION "\n");
}

TEST(Help, WithoutArgumentsItIsUsage) {
  const Outcome outcome = shunt({});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "Usage"));
}

struct BadUsage {
  std::vector<std::string> args;
  std::string who, part;
};

TEST(Usage, ErrorsAreOneLineAndCode2) {
  const std::string model = tiny_moe;
  const std::vector<BadUsage> cases = {
      {{"nonsense"}, "shunt", "nonsense"},
      {{"run"}, "shunt run", "--model"},
      {{"run", "--model", model, "--nonsense"}, "shunt run", "--nonsense"},
      {{"run", "--model", model, "surplus"}, "shunt run", "surplus"},
      {{"run", "--model"}, "shunt run", "--model"},
      {{"run", "--model", model, "--threads", "abc"}, "shunt run", "'abc'"},
      {{"run", "--model", model, "--threads", "-1"}, "shunt run", "'-1'"},
      {{"run", "--model", model, "--threads", "1025"}, "shunt run", "1024"},
      {{"run", "--model", model, "--threads", "2.5"}, "shunt run", "'2.5'"},
      {{"run", "--model", model, "--threads", ""}, "shunt run", "--threads"},
      {{"run", "--model", model, "--device", "tpu"}, "shunt run", "'tpu' is not cpu or cuda"},
      {{"run", "--model", model, "--dtype", "int8"}, "shunt run", "'int8' is not f32"},
      {{"run", "--model", model, "--format", "fp2"}, "shunt run", "--format: format is 'fp2'"},
      {{"run", "--model", model, "--layer", "first"}, "shunt run", "'first'"},
      {{"run", "--model", model, "--layer", "-1"}, "shunt run", "'-1'"},
      {{"run", "--model", model, "--tolerance", "-1"}, "shunt run", "--tolerance"},
      {{"run", "--model", model, "--tolerance", "nan"}, "shunt run", "'nan' is not a number"},
      {{"run", "--model", model, "--tolerance", "inf"}, "shunt run", "'inf' is not a number"},
      {{"run", "--model", model, "--input", ""}, "shunt run", "--input '': must not be empty"},
      {{"convert", model, "x", "--to", "nvfp4", "--prune", ""},
       "shunt convert",
       "--prune '': must not be empty"},
      {{"bench", "layer", "--format", ""}, "shunt bench", "--format '': must not be empty"},
      {{"run", "--model", model, "--output", "y.safetensors"}, "shunt run", "--input"},
      {{"run", "--model", model, "--input-name", "x"}, "shunt run", "--input"},
      {{"inspect"}, "shunt inspect", "--model"},
      {{"bench", "sort"}, "shunt bench", "'sort' is no stage"},
      {{"bench", "--experts", "0"}, "shunt bench", "'0'"},
      {{"bench", "--experts", "8"}, "shunt bench", "--top-k"},
      {{"bench", "--tokens", "1,,2"}, "shunt bench", "'1,,2'"},
      {{"bench", "--tokens", "0"}, "shunt bench", "'0'"},
      {{"bench", "--tokens", "many"}, "shunt bench", "'many'"},
      {{"bench", "gate", "--rule", "best"}, "shunt bench", "'best'"},
      {{"bench", "gate", "--experts", "8", "--top-k", "2", "--groups", "4"}, "shunt bench", "'4'"},
      {{"bench", "--grid"}, "shunt bench", "--device cuda"},
      {{"bench", "layer", "--format", "fp2"}, "shunt bench", "--format: format is 'fp2'"},
      {{"bench", "--routing", "pareto"}, "shunt bench", "'pareto'"},
      {{"bench", "--rotate-bytes", "1X"}, "shunt bench", "'1X'"},
      {{"bench", "--rotate-bytes", "-1"}, "shunt bench", "'-1'"},
      {{"bench", "--seconds", "nan"}, "shunt bench", "'nan' is not a number from 0.01 to 600"},
      {{"bench", "--wait", "nan"}, "shunt bench", "'nan' is not a number from 0 to 600"},
      {{"bench", "layer", "--rows", "fp8_block"}, "shunt bench", "--rows is about"},
      {{"bench", "order", "--tile", "16"}, "shunt bench", "--tile is about"},
      {{"bench", "layer", "--device", "cuda", "--tile", "16"}, "shunt bench", "--tile is about"},
      {{"bench", "gemm", "--batch-invariant"}, "shunt bench", "--batch-invariant is about"},
      {{"bench", "activate", "--groups", "4,2"}, "shunt bench", "--rule and --groups are about"},
      {{"bench", "gemm", "--shared", "8"}, "shunt bench", "--shared is about layer"},
      {{"bench", "gemm", "--shared-format", "nvfp4"}, "shunt bench", "--shared-format is about"},
      {{"bench", "layer", "--shared-format", "nvfp4"}, "shunt bench", "no shared expert"},
      {{"bench", "layer", "--shared", "64", "--shared-format", "fp2"},
       "shunt bench",
       "--shared-format: format is 'fp2'"},
      {{"bench", "route", "--format", "nvfp4"},
       "shunt bench",
       "only gemm, indexed, layer and pack"},
      {{"bench", "indexed", "--rows", "fp8_block", "--device", "cuda"},
       "shunt bench",
       "--rows is about"},
      {{"bench", "indexed", "--experts", "8", "--top-k", "2", "--hidden", "64"},
       "shunt bench",
       "gemm, indexed, activate and layer all of them"},
      {{"bench", "pack"}, "shunt bench", "pack: --format must be a packed one"},
      {{"bench", "pack", "--format", "nvfp4", "--top-k", "2"}, "shunt bench", "--top-k, --rule"},
      {{"bench", "pack", "--format", "nvfp4", "--hidden", "64"},
       "shunt bench",
       "pack the last two"},
      {{"bench", "pack", "--format", "nvfp4", "--tokens", "4"},
       "shunt bench",
       "--tokens, --experts"},
      {{"bench", "pack", "--format", "nvfp4", "--device", "cuda"},
       "shunt bench",
       "pack runs on the CPU"},
      {{"bench", "gemm", "--device", "cuda", "--grid", "--tokens", "4"},
       "shunt bench",
       "--grid has shapes of its own"},
      {{"bench", "all", "--device", "cuda", "--grid", "--dtype", "bf16"},
       "shunt bench",
       "--grid has shapes of its own"},
      {{"convert", model, "x", "--to", "nvfp4", "--damping", "0.5"}, "shunt convert", "--damping"},
      {{"convert", model, "x", "--to", "nvfp4", "--damping", "nan"}, "shunt convert", "'nan'"},
      {{"convert", model, "x", "--to", "int4:64:ordered"}, "shunt convert", "--to: format is"},
      {{"convert", model, "", "--to", "nvfp4"}, "shunt convert", "OUT"},
      {{"eval", model, "--markdown", "--json"}, "shunt eval", "--json FILE"},
      {{"eval", model, "--format", "int4:64:zeros"}, "shunt eval", "--format: format is"},
      {{"info", "surplus"}, "shunt info", "surplus"},
  };
  for (const auto& bad : cases) {
    SCOPED_TRACE(::testing::PrintToString(bad.args));
    expect_failure(shunt(bad.args), 2, bad.who, bad.part);
  }
}

}  // namespace
}  // namespace shunt::test
