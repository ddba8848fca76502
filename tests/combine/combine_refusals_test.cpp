// What combine() refuses, and that it says why.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "combine/combine_case.hpp"
#include "cuda/runtime.hpp"

namespace shunt::test {
namespace {

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "not refused";
}

void expect(const std::string& what, const std::string& words) {
  EXPECT_NE(what.find(words), std::string::npos) << "no '" << words << "' in: " << what;
}

TEST(CombineSpecs, SupportsSaysWhyNot) {
  const Device device{};
  EXPECT_TRUE(supports(CombineSpec{.slots = 1}, device));
  EXPECT_EQ(supports(CombineSpec{}, device).reason, "slots is 0: must be 1 to 128");
  EXPECT_EQ(supports(CombineSpec{.slots = 129}, device).reason, "slots is 129: must be 1 to 128");
  EXPECT_EQ(supports(CombineSpec{.slots = 1, .identity_from = -2}, device).reason,
            "identity_from is -2: must be an expert id, or -1 for none");
  EXPECT_EQ(
      supports(CombineSpec{.slots = 1, .identity_from = 4, .identity_until = 4}, device).reason,
      "identity_until is 4: must be 0, or above an identity_from, here 4");
  EXPECT_EQ(supports(CombineSpec{.slots = 1, .identity_until = 4}, device).reason,
            "identity_until is 4: must be 0, or above an identity_from, here -1");
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(supports(CombineSpec{.slots = 1, .shared_scale = infinity}, device).reason,
            "shared_scale is inf: must be finite");
  const Device gpu{DeviceType::cuda, 0};
  EXPECT_EQ(supports(CombineSpec{.slots = 1}, gpu).supported, cuda_engine::built);
  EXPECT_FALSE(supports(CombineSpec{.slots = 0}, gpu));
}

TEST(CombineSpecs, Json) {
  const CombineSpec spec{.slots = 12,
                         .weighted = false,
                         .identity_from = 512,
                         .identity_until = 768,
                         .shared_gate = true,
                         .shared_scale = 0.1F};
  EXPECT_EQ(combine_spec_from_json(to_json(spec)), spec);
  EXPECT_NE(to_json(spec).find("\"shared_scale\":0.1}"), std::string::npos) << to_json(spec);
  EXPECT_EQ(combine_spec_from_json(R"({"slots": 2})"), CombineSpec{.slots = 2});
  const auto bad = [](const std::string& json, const std::string& words) {
    expect(message([&] { combine_spec_from_json(json); }), words);
  };
  bad("{}", "CombineSpec.slots is missing");
  bad(R"({"slots": 0})", "CombineSpec.slots is 0: must be an integer from 1 to 128");
  bad(R"({"slots": 2, "weigthed": true})", "CombineSpec.weigthed is unknown");
  bad(R"({"slots": 2, "weighted": "yes"})", "CombineSpec.weighted is \"yes\"");
  bad(R"({"slots": 2, "shared_scale": 1e99})", "CombineSpec.shared_scale is");
  bad(R"({"slots": 2, "identity_from": 3000000000})", "CombineSpec.identity_from is 3000000000");
  bad(R"({"slots": 2, "identity_until": 5})", "CombineSpec: identity_until is 5");
  bad(R"({"slots": 2, "identity_from": 7, "identity_until": 5})",
      "CombineSpec: identity_until is 5: must be 0, or above an identity_from, here 7");
}

TEST(Combine, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  const CombineShape shape{
      .tokens = 3, .width = 4, .experts = 4, .slots = 2, .shared = true, .residual = true};
  // `change` makes a legal call illegal.
  const auto refused = [&](const std::string& words,
                           const std::function<void(CombineCase&, CombineInputs&, Tensor&)>& change,
                           CombineSpec spec = {}) {
    CombineCase c = make_case(spec, shape);
    Matrix out(f32, 3, 4);
    CombineInputs in = c.inputs();
    Tensor y = out.tensor();
    change(c, in, y);
    expect(message([&] { combine(cpu({.threads = 1}), c.spec, in, y); }), words);
  };
  const auto nothing = [](CombineCase&, CombineInputs&, Tensor&) {};
  refused("not refused", nothing);
  refused("not refused", nothing, {.identity_from = 4, .shared_gate = true});
  std::vector<float> floats(64);
  std::vector<std::int32_t> ints(64);

  refused("combine: slots is 0", [](auto& c, auto&, auto&) { c.spec.slots = 0; });
  refused("combine: out is (none)", [](auto&, auto&, auto& y) { y = {}; });
  refused("combine: out is i32 [3, 4]", [](auto&, auto&, auto& y) { y.dtype = i32; });
  refused("combine: out has a row stride of 3", [](auto&, auto&, auto& y) { y.strides[0] = 3; });
  refused("combine: rows is (none)", [](auto&, auto& in, auto&) { in.rows = {}; });
  refused("combine: rows is f32 [6, 3]", [&](auto&, auto& in, auto&) {
    in.rows = view(floats.data(), {6, 3});
  });
  refused("combine: rows", [](auto&, auto& in, auto&) { in.rows.strides[1] = 2; });
  refused("combine: inverse is i32 [3, 3]", [&](auto&, auto& in, auto&) {
    in.inverse = view(ints.data(), {3, 3});
  });
  refused("combine: inverse[1, 0] is 6: must be -1 to 5",
          [](auto& c, auto&, auto&) { c.inverse[2] = 6; });
  refused("combine: inverse[2, 1] is -2", [](auto& c, auto&, auto&) { c.inverse[5] = -2; });
  refused("combine: weights is missing", [](auto&, auto& in, auto&) { in.weights = {}; });
  refused("combine: weights is given", [](auto& c, auto&, auto&) { c.spec.weighted = false; });
  refused("combine: ids is missing", [](auto& c, auto&, auto&) { c.spec.identity_from = 4; });
  refused("combine: ids is given", [&](auto&, auto& in, auto&) {
    in.ids = view(ints.data(), {3, 2});
  });
  refused("combine: hidden is given",
          [](auto& c, auto& in, auto&) { in.hidden = c.hidden.tensor(); });
  refused("combine: hidden is missing", [](auto&, auto& in, auto&) { in.hidden = {}; },
          {.identity_from = 4});
  refused("combine: shared is f32 [2, 4]",
          [](auto&, auto& in, auto&) { in.shared = in.shared.rows(0, 2); });
  refused("combine: shared_gate is missing", [](auto&, auto& in, auto&) { in.shared_gate = {}; },
          {.shared_gate = true});
  refused("combine: shared_gate is given",
          [&](auto&, auto& in, auto&) { in.shared_gate = view(floats.data(), {3}); });
  refused("combine: shared is missing: CombineSpec.shared_gate",
          [](auto&, auto& in, auto&) { in.shared = {}; }, {.shared_gate = true});
  refused("combine: shared is missing: CombineSpec.shared_scale",
          [](auto&, auto& in, auto&) { in.shared = {}; }, {.shared_scale = 2});
  refused("combine: residual is f32 [3, 3]", [&](auto&, auto& in, auto&) {
    in.residual = view(floats.data(), {3, 3});
  });
  refused("combine: valid_tokens is f32 [1]",
          [&](auto&, auto& in, auto&) { in.valid_tokens = view(floats.data(), {1}); });
  refused("combine: out overlaps rows: must lie apart",
          [](auto&, auto& in, auto& out) { out = in.rows.rows(2, 5); });
  // Of memory with room around what it lies over.
  const auto over = [](auto* numbers) {
    return view(static_cast<const void*>(numbers + 31 - 11), f32, {3, 4});
  };
  refused("combine: out overlaps inverse: must lie apart", [&](auto&, auto& in, auto& out) {
    in.inverse = view(ints.data() + 31, {3, 2}), out = over(ints.data());
  });
  refused("combine: out overlaps weights: must lie apart", [&](auto&, auto& in, auto& out) {
    in.weights = view(floats.data() + 31, {3, 2}), out = over(floats.data());
  });
  refused("combine: out overlaps ids: must lie apart",
          [&](auto&, auto& in, auto& out) {
            in.ids = view(ints.data() + 31, {3, 2}), out = over(ints.data());
          },
          {.identity_from = 4});
  refused("combine: out overlaps shared_gate: must lie apart",
          [&](auto&, auto& in, auto& out) {
            in.shared_gate = view(floats.data() + 31, {3}), out = over(floats.data());
          },
          {.shared_gate = true});
  refused("combine: out overlaps valid_tokens: must lie apart", [](auto&, auto& in, auto& out) {
    in.valid_tokens = view(out.template as<std::int32_t>() + 1, {1});
  });
  refused("not refused", [](auto&, auto& in, auto& out) { out = in.residual; });
  refused("combine: out overlaps shared: must be the same view, or lie apart",
          [](auto&, auto& in, auto& out) {
            out = in.shared;
            out.data = out.template as<float>() + 1;
          });
  refused("another device", [](auto&, auto& in, auto&) { in.rows.device = {DeviceType::cuda, 1}; });
}

}  // namespace
}  // namespace shunt::test
