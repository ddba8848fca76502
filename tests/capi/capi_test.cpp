// The C header compiled as C++, and that C reaches every member of every struct of C++.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "capi/call.hpp"
#include "capi/specs.hpp"
#include "shunt/c/shunt.h"

namespace shunt::test {
namespace {

using capi::Call;
using capi::to_spec;

// How many members an aggregate has.
struct Anything {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor)
};
template <class Aggregate, class... Members>
constexpr int members() {
  if constexpr (requires { Aggregate{Members{}..., Anything{}}; }) {
    return members<Aggregate, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

// A member that is added to a struct of C++ must be added to that of C, and then here.
TEST(CApi, NothingOfCppIsMissing) {
  EXPECT_EQ(members<CudaOptions>(), 3);
  EXPECT_EQ(members<RouteSpec>(), 20);
  EXPECT_EQ(members<Groups>(), 4);
  EXPECT_EQ(members<SharedSlots>(), 2);
  EXPECT_EQ(members<RouteInputs>(), 10);
  EXPECT_EQ(members<RouteOutputs>(), 5);
  EXPECT_EQ(members<OrderSpec>(), 8);
  EXPECT_EQ(members<OrderInputs>(), 4);
  EXPECT_EQ(members<OrderOutputs>(), 11);
  EXPECT_EQ(members<GatherSpec>(), 5);
  EXPECT_EQ(members<GatherInputs>(), 5);
  EXPECT_EQ(members<QuantiseSpec>(), 3);
  EXPECT_EQ(members<PackedMatrix>(), 9);
  EXPECT_EQ(members<PreparedWeights>(), 10);
  EXPECT_EQ(members<GroupedGemmSpec>(), 10);
  EXPECT_EQ(members<GroupedGemmInputs>(), 8);
  EXPECT_EQ(members<IndexedGemmInputs>(), 4);
  EXPECT_EQ(members<ActivationSpec>(), 8);
  EXPECT_EQ(members<CombineSpec>(), 6);
  EXPECT_EQ(members<CombineInputs>(), 9);
  EXPECT_EQ(members<ShuffleSpec>(), 6);
  EXPECT_EQ(members<ScatterAddSpec>(), 1);
  EXPECT_EQ(members<ScatterAddInputs>(), 3);
  EXPECT_EQ(members<ExpertWeights>(), 10);
  EXPECT_EQ(members<LayerWeights>(), 17);
  EXPECT_EQ(members<LayerOptions>(), 6);
  EXPECT_EQ(members<LayerInputs>(), 8);
  EXPECT_EQ(members<LayerOutputs>(), 3);
  EXPECT_EQ(members<CheckpointLayer>(), 4);
}

TEST(CApi, DefaultsAreThoseOfCpp) {
  const Call call("test");
  const shunt_route_spec route = SHUNT_ROUTE_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &route), RouteSpec{});
  const shunt_order_spec order = SHUNT_ORDER_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &order), OrderSpec{});
  const shunt_gather_spec gather = SHUNT_GATHER_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &gather), GatherSpec{});
  const shunt_grouped_gemm_spec gemm = SHUNT_GROUPED_GEMM_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &gemm), GroupedGemmSpec{});
  const shunt_activation_spec activation = SHUNT_ACTIVATION_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &activation), ActivationSpec{});
  const shunt_combine_spec combine = SHUNT_COMBINE_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &combine), CombineSpec{});
  const shunt_shuffle_spec shuffle = SHUNT_SHUFFLE_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &shuffle), ShuffleSpec{});
  const shunt_scatter_add_spec scatter_add = SHUNT_SCATTER_ADD_SPEC_INIT;
  EXPECT_EQ(to_spec(call, &scatter_add), ScatterAddSpec{});
  const shunt_layer_options options = SHUNT_LAYER_OPTIONS_INIT;
  EXPECT_EQ(capi::to_options(call, &options).dtype, LayerOptions{}.dtype);
  EXPECT_EQ(capi::to_options(call, nullptr).dtype, LayerOptions{}.dtype);
  EXPECT_EQ(capi::to_options(call, &options).format, LayerOptions{}.format);
}

TEST(CApi, EveryFieldIsWithinReach) {
  const Call call("test");
  const shunt_route_spec route = {sizeof route, 7, 3, 2, 1,     1, 30, 1, 2, 2,     1, 1, 0.5F, 1,
                                  2.5F,         0, 1, 1, 0.25F, 2, 3,  1, 1, 0.75F, 1};
  EXPECT_EQ(to_spec(call, &route), (RouteSpec{7,
                                              3,
                                              Score::sigmoid,
                                              ScoreStage::after_top_k,
                                              0.75F,
                                              true,
                                              30,
                                              true,
                                              {2, 2, GroupRank::sum_of_top_2, 1},
                                              true,
                                              0.5F,
                                              EpsilonRule::floor,
                                              2.5F,
                                              false,
                                              true,
                                              true,
                                              0.25F,
                                              {2, SharedWeight::sigmoid_gate},
                                              true,
                                              true}));
  // 0 of a caller who names no scale.
  shunt_route_spec unscaled = route;
  unscaled.logit_scale = 0;
  EXPECT_EQ(to_spec(call, &unscaled).logit_scale, 1);
  const shunt_order_spec order = {sizeof order, 8, 2, 1, 4, 1, 16, 99, 0};
  EXPECT_EQ(to_spec(call, &order), (OrderSpec{8, 2, 1, 4, true, 16, 99, false}));
  const shunt_gather_spec gather = {sizeof gather, 2, 1, SHUNT_QUANTISE_ROW, 0.5F, 1, 0};
  EXPECT_EQ(to_spec(call, &gather), (GatherSpec{2, true, Quantise::row, 0.5F, true}));
  const shunt_quantise_spec quantise = {sizeof quantise, SHUNT_QUANTISE_BLOCK_128, 0.5F, 1, 0};
  EXPECT_EQ(to_spec(call, &quantise), (QuantiseSpec{Quantise::block_128, 0.5F, true}));
  // A caller's whose header has no quantisation.
  shunt_gather_spec older = {16, 2, 1, 77, 77, 77, 77};
  EXPECT_EQ(to_spec(call, &older), (GatherSpec{2, true}));
  const shunt_grouped_gemm_spec gemm = {sizeof gemm, 2, SHUNT_BF16,           3,      4, 1,
                                        0,           1, SHUNT_ROWS_FP8_BLOCK, "int4", 1, 0};
  EXPECT_EQ(to_spec(call, &gemm), (GroupedGemmSpec{.groups = 2,
                                                   .n = 3,
                                                   .k = 4,
                                                   .dtype = bf16,
                                                   .bias = true,
                                                   .prepared = false,
                                                   .format = {Format::int4, 32},
                                                   .rows = RowFormat::fp8_block,
                                                   .batch_invariant = true,
                                                   .fast_accumulation = true}));
  // A caller's whose header has no fast_accumulation.
  const shunt_grouped_gemm_spec without_sums = {56, 2, SHUNT_BF16,           3,      4,  1,
                                                0,  1, SHUNT_ROWS_FP8_BLOCK, "int4", 77, 77};
  EXPECT_FALSE(to_spec(call, &without_sums).fast_accumulation);
  const shunt_layer_options layer = {sizeof layer,         SHUNT_F16, 1, 1,
                                     SHUNT_ROWS_FP8_TOKEN, "int4:64", 1, 0};
  EXPECT_TRUE(capi::to_options(call, &layer).fast_accumulation);
  shunt_grouped_gemm_spec gemm_of_tomorrow = gemm;
  gemm_of_tomorrow.reserved = 1;
  EXPECT_THROW(to_spec(call, &gemm_of_tomorrow), Error);
  shunt_layer_options layer_of_tomorrow = layer;
  layer_of_tomorrow.reserved = 1;
  EXPECT_THROW(capi::to_options(call, &layer_of_tomorrow), Error);
  EXPECT_EQ(capi::to_options(call, &layer).dtype, f16);
  EXPECT_TRUE(capi::to_options(call, &layer).in_place);
  EXPECT_TRUE(capi::to_options(call, &layer).batch_invariant);
  EXPECT_EQ(capi::to_options(call, &layer).format, (FormatSpec{Format::int4, 64}));
  EXPECT_EQ(capi::to_options(call, &layer).rows, RowFormat::fp8_token);
  const shunt_activation_spec activation = {
      sizeof activation, SHUNT_ACTIVATION_SITU, 1, 1.5F, 7, 1, 1, 4, 25};
  EXPECT_EQ(to_spec(call, &activation),
            (ActivationSpec{Activation::situ, true, 1.5F, 7, LimitOn::output, 1, 4, 25}));
  // A caller's whose header has no betas.
  const shunt_activation_spec without = {32, 4, 0, 1.5F, 7, 1, 1, 77, 77};
  EXPECT_EQ(to_spec(call, &without),
            (ActivationSpec{Activation::gelu, false, 1.5F, 7, LimitOn::output, 1}));
  const shunt_combine_spec combine = {sizeof combine, 4, 0, 64, 1, 0.5F, 96};
  EXPECT_EQ(to_spec(call, &combine), (CombineSpec{4, false, 64, 96, true, 0.5F}));
  const shunt_shuffle_spec shuffle = {sizeof shuffle, 2, 8, 3, 5, 1, 1};
  EXPECT_EQ(to_spec(call, &shuffle), (ShuffleSpec{2, 8, 3, 5, true, true}));
  const shunt_scatter_add_spec scatter_add = {sizeof scatter_add, 0, 0};
  EXPECT_EQ(to_spec(call, &scatter_add), ScatterAddSpec{false});
}

TEST(CApi, ErrorsAreEachThreadsOwn) {
  EXPECT_EQ(shunt_context_create_cpu(-5, nullptr), SHUNT_INVALID_ARGUMENT);
  const std::string here = shunt_last_error();
  EXPECT_NE(here, "");
  std::thread([] {
    EXPECT_STREQ(shunt_last_error(), "");
    EXPECT_EQ(shunt_padded_rows_capacity(nullptr, 0, nullptr), SHUNT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(shunt_last_error()).find("shunt_padded_rows_capacity"),
              std::string::npos);
  }).join();
  EXPECT_EQ(shunt_last_error(), here);
  // Functions without a status leave it alone.
  EXPECT_EQ(shunt_buffer_bytes(nullptr), 0U);
  shunt_buffer_destroy(nullptr);
  EXPECT_EQ(shunt_last_error(), here);
  EXPECT_EQ(shunt_known_families(nullptr, 0, nullptr), SHUNT_OK);
  EXPECT_STREQ(shunt_last_error(), "");
}

TEST(CApi, TextsAreCutBetweenCharacters) {
  const Call call("test");
  char text[8];
  std::size_t length = 0;
  call.text("ab\xC3\xA4z", text, 4, &length);  // the third character takes two bytes
  EXPECT_STREQ(text, "ab");
  EXPECT_EQ(length, 5U);
  call.text("ab\xC3\xA4z", text, 5, &length);
  EXPECT_STREQ(text, "ab\xC3\xA4");
  call.text("", text, 1, &length);
  EXPECT_STREQ(text, "");
}

TEST(CApi, LongMessagesAreCut) {
  const std::string folder(10000, 'x');
  shunt_checkpoint* checkpoint = nullptr;
  EXPECT_NE(shunt_checkpoint_open(folder.c_str(), &checkpoint), SHUNT_OK);
  EXPECT_LT(std::strlen(shunt_last_error()), 2048U);
}

}  // namespace
}  // namespace shunt::test
