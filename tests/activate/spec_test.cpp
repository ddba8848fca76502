#include <gtest/gtest.h>

#include <string>

#include "shunt/activate.hpp"
#include "shunt/error.hpp"

namespace shunt {
namespace {

TEST(ActivationSpec, JsonRoundTrip) {
  for (const ActivationSpec& spec :
       {ActivationSpec{}, ActivationSpec{.alpha = 1.702F, .limit = 7, .up_offset = 1},
        ActivationSpec{.kind = Activation::relu2, .gated = false},
        ActivationSpec{.limit = 2.5F, .limit_on = LimitOn::output},
        ActivationSpec{.kind = Activation::situ, .beta = 4, .linear_beta = 25}}) {
    EXPECT_EQ(activation_spec_from_json(to_json(spec)), spec) << to_json(spec);
  }
}

TEST(ActivationSpec, RefusesJsonByName) {
  for (const auto& [json, word] :
       {std::pair<const char*, const char*>{R"({"kind": "swish"})", "swish"},
        {R"({"limits": 7})", "limits"},
        {R"({"alpha": -1})", "alpha"},
        {R"({"limit": "7"})", "limit"},
        {R"({"gated": false, "up_offset": 1})", "up_offset"},
        {R"({"beta": 4})", "beta"},
        {R"({"kind": "situ", "linear_beta": -1})", "linear_beta"},
        {"[]", "ActivationSpec"}}) {
    try {
      activation_spec_from_json(json);
      ADD_FAILURE() << json;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

TEST(ActivationSpec, Words) {
  EXPECT_EQ(describe(ActivationSpec{}), "SwiGLU");
  EXPECT_EQ(describe(ActivationSpec{.alpha = 1.702F, .limit = 7, .up_offset = 1}),
            "clamped SwiGLU (alpha 1.702, limit 7 on the input, up +1)");
  EXPECT_EQ(describe(ActivationSpec{.kind = Activation::relu2, .gated = false}), "ReLU^2");
  EXPECT_EQ(describe(ActivationSpec{.kind = Activation::situ, .beta = 4, .linear_beta = 25}),
            "SiTU-GLU (beta 4, linear beta 25)");
}

}  // namespace
}  // namespace shunt
