// RouteSpec: what is refused and in which words, JSON there and back, and wrong tensors.
#include <cstring>
#include <functional>

#include "route/engine.hpp"
#include "route/route_util.hpp"

namespace shunt::test {
namespace {

std::string message_of(const std::function<void()>& action, Status status) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message;
  }
  return "nothing was thrown";
}

TEST(RouteSpec, RefusesByNameValueAndWhatIsLegal) {
  const auto reason = [](RouteSpec spec) { return supports(spec, Device{}).reason; };
  EXPECT_EQ(reason({.experts = 8, .top_k = 2}), "");
  EXPECT_EQ(reason({.experts = 4096, .top_k = 64, .groups = {.count = 64, .keep = 1}}), "");
  EXPECT_EQ(reason({}), "RouteSpec.experts is 0: must be 1 to 4096");
  EXPECT_EQ(reason({.experts = 4097, .top_k = 1}), "RouteSpec.experts is 4097: must be 1 to 4096");
  EXPECT_EQ(reason({.experts = 8, .top_k = 9}), "RouteSpec.top_k is 9: must be 1 to 8");
  EXPECT_EQ(reason({.experts = 256, .top_k = 65}), "RouteSpec.top_k is 65: must be 1 to 64");
  EXPECT_EQ(reason({.experts = 8, .top_k = 0}), "RouteSpec.top_k is 0: must be 1 to 8");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .groups = {.count = 3, .keep = 2}}),
            "RouteSpec.groups.count is 3: must divide experts, 8");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .groups = {.count = 4, .keep = 5}}),
            "RouteSpec.groups.keep is 5: must be 1 to 4");
  EXPECT_EQ(reason({.experts = 8, .top_k = 3, .groups = {.count = 8, .keep = 2}}),
            "RouteSpec.top_k is 3: must be at most 2, the experts in 2 of 8 groups");
  EXPECT_EQ(reason({.experts = 8, .top_k = 3, .groups = {.count = 4, .keep = 2, .limit = 1}}),
            "RouteSpec.top_k is 3: must be at most 2, the experts in 2 of 4 groups, 1 of each");
  EXPECT_EQ(reason({.experts = 8, .top_k = 3, .groups = {.limit = 1}}),
            "RouteSpec.groups.limit is 1: must be 0 to 0");
  EXPECT_EQ(reason({.experts = 128, .top_k = 3, .groups = {.count = 128, .keep = 3}}),
            "RouteSpec.groups.count is 128: must be 1 to 64");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .score = static_cast<Score>(9)}),
            "RouteSpec.score is 9: must be one of none, softmax, sigmoid, sqrt_softplus, "
            "sparsemixer");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .soft_cap = -1}),
            "RouteSpec.soft_cap is -1: must be finite and 0 or above");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .logit_scale = 0}),
            "RouteSpec.logit_scale is 0: must be finite and above 0");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .scale = 0}),
            "RouteSpec.scale is 0: must be finite and above 0");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .scale = std::nanf("")}),
            "RouteSpec.scale is nan: must be finite and above 0");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .jitter = 0.1F}),
            "RouteSpec.jitter is 0.1: must be 0 but with the score sparsemixer");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .score = Score::sparsemixer, .selection_bias = true}),
            "RouteSpec.selection_bias is true: must be false with the score sparsemixer, which "
            "selects by itself");
  EXPECT_EQ(reason({.experts = 8, .top_k = 2, .groups = {.count = 2, .keep = 1}, .hashed = true}),
            "RouteSpec.groups.count is 2: must be 1 with hashed ids, which nothing selects");
  EXPECT_EQ(reason({.experts = 8,
                    .top_k = 2,
                    .score = Score::sigmoid,
                    .shared = {.count = 1, .weight = SharedWeight::joint}}),
            "RouteSpec.renormalize is false: must be true with shared.weight joint");
  EXPECT_EQ(
      reason({.experts = 8,
              .top_k = 2,
              .renormalize = true,
              .shared = {.count = 1, .weight = SharedWeight::joint}}),
      "RouteSpec.score is softmax: must be sigmoid or sqrt_softplus with shared.weight joint");
  // Whether there is a CUDA engine is the build's choice, and a refusal says so.
  const Support on_cuda = supports({.experts = 8, .top_k = 2}, {DeviceType::cuda, 0});
  if (!on_cuda) {
    EXPECT_EQ(on_cuda.reason, "route: this build has no CUDA engine (SHUNT_CUDA=ON builds it in)");
  }
  EXPECT_NE(message_of([] { route_workspace_bytes(cpu({.threads = 1}), {}, 1, 0); },
                       Status::invalid_argument)
                .find("RouteSpec.experts is 0"),
            std::string::npos);
}

TEST(RouteSpec, JsonThereAndBack) {
  for (const auto& [experts, top_k, groups, keep] :
       {std::array{1, 1, 1, 1}, std::array{160, 6, 8, 3}}) {
    for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
      const std::string json = to_json(rule.spec);
      EXPECT_TRUE(route_spec_from_json(json) == rule.spec) << json;
      EXPECT_EQ(to_json(route_spec_from_json(json)), json);
    }
  }
  RouteSpec odd{.experts = 7,
                .top_k = 3,
                .logit_scale = 0.3F,
                .soft_cap = 0.1F,
                .renormalize_epsilon = 1e-37F,
                .scale = 2.827F};
  EXPECT_TRUE(route_spec_from_json(to_json(odd)) == odd);
  EXPECT_NE(to_json(odd).find("\"scale\":2.827,"), std::string::npos) << to_json(odd);
}

TEST(RouteSpec, JsonWithDefaults) {
  EXPECT_TRUE(route_spec_from_json(R"({"experts": 8, "top_k": 2})") ==
              (RouteSpec{.experts = 8, .top_k = 2}));
  EXPECT_TRUE(route_spec_from_json(R"({"experts": 8, "top_k": 2, "groups": {"count": 2}})") ==
              (RouteSpec{.experts = 8, .top_k = 2, .groups = {.count = 2}}));
}

TEST(RouteSpec, RefusesJsonByName) {
  const auto message = [](const std::string& json) {
    return message_of([&] { route_spec_from_json(json); }, Status::invalid_argument);
  };
  const auto with = [&](const std::string& more) {
    return message(R"({"experts": 8, "top_k": 2, )" + more + "}");
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {message(""), "RouteSpec: not JSON"},
      {message("[]"), "RouteSpec is []"},
      {message("null"), "RouteSpec is null"},
      {message("{}"), "RouteSpec.experts is missing"},
      {message(R"({"experts": 8})"), "RouteSpec.top_k is missing"},
      {message(R"({"experts": "8", "top_k": 2})"), "RouteSpec.experts is \"8\""},
      {message(R"({"experts": 8.5, "top_k": 2})"), "RouteSpec.experts is 8.5"},
      {message(R"({"experts": 99999999999999999999, "top_k": 2})"), "RouteSpec.experts is"},
      {message(R"({"experts": -8, "top_k": 2})"), "RouteSpec.experts is -8"},
      {message(R"({"experts": 8, "top_k": 9})"), "RouteSpec.top_k is 9"},
      {with(R"("scroe": "softmax")"), "RouteSpec.scroe is unknown"},
      {with(R"("score": "softmx")"), "RouteSpec.score is \"softmx\""},
      {with(R"("score": 1)"), "RouteSpec.score is 1"},
      {with(R"("renormalize": 1)"), "RouteSpec.renormalize is 1: must be true or false"},
      {with(R"("scale": "2")"), "RouteSpec.scale is \"2\""},
      {with(R"("scale": 1e99)"), "RouteSpec.scale is 1e+99"},
      {with(R"("scale": 1e-99)"), "RouteSpec.scale is 1e-99: must be a finite f32 number"},
      {with(R"("scale": 0)"), "RouteSpec.scale is 0"},
      {with(R"("scale": null)"), "RouteSpec.scale is null"},
      {with(R"("groups": 4)"), "RouteSpec.groups is 4"},
      {with(R"("groups": {"count": 4, "size": 2})"), "RouteSpec.groups.size is unknown"},
      {with(R"("groups": {"count": 3})"), "RouteSpec.groups.count is 3: must divide"},
      {with(R"("shared": {"count": -1})"), "RouteSpec.shared.count is -1"},
  };
  for (const auto& [got, expected] : cases) {
    EXPECT_NE(got.find(expected), std::string::npos) << got << "\n  instead of " << expected;
  }
}

TEST(RouteSpec, DescribesTheRule) {
  EXPECT_EQ(describe(rules(256, 8, 8, 4)[5].spec),
            "logits; sigmoid scores; best 8 of 256 experts in the best 4 of 8 groups by the sum of "
            "their two best after adding the selection bias; weights over their sum + 1e-20; times "
            "2.5");
  EXPECT_EQ(describe(rules(32, 4, 1, 1)[2].spec),
            "logits with bias; best 4 of 32 experts; softmax of those");
  for (const NamedRule& rule : rules(12, 3, 2, 1)) {
    EXPECT_EQ(describe(rule.spec).find('\n'), std::string::npos);
  }
}

// What is added to the sum counts as nothing where f32 cannot hold it beside the least sum there
// is.
TEST(RouteSpec, AnEpsilonThatVanishes) {
  RouteSpec spec{
      .experts = 128, .top_k = 8, .score_stage = ScoreStage::before_top_k, .renormalize = true};
  for (const float epsilon : {0.0F, 1e-20F, 9e-10F}) {
    spec.renormalize_epsilon = epsilon;
    EXPECT_EQ(resolve(spec).weigh, routing::Weigh::softmax_of_selected) << epsilon;
  }
  for (const float epsilon : {1e-9F, 1e-8F, 1e-3F}) {
    spec.renormalize_epsilon = epsilon;
    EXPECT_EQ(resolve(spec).weigh, routing::Weigh::softmax_of_all) << epsilon;
    EXPECT_EQ(resolve(spec).epsilon, epsilon);
  }
}

class RouteTensors : public ::testing::Test {
 protected:
  Context context = cpu({.threads = 1});
  RouteSpec spec{.experts = 4, .top_k = 2};
  std::vector<float> values = std::vector<float>(64);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(64);
  RouteInputs in{.logits = view(values.data(), {3, 4})};
  RouteOutputs out{.ids = view(ids.data(), {3, 2})};

  std::string message() {
    return message_of(
        [&] {
          const Buffer workspace = context.allocate(1 << 20);
          route(context, spec, in, out, workspace);
        },
        Status::invalid_argument);
  }
  void expect(const std::string& part) {
    const std::string got = message();
    EXPECT_NE(got.find(part), std::string::npos) << got << "\n  instead of " << part;
  }
};

TEST_F(RouteTensors, WhatMustBeGivenAndWhatMustNot) {
  EXPECT_EQ(message(), "nothing was thrown");
  out = {};
  expect("route: no output is given");
  out.ids = view(ids.data(), {3, 2});
  in.hidden = view(values.data(), {3, 5});
  expect("route: logits and hidden are both given");
  in.logits = {};
  expect("route: router_weight");
  in.hidden = {};
  expect("route: logits and hidden are both missing");
  in.logits = view(values.data(), {3, 4});
  in.router_weight = view(values.data(), {4, 5});
  expect("route: router_weight");
  in.router_weight = {};
  in.selection_bias = view(values.data(), {4});
  expect("route: selection_bias");
  spec.selection_bias = true;
  EXPECT_EQ(message(), "nothing was thrown");
  in.selection_bias = {};
  expect("route: selection_bias");
  spec.selection_bias = false;
  spec.hashed = true;
  expect("route: token_ids");
}

TEST_F(RouteTensors, ShapesDtypesStridesAndDevices) {
  in.logits = view(values.data(), {3, 5});
  expect("route: logits is f32 [3, 5]");
  in.logits = view(ids.data(), {3, 4});
  expect("route: logits is i32 [3, 4]");
  in.logits = view(values.data(), {12});
  expect("route: logits is f32 [12]");
  in.logits = view(values.data(), {4, 3}).transposed();
  expect("route: logits");
  in.logits = view(static_cast<float*>(nullptr), {3, 4});
  expect("route: logits");
  in.logits = view(values.data(), DType::f32, {3, 4}, {DeviceType::cuda, 0});
  expect("route: logits");
  in.logits = view(values.data(), {3, 4});
  out.ids = view(ids.data(), {3, 3});
  expect("route: ids is i32 [3, 3]");
  out.ids = view(ids.data(), {3, 2});
  out.ids.strides[0] = 1;
  expect("route: ids has a row stride of 1");
  out.ids = view(ids.data(), {3, 2});
  out.weights = view(ids.data(), {3, 2});
  expect("route: weights is i32 [3, 2]");
  out.weights = {};
  out.dense = view(values.data(), {3, 5});
  expect("route: dense is f32 [3, 5]");
}

TEST_F(RouteTensors, OutputsLieApart) {
  out.weights = view(reinterpret_cast<float*>(ids.data() + 5), {3, 2});
  expect("route: weights overlaps ids: must lie apart");
  out.weights = view(reinterpret_cast<float*>(ids.data() + 6), {3, 2});
  EXPECT_EQ(message(), "nothing was thrown");
  out.replay = view(reinterpret_cast<std::int16_t*>(ids.data() + 11), DType::i16, {3, 2});
  expect("route: replay overlaps weights: must lie apart");
  // Columns of one matrix.
  out.replay = {};
  out.ids.strides[0] = out.weights.strides[0] = 4;
  out.weights.data = ids.data() + 2;
  EXPECT_EQ(message(), "nothing was thrown");
}

TEST_F(RouteTensors, HashedIdsInRange) {
  spec.hashed = true;
  std::vector<std::int32_t> tokens = {0, 1, 2};
  std::vector<std::int64_t> table = {0, 1, 2, 3, 3, 0};
  in.token_ids = view(tokens.data(), {3});
  in.hash_table = view(table.data(), {3, 2});
  EXPECT_EQ(message(), "nothing was thrown");
  tokens[1] = 3;
  expect("route: token_ids[1] is 3: must be 0 to 2");
  tokens[1] = -1;
  expect("route: token_ids[1] is -1: must be 0 to 2");
  tokens[1] = 1;
  table[3] = 4;
  expect("route: hash_table[1, 1] is 4: must be 0 to 3");
  in.hash_table = view(table.data(), {0, 2});
  expect("route: hash_table is i64 [0, 2]: must have a row for every token id");
}

// Rows of dense weights over hidden states would be written while later ones are still to be read.
TEST_F(RouteTensors, OutputsLieApartFromInputs) {
  out.weights = view(values.data() + 11, {3, 2});
  expect("route: weights overlaps logits: must lie apart");
  out.weights = {};
  out.ids = view(values.data() + 5, i32, {3, 2});
  expect("route: ids overlaps logits: must lie apart");
  out.ids = {};
  out.dense = in.logits;
  expect("route: dense overlaps logits: must lie apart");
}

TEST_F(RouteTensors, WorkspaceAskedFor) {
  const std::size_t bytes = route_workspace_bytes(context, spec, 3, 0);
  const Buffer workspace = context.allocate(bytes);
  route(context, spec, in, out, workspace);
  const std::string got = message_of(
      [&] {
        route(context, spec, in, out, {workspace.data(), bytes - 1});
      },
      Status::invalid_argument);
  EXPECT_NE(got.find("workspace"), std::string::npos) << got;
  std::memcpy(workspace.data(), values.data(), 12 * sizeof(float));
  in.logits.data = workspace.data();
  const std::string shared =
      message_of([&] { route(context, spec, in, out, workspace); }, Status::invalid_argument);
  EXPECT_NE(shared.find("route: workspace overlaps logits: must lie apart"), std::string::npos)
      << shared;
  EXPECT_THROW(route_workspace_bytes(context, spec, -1, 0), Error);
  EXPECT_THROW(route_workspace_bytes(context, spec, 1, -1), Error);
}

// resolve() may take the softmax of the selected alone for that of all only where nothing else
// reads the sum of the selected.
TEST(RouteSpec, SharesOfAllStayWhereTheirSumIsRead) {
  RouteSpec spec{.experts = 8,
                 .top_k = 2,
                 .score = Score::softmax,
                 .renormalize = true,
                 .renormalize_epsilon = 0};
  EXPECT_EQ(resolve(spec).weigh, routing::Weigh::softmax_of_selected);
  spec.shared = {.count = 1, .weight = SharedWeight::sum_over_scale};
  EXPECT_EQ(resolve(spec).weigh, routing::Weigh::softmax_of_all);
  EXPECT_TRUE(resolve(spec).renormalize);
}

}  // namespace
}  // namespace shunt::test
