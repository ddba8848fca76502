#include "core/json.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <clocale>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "checkpoint/temporary.hpp"
#include "shunt/error.hpp"

namespace shunt {
namespace {

std::string error_of(const std::string& text) {
  try {
    SpecReader reader("Spec", text);
    bool flag = false;
    int count = 0;
    std::int64_t size = 0;
    float number = 0;

    reader.read("flag", flag);
    reader.read("count", count, 1, 64);
    reader.read("size", size, 0, std::int64_t{1} << 40);
    reader.read("number", number);

    enum class Kind { a, b } kind = Kind::a;
    reader.read("kind", kind, {"a", "b"});

    reader.finish();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "";
}

TEST(SpecReader, ReadsWhatIsLegal) {
  EXPECT_EQ(error_of(R"({"flag": true, "count": 64, "size": 1099511627776, "number": 1,
                         "kind": "b"})"),
            "");
}

TEST(SpecReader, NamesFieldValueAndWhatIsLegal) {
  EXPECT_EQ(error_of(R"({"count": 65})"), "Spec.count is 65: must be an integer from 1 to 64");
  EXPECT_EQ(error_of(R"({"count": 2.5})"), "Spec.count is 2.5: must be an integer from 1 to 64");
  EXPECT_EQ(error_of(R"({"count": "2"})"), "Spec.count is \"2\": must be an integer from 1 to 64");
  EXPECT_EQ(error_of(R"({"count": 18446744073709551615})"),
            "Spec.count is 18446744073709551615: must be an integer from 1 to 64");
  EXPECT_EQ(error_of(R"({"flag": 1})"), "Spec.flag is 1: must be true or false");
  EXPECT_EQ(error_of(R"({"number": 1e39})"), "Spec.number is 1e+39: must be a finite f32 number");
  EXPECT_EQ(error_of(R"({"number": -1e-46})"),
            "Spec.number is -1e-46: must be a finite f32 number");
  EXPECT_EQ(error_of(R"({"number": 1e-45})"), "");
  EXPECT_EQ(error_of(R"({"number": 0.0})"), "");
  EXPECT_EQ(error_of(R"({"kind": "c"})"), "Spec.kind is \"c\": must be one of a, b");
  EXPECT_EQ(error_of(R"({"flog": true})"),
            "Spec.flog is unknown; known are count, flag, kind, number, size");
  EXPECT_EQ(error_of("[]"), "Spec is []: must be a JSON object");
  // One line, and nothing that a terminal obeys.
  EXPECT_EQ(error_of(R"({"flo\n\u001bg\u007f": true})"),
            "Spec.flo??g? is unknown; known are count, flag, kind, number, size");
}

TEST(SpecReader, RefusesWhatIsNotJson) {
  EXPECT_NE(error_of("{\"count\": NaN}").find("not JSON"), std::string::npos);
  EXPECT_NE(error_of("").find("not JSON"), std::string::npos);
  EXPECT_EQ(error_of("{\"flag\": \"\n\"}").find('\n'), std::string::npos);
  EXPECT_NE(error_of(std::string(100000, '[')).find("deeper"), std::string::npos);
}

TEST(SpecReader, NamesAFieldOfANestedObjectByItsPath) {
  const auto error_in = [](const std::string& text) -> std::string {
    try {
      SpecReader reader("Spec", text);
      auto inner = reader.object("inner");
      if (!inner) return "absent";
      int count = 0;
      inner->read("count", count, 1, 64);
      inner->finish();
      reader.finish();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error_in("{}"), "absent");
  EXPECT_EQ(error_in(R"({"inner": {"count": 3}})"), "");
  EXPECT_EQ(error_in(R"({"inner": {"count": 0}})"),
            "Spec.inner.count is 0: must be an integer from 1 to 64");
  EXPECT_EQ(error_in(R"({"inner": {"more": 0}})"), "Spec.inner.more is unknown; known are count");
  EXPECT_EQ(error_in(R"({"inner": null})"), "Spec.inner is null: must be a JSON object");
  EXPECT_EQ(error_in(R"({"inner": {}, "other": 1})"), "Spec.other is unknown; known are inner");
}

TEST(SpecReader, GivesPartsAsText) {
  SpecReader reader("Spec", R"({"name": "x\n", "inner": {"b": [1, 2.0], "a": null}, "number": 1})");
  EXPECT_EQ(reader.json("inner"), R"({"a":null,"b":[1,2.0]})");
  EXPECT_EQ(reader.json("absent"), std::nullopt);
  EXPECT_EQ(reader.take_text("number"), std::nullopt);
  EXPECT_TRUE(reader.has("number"));
  EXPECT_EQ(reader.take_text("name"), "x\n");
  EXPECT_FALSE(reader.has("name"));
  EXPECT_THROW(reader.finish(), Error);  // of the number
  // What has no keys has none to give, and is refused where it is read.
  SpecReader list("Spec", "[1]");
  EXPECT_FALSE(list.has("name"));
  EXPECT_EQ(list.take_text("name"), std::nullopt);
  EXPECT_THROW(list.finish(), Error);
}

// A caller's locale may write decimal commas.
TEST(SpecWriter, AsksNoLocale) {
  const test::TemporaryFolder folder;
  const std::string name = "de_DE.UTF-8";
  const std::string made = "localedef -i de_DE -f UTF-8 '" + folder / name + "' >/dev/null 2>&1";
  const int code = std::system(made.c_str());
  ::setenv("LOCPATH", folder.path().c_str(), 1);
  const bool set = code == 0 && std::setlocale(LC_ALL, name.c_str()) != nullptr;
  ::unsetenv("LOCPATH");
  if (!set) GTEST_SKIP() << "localedef makes no German locale here";
  const double number = shortest(2.5F);
  const std::string text = SpecWriter().add("scale", shortest(30.25F)).text();
  const bool comma = *std::localeconv()->decimal_point == ',';
  std::setlocale(LC_ALL, "C");
  EXPECT_TRUE(comma);
  EXPECT_EQ(number, 2.5);
  EXPECT_EQ(text, "{\"scale\":30.25}");
}

TEST(SpecWriter, KeepsOrderAndTypes) {
  const float third = 1.0F / 3;
  EXPECT_EQ(SpecWriter().text(), "{}");
  EXPECT_EQ(SpecWriter()
                .add("word", "wörd \"\\\n")
                .add("flag", true)
                .add("count", -7)
                .add("size", std::int64_t{1} << 40)
                .add("whole", 2.0F)
                .add("as_double", 2.827F)
                .add("as_float", shortest(2.827F))
                .add("large", 1e30)
                .add("third", third)
                .add("text", std::string("t"))
                .text(),
            R"({"word":"wörd \"\\\n","flag":true,"count":-7,"size":1099511627776,"whole":2.0,)"
            R"("as_double":2.8269999027252197,"as_float":2.827,"large":1e+30,)"
            R"("third":0.3333333432674408,"text":"t"})");
  EXPECT_EQ(SpecWriter()
                .add("b", SpecWriter().add("z", 1).add("a", 2))
                .add_json("a", SpecWriter().add("x", false).text())
                .text(),
            R"({"b":{"z":1,"a":2},"a":{"x":false}})");
}

TEST(SpecWriter, ShortestIsTheSameFloat) {
  // That of 0x15ae43fd, read as a double and rounded, would be the next float.
  for (const std::uint32_t bits : {0x15ae43fdu, 0x95ae43fdu, 0x00000001u, 0x7f7fffffu}) {
    const auto value = std::bit_cast<float>(bits);
    SpecReader reader("Spec", SpecWriter().add("number", shortest(value)).text());
    float number = 0;
    reader.read("number", number);
    EXPECT_EQ(number, value) << bits;
  }
}

// The JSON library stops at a byte that is 0, whatever stands behind it.
TEST(SpecReader, RefusesAByteThatIsZero) {
  const std::string legal = "{\"flag\": true}";
  EXPECT_EQ(error_of(legal), "");
  EXPECT_EQ(error_of(legal + '\0'), "Spec: not JSON: byte 14 is 0");
  EXPECT_EQ(error_of(legal + '\0' + "{\"flag\": 1}"), "Spec: not JSON: byte 14 is 0");
}

// The JSON library keeps the last of two.
TEST(SpecReader, RefusesAKeyThatStandsTwice) {
  EXPECT_EQ(error_of("{\"deep\": 1, \"deep\": 1}"), "Spec: key 'deep' stands twice in one object");
  EXPECT_EQ(error_of("{\"a\": {\"b\": 1, \"b\": 2}}"), "Spec: key 'b' stands twice in one object");
}

// The parser recurses: what nests too deep is refused before it. A quoted bracket is none, nor one
// behind an escaped quote.
TEST(SpecReader, BoundsHowDeepItNests) {
  const auto nested = [](std::size_t depth) {
    return "{\"deep\": " + std::string(depth - 1, '[') + std::string(depth - 1, ']') + "}";
  };
  EXPECT_NE(error_of(nested(64)).find("Spec.deep is unknown"), std::string::npos);
  EXPECT_EQ(error_of(nested(65)), "Spec: JSON nests deeper than 64");
  EXPECT_EQ(error_of(nested(1000000)), "Spec: JSON nests deeper than 64");
  const std::string brackets(100, '[');
  EXPECT_NE(error_of("{\"" + brackets + "\": 1}").find("is unknown"), std::string::npos);
  EXPECT_NE(error_of("{\"a\\\"" + brackets + "\": 1}").find("is unknown"), std::string::npos);
}

}  // namespace
}  // namespace shunt
