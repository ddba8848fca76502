// route_and_order against route() followed by order(), on either engine.
#include "shunt/route_and_order.hpp"

#include <gtest/gtest.h>

#include <string>

#include "order/order_case.hpp"
#include "route/route_util.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt::test {
namespace {

struct Result {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  OrderResult order;
  bool operator==(const Result&) const = default;
};

struct FusedCase {
  RouteSpec route;
  OrderSpec order;
  RouteInputs in;
  std::vector<std::int32_t> map;
  std::size_t zeroed_bytes = 40;

  FusedCase(const RouteSpec& spec, const RouteInputs& inputs, int tile = 0)
      : route(spec),
        order{.experts = spec.experts + spec.shared.count, .slots = spec.slots(), .tile = tile},
        in(inputs) {}

  std::int64_t tokens() const { return (in.logits ? in.logits : in.hidden).shape[0]; }
  std::int64_t hidden() const { return in.hidden ? in.hidden.shape[1] : 0; }

  RouteInputs inputs(Mirror& there) const {
    return {.logits = there.in(in.logits),
            .hidden = there.in(in.hidden),
            .router_weight = there.in(in.router_weight),
            .router_bias = there.in(in.router_bias),
            .selection_bias = there.in(in.selection_bias),
            .per_expert_scale = there.in(in.per_expert_scale),
            .token_ids = there.in(in.token_ids),
            .hash_table = there.in(in.hash_table),
            .shared_logits = there.in(in.shared_logits),
            .valid_tokens = there.in(in.valid_tokens)};
  }
  Tensor expert_map(Mirror& there) const {
    if (!order.expert_map) return {};
    return there.in(view(map.data(), {static_cast<std::int64_t>(map.size())}));
  }

  // call(there, RouteOutputs, OrderOutputs)
  template <class Call>
  Result result(const Context& context, Call&& call) const {
    Result r;
    const auto pairs = at(tokens() * route.slots());
    r.ids.assign(pairs, -7);
    r.weights.assign(pairs, -7);
    OrderCase sizes{.spec = order, .ids = r.ids, .weights = r.weights, .map = map};
    sizes.zeroed_bytes = zeroed_bytes;
    r.order = sizes.with([&](const OrderSpec&, const OrderInputs&, const OrderOutputs& out) {
      Mirror there(context);
      const RouteOutputs routed{
          .ids = there.out(view(r.ids.data(), {tokens(), route.slots()})),
          .weights = there.out(view(r.weights.data(), {tokens(), route.slots()}))};
      const OrderOutputs ordered = mirrored(there, out);
      call(there, routed, ordered);
      there.fetch();
    });
    return r;
  }

  Result fused(const Context& context) const {
    return result(context, [&](Mirror& there, const RouteOutputs& routed, const OrderOutputs& out) {
      const Buffer workspace = context.allocate(
          route_and_order_workspace_bytes(context, route, order, tokens(), hidden()));
      route_and_order(context, route, inputs(there), routed, order, out, workspace,
                      expert_map(there));
      context.synchronize();
    });
  }
  Result one_after_the_other(const Context& context) const {
    return result(context, [&](Mirror& there, const RouteOutputs& routed, const OrderOutputs& out) {
      const Buffer first =
          context.allocate(route_workspace_bytes(context, route, tokens(), hidden()));
      const Buffer second = context.allocate(order_workspace_bytes(context, order, tokens()));
      shunt::route(context, route, inputs(there), routed, first);
      shunt::order(context, order,
                   {.ids = routed.ids, .weights = routed.weights, .expert_map = expert_map(there)},
                   out, second);
      context.synchronize();
    });
  }

  void expect_the_same(const Context& context, const std::string& what) const {
    const Result want = one_after_the_other(context);
    EXPECT_EQ(fused(context), want) << what;
    EXPECT_EQ(fused(context), want) << what << ", again";
  }
};

std::string about(const RouteSpec& spec, std::int64_t tokens) {
  return to_json(spec) + " tokens " + std::to_string(tokens);
}

constexpr std::int64_t token_counts[] = {0, 1, 2, 15, 16, 17, 33, 64, 128, 129, 255, 256, 257, 700};

TEST(RouteAndOrder, FromLogitsOfEveryRule) {
  const Context context = engine();
  unsigned seed = 1;
  for (const NamedRule& rule : rules(128, 8, 8, 4)) {
    for (const std::int64_t tokens : token_counts) {
      const RouteCase c =
          random_case(rule.spec, tokens, ++seed, tokens % 2 == 0 ? Values::coarse : Values::normal);
      FusedCase(rule.spec, c.inputs()).expect_the_same(context, about(rule.spec, tokens));
      FusedCase(rule.spec, c.inputs(), 16).expect_the_same(context, about(rule.spec, tokens));
      if (HasFailure()) return;
    }
  }
}

TEST(RouteAndOrder, FromLogitsOfEveryWidth) {
  const Context context = engine();
  struct Shape {
    int experts, top_k;
  };
  for (const auto [experts, top_k] :
       {Shape{1, 1}, Shape{16, 1}, Shape{60, 4}, Shape{160, 6}, Shape{257, 9}, Shape{384, 8},
        Shape{1024, 8}, Shape{4096, 64}}) {
    const RouteSpec spec{.experts = experts,
                         .top_k = top_k,
                         .score = Score::sigmoid,
                         .score_stage = ScoreStage::after_top_k};
    for (const std::int64_t tokens : token_counts) {
      if (tokens * experts > 1000000) continue;
      const RouteCase c = random_case(spec, tokens, 5, Values::coarse);
      FusedCase(spec, c.inputs()).expect_the_same(context, about(spec, tokens));
      if (HasFailure()) return;
    }
  }
}

TEST(RouteAndOrder, FromHiddenStates) {
  const Context context = engine();
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const int experts : {8, 128, 256, 500, 513}) {
    for (const std::int64_t tokens : {1, 3, 16, 17, 40, 64, 70, 128, 129, 400}) {
      for (const DType dtype : {f32, bf16}) {
        // H is cut among blocks and clusters where it is long.
        const std::int64_t width = tokens == 17 ? 72 : tokens <= 3 || tokens == 40 ? 2560 : 320;
        std::vector<float> x(at(tokens * width)), w(at(experts * width));
        for (float& v : x) v = normal(random);
        for (float& v : w) v = normal(random) / 16;
        const auto x_short = narrowed(x, bf16), w_short = narrowed(w, bf16);
        const RouteSpec spec{.experts = experts, .top_k = 8, .renormalize = true};
        RouteInputs in;
        in.hidden = dtype == f32 ? view(x.data(), {tokens, width})
                                 : view(x_short.data(), bf16, {tokens, width});
        in.router_weight = dtype == f32 ? view(w.data(), {experts, width})
                                        : view(w_short.data(), bf16, {experts, width});
        for (const int tile : {0, 8}) {
          FusedCase(spec, in, tile).expect_the_same(context, about(spec, tokens));
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(RouteAndOrder, ValidTokensLocalExpertsMapAndZeroes) {
  const Context context = engine();
  const RouteSpec spec{.experts = 64, .top_k = 6, .renormalize = true};
  for (const std::int64_t tokens : {5, 40, 200, 600}) {
    const RouteCase c = random_case(spec, tokens, 3);
    for (const std::int32_t valid : {-3, 0, 1, static_cast<std::int32_t>(tokens - 2), 9999}) {
      RouteInputs in = c.inputs();
      in.valid_tokens = view(&valid, {1});
      FusedCase one(spec, in);
      one.order.first_expert = 10;
      one.order.local_experts = 30;
      one.zeroed_bytes = 1000003;
      one.expect_the_same(context, about(spec, tokens));
      FusedCase mapped(spec, in, 4);
      mapped.order.expert_map = true;
      mapped.order.local_experts = 16;
      for (int e = 0; e < 64; ++e) mapped.map.push_back(e % 4 == 1 ? e / 4 : -1);
      mapped.expect_the_same(context, about(spec, tokens));
    }
  }
}

// One token that is padding: blocks that have much to zero end long after the first has met them.
TEST(RouteAndOrder, OneTokenThatIsNotValid) {
  const Context context = engine();
  const std::int32_t valid = 0;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> x(1024), w(at(256 * 1024));
  for (std::uint16_t& v : x) v = f32_to_bf16(normal(random));
  for (std::uint16_t& v : w) v = f32_to_bf16(normal(random));
  for (const RouteSpec& spec :
       {RouteSpec{.experts = 256, .top_k = 8, .renormalize = true},
        RouteSpec{.experts = 256,
        .top_k = 8,
        .score = Score::sigmoid,
        .selection_bias = true,
        .groups = {8, 4, GroupRank::sum_of_top_2},
        .renormalize = true},
        RouteSpec{.experts = 128, .top_k = 6, .score = Score::sigmoid, .renormalize = false}}) {
    const RouteCase c = random_case(spec, 1, 3);
    RouteInputs in = c.extras();
    in.hidden = view(x.data(), bf16, {1, 1024});
    in.router_weight = view(w.data(), bf16, {spec.experts, 1024});
    in.valid_tokens = view(&valid, {1});
    FusedCase one(spec, in);
    one.zeroed_bytes = 64 << 20;
    for (int again = 0; again < (on_gpu() ? 30 : 1); ++again) {
      one.expect_the_same(context, about(spec, 1));
      if (HasFailure()) return;
    }
  }
}

// Ids and weights that nobody asks for still reach the order.
TEST(RouteAndOrder, TheOrderAlone) {
  const Context context = engine();
  const RouteSpec spec{.experts = 32, .top_k = 3};
  for (const std::int64_t tokens : {0, 7, 90, 300}) {
    const RouteCase c = random_case(spec, tokens, 4);
    const FusedCase fused(spec, c.inputs());
    const Result want = fused.one_after_the_other(context);
    const Result got =
        fused.result(context, [&](Mirror& there, const RouteOutputs&, const OrderOutputs& out) {
          const Buffer workspace = context.allocate(
              route_and_order_workspace_bytes(context, spec, fused.order, tokens, 0));
          route_and_order(context, spec, fused.inputs(there), {}, fused.order, out, workspace);
          context.synchronize();
        });
    EXPECT_EQ(got.order, want.order) << tokens;
  }
}

std::string refusal(const RouteSpec& route, const OrderSpec& order) {
  return supports(route, order, Device{}).reason;
}

TEST(RouteAndOrder, RefusesSpecsThatDoNotBelongTogether) {
  const RouteSpec route{.experts = 8, .top_k = 2, .shared = {.count = 1}};
  EXPECT_TRUE(supports(route, {.experts = 9, .slots = 3}, Device{}));
  EXPECT_EQ(refusal(route, {.experts = 9, .slots = 2}),
            "slots of the order is 2: must be 3, the ids that routing gives a token");
  EXPECT_EQ(refusal(route, {.experts = 8, .slots = 3}),
            "experts of the order is 8: must be 9, the experts of the routing");
  EXPECT_EQ(refusal({.experts = 8, .top_k = 9}, {.experts = 8, .slots = 9}),
            supports(RouteSpec{.experts = 8, .top_k = 9}, Device{}).reason);
  EXPECT_EQ(refusal({.experts = 8, .top_k = 2}, {.experts = 8, .slots = 2, .tile = -1}),
            supports(OrderSpec{.experts = 8, .slots = 2, .tile = -1}, Device{}).reason);
}

TEST(RouteAndOrder, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  const Context context = engine();
  const RouteSpec spec{.experts = 8, .top_k = 2};
  const OrderSpec order{.experts = 8, .slots = 2};
  const RouteCase c = random_case(spec, 3, 1);
  std::vector<std::int32_t> ids(12, 5), offsets(9, 5);
  const auto bytes = route_and_order_workspace_bytes(context, spec, order, 3, 0);
  const Buffer workspace = context.allocate(bytes);
  const auto status = [&](const RouteOutputs& routed, const OrderOutputs& ordered,
                          std::size_t given) {
    try {
      route_and_order(context, spec, c.inputs(), routed, order, ordered, {workspace.data(), given});
    } catch (const Error& error) {
      return error.status();
    }
    return Status::ok;
  };
  const OrderOutputs good{.offsets = view(offsets.data(), {9})};
  EXPECT_EQ(status({}, {}, bytes), Status::invalid_argument);
  EXPECT_EQ(status({}, good, bytes - 1), Status::invalid_argument);
  Tensor strided = view(ids.data(), {3, 2});
  strided.strides[0] = 4;
  EXPECT_EQ(status({.ids = strided}, good, bytes), Status::invalid_argument);
  EXPECT_EQ(status({.ids = view(ids.data(), {3, 3})}, good, bytes), Status::invalid_argument);
  EXPECT_EQ(offsets, std::vector<std::int32_t>(9, 5));  // nothing ran
  EXPECT_EQ(status({}, good, bytes), Status::ok);
  EXPECT_EQ(offsets[8], 6);
}

#if SHUNT_CUDA_BUILT
// One graph whose logits and count of tokens change between replays, launches allowed to overlap.
TEST(RouteAndOrder, GraphReplaysFollowTheData) {
  if (!on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  for (const bool from_hidden : {false, true}) {
    for (const bool dependent : {false, true}) {
      for (const std::int64_t tokens : {1, 16, 50, 120, 256, 2000}) {
        constexpr std::int64_t width = 256;
        const RouteSpec spec{.experts = 256,
                             .top_k = 8,
                             .score = Score::sigmoid,
                             .selection_bias = true,
                             .groups = {8, 4, GroupRank::sum_of_top_2},
                             .renormalize = true};
        const Stream stream;
        const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
        RouteCase c = random_case(spec, tokens, 1);
        std::vector<float> x(at(tokens * width)), w(at(256 * width));
        std::int32_t valid = 0;
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (float& v : w) v = normal(random);
        RouteInputs in = from_hidden ? c.extras() : c.inputs();
        if (from_hidden) {
          in.hidden = view(x.data(), {tokens, width});
          in.router_weight = view(w.data(), {256, width});
        }
        in.valid_tokens = view(&valid, {1});
        const FusedCase fused(spec, in);

        Result got;
        std::vector<std::int32_t> inverse(at(tokens * 8)), offsets(257);
        got.ids.resize(at(tokens * 8));
        Mirror there(context);
        const RouteInputs inputs = fused.inputs(there);
        const Tensor ids = there.out(view(got.ids.data(), {tokens, 8}));
        const OrderOutputs out{.offsets = there.out(view(offsets.data(), {257})),
                               .inverse = there.out(view(inverse.data(), {tokens, 8}))};
        const Buffer workspace = context.allocate(
            route_and_order_workspace_bytes(context, spec, fused.order, tokens, width));
        const Graph graph(stream, [&] {
          for (int twice = 0; twice < 2; ++twice) {
            route_and_order(context, spec, inputs, {.ids = ids}, fused.order, out, workspace);
          }
        });
        for (int round = 0; round < 6; ++round) {
          for (float& v : c.logits) v = normal(random);
          for (float& v : x) v = normal(random);
          valid = static_cast<std::int32_t>(tokens - round % 3 * tokens / 3);
          if (from_hidden) {
            context.copy(inputs.hidden.data, x.data(), x.size() * 4);
          } else {
            context.copy(inputs.logits.data, c.logits.data(), c.logits.size() * 4);
          }
          context.copy(inputs.valid_tokens.data, &valid, 4);
          graph.replay();
          there.fetch();
          const Result want = fused.one_after_the_other(context);
          ASSERT_EQ(got.ids, want.ids) << tokens << " " << from_hidden << " " << round;
          ASSERT_EQ(offsets, want.order.offsets) << tokens << " " << from_hidden;
          ASSERT_EQ(inverse, want.order.inverse) << tokens << " " << from_hidden;
        }
      }
    }
  }
}
#endif

}  // namespace
}  // namespace shunt::test
