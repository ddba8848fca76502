// route() in CUDA graphs: between replays change the rows, their order, and how many are valid.
#include "route/route_util.hpp"
#include "shunt/order.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt::test {
namespace {

// Who may start before its predecessor has ended.
struct Overlap {
  bool rows = false, route = false;
};

// One graph, twice over: a gather writes the rows that two calls of route read, one of them with
// every output. Rows are hidden states of `width`, or logits when that is 0.
void expect_to_follow(const RouteSpec& spec, std::int64_t tokens, std::int64_t width, DType dtype,
                      Overlap overlap) {
  SCOPED_TRACE(to_json(spec));
  SCOPED_TRACE(testing::Message() << tokens << " tokens, width " << width << " " << to_string(dtype)
                                  << (overlap.rows ? ", rows overlap" : "")
                                  << (overlap.route ? ", route overlaps" : ""));
  const Stream stream;
  const Context before = cuda({.stream = stream.get(), .dependent_launch = overlap.rows});
  const Context context = cuda({.stream = stream.get(), .dependent_launch = overlap.route});
  const Context plain = cuda(), host = cpu({.threads = 2});
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<std::uint32_t>& memory, std::int64_t count) {
    memory.resize(at(bytes(dtype, count) / 4 + 1));
    for (std::int64_t i = 0; i < count; ++i) store_f32(memory.data(), dtype, i, normal(random));
  };

  const RouteCase c = random_case(spec, tokens, 5);
  const std::int64_t columns = width > 0 ? width : spec.columns();
  std::vector<std::uint32_t> source, rows, router;
  fill(source, tokens * columns);
  fill(rows, tokens * columns);
  fill(router, spec.columns() * width);
  std::vector<std::int32_t> permutation(at(tokens));
  for (std::size_t t = 0; t < permutation.size(); ++t) permutation[t] = static_cast<int>(t);
  const auto all = static_cast<std::int32_t>(tokens);
  std::int32_t valid = 0;
  const Tensor from = view(source.data(), dtype, {tokens, columns});
  const Tensor ordered = view(rows.data(), dtype, {tokens, columns});
  RouteInputs in = c.extras();
  (width > 0 ? in.hidden : in.logits) = ordered;
  if (width > 0) in.router_weight = view(router.data(), dtype, {spec.columns(), width});
  in.valid_tokens = view(&valid, {1});
  const RouteResult whole(spec, tokens), compact(spec, tokens);
  RouteOutputs few = compact.outputs(spec, tokens);
  few.dense = few.logits = few.replay = {};

  Mirror mirror(context);
  const GatherInputs gathered{.hidden = mirror.in(from),
                              .permutation = mirror.in(view(permutation.data(), {tokens})),
                              .rows = mirror.in(view(&all, {1}))};
  const RouteInputs there = mirrored(mirror, in);
  const RouteOutputs every = mirrored(mirror, whole.outputs(spec, tokens));
  const RouteOutputs some = mirrored(mirror, few);
  const Buffer workspace = context.allocate(route_workspace_bytes(context, spec, tokens, width));
  const auto enqueue = [&] {
    for (int twice = 0; twice < 2; ++twice) {
      gather(before, {.slots = 1}, gathered, width > 0 ? there.hidden : there.logits);
      route(context, spec, there, every, workspace);
      route(context, spec, there, some, workspace);
    }
  };
  enqueue();  // loads the kernels
  context.synchronize();
  const Graph graph(stream, enqueue);
  for (const std::int32_t count : {all, 0, all / 2, all + 9, -3, all}) {
    fill(source, tokens * columns);
    std::shuffle(permutation.begin(), permutation.end(), random);
    valid = count;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::memcpy(ordered[t].data, from[permutation[at(t)]].data, at(bytes(dtype, columns)));
    }
    context.copy(gathered.hidden.data, source.data(), at(bytes(dtype, tokens * columns)));
    context.copy(gathered.permutation.data, permutation.data(), 4 * permutation.size());
    context.copy(there.valid_tokens.data, &valid, 4);
    graph.replay();
    mirror.fetch();
    const RouteResult want = run(width > 0 ? plain : host, spec, in);
    EXPECT_TRUE(whole == want) << count << " valid";
    EXPECT_EQ(compact.ids, want.ids) << count << " valid";
    EXPECT_EQ(compact.weights, want.weights) << count << " valid";
    if (::testing::Test::HasFailure()) return;
  }
}

constexpr Overlap overlaps[] = {{false, false}, {false, true}, {true, true}};

TEST(RouteGraphs, FromLogits) {
  if (!on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  for (const Overlap overlap : overlaps) {
    for (const auto& [experts, top_k, groups, keep] :
         {std::array{256, 8, 8, 4}, std::array{60, 4, 1, 1}, std::array{600, 10, 1, 1}}) {
      for (const NamedRule& rule : rules(experts, top_k, groups, keep)) {
        for (const std::int64_t tokens : {1, 70, 1500}) {
          if (tokens > 70 && rule.name != "R1" && rule.name != "R6") continue;
          expect_to_follow(rule.spec, tokens, 0, tokens == 70 ? bf16 : f32, overlap);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(RouteGraphs, FromHiddenStates) {
  if (!on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  for (const Overlap overlap : overlaps) {
    for (const int experts : {40, 256, 600}) {
      const RouteSpec spec{.experts = experts,
                           .top_k = 6,
                           .score = Score::sigmoid,
                           .selection_bias = true,
                           .renormalize = true};
      for (const std::int64_t tokens : {1, 16, 70, 1500}) {
        for (const std::int64_t width : {72, 1024}) {
          for (const DType dtype : {bf16, f32}) {
            expect_to_follow(spec, tokens, width, dtype, overlap);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
#endif
