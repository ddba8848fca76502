// What a layer's plan decides: pure functions, the same with and without a GPU.
#include "layer/plan.hpp"

#include <gtest/gtest.h>

namespace shunt {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

TEST(LayerPlan, ASharedExpertRunsBesideRoutingWhereThatHidesMoreThanAForkCosts) {
  EXPECT_FALSE(plan_shared(Device{}, 64, 20).beside);
  EXPECT_FALSE(plan_shared(gpu, 64, 2).beside);
  const SharedPlan few = plan_shared(gpu, 64, 20), many = plan_shared(gpu, 4096, 200);
  EXPECT_TRUE(few.beside);
  EXPECT_EQ(few.us, 20);
  EXPECT_GT(few.hidden, 5);
  EXPECT_LT(few.hidden, 20);
  EXPECT_TRUE(many.beside);
  EXPECT_GT(many.hidden, few.hidden);
}

TEST(LayerPlan, FewPairsAreRoutedAndOrderedAtOnceUnlessLaunchesAreDependent) {
  LayerSpec spec;
  spec.route = {.experts = 64, .top_k = 8};
  EXPECT_TRUE(routes_and_orders_at_once(spec, gpu, 128, false));
  EXPECT_FALSE(routes_and_orders_at_once(spec, gpu, 129, false));
  EXPECT_FALSE(routes_and_orders_at_once(spec, gpu, 1, true));
  EXPECT_FALSE(routes_and_orders_at_once(spec, Device{}, 1, false));
}

TEST(LayerPlan, SoFewPairsAreOrderedByTheProductsThemselves) {
  LayerSpec spec;
  spec.route = {.experts = 64, .top_k = 4};
  const auto in_products = [&](Device device, std::int64_t tokens, IdsFrom from = IdsFrom::router,
                               RowFormat rows = RowFormat::as_dtype) {
    return orders_in_products(spec, device, tokens, from, rows);
  };
  EXPECT_TRUE(in_products(gpu, 8));
  EXPECT_FALSE(in_products(gpu, 9));  // more rows than a tile has
  EXPECT_FALSE(in_products(Device{}, 1));
  spec.route.top_k = 8;
  EXPECT_TRUE(in_products(gpu, 4));
  EXPECT_FALSE(in_products(gpu, 5));
  EXPECT_TRUE(in_products(gpu, 2, IdsFrom::elsewhere));
  EXPECT_FALSE(in_products(gpu, 3, IdsFrom::elsewhere));
  EXPECT_TRUE(in_products(gpu, 4, IdsFrom::router, RowFormat::fp8_block));
  EXPECT_TRUE(in_products(gpu, 1, IdsFrom::elsewhere, RowFormat::fp8_block));
  EXPECT_FALSE(in_products(gpu, 2, IdsFrom::elsewhere, RowFormat::fp8_block));
  spec.latent = spec.experts.hidden = 64;  // rows are a projection's, ids are older
  EXPECT_TRUE(in_products(gpu, 4));
  spec.expert_norm.enabled = true;  // of as many rows as an order says
  EXPECT_FALSE(in_products(gpu, 4));
}

TEST(LayerPlan, OneTokensRowsAreAddedUpWhereNothingElseJoinsThem) {
  LayerSpec spec;
  spec.route = {.experts = 64, .top_k = 8};
  EXPECT_TRUE(adds_up(spec, 1));
  EXPECT_FALSE(adds_up(spec, 2));
  spec.shared.intermediate = 32;
  EXPECT_FALSE(adds_up(spec, 1));
  spec.latent = spec.experts.hidden = 64;  // the shared expert joins behind their projection
  spec.output_norm.enabled = spec.output_bias = true;
  EXPECT_TRUE(adds_up(spec, 1));
  spec.expert_norm.enabled = true;
  EXPECT_FALSE(adds_up(spec, 1));
  spec.expert_norm.enabled = false;
  spec.route.top_k = 9;
  EXPECT_FALSE(adds_up(spec, 1));
}

}  // namespace
}  // namespace shunt
