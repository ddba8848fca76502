// The reader of config.json: numbers strictly, unknown fields about experts by name.
#include "checkpoint/config.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/strict_json.hpp"
#include "checkpoint/temporary.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {
namespace {

using test::error_of;

std::string integer_error(const std::string& value) {
  const nlohmann::json json = parse_object("config.json", "{\"n\": " + value + "}");
  Config config("config.json", json);
  return error_of([&] { config.integer({"n"}, 1, 4096); });
}

TEST(Config, IntegersAreIntegersWithinTheirRange) {
  EXPECT_EQ(integer_error("1"), "");
  EXPECT_EQ(integer_error("4096"), "");
  for (const char* bad :
       {"0", "-1", "4097", "9223372036854775807", "18446744073709551615", "1e3", "1e300", "8.0",
        "8.5", "true", "\"8\"", "[8]", "{}", "NaN", "Infinity", "-Infinity"}) {
    const std::string message = integer_error(bad);
    EXPECT_NE(message.find("must be an integer from 1 to 4096"), std::string::npos) << message;
    EXPECT_EQ(message.find("config.json: n is "), 0u) << message;
  }
  EXPECT_EQ(integer_error("null"), "config.json: n is missing: must be an integer from 1 to 4096");
}

TEST(Config, NumbersAreFinite) {
  const auto error = [](const std::string& value) {
    const nlohmann::json json = parse_object("c", "{\"s\": " + value + "}");
    Config config("c", json);
    return error_of([&] { config.number_or({"s"}, 1, -1e30, 1e30); });
  };
  for (const char* good : {"1", "2.5", "-3", "null", "0"}) EXPECT_EQ(error(good), "");
  for (const char* bad : {"NaN", "Infinity", "1e31", "-1e300", "\"2.5\"", "false", "[1]"}) {
    EXPECT_NE(error(bad).find("must be a finite number"), std::string::npos) << bad;
  }
}

// Code of models takes None for false, or for no limit: not for what absence means.
TEST(Config, NullsWhereAbsenceMeansSomething) {
  const nlohmann::json json = parse_object("c", R"({"n": null, "set": 2})");
  Config config("c", json);
  EXPECT_FALSE(config.flag_or({"n"}, false));
  EXPECT_EQ(config.number_or({"n"}, 0, 0, 9), 0);
  EXPECT_EQ(config.number_or({"n"}, 1, 0, 9), 1);
  EXPECT_EQ(config.number_or({"n", "set"}, 7, 0, 9), 2);
  EXPECT_EQ(config.number_or({"absent"}, 7, 0, 9), 7);
  EXPECT_EQ(error_of([&] { config.flag_or({"n"}, true); }), "c: n is null: must be true or false");
  EXPECT_EQ(error_of([&] {
              config.number_or({"absent", "n"}, 7, 0, 9);
            }),
            "c: n is null: must be a finite number from 0 to 9");
  EXPECT_EQ(config.integer_or({"n"}, 0, 0, 9), 0);
  EXPECT_EQ(config.integer_or({"n"}, 1, 0, 9), 1);
  EXPECT_EQ(config.integer_or({"n"}, -1, -1, 9), -1);
  EXPECT_EQ(config.integer_or({"n", "set"}, 7, 0, 9), 2);
  EXPECT_EQ(error_of([&] {
              config.integer_or({"absent", "n"}, 7, 0, 9);
            }),
            "c: n is null: must be an integer from 0 to 9");
  EXPECT_EQ(config.integer_if({"n"}, 0, 9), std::nullopt);
  EXPECT_EQ(config.integer_if({"n", "set"}, 0, 9), 2);
}

TEST(Config, TwoNamesOfOneFieldMustAgree) {
  const nlohmann::json json = parse_object("c", R"({"a": 3, "b": 4, "c": 3})");
  Config config("c", json);
  EXPECT_EQ(config.integer({"a", "c"}, 0, 9), 3);
  EXPECT_NE(error_of([&] {
              config.integer({"a", "b"}, 0, 9);
            }).find("must be equal"),
            std::string::npos);
}

TEST(Config, ListsAreCheckedElementByElement) {
  const nlohmann::json json =
      parse_object("c", R"({"i": [1, 2], "bad": [1, -2], "t": ["a"], "n": [null, 0.5], "s": "x"})");
  Config config("c", json);
  EXPECT_EQ(config.integers({"i"}, 0, 9), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(config.texts({"t"}), (std::vector<std::string>{"a"}));
  EXPECT_EQ(config.numbers({"n"}, 7, 0, 1), (std::vector<double>{7, 0.5}));
  EXPECT_FALSE(config.integers({"absent"}, 0, 9));
  EXPECT_NE(error_of([&] { config.texts({"i"}); }).find("must be a list of strings"),
            std::string::npos);
  EXPECT_NE(error_of([&] { config.objects("i"); }).find("i[0] is 1: must be an object"),
            std::string::npos);
  for (const char* name : {"bad", "t", "n", "s"}) {
    EXPECT_NE(error_of([&] { config.integers({name}, 0, 9); }).find("must be a list"),
              std::string::npos);
  }
  EXPECT_EQ(config.integer_per_layer({"i"}, 2, 0, 9), (std::vector<std::int64_t>{1, 2}));
  EXPECT_NE(error_of([&] { config.integer_per_layer({"i"}, 3, 0, 9); }).find("each of 3 layers"),
            std::string::npos);
}

TEST(Config, FieldsAboutExpertsMustBeRead) {
  const nlohmann::json json = parse_object(
      "c", R"({"hidden_size": 8, "rope_theta": 1, "vision_moe": 1, "moe_new_rule": "x"})");
  Config config("c", json);
  const std::string message = error_of([&] { config.finish("family"); });
  EXPECT_EQ(message,
            "c: moe_new_rule is \"x\": not understood for family, and it may change the "
            "mathematics");
  config.ignore({"moe_new_rule"});
  EXPECT_EQ(error_of([&] { config.finish("family"); }), "");
}

TEST(Config, JsonIsStrictButForPythonsNumbers) {
  EXPECT_EQ(parse_object("c", R"({"a": NaN, "b": [-Infinity, "NaN", -1]})").dump(),
            R"({"a":"NaN","b":["-Infinity","NaN",-1]})");
  EXPECT_NE(error_of([] { parse_object("c", R"({"a": 1, "a": 2})"); }).find("'a' stands twice"),
            std::string::npos);
  for (const char* bad : {"", "{", "{\"a\": }", "[]", "3", "{} {}", "{\"a\": Nan}", "{'a': 1}"}) {
    EXPECT_NE(error_of([&] { parse_object("c", bad); }), "") << bad;
  }
  // Which the JSON library takes for the end of the text.
  EXPECT_EQ(error_of([] { parse_object("c", std::string("{}\0", 3)); }),
            "c: not JSON: byte 2 is 0");
}

// The smallest config of a family, with one field changed.
std::string mixtral(const std::string& field, const std::string& value) {
  nlohmann::json json = {{"model_type", "mixtral"},  {"hidden_size", 64},
                         {"num_hidden_layers", 2},   {"num_local_experts", 8},
                         {"num_experts_per_tok", 2}, {"intermediate_size", 96}};
  if (value.empty()) {
    json.erase(field);
  } else {
    json[field] = nlohmann::json::parse(value);
  }
  return json.dump();
}

TEST(Config, BadFieldsOfAModelAreNamed) {
  struct Case {
    const char *field, *value, *message;
  };
  const Case cases[] = {
      {"hidden_size", "", "hidden_size is missing"},
      {"hidden_size", "-64", "hidden_size is -64"},
      {"hidden_size", "1e18", "hidden_size is 1e+18"},
      {"hidden_size", "\"64\"", "hidden_size is \"64\""},
      {"num_local_experts", "0", "config.json: num_local_experts is 0"},
      {"num_local_experts", "4097", "must be an integer from 1 to 4096"},
      {"num_experts_per_tok", "9", "must be at most the number of experts, 8"},
      {"num_experts_per_tok", "65", "must be an integer from 1 to 64"},
      {"num_hidden_layers", "1000000000", "must be an integer from 1 to 10000"},
      {"intermediate_size", "", "intermediate_size is missing"},
      {"model_type", "", "model_type is missing"},
      {"model_type", "3", "model_type is 3"},
      {"model_type", "\"mixtral2\"", "unknown; known are PanguProMoE afmoe"},
      {"model_type", "\"doge\"", "product keys"},
      {"hidden_act", "\"mish\"", "hidden_act is 'mish'"},
      {"hidden_act", "7", "hidden_act is 7: must be a string"},
      {"router_temperature", "2", "router_temperature is 2: not understood"},
      {"moe_layer_freq", "2", "moe_layer_freq is 2: not understood"},
      {"num_dense_layers", "1", "num_dense_layers is 1: not understood"},
      {"mlp_bias", "true", "mlp_bias is true: only false is understood"},
      {"quantization_config", R"({"quant_method": "hqq"})", "quant_method is \"hqq\": not read"},
      {"quantization_config", R"({})", "quant_method is missing"},
      {"quantization_config", "5", "quantization_config is 5: must be an object"},
      {"quantization", R"({"bits": 4})", "MLX's formats are not read"},
      {"text_config", "[]", "text_config is []: must be an object"},
  };
  EXPECT_EQ(error_of([] { layer_spec_from_config(mixtral("hidden_size", "64"), 0); }), "");
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.field) + " = " + c.value);
    const std::string message =
        error_of([&] { layer_spec_from_config(mixtral(c.field, c.value), 0); });
    EXPECT_NE(message.find(c.message), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  const std::string config = mixtral("hidden_size", "64");
  EXPECT_NE(error_of([&] { layer_spec_from_config(config, 2); }).find("must be 0 to 1"),
            std::string::npos);
  EXPECT_NE(error_of([&] { layer_spec_from_config(config, -1); }).find("layer is -1"),
            std::string::npos);
}

}  // namespace
}  // namespace shunt
