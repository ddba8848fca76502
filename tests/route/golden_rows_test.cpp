// Every rule against the router of transformers that has it: golden_rows.json, written by
// make_golden_rows.py.
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "route/route_util.hpp"

namespace shunt::test {
namespace {

TEST(RouteGoldenRows, MatchTransformers) {
  std::ifstream file(SHUNT_SOURCE_DIR "/tests/route/golden_rows.json");
  ASSERT_TRUE(file);
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_GE(cases.size(), 28U);
  const Context context = engine(1);
  for (const nlohmann::json& golden : cases) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    RouteCase c(route_spec_from_json(golden.at("spec").dump()), golden.at("tokens"));
    const auto floats = [&](const char* key) { return golden.value(key, std::vector<float>{}); };
    c.logits = floats("logits");
    ASSERT_EQ(c.logits.size(), at(c.tokens * c.columns()));
    c.router_bias = floats("router_bias");
    c.selection_bias = floats("selection_bias");
    c.per_expert_scale = floats("per_expert_scale");
    for (const float id : floats("token_ids")) {
      c.token_ids.push_back(static_cast<std::int32_t>(id));
    }
    for (const float id : floats("hash_table")) {
      c.hash_table.push_back(static_cast<std::int64_t>(id));
    }
    if (c.spec.hashed) {
      c.vocabulary = static_cast<int>(c.hash_table.size()) / c.spec.top_k;
    }
    const RouteResult out = run(context, c);
    check(c, out);

    // transformers leaves the order of slots open: each row as id -> weight.
    const std::vector<int> ids = golden.at("ids");
    const std::vector<float> weights = golden.at("weights");
    ASSERT_EQ(ids.size(), out.ids.size());
    const std::size_t slots = at(c.spec.slots());
    for (std::size_t row = 0; row < ids.size(); row += slots) {
      std::map<int, float> expected;
      for (std::size_t i = row; i < row + slots; ++i) expected[ids[i]] = weights[i];
      for (std::size_t i = row; i < row + slots; ++i) {
        ASSERT_EQ(expected.count(out.ids[i]), 1U)
            << "token " << row / slots << " id " << out.ids[i];
        EXPECT_NEAR(out.weights[i], expected[out.ids[i]], 2e-6F * expected[out.ids[i]] + 1e-12F)
            << "token " << row / slots << " id " << out.ids[i];
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
