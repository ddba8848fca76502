#include "core/json.hpp"

#include <gtest/gtest.h>

#include <string>

#include "shunt/error.hpp"

namespace shunt {
namespace {

std::string error_of(const std::string& text) {
  try {
    const nlohmann::json json = parse_json("spec", text);
    SpecReader reader("Spec", json);
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

}  // namespace
}  // namespace shunt
