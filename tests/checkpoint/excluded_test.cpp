// Lists of modules that a quantised checkpoint leaves plain, and the regular expressions in them.
#include "checkpoint/excluded.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"

namespace shunt::test {
namespace {

using Ends = std::vector<std::size_t>;

TEST(Regex, MatchesAsPythonDoes) {
  EXPECT_EQ(Regex("a*").ends("aab"), (Ends{0, 1, 2}));
  EXPECT_EQ(Regex("ab|a").ends("abc"), (Ends{1, 2}));
  EXPECT_EQ(Regex("a|b|cd").ends("cd"), (Ends{2}));
  EXPECT_EQ(Regex("x(a|bc)+y").ends("xabcay"), (Ends{6}));
  EXPECT_EQ(Regex("a{2,3}").ends("aaaa"), (Ends{2, 3}));
  EXPECT_EQ(Regex("a{,2}").ends("aaa"), (Ends{0, 1, 2}));
  EXPECT_EQ(Regex("a{2,}").ends("aaaa"), (Ends{2, 3, 4}));
  EXPECT_EQ(Regex("a{x").ends("a{x"), (Ends{3}));
  EXPECT_EQ(Regex("(ab){2}$").ends("abab"), (Ends{4}));
  EXPECT_EQ(Regex("(?:a?b)*?c").ends("abbc"), (Ends{4}));
  EXPECT_EQ(Regex("[a-c]+").ends("abcd"), (Ends{1, 2, 3}));
  EXPECT_EQ(Regex("[^.]+\\.").ends("ab.c"), (Ends{3}));
  EXPECT_EQ(Regex("[]x]").ends("]"), (Ends{1}));
  EXPECT_EQ(Regex("[\\d-]+$").ends("1-2"), (Ends{3}));
  EXPECT_EQ(Regex("\\w+\\b").ends("ab c"), (Ends{2}));
  EXPECT_EQ(Regex("(?!.*experts).*$").ends("mlp.gate"), (Ends{8}));
  EXPECT_EQ(Regex("(?!.*experts).*$").ends("mlp.experts.1"), (Ends{}));
  EXPECT_EQ(Regex("a(?=b)").ends("ab"), (Ends{1}));
  EXPECT_EQ(Regex("(a*)*b").ends(std::string(200, 'a')), (Ends{}));
  // Each look ahead would multiply the time by the text's length, asked again at every place.
  EXPECT_EQ(Regex(".*(?=.*(?=.*(?=.*(?=.*(?=.*(?=.*Z))))))").ends(std::string(200, 'a')), (Ends{}));
  EXPECT_EQ(Regex("a(?=b(?!c))").ends("abd"), (Ends{1}));
  EXPECT_EQ(Regex("a(?=b(?!c))").ends("abc"), (Ends{}));
  EXPECT_EQ(Regex("").ends("x"), (Ends{0}));
  EXPECT_EQ(Regex("b").ends("ab", 1), (Ends{2}));
  EXPECT_TRUE(Regex("b.$").search("abc"));
  EXPECT_FALSE(Regex("^b").search("ab"));
  for (const char* bad : {"(", ")", "a)", "[a", "*", "a\\", "\\q", "(?P<x>a)", "(?<=a)b", "[b-a]",
                          "a{3,2}", "a{9999}", "((((a{999}){999}){999}){999}){999}"}) {
    const std::string message = error_of([&] { const Regex regex{bad}; });
    EXPECT_NE(message.find("not read"), std::string::npos) << bad << ": " << message;
  }
  EXPECT_NE(error_of([] { const Regex regex{std::string(100, '(')}; }).find("not read"),
            std::string::npos);
}

TEST(Globs, MatchAsFnmatchDoes) {
  EXPECT_TRUE(matches_glob("*mlp.gate*", "model.layers.3.mlp.gate"));
  EXPECT_TRUE(matches_glob("model.layers.[0-2].*", "model.layers.1.mlp"));
  EXPECT_FALSE(matches_glob("model.layers.[!0-2].*", "model.layers.1.mlp"));
  EXPECT_TRUE(matches_glob("a?c", "abc"));
  EXPECT_FALSE(matches_glob("a?c", "ac"));
  EXPECT_FALSE(matches_glob("lm_head", "model.lm_head"));
  EXPECT_TRUE(matches_glob("[", "["));
  EXPECT_TRUE(matches_glob("*", ""));
  EXPECT_FALSE(matches_glob("a", ""));
  EXPECT_TRUE(matches_glob("*a*b*", "xxaxxbxx"));
}

TEST(ModuleLists, AnswerForEveryMethod) {
  const std::string expert = "model.layers.10.mlp.experts.3.gate_proj";
  const struct {
    ListSyntax syntax;
    const char* entry;
    Listed expected;
  } cases[] = {
      {ListSyntax::transformers, "model.layers.10.mlp.experts.3.gate_proj", Listed::yes},
      {ListSyntax::transformers, "model.layers.10", Listed::yes},
      {ListSyntax::transformers, "model.layers.1", Listed::perhaps},  // transformers' prefix
      {ListSyntax::transformers, "model.layers.2", Listed::no},
      {ListSyntax::transformers, "gate_proj", Listed::perhaps},
      {ListSyntax::transformers, "lm_head", Listed::no},
      {ListSyntax::transformers, "model.layers.*.mlp.experts", Listed::yes},
      {ListSyntax::transformers, "model.layers.*.self_attn", Listed::no},
      {ListSyntax::transformers, "language_model.model.layers.10.mlp", Listed::perhaps},
      {ListSyntax::compressed, "re:.*gate$", Listed::no},
      {ListSyntax::compressed, "re:.*mlp.experts.*", Listed::yes},
      {ListSyntax::compressed, "re:experts", Listed::perhaps},
      {ListSyntax::compressed, "model.layers.10.mlp.experts.3.gate_proj", Listed::yes},
      {ListSyntax::compressed, "model.layers.10.mlp", Listed::perhaps},
      {ListSyntax::compressed, "Linear", Listed::no},
      {ListSyntax::globs, "model.layers.10*", Listed::yes},
      {ListSyntax::globs, "*.experts.?.gate_proj", Listed::yes},
      {ListSyntax::globs, "experts.3", Listed::perhaps},
      {ListSyntax::globs, "*mlp.gate", Listed::no},
  };
  for (const auto& c : cases) {
    ModuleList list;
    list.add(c.syntax, "nothing.of.the.kind");
    list.add(c.syntax, c.entry);
    std::string by;
    EXPECT_EQ(static_cast<int>(list.find(expert, &by)), static_cast<int>(c.expected)) << c.entry;
    EXPECT_EQ(by, c.expected == Listed::no ? "" : c.entry);
  }
}

// All expressions of a list together are bounded as well.
TEST(ModuleLists, HoldNoMoreStepsThanAreRead) {
  ModuleList list;
  const std::string thousand = "re:a{1000}";
  for (int i = 0; i < 99; ++i) list.add(ListSyntax::compressed, thousand);
  EXPECT_NE(error_of([&] { list.add(ListSyntax::compressed, thousand); }).find("steps in all"),
            std::string::npos);
}

// A checkpoint of tests/data/quantised whose quantization_config `change` has changed.
std::string reading(const char* name, const std::function<void(nlohmann::json&)>& change) {
  const TemporaryFolder at;
  const std::string from = std::string(SHUNT_SOURCE_DIR "/tests/data/quantised/") + name;
  nlohmann::json config = nlohmann::json::parse(read_file(from + "/config.json"));
  change(config["quantization_config"]);
  write_file(at / "config.json", config.dump());
  write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
  return error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
}

TEST(ModuleLists, AreHeldToTheTensors) {
  const std::string down = "model.layers.0.mlp.experts.1.down_proj";
  const struct {
    const char* name;
    const char* field;
    const char* value;
    const char* message;  // empty: read
  } cases[] = {
      {"fp8_block", "modules_to_not_convert", R"(["model.layers.0.mlp.experts.1.down_proj"])",
       "'model.layers.0.mlp.experts.1.down_proj' are packed: "
       "quantization_config.modules_to_not_convert leaves it plain, by "
       "'model.layers.0.mlp.experts.1.down_proj'"},
      {"fp8_block", "modules_to_not_convert", R"(["lm_head", "model.layers.0.mlp.gate"])", ""},
      {"fp8_block", "modules_to_not_convert", R"("lm_head")", "must be a list of names"},
      {"fp8_block", "modules_to_not_convert", R"([7])", "must be a list of names"},
      {"fp8_block", "modules_to_not_convert", R"(["(?P<b>c).*"])",
       "modules_to_not_convert: regular"},
      {"fp8_channel", "ignore", R"(["re:.*experts.0.*"])",
       "experts.0.gate_proj' are packed: quantization_config.ignore leaves it plain, by "
       "'re:.*experts.0.*'"},
      {"fp8_channel", "ignore", R"(["re:.*shared_expert.*"])", ""},
      {"nvfp4_modelopt", "ignore", R"(["*experts*"])", "quantization_config.ignore leaves"},
      {"nvfp4_modelopt", "exclude_modules", R"(["model.layers.0*"])",
       "quantization_config.exclude_modules leaves"},
      {"gptq", "dynamic", R"({"-:.*down_proj": {}})", "quantization_config.dynamic leaves"},
      {"gptq", "dynamic", R"({"-:.*shared_expert.*": {}, "+:.*": {"bits": 4}})", ""},
      {"gptq", "dynamic", R"({"+:.*up_proj": {"bits": 8}})", "bits is 8: must be 4"},
      {"awq", "modules_to_not_convert", R"(["model.layers.0.mlp"])", "leaves it plain"},
      {"mxfp4_gpt_oss", "modules_to_not_convert", R"(["model.layers.0.mlp.experts"])",
       "experts.gate_up_proj' are packed"},
      {"mxfp4_deepseek_v4", "modules_to_not_convert", R"(["lm_head"])",
       "'model.layers.0.ffn.shared_experts.w1' are plain: "
       "quantization_config.modules_to_not_convert does not name it, so that method fp8 packs it"},
      // As other programs would put it: tensors tell.
      {"mxfp4_deepseek_v4", "modules_to_not_convert", R"(["shared_experts"])", ""},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(c.name) + " " + c.value);
    const std::string message = reading(c.name, [&](nlohmann::json& quantised) {
      quantised[c.field] = nlohmann::json::parse(c.value);
    });
    if (*c.message == '\0') {
      EXPECT_EQ(message, std::string());
    } else {
      EXPECT_NE(message.find(c.message), std::string::npos) << message;
    }
  }
}

// Targets that do not mean a module leave it plain as well.
TEST(ModuleLists, TargetsOfCompressedTensors) {
  const auto with = [](const char* targets) {
    return reading("fp8_channel", [&](nlohmann::json& quantised) {
      quantised["config_groups"]["group_0"]["targets"] = nlohmann::json::parse(targets);
    });
  };
  const std::string none;
  EXPECT_EQ(with(R"(["Linear"])"), none);
  EXPECT_EQ(with(R"(["re:.*experts.*"])"), none);
  EXPECT_NE(with("7").find("targets is 7"), std::string::npos);
}

}  // namespace
}  // namespace shunt::test
