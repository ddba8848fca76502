// order on a GPU: what only a GPU can get wrong. Skipped elsewhere.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "order/order_case.hpp"

#if SHUNT_CUDA_BUILT

#include "cuda/graph.hpp"
#include "order/order_cuda.hpp"

namespace shunt::test {
namespace {

// The result of one way to lay the sort over the GPU.
template <class Plan>
OrderResult planned(const OrderCase& c, const Context& context, Plan&& plan) {
  return c.on(context, [&](const OrderSpec& s, const OrderInputs& in, const OrderOutputs& out) {
    const cuda_engine::Gpu& gpu = cuda_engine::gpu(context);
    const OrderCall call = checked_order(context, s, in, out, {});
    ordering::launch_sort(gpu, call, plan(call, ordering::sort_limits(gpu)));
  });
}

TEST(OrderGpu, EveryPlanGivesTheSame) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const int tokens : {1, 100, 1500}) {
    for (const OrderSpec& spec :
         {OrderSpec{.experts = 128, .slots = 8, .tile = 16},
          OrderSpec{.experts = 1025, .slots = 9, .tile = 4, .tile_for_empty_expert = false}}) {
      for (const Pattern pattern : {Pattern::poison, Pattern::hot}) {
        OrderCase c = make_case(spec, tokens, pattern);
        c.valid = {tokens - tokens / 7};
        const OrderResult expected = c.engine(cpu({.threads = 1}));
        for (const unsigned cluster : {1U, 2U, 4U, 8U}) {
          if (cluster > static_cast<unsigned>(context.gpu().largest_cluster)) continue;
          for (const unsigned parts : {1U, 2U, 5U, 16U}) {
            for (const unsigned threads : {64U, 256U, 1024U}) {
              const auto plan = [&](const OrderCall& call, const ordering::SortLimits& limits) {
                return ordering::make_plan(call, limits, cluster, parts, threads);
              };
              ASSERT_EQ(planned(c, context, plan), expected)
                  << name(c) << ": " << parts << " clusters of " << cluster << " blocks of "
                  << threads;
            }
          }
        }
      }
    }
  }
}

TEST(OrderGpu, EveryComparingPlanGivesTheSame) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const int tokens : {0, 1, 9, 100, 455}) {
    for (const OrderSpec& spec :
         {OrderSpec{.experts = 128, .slots = 8},
          OrderSpec{.experts = 16384, .slots = 9, .first_expert = 3, .local_experts = 5000}}) {
      for (const Pattern pattern : {Pattern::poison, Pattern::hot}) {
        OrderCase c = make_case(spec, tokens, pattern);
        c.valid = {tokens - tokens / 7};
        const OrderResult expected = c.engine(cpu({.threads = 1}));
        for (const unsigned parts : {1U, 3U, 40U}) {
          for (const unsigned threads : {32U, 160U, 1024U}) {
            for (const unsigned lanes : {1U, 2U, 8U, 32U}) {
              const auto plan = [&](const OrderCall& call, const ordering::SortLimits&) {
                return ordering::make_few_plan(call, parts, threads, lanes);
              };
              ASSERT_EQ(planned(c, context, plan), expected)
                  << name(c) << ": " << parts << " blocks of " << threads << ", " << lanes;
            }
          }
        }
      }
    }
  }
}

TEST(OrderGpu, EveryComparingPlanOfTilesGivesTheSame) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const int tokens : {0, 1, 9, 100, 113}) {
    for (const OrderSpec& spec :
         {OrderSpec{.experts = 128, .slots = 8, .tile = 16},
          OrderSpec{.experts = 8, .slots = 2, .tile = 128, .tile_for_empty_expert = false},
          OrderSpec{
              .experts = 4000, .slots = 9, .first_expert = 3, .local_experts = 1001, .tile = 5}}) {
      for (const Pattern pattern : {Pattern::poison, Pattern::hot}) {
        OrderCase c = make_case(spec, tokens, pattern);
        c.valid = {tokens - tokens / 7};
        const OrderResult expected = c.engine(cpu({.threads = 1}));
        for (const unsigned parts : {1U, 3U, 40U}) {
          for (const unsigned threads : {128U, 1024U}) {
            if (threads < static_cast<unsigned>(spec.locals())) continue;
            for (const unsigned lanes : {1U, 2U, 8U, 32U}) {
              const auto plan = [&](const OrderCall& call, const ordering::SortLimits&) {
                return ordering::make_few_tiles_plan(call, parts, threads, lanes);
              };
              ASSERT_EQ(planned(c, context, plan), expected)
                  << name(c) << ": " << parts << " blocks of " << threads << ", " << lanes;
            }
          }
        }
      }
    }
  }
}

TEST(OrderGpu, EqualsTheCpuEngine) {
  SHUNT_ON_GPU_ONLY();
  const Context here = cpu();
  const Context there = cuda();
  struct Shape {
    int experts, slots;
  };
  for (const auto [experts, slots] :
       {Shape{8, 2}, Shape{64, 6}, Shape{128, 8}, Shape{257, 9}, Shape{385, 9}, Shape{513, 11},
        Shape{896, 16}, Shape{1024, 8}, Shape{4096, 22}}) {
    for (const std::int64_t tokens : {4, 33, 127, 512, 2049, 4096, 16384, 65536}) {
      for (const Pattern pattern : {Pattern::poison, Pattern::hot, Pattern::duplicates}) {
        if (tokens == 65536 && slots > 11) continue;
        OrderCase c = make_case({.experts = experts, .slots = slots, .tile = 32}, tokens, pattern,
                                static_cast<std::uint32_t>(tokens));
        c.valid = {static_cast<std::int32_t>(tokens - 3)};
        const OrderResult expected = c.engine(here);
        ASSERT_EQ(c.engine(there), expected) << name(c);
        ASSERT_EQ(c.engine(there), expected) << name(c) << ", again";
      }
    }
  }
}

TEST(OrderGpu, MostExpertsAndUnalignedIds) {
  SHUNT_ON_GPU_ONLY();
  const Context here = cpu();
  const Context there = cuda();
  for (const OrderSpec& spec : {OrderSpec{.experts = 16384, .slots = 7},
                                OrderSpec{.experts = 65536, .slots = 5, .local_experts = 9000},
                                OrderSpec{.experts = 8192, .slots = 3, .tile = 8}}) {
    for (const std::int64_t tokens : {3, 1001, 9001}) {
      OrderCase c = make_case(spec, tokens, Pattern::distinct);
      ASSERT_EQ(c.engine(there), c.engine(here)) << name(c);
    }
  }
  // The ids begin 4 bytes past an alignment of 16.
  for (const std::int64_t tokens : {5, 700, 5000}) {
    OrderCase c = make_case({.experts = 60, .slots = 4}, tokens, Pattern::poison);
    const OrderResult expected = c.engine(here);
    std::vector<std::int32_t> shifted(c.ids.size() + 1);
    std::copy(c.ids.begin(), c.ids.end(), shifted.begin() + 1);
    const OrderResult result =
        c.with([&](const OrderSpec& s, const OrderInputs& in, const OrderOutputs& out) {
          Mirror device(there);
          device.in(view(shifted.data(), {static_cast<std::int64_t>(shifted.size())}));
          OrderInputs moved = in;
          moved.ids.data = shifted.data() + 1;
          order(there, s, mirrored(device, moved), mirrored(device, out), {});
          device.fetch();
        });
    ASSERT_EQ(result, expected) << name(c);
  }
}

// A map that the host cannot check: entries that name no local expert count as -1.
TEST(OrderGpu, IllegalMapEntriesAreSkipped) {
  SHUNT_ON_GPU_ONLY();
  OrderCase c = make_case({.experts = 50, .slots = 4, .local_experts = 10, .expert_map = true}, 300,
                          Pattern::poison);
  for (int e = 0; e < 50; ++e) c.map.push_back(e % 5 == 0 ? e / 5 : -1);
  const OrderResult expected = c.engine(cpu({.threads = 1}));
  for (int e = 0; e < 50; ++e) {
    if (e % 5 == 1) c.map[static_cast<std::size_t>(e)] = 10 + e;
    if (e % 5 == 2) c.map[static_cast<std::size_t>(e)] = INT32_MIN;
    if (e % 5 == 3) c.map[static_cast<std::size_t>(e)] = INT32_MAX;
  }
  EXPECT_EQ(c.engine(cuda()), expected);
}

TEST(OrderGpu, ZeroesAnyBytes) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const std::size_t bytes : {1, 15, 16, 17, 4099, 131073, 3000001}) {
    OrderCase c = make_case({.experts = 20, .slots = 4}, 2000, Pattern::distinct);
    c.zeroed_bytes = bytes;
    ASSERT_EQ(c.engine(context), c.reference()) << bytes;
  }
  // Not a byte further, at any alignment.
  const std::vector<std::int32_t> ids = {0, 1};
  const std::vector<unsigned char> ones(400, 1);
  for (std::int64_t begin = 0; begin < 17; ++begin) {
    for (const std::int64_t size : {0, 1, 5, 16, 33, 300}) {
      std::vector<unsigned char> memory = ones;
      const Tensor whole = view(memory.data(), DType::u8, {400});
      Mirror there(context);
      there.out(whole);
      order(context, {.experts = 2, .slots = 1}, {.ids = there.in(view(ids.data(), {2, 1}))},
            {.zeroed = there.out(whole.rows(begin, begin + size))}, {});
      there.fetch();
      std::vector<unsigned char> expected = ones;
      std::fill_n(expected.begin() + begin, size, 0);
      ASSERT_EQ(memory, expected) << begin << " " << size;
    }
  }
}

// One graph; ids, weights and the count of valid tokens change between its replays.
TEST(OrderGpu, GraphReplaysFollowTheData) {
  SHUNT_ON_GPU_ONLY();
  for (const std::int64_t tokens : {1, 64, 1000, 9000}) {
    const OrderSpec spec{.experts = 160, .slots = 8, .tile = 32};
    const Stream stream;
    const Context context = cuda({.stream = stream.get()});
    OrderCase c = make_case(spec, tokens, Pattern::distinct);
    c.valid = {static_cast<std::int32_t>(tokens)};
    std::vector<OrderCase> cases;
    for (const Pattern pattern : patterns) {
      cases.push_back(make_case(spec, tokens, pattern, 9));
      cases.back().valid = {static_cast<std::int32_t>(tokens - tokens / 3)};
    }
    // Not through with(): the graph keeps the addresses.
    const std::int64_t pairs = tokens * spec.slots;
    const std::int64_t capacity = padded_rows_capacity(spec, tokens);
    std::vector<std::int32_t> offsets(161), inverse(static_cast<std::size_t>(pairs)),
        token_ids(static_cast<std::size_t>(capacity));
    std::vector<float> weights(static_cast<std::size_t>(capacity));
    Mirror there(context);
    const OrderInputs in = mirrored(there, c.inputs());
    const OrderOutputs out =
        mirrored(there, {.offsets = view(offsets.data(), {161}),
                         .inverse = view(inverse.data(), {tokens, spec.slots}),
                         .sorted_token_ids = view(token_ids.data(), {capacity}),
                         .sorted_weights = view(weights.data(), {capacity})});
    const Graph graph(stream, [&] { order(context, spec, in, out, {}); });
    for (const OrderCase& next : cases) {
      context.copy(in.ids.data, next.ids.data(), next.ids.size() * 4);
      context.copy(in.weights.data, next.weights.data(), next.weights.size() * 4);
      context.copy(in.valid_tokens.data, next.valid.data(), 4);
      for (int again = 0; again < 2; ++again) {
        graph.replay();
        there.fetch();
        const OrderResult expected = next.reference();
        ASSERT_EQ(offsets, expected.offsets) << name(next);
        ASSERT_EQ(inverse, expected.inverse) << name(next);
        ASSERT_EQ(token_ids, expected.sorted_token_ids) << name(next);
        ASSERT_EQ(weights, expected.sorted_weights) << name(next);
      }
    }
  }
}

// Each call sorts what the call before it wrote, with every launch allowed to start early.
TEST(OrderGpu, DependentLaunchesWaitForTheirInput) {
  SHUNT_ON_GPU_ONLY();
  constexpr int calls = 12;
  for (const std::int64_t tokens : {6, 100, 1500}) {
    const Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = true});
    const std::int64_t pairs = tokens * 4;
    const OrderSpec spec{.experts = static_cast<int>(pairs), .slots = 4};
    const auto size = static_cast<std::size_t>(pairs);
    std::vector<std::vector<std::int32_t>> results(calls, std::vector<std::int32_t>(size));
    std::vector<std::int32_t> ids =
        make_case({.experts = 50, .slots = 4}, tokens, Pattern::distinct).ids;
    const auto chain = [&](const Context& on, Mirror& device) {
      Tensor input = device.in(view(ids.data(), {tokens, 4}));
      for (auto& result : results) {
        Tensor output = device.out(view(result.data(), {tokens, 4}));
        const Buffer workspace = on.allocate(order_workspace_bytes(on, spec, tokens));
        order(on, spec, {.ids = input}, {.inverse = output}, workspace);
        input = output;
      }
    };
    const Context host = cpu({.threads = 1});
    Mirror same(host);
    chain(host, same);
    const auto expected = results;
    for (auto& result : results) std::fill(result.begin(), result.end(), -5);
    Mirror there(context);
    for (auto& result : results) there.out(view(result.data(), {tokens, 4}));
    there.in(view(ids.data(), {tokens, 4}));
    const Graph graph(stream, [&] { chain(context, there); });
    for (int again = 0; again < 20; ++again) graph.replay();
    there.fetch();
    ASSERT_EQ(results, expected) << tokens;
  }
}

}  // namespace
}  // namespace shunt::test

#endif
