// What order() refuses, and that it says why.
#include <gtest/gtest.h>

#include <functional>

#include "cuda/runtime.hpp"
#include "order/order_case.hpp"

namespace shunt::test {
namespace {

void refused(const std::function<void()>& call, Status status,
             const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "not refused; expected words: " << words[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    const std::string what = error.what();
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    for (const std::string& word : words) {
      EXPECT_NE(what.find(word), std::string::npos) << "no '" << word << "' in: " << what;
    }
  }
}

TEST(OrderSpecs, SupportsSaysWhyNot) {
  const Device device{};
  EXPECT_TRUE(supports(OrderSpec{.experts = 1, .slots = 1}, device));
  EXPECT_TRUE(supports(OrderSpec{.experts = 65536, .slots = 128, .tile = 65536}, device));
  const auto reason = [&](const OrderSpec& spec) { return supports(spec, device).reason; };
  EXPECT_EQ(reason({.slots = 1}), "experts is 0: must be 1 to 65536");
  EXPECT_EQ(reason({.experts = 65537, .slots = 1}), "experts is 65537: must be 1 to 65536");
  EXPECT_EQ(reason({.experts = 4}), "slots is 0: must be 1 to 128");
  EXPECT_EQ(reason({.experts = 4, .slots = 129}), "slots is 129: must be 1 to 128");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .first_expert = 4}),
            "first_expert is 4: must be 0 to experts - 1, 3");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .first_expert = 2, .local_experts = 3}),
            "local_experts is 3: must be 1 to experts - first_expert, 2, or -1 for all");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .local_experts = 0}),
            "local_experts is 0: must be 1 to experts - first_expert, 4, or -1 for all");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .first_expert = 1, .expert_map = true}),
            "first_expert is 1: must be 0 with expert_map, which renumbers by itself");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .tile = -1}),
            "tile is -1: must be 1 to 65536, or 0 for the compact form only");
  EXPECT_EQ(reason({.experts = 4, .slots = 1, .sentinel = -2}),
            "sentinel is -2: must be at least the number of tokens, or -1 for that number");
  const Device gpu{DeviceType::cuda, 0};
  if (supports(OrderSpec{.experts = 4, .slots = 1}, gpu)) {
    EXPECT_TRUE(supports(OrderSpec{.experts = 16384, .slots = 1}, gpu));
    EXPECT_EQ(supports(OrderSpec{.experts = 16385, .slots = 1}, gpu).reason,
              "local_experts is 16385: the CUDA engine sorts at most 16384");
    EXPECT_EQ(supports(OrderSpec{.experts = 8193, .slots = 1, .tile = 8}, gpu).reason,
              "local_experts is 8193: the CUDA engine sorts at most 8192 into padded tiles");
  } else {
    EXPECT_EQ(supports(OrderSpec{.experts = 4, .slots = 1}, gpu).reason,
              "order: this build has no CUDA engine (SHUNT_CUDA=ON builds it in)");
  }
  EXPECT_FALSE(supports(GatherSpec{.slots = 0}, device));
  EXPECT_EQ(supports(GatherSpec{.slots = 1}, Device{DeviceType::cuda, 0}).supported,
            cuda_engine::built);
}

TEST(OrderSpecs, Json) {
  const OrderSpec spec{.experts = 256,
                       .slots = 8,
                       .first_expert = 64,
                       .local_experts = 32,
                       .tile = 128,
                       .sentinel = 1 << 20,
                       .tile_for_empty_expert = false};
  EXPECT_EQ(order_spec_from_json(to_json(spec)), spec);
  EXPECT_EQ(order_spec_from_json(R"({"experts": 3, "slots": 2})"),
            (OrderSpec{.experts = 3, .slots = 2}));
  EXPECT_EQ(order_spec_from_json(to_json(OrderSpec{.experts = 8, .slots = 1, .expert_map = true})),
            (OrderSpec{.experts = 8, .slots = 1, .expert_map = true}));
  const auto bad = [](const std::string& json, const std::string& word) {
    refused([&] { order_spec_from_json(json); }, Status::invalid_argument, {"OrderSpec", word});
  };
  bad(R"({"experts": 3})", "slots is missing");
  bad(R"({"slots": 3})", "experts is missing");
  bad(R"({"experts": 3, "slots": 2, "tiles": 4})", "tiles is unknown");
  bad(R"({"experts": "3", "slots": 2})", "experts is \"3\"");
  bad(R"({"experts": 1e9, "slots": 2})", "experts is");
  bad(R"({"experts": 3, "slots": 2, "tile": -4})", "tile is -4");
  bad(R"({"experts": 3, "slots": 2, "expert_map": 1})", "expert_map is 1");
  bad(R"({"experts": 3, "slots": 2, "first_expert": 3})", "first_expert is 3");
  bad(R"({"experts": 3, "slots": 2)", "not JSON");
  bad("[]", "must be a JSON object");

  const GatherSpec gather{.slots = 4, .scale_by_weight = true};
  EXPECT_EQ(gather_spec_from_json(to_json(gather)), gather);
  const GatherSpec quantised{.slots = 4,
                             .quantise = Quantise::block_128,
                             .scale_upper_bound = 0.1F,
                             .power_of_two_scales = true};
  EXPECT_EQ(gather_spec_from_json(to_json(quantised)), quantised);
  EXPECT_NE(to_json(quantised).find("\"scale_upper_bound\":0.1,"), std::string::npos);
  const auto bad_gather = [](const std::string& json, const std::string& word) {
    refused([&] { gather_spec_from_json(json); }, Status::invalid_argument, {"GatherSpec", word});
  };
  bad_gather(R"({"slots": 4, "scale": true})", "GatherSpec.scale is unknown");
  bad_gather(R"({"slots": 4, "quantise": "column"})", "quantise is \"column\"");
  bad_gather(R"({"slots": 4, "quantise": "row", "scale_upper_bound": -1})",
             "scale_upper_bound is -1");
  bad_gather(R"({"slots": 4, "power_of_two_scales": true})",
             "power_of_two_scales is given, but quantise is none");
  bad_gather(R"({"slots": 4, "scale_upper_bound": 2})",
             "scale_upper_bound is given, but quantise is none");
}

// Each change makes one legal call illegal.
struct Call {
  OrderSpec spec{.experts = 8, .slots = 2, .tile = 4};
  std::vector<std::int32_t> ints = std::vector<std::int32_t>(100), made = ints;
  std::vector<float> floats = std::vector<float>(100);
  OrderInputs in{.ids = view(ints.data(), {5, 2}), .weights = view(floats.data(), {5, 2})};
  OrderOutputs out{.offsets = view(made.data(), {9})};
  std::size_t missing_bytes = 0;

  void run() {
    const Context context = cpu({.threads = 1});
    const Buffer workspace = context.allocate(4096);
    const std::size_t needed =
        supports(spec, context.device()) ? order_workspace_bytes(context, spec, 5) : 0;
    order(context, spec, in, out, {workspace.data(), needed - missing_bytes});
  }
};

void refused(const std::function<void(Call&)>& change, const std::vector<std::string>& words,
             Status status = Status::invalid_argument) {
  Call call;
  change(call);
  refused([&] { call.run(); }, status, words);
}

TEST(Order, RefusesBadArguments) {
  EXPECT_NO_THROW(Call().run());
  refused([](Call& c) { c.spec.tile = -3; }, {"order: tile is -3"});
  refused([](Call& c) { c.in.ids = {}; }, {"order: ids is (none)", "missing"});
  refused(
      [](Call& c) {
        c.in.ids = view(c.ints.data(), {5, 3});
      },
      {"order: ids is i32 [5, 3]", "i32 [any, 2]"});
  refused([](Call& c) { c.in.ids = view(c.floats.data(), {5, 2}); }, {"order: ids is f32", "i32"});
  refused([](Call& c) { c.in.ids.strides[0] = 3; }, {"order: ids", "dense"});
  refused([](Call& c) { c.in.ids.data = nullptr; }, {"order: ids", "null"});
  refused([](Call& c) { c.in.ids.device = {DeviceType::cuda, 0}; }, {"order: ids", "device"});
  refused([](Call& c) { c.in.weights = view(c.floats.data(), {5}); }, {"order: weights", "rank"});
  refused(
      [](Call& c) {
        c.in.weights = {};
        c.out.weights = view(c.floats.data(), {10});
      },
      {"order: weights is missing"});
  refused([](Call& c) { c.in.valid_tokens = view(c.ints.data(), {2}); }, {"order: valid_tokens"});
  refused([](Call& c) { c.in.expert_map = view(c.ints.data(), {8}); },
          {"order: expert_map is given", "OrderSpec.expert_map"});
  refused([](Call& c) { c.spec.expert_map = true; }, {"order: expert_map is missing"});
  refused(
      [](Call& c) {
        c.spec.expert_map = true;
        c.ints[3] = 8;
        c.in.expert_map = view(c.ints.data(), {8});
      },
      {"order: expert_map[3] is 8", "-1 to 7"});
  refused([](Call& c) { c.spec.sentinel = 4; }, {"order: sentinel is 4", "at least 5"});
  refused([](Call& c) { c.out = {}; }, {"order: no output"});
  refused(
      [](Call& c) {
        c.spec.tile = 0;
        c.out.num_sorted_tiles = view(c.ints.data(), {1});
      },
      {"order: tile is 0"});
  refused([](Call& c) { c.out.offsets = view(c.ints.data(), {8}); }, {"order: offsets", "[9]"});
  refused([](Call& c) { c.out.permutation = view(c.ints.data(), {9}); },
          {"order: permutation", "[10]"});
  refused([](Call& c) { c.out.inverse = view(c.ints.data(), {10}); }, {"order: inverse", "[5, 2]"});
  refused([](Call& c) { c.out.weights = view(c.floats.data(), {11}); },
          {"order: output weights", "[10]"});
  refused([](Call& c) { c.out.sorted_token_ids = view(c.ints.data(), {39}); },
          {"order: sorted_token_ids", "[40]"});
  refused([](Call& c) { c.out.sorted_weights = view(c.floats.data(), {41}); },
          {"order: sorted_weights", "[40]"});
  refused([](Call& c) { c.out.sorted_expert_ids = view(c.ints.data(), {40}); },
          {"order: sorted_expert_ids", "[10]"});
  refused([](Call& c) { c.out.num_tokens_post_padded = view(c.floats.data(), {1}); },
          {"order: num_tokens_post_padded", "i32"});
  refused(
      [](Call& c) {
        c.out.padded_inverse = view(c.ints.data(), {2, 5});
      },
      {"order: padded_inverse", "[5, 2]"});
  refused(
      [](Call& c) {
        c.out.zeroed = view(c.ints.data(), {4, 4});
        c.out.zeroed.strides[0] = 8;
      },
      {"order: zeroed", "dense"});
  for (const int rank : {-1, 100}) {
    refused(
        [rank](Call& c) {
          c.out.zeroed = view(c.ints.data(), {4, 4});
          c.out.zeroed.rank = rank;
        },
        {"order: zeroed", "of rank " + std::to_string(rank)});
  }
  refused(
      [](Call& c) {
        c.out.zeroed = view(c.ints.data(), {4, 4});
        c.out.zeroed.shape[0] = -1;
      },
      {"order: zeroed", "[-1, 4]"});
  refused([](Call& c) { c.out.weights = view(c.floats.data(), {10}); },
          {"order: output weights overlaps weights: must lie apart"});
  refused(
      [](Call& c) {
        c.out.inverse = view(c.ints.data() + 9, {5, 2});
      },
      {"order: inverse overlaps ids: must lie apart"});
  refused([](Call& c) { c.out.zeroed = view(c.floats.data() + 9, {4}); },
          {"order: zeroed overlaps weights: must lie apart"});
  Call empty;
  empty.out.zeroed = view(empty.ints.data(), {3, 0});
  empty.out.zeroed.strides = {1, 1};
  EXPECT_NO_THROW(empty.run());
  refused([](Call& c) { c.missing_bytes = 1; }, {"order: workspace has", "are needed"});
}

TEST(Order, RefusesOperandsInTheWorkspace) {
  const Context context = cpu({.threads = 1});
  Call call;
  const Buffer workspace = context.allocate(order_workspace_bytes(context, call.spec, 5));
  const auto with = [&](const OrderInputs& in, const OrderOutputs& out, const char* words) {
    refused([&] { order(context, call.spec, in, out, workspace); }, Status::invalid_argument,
            {words});
  };
  OrderInputs in = call.in;
  in.ids.data = workspace.data();
  with(in, call.out, "order: workspace overlaps ids: must lie apart");
  OrderOutputs out = call.out;
  out.offsets.data = workspace.data();
  with(call.in, out, "order: workspace overlaps offsets: must lie apart");
}

TEST(Order, RefusesSizesThatOverflow) {
  const OrderSpec spec{.experts = 65536, .slots = 128, .tile = 65536};
  EXPECT_EQ(padded_rows_capacity(spec, 0), std::int64_t{65536} * 65536);
  refused([&] { padded_rows_capacity(spec, INT64_MAX / 2); }, Status::invalid_argument,
          {"overflows"});
  refused([&] { padded_rows_capacity(spec, -1); }, Status::invalid_argument, {"tokens is -1"});
  Call call;
  call.spec = spec;
  call.in.ids = view(call.ints.data(), {0, 128});
  call.in.weights = {};
  call.out = {.num_sorted_tiles = view(call.ints.data(), {1})};
  refused([&] { call.run(); }, Status::invalid_argument, {"padded rows, more than 2147483647"});
  call.in.ids = view(call.ints.data(), {std::int64_t{1} << 24, 128});
  refused([&] { call.run(); }, Status::invalid_argument, {"more than 2147483647 pairs"});
}

}  // namespace
}  // namespace shunt::test
