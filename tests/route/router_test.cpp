// Routers of 16-bit types around the edges of the CUDA engine's kernels: tiles of tokens, of
// columns and of H, counts on the device, graphs.
#include "route/route_util.hpp"
#include "sanitizer.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt::test {
namespace {

// x, W and what is exactly the same in f32.
struct Router {
  std::int64_t tokens, columns, width;
  DType dtype;
  std::vector<std::uint16_t> x, w;
  std::vector<float> x_wide, w_wide;

  Router(std::int64_t t, std::int64_t c, std::int64_t h, DType d, unsigned seed)
      : tokens(t), columns(c), width(h), dtype(d) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<std::uint16_t>& to, std::vector<float>& wide,
                          std::int64_t size, float deviation) {
      for (std::int64_t i = 0; i < size; ++i) {
        const float v = deviation * normal(random);
        to.push_back(d == bf16 ? f32_to_bf16(v) : f32_to_f16(v));
        wide.push_back(d == bf16 ? bf16_to_f32(to.back()) : f16_to_f32(to.back()));
      }
    };
    fill(x, x_wide, t * h, 1);
    fill(w, w_wide, c * h, 1 / std::sqrt(static_cast<float>(h)));
  }
  RouteInputs inputs() const {
    return {.hidden = view(x.data(), dtype, {tokens, width}),
            .router_weight = view(w.data(), dtype, {columns, width})};
  }
  void expect_logit(const RouteResult& out, std::int64_t t, std::int64_t c) const {
    double sum = 0, size = 0;
    for (std::int64_t h = 0; h < width; ++h) {
      const double product = static_cast<double>(x_wide[at(t * width + h)]) *
                             static_cast<double>(w_wide[at(c * width + h)]);
      sum += product;
      size += std::abs(product);
    }
    ASSERT_NEAR(static_cast<double>(out.logits[at(t * columns + c)]), sum, 2e-6 * size)
        << "token " << t << " expert " << c;
  }
  // All where they are few, else the corners and a few hundred more.
  void check_logits(const RouteResult& out) const {
    if (tokens * columns * width <= 400000) {
      for (std::int64_t i = 0; i < tokens * columns; ++i)
        expect_logit(out, i / columns, i % columns);
      return;
    }
    std::mt19937 random(1);
    for (int i = 0; i < 300; ++i) {
      const auto any = [&](std::int64_t size) {
        const auto r = static_cast<std::int64_t>(random());
        return r % 4 == 0 ? size - 1 : r / 4 % size;
      };
      const std::int64_t t = any(tokens);
      expect_logit(out, t, any(columns));
    }
  }
};

RouteSpec spec_of(std::int64_t columns) {
  return {.experts = static_cast<int>(columns),
          .top_k = static_cast<int>(std::min<std::int64_t>(columns, 5)),
          .renormalize = true};
}

const std::vector<std::int64_t> some_tokens = {1,  2,  4,  5,  7,   8,   9,   16,  17,
                                               33, 63, 64, 65, 127, 129, 200, 1000};
const std::vector<std::int64_t> some_columns = {1,   8,   15,  17,  60,  64,  65,
                                                128, 160, 255, 256, 257, 384, 512};
const std::vector<std::int64_t> some_widths = {8, 64, 72, 100, 448, 2880, 7168};

TEST(Router, LogitsAndWhatFollowsFromThem) {
  const Context context = engine();
  const std::int64_t most = on_gpu() ? 2000000000 : SHUNT_SANITIZED ? 4000000 : 20000000;
  unsigned n = 0;
  for (const std::int64_t tokens : some_tokens) {
    for (const std::int64_t columns : some_columns) {
      for (const std::int64_t width : some_widths) {
        // One of five, all pairs of two sizes among them; large ones are rarer.
        ++n;
        if (n % 5 != 0 || tokens * columns * width > most) continue;
        if (tokens * width + columns * width > 2000000 && n % 3 != 0) continue;
        SCOPED_TRACE(testing::Message() << tokens << " x " << columns << " x " << width);
        const Router router(tokens, columns, width, n % 2 == 0 ? bf16 : f16, n);
        const RouteSpec spec = spec_of(columns);
        const RouteResult out = run(context, spec, router.inputs());
        router.check_logits(out);
        EXPECT_TRUE(run(context, spec, router.inputs()) == out) << "the second time";
        RouteCase c(spec, tokens);
        c.logits = out.logits;
        EXPECT_TRUE(run(context, c) == out) << "against the gate";
        if (HasFailure()) return;
      }
    }
  }
}

// Every rule of the gate follows from a router's logits too.
TEST(Router, EveryRule) {
  const Context context = engine();
  unsigned seed = 0;
  for (const std::int64_t tokens : {3, 40, 150, 4300}) {
    if (tokens > 1000 && !on_gpu()) continue;  // many more have kernels of their own there
    for (const auto& [experts, groups, keep] :
         {std::array{8, 1, 1}, std::array{16, 1, 1}, std::array{60, 1, 1}, std::array{64, 4, 2},
          std::array{256, 8, 4}, std::array{384, 8, 3}}) {
      for (const NamedRule& rule : rules(experts, 6, groups, keep)) {
        if (tokens > 1000 && experts > 60) continue;
        SCOPED_TRACE(rule.name);
        // What a router reports is finished: another bias or cap would follow.
        if (finishes_logits(rule.spec)) continue;
        const Router router(tokens, rule.spec.columns(), 136, bf16, ++seed);
        RouteCase c = random_case(rule.spec, tokens, seed);
        RouteInputs in = c.extras();
        in.hidden = router.inputs().hidden;
        in.router_weight = router.inputs().router_weight;
        const RouteResult out = run(context, rule.spec, in);
        c.logits = out.logits;
        EXPECT_TRUE(run(context, c) == out) << to_json(rule.spec);
        // Ids and weights alone: what a kernel may have a shorter way to.
        RouteResult compact = out;
        std::fill(compact.ids.begin(), compact.ids.end(), -7);
        std::fill(compact.weights.begin(), compact.weights.end(), -7.0F);
        RouteOutputs asked = compact.outputs(rule.spec, tokens);
        asked.dense = asked.logits = asked.replay = {};
        route_on(context, rule.spec, in, asked);
        EXPECT_TRUE(compact == out) << to_json(rule.spec);
        if (HasFailure()) return;
      }
    }
  }
}

// Two to eight tokens have a block each, where only ids and weights are asked for; else they do
// not.
TEST(Router, FewTokensHaveTheSameBitsByBlocksOfTheirOwn) {
  const Context context = engine();
  unsigned seed = 90;
  for (const int tokens : {2, 5, 8}) {
    for (const auto& [experts, groups, keep] :
         {std::array{72, 1, 1}, std::array{128, 1, 1}, std::array{256, 8, 4}}) {
      for (const NamedRule& rule : rules(experts, 8, groups, keep)) {
        if (finishes_logits(rule.spec)) continue;
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << experts << ", " << rule.name);
        const Router router(tokens, rule.spec.columns(), 520, bf16, ++seed);
        RouteCase c = random_case(rule.spec, tokens, seed);
        RouteInputs in = c.extras();
        in.hidden = router.inputs().hidden;
        in.router_weight = router.inputs().router_weight;
        const std::int32_t valid = tokens - 1;
        in.valid_tokens = view(&valid, {1});
        const RouteResult out = run(context, rule.spec, in);
        RouteResult compact = out;
        std::fill(compact.ids.begin(), compact.ids.end(), -7);
        std::fill(compact.weights.begin(), compact.weights.end(), -7.0F);
        RouteOutputs asked = compact.outputs(rule.spec, tokens);
        asked.dense = asked.logits = asked.replay = {};
        route_on(context, rule.spec, in, asked);
        EXPECT_TRUE(compact == out) << to_json(rule.spec);
      }
    }
  }
}

// The shorter way of plain rules in every layout of clusters, with rows that it leaves to others:
// one of NaN, some whose logits all tie, and some past the count.
TEST(Router, PlainRulesInEveryLayout) {
  const Context context = engine();
  for (const auto& [tokens, columns, width] :
       {std::array{20, 80, 4096}, std::array{100, 256, 7168}, std::array{128, 512, 4096},
        std::array{512, 8, 128}, std::array{700, 128, 1024}, std::array{2048, 128, 1024},
        std::array{1030, 64, 2048}, std::array{4096, 60, 2048}, std::array{4100, 256, 1024},
        std::array{1500, 512, 512}, std::array{8192, 512, 256}}) {
    if (!on_gpu() && std::int64_t{tokens} * columns * width > 20000000) continue;
    SCOPED_TRACE(testing::Message() << tokens << " x " << columns << " x " << width);
    Router router(tokens, columns, width, f16, 9);
    std::fill_n(router.x.begin() + width, width, std::uint16_t{0x7e00});
    std::fill_n(router.x.begin() + std::ptrdiff_t{5} * width, 3 * width, std::uint16_t{0});
    for (const int k : {1, 4, 8}) {
      RouteSpec spec = spec_of(columns);
      spec.top_k = k;
      if (k == 4) spec.score_stage = ScoreStage::after_top_k;
      const std::int32_t valid = tokens - 3;
      RouteInputs in = router.inputs();
      in.valid_tokens = view(&valid, {1});
      const RouteResult out = run(context, spec, in);
      RouteResult compact = out;
      std::fill(compact.ids.begin(), compact.ids.end(), -7);
      std::fill(compact.weights.begin(), compact.weights.end(), -7.0F);
      RouteOutputs asked = compact.outputs(spec, tokens);
      asked.dense = asked.logits = asked.replay = {};
      route_on(context, spec, in, asked);
      EXPECT_TRUE(compact == out) << "k " << k;
    }
  }
}

TEST(Router, RowsPastTheCountAreCleared) {
  const Context context = engine();
  for (const auto& [tokens, columns, width] :
       {std::array{1, 256, 2048}, std::array{4, 60, 4096}, std::array{13, 160, 1024},
        std::array{64, 256, 2880}, std::array{70, 8, 128}, std::array{300, 64, 512},
        std::array{300, 130, 448}, std::array{300, 384, 448}}) {
    Router router(tokens, columns, width, f16, 3);
    const RouteSpec spec = spec_of(columns);
    const RouteResult all = run(context, spec, router.inputs());
    for (const std::int32_t valid : {-1, 0, 1, tokens / 2, tokens - 1, tokens, tokens + 1}) {
      const std::int64_t rows = std::clamp(valid, 0, tokens);
      SCOPED_TRACE(testing::Message() << valid << " of " << tokens << " x " << columns);
      RouteInputs in = router.inputs();
      in.valid_tokens = view(&valid, {1});
      // What lies past the count is not looked at: NaN changes no valid row.
      std::vector<std::uint16_t> poisoned = router.x;
      std::fill(poisoned.begin() + rows * width, poisoned.end(), std::uint16_t{0x7e00});
      in.hidden = view(poisoned.data(), f16, {tokens, width});
      const RouteResult out = run(context, spec, in);
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t s = 0; s < spec.top_k; ++s) {
          const std::size_t i = at(t * spec.top_k + s);
          ASSERT_EQ(out.ids[i], t < rows ? all.ids[i] : -1) << t;
          ASSERT_EQ(out.weights[i], t < rows ? all.weights[i] : 0.0F) << t;
        }
        for (std::int64_t c = 0; c < columns; ++c) {
          const std::size_t i = at(t * columns + c);
          ASSERT_EQ(out.logits[i], t < rows ? all.logits[i] : 0.0F) << t;
        }
      }
    }
  }
}

TEST(Router, StridedRowsAndAPoisonedOne) {
  const Context context = engine();
  for (const auto& [tokens, columns, narrow] :
       {std::array{3, 256, 512}, std::array{40, 96, 1000}, std::array{300, 200, 104},
        std::array{33, 70, 100}, std::array{200, 70, 100}, std::array{3, 600, 1}}) {
    const std::int64_t width = narrow;
    Router router(tokens, columns, width, bf16, 5);
    const RouteSpec spec = spec_of(columns);
    const RouteResult want = run(context, spec, router.inputs());
    const std::uint16_t nan = f32_to_bf16(std::nanf(""));
    // NaN after each row, up to a multiple of 16 bytes and 16 more; and a whole row of it.
    const std::int64_t stride = (width + 7) / 8 * 8 + 8;
    const auto strided = [&](const std::vector<std::uint16_t>& values) {
      std::vector<std::uint16_t> to;
      for (std::size_t i = 0; i < values.size(); i += at(width)) {
        to.insert(to.end(), values.begin() + static_cast<std::ptrdiff_t>(i),
                  values.begin() + static_cast<std::ptrdiff_t>(i) + width);
        to.insert(to.end(), at(stride - width), nan);
      }
      return to;
    };
    std::vector<std::uint16_t> x = strided(router.x);
    const std::vector<std::uint16_t> w = strided(router.w);
    std::fill_n(x.begin() + stride, width, nan);
    RouteInputs in = router.inputs();
    in.hidden.data = x.data();
    in.router_weight.data = const_cast<std::uint16_t*>(w.data());
    in.hidden.strides[0] = in.router_weight.strides[0] = stride;
    const RouteResult out = run(context, spec, in);
    for (std::int64_t i = 0; i < std::int64_t{tokens} * spec.top_k; ++i) {
      if (i / spec.top_k == 1) {
        ASSERT_TRUE(out.ids[at(i)] >= 0 && out.ids[at(i)] < columns);
        continue;
      }
      ASSERT_EQ(out.ids[at(i)], want.ids[at(i)]) << i;
      // Dense rows of an odd width are another kernel's.
      ASSERT_NEAR(out.weights[at(i)], want.weights[at(i)], 1e-5F) << i;
    }
  }
}

#if SHUNT_CUDA_BUILT
// Captured once, replayed with other hidden states: also that tickets are zero again.
TEST(Router, InAGraph) {
  if (!on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  for (const bool dependent : {false, true}) {
    for (const auto& [tokens, columns, width] :
         {std::array{1, 256, 7168}, std::array{5, 128, 2048}, std::array{64, 256, 4096},
          std::array{512, 8, 128}, std::array{1000, 256, 2048}, std::array{200, 500, 1024}}) {
      SCOPED_TRACE(testing::Message() << tokens << " x " << columns << " x " << width);
      const Stream stream;
      const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
      const RouteSpec spec = spec_of(columns);
      const Router first(tokens, columns, width, f16, 1), second(tokens, columns, width, f16, 2);
      const RouteInputs host = first.inputs();
      const auto bytes = first.x.size() * 2;
      const Buffer x = context.allocate(bytes), w = context.allocate(first.w.size() * 2);
      const auto slots = at(std::int64_t{tokens} * spec.top_k);
      const Buffer ids = context.allocate(slots * 4), weights = context.allocate(slots * 4);
      const Buffer workspace =
          context.allocate(route_workspace_bytes(context, spec, tokens, width));
      context.copy(w.data(), first.w.data(), first.w.size() * 2);
      context.copy(x.data(), first.x.data(), bytes);
      const auto there = [&](const Tensor& tensor, const Buffer& buffer) {
        Tensor t = tensor;
        t.data = buffer.data();
        t.device = context.device();
        return t;
      };
      RouteResult got(spec, tokens);
      const RouteOutputs out{
          .ids = there(view(got.ids.data(), {tokens, spec.top_k}), ids),
          .weights = there(view(got.weights.data(), {tokens, spec.top_k}), weights)};
      const RouteInputs in{.hidden = there(host.hidden, x),
                           .router_weight = there(host.router_weight, w)};
      // Three in a row: each must find the tickets as the first did.
      const Graph graph(stream, [&] {
        for (int i = 0; i < 3; ++i) route(context, spec, in, out, workspace);
      });
      for (const Router* router : {&first, &second, &first}) {
        RouteInputs now = router->inputs();
        now.router_weight = first.inputs().router_weight;
        const RouteResult want = run(context, spec, now);
        context.copy(x.data(), router->x.data(), bytes);
        graph.replay();
        context.copy(got.ids.data(), ids.data(), slots * 4);
        context.copy(got.weights.data(), weights.data(), slots * 4);
        EXPECT_EQ(got.ids, want.ids);
        EXPECT_EQ(got.weights, want.weights);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace shunt::test
