// gather to fp8, on either engine: the reference's bits.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/convert.hpp"
#include "engine.hpp"
#include "order/order_case.hpp"

namespace shunt::test {
namespace {

struct Case {
  GatherSpec spec;
  std::int64_t tokens = 0, width = 0, gap = 0;  // after each row, in elements
  DType from = f32;
  bool inverse = false;
  bool columns_first = false;  // scales of a block lie together
};

std::string name(const Case& c) {
  return fmt::format("{} T{} H{} gap {} {}{}{}", to_json(c.spec), c.tokens, c.width, c.gap,
                     to_string(c.from), c.inverse ? " inverse" : "",
                     c.columns_first ? " columns first" : "");
}

struct Quantised {
  std::vector<std::uint8_t> rows;
  std::vector<float> scales;
  bool operator==(const Quantised&) const = default;
};

// `hidden` [T, H] of values, and the pairs that go to row after row.
struct Data {
  Case c;
  std::vector<std::uint32_t> memory;
  Tensor hidden;
  OrderResult sorted;

  explicit Data(const Case& given, std::uint32_t seed = 3) : c(given) {
    const OrderSpec order_spec{.experts = 5, .slots = c.spec.slots};
    sorted = make_case(order_spec, c.tokens, Pattern::poison, seed).reference();
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    memory.assign(static_cast<std::size_t>(c.tokens * (c.width + c.gap) + 1), 0);
    hidden = view(memory.data(), c.from, {c.tokens, c.width});
    hidden.strides[0] = c.width + c.gap;
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      const float size = std::exp2(static_cast<float>(random() % 24) - 12);
      for (std::int64_t h = 0; h < c.width; ++h) set(t, h, size * normal(random));
    }
  }
  void set(std::int64_t t, std::int64_t h, float value) {
    store_f32(hidden.data, c.from, t * hidden.strides[0] + h, value);
  }
  std::int64_t pairs() const { return c.tokens * c.spec.slots; }

  // run(inputs, rows, scales)
  template <class Run>
  Quantised with(const Run& run) const {
    const std::int64_t blocks = (c.width + 127) / 128;
    const bool per_row = c.spec.quantise == Quantise::row;
    Quantised q{.rows = std::vector<std::uint8_t>(
                    static_cast<std::size_t>(pairs() * (c.width + c.gap) + 1), 0x4d),
                .scales = std::vector<float>(
                    static_cast<std::size_t>(pairs() * (per_row ? 1 : blocks) + 1), 77.0F)};
    Tensor rows = view(q.rows.data(), DType::f8_e4m3, {pairs(), c.width});
    rows.strides[0] = c.width + c.gap;
    Tensor scales = per_row           ? view(q.scales.data(), {pairs()})
                    : c.columns_first ? view(q.scales.data(), {blocks, pairs()}).transposed()
                                      : view(q.scales.data(), {pairs(), blocks});
    GatherInputs in{.hidden = hidden,
                    .permutation = view(sorted.permutation.data(), {pairs()}),
                    .rows = view(&sorted.offsets.back(), {1})};
    if (c.spec.scale_by_weight) in.weights = view(sorted.weights.data(), {pairs()});
    if (c.inverse) in.inverse = view(sorted.inverse.data(), {c.tokens, c.spec.slots});
    run(in, rows, scales);
    return q;
  }
  Quantised engine(const Context& context) const {
    return with([&](const GatherInputs& in, const Tensor& rows, const Tensor& scales) {
      Mirror mirror(context);
      gather(context, c.spec,
             {.hidden = mirror.in(in.hidden),
              .permutation = mirror.in(in.permutation),
              .rows = mirror.in(in.rows),
              .weights = mirror.in(in.weights),
              .inverse = mirror.in(in.inverse)},
             mirror.out(rows), mirror.out(scales));
      mirror.fetch();
    });
  }
  Quantised reference() const {
    return with([&](const GatherInputs& in, const Tensor& rows, const Tensor& scales) {
      gather_reference(c.spec, in, rows, scales);
    });
  }
};

TEST(GatherQuantised, EqualsTheReference) {
  const Context context = engine(2);
  for (const Quantise quantise : {Quantise::row, Quantise::block_128}) {
    for (const DType from : {f32, bf16, f16}) {
      for (const bool scaled : {false, true}) {
        for (const bool inverse : {false, true}) {
          for (const bool power_of_two : {false, true}) {
            for (const std::int64_t width : {0, 1, 5, 127, 128, 132, 144, 528, 1000}) {
              for (const std::int64_t tokens : {0, 1, 9}) {
                for (const std::int64_t gap : {0, 3, 8}) {
                  const Data data({.spec = {.slots = 3,
                                            .scale_by_weight = scaled,
                                            .quantise = quantise,
                                            .power_of_two_scales = power_of_two},
                                   .tokens = tokens,
                                   .width = width,
                                   .gap = gap,
                                   .from = from,
                                   .inverse = inverse,
                                   .columns_first = gap == 8});
                  const Quantised got = data.engine(context), want = data.reference();
                  ASSERT_EQ(got.scales, want.scales) << name(data.c);
                  ASSERT_EQ(got.rows, want.rows) << name(data.c);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Rows of more columns than a block of threads holds.
TEST(GatherQuantised, LongRows) {
  const Context context = engine(3);
  for (const Quantise quantise : {Quantise::row, Quantise::block_128}) {
    for (const std::int64_t width : {7168, 8192, 8196, 20001}) {
      for (const bool inverse : {false, true}) {
        const Data data({.spec = {.slots = 2, .quantise = quantise},
                         .tokens = 7,
                         .width = width,
                         .from = bf16,
                         .inverse = inverse});
        ASSERT_EQ(data.engine(context), data.reference()) << name(data.c);
      }
    }
  }
}

// Zeros, numbers too small for a scale of their own, NaN, infinities, products that overflow.
TEST(GatherQuantised, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Quantise quantise : {Quantise::row, Quantise::block_128}) {
    for (const bool power_of_two : {false, true}) {
      for (const bool scaled : {false, true}) {
        for (const bool inverse : {false, true}) {
          Data data({.spec = {.slots = 1,
                              .scale_by_weight = scaled,
                              .quantise = quantise,
                              .power_of_two_scales = power_of_two},
                     .tokens = 8,
                     .width = 256,
                     .inverse = inverse});
          for (std::int64_t h = 0; h < 256; ++h) {
            data.set(0, h, 0);
            data.set(1, h, 1e-30F);
            data.set(2, h, nan);
            data.set(3, h, h % 2 == 0 ? infinity : -infinity);
            data.set(4, h, h == 3 ? nan : h == 4 ? -infinity : static_cast<float>(h));
            data.set(5, h, 3e38F);
            data.set(6, h, 1e-45F);
          }
          std::vector<float>& weights = data.sorted.weights;
          for (std::size_t r = 0; r < weights.size(); ++r) weights[r] = r % 2 == 0 ? 4 : -0.5F;
          // Every token, in order.
          for (std::int32_t t = 0; t < 8; ++t) {
            data.sorted.permutation[static_cast<std::size_t>(t)] = t;
            data.sorted.inverse[static_cast<std::size_t>(t)] = t;
          }
          data.sorted.offsets.back() = 8;
          const Quantised got = data.engine(engine());
          ASSERT_EQ(got, data.reference()) << name(data.c);
          for (const float scale : got.scales) ASSERT_TRUE(scale > 0 && std::isfinite(scale));
          if (scaled) continue;
          EXPECT_EQ(got.rows[0], 0);
          EXPECT_EQ(got.rows[512], 0x7f);
          EXPECT_EQ(got.rows[768], 0x7e);
          EXPECT_EQ(got.rows[3 * 256 + 1], 0xfe);
          EXPECT_EQ(got.rows[4 * 256 + 3], 0x7f);
          EXPECT_EQ(got.rows[4 * 256 + 4], 0xfe);
        }
      }
    }
  }
}

TEST(GatherQuantised, UpperBound) {
  for (const float bound : {0.25F, 1e-20F, 1e30F}) {
    for (const bool power_of_two : {false, true}) {
      const Data data({.spec = {.slots = 2,
                                .quantise = Quantise::row,
                                .scale_upper_bound = bound,
                                .power_of_two_scales = power_of_two},
                       .tokens = 20,
                       .width = 300,
                       .from = bf16});
      const Quantised got = data.engine(engine());
      ASSERT_EQ(got, data.reference()) << name(data.c);
      for (std::int32_t r = 0; r < data.sorted.offsets.back(); ++r) {
        const float scale = got.scales[static_cast<std::size_t>(r)];
        EXPECT_LE(scale, std::max(bound, 1e-12F) / 448 * (power_of_two ? 2 : 1));
        if (power_of_two) {
          EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
        }
      }
    }
  }
}

// What comes back is within half a step of fp8: 1/16 of a normal value, 2^-10 of the scale below.
TEST(GatherQuantised, DequantisesToTheInput) {
  for (const Quantise quantise : {Quantise::row, Quantise::block_128}) {
    const Data data(
        {.spec = {.slots = 1, .quantise = quantise}, .tokens = 30, .width = 384, .from = f32});
    const Quantised q = data.engine(engine());
    for (std::int32_t r = 0; r < data.sorted.offsets.back(); ++r) {
      const std::int64_t token = data.sorted.permutation[static_cast<std::size_t>(r)];
      for (std::int64_t h = 0; h < 384; ++h) {
        const auto at = static_cast<std::size_t>(std::int64_t{r} * 384 + h);
        const float scale = quantise == Quantise::row
                                ? q.scales[static_cast<std::size_t>(r)]
                                : q.scales[static_cast<std::size_t>(std::int64_t{r} * 3 + h / 128)];
        const float x = data.hidden.as<float>()[token * 384 + h];
        ASSERT_NEAR(e4m3_to_f32(q.rows[at]) * scale, x,
                    std::max(std::abs(x) * 0.0626F, scale * 0.000977F));
      }
    }
  }
}

TEST(GatherQuantised, AnyRunGivesTheSameBits) {
  const Data data({.spec = {.slots = 8, .quantise = Quantise::row},
                   .tokens = 200,
                   .width = 2048,
                   .from = bf16,
                   .inverse = true});
  const Quantised one = data.engine(engine(1));
  for (const int threads : {1, 2, 4}) ASSERT_EQ(data.engine(engine(threads)), one);
}

TEST(GatherQuantised, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  std::vector<float> hidden(12), scales(24);
  std::vector<std::uint8_t> rows(24);
  std::vector<std::int32_t> permutation = {0, 1, 2, 3, 4, 5}, count = {6};
  const GatherInputs in{.hidden = view(hidden.data(), {3, 4}),
                        .permutation = view(permutation.data(), {6}),
                        .rows = view(count.data(), {1})};
  const Tensor out = view(rows.data(), DType::f8_e4m3, {6, 4});
  const auto refused = [&](const std::string& words, GatherSpec spec, const GatherInputs& inputs,
                           const Tensor& to, const Tensor& scale) {
    spec.slots = 2;
    std::string what = "not refused";
    try {
      gather(cpu({.threads = 1}), spec, inputs, to, scale);
    } catch (const Error& error) {
      what = error.what();
    }
    EXPECT_NE(what.find(words), std::string::npos) << "no '" << words << "' in: " << what;
  };
  const Tensor row_scales = view(scales.data(), {6}), block_scales = view(scales.data(), {6, 1});
  refused("not refused", {.quantise = Quantise::row}, in, out, row_scales);
  refused("not refused", {.quantise = Quantise::block_128}, in, out, block_scales);
  refused("scales is missing", {.quantise = Quantise::row}, in, out, {});
  refused("scales is f32 [6, 1]", {.quantise = Quantise::row}, in, out, block_scales);
  refused("scales is f32 [6]", {.quantise = Quantise::block_128}, in, out, row_scales);
  Tensor same = row_scales;
  same.strides[0] = 0;
  refused("gather: scales has strides 0: its elements must not overlap",
          {.quantise = Quantise::row}, in, out, same);
  same = block_scales;
  same.strides[0] = 0;
  refused("gather: scales has strides 0 and 1", {.quantise = Quantise::block_128}, in, out, same);
  refused("gather: scales overlaps hidden: must lie apart", {.quantise = Quantise::row}, in, out,
          view(hidden.data() + 6, {6}));
  refused("gather: scales overlaps permutation: must lie apart", {.quantise = Quantise::row}, in,
          out, view(permutation.data(), f32, {6}));
  // Words of fp8 rows and scales in turn, then the scales one word sooner.
  std::vector<float> words(13);
  Tensor among = view(words.data(), DType::f8_e4m3, {6, 4});
  among.strides[0] = 8;
  Tensor between = view(words.data() + 1, {6});
  between.strides[0] = 2;
  refused("not refused", {.quantise = Quantise::row}, in, among, between);
  between.data = words.data();
  refused("gather: scales overlaps rows (output): must lie apart", {.quantise = Quantise::row}, in,
          among, between);
  refused("rows (output) is f8_e4m3", {}, in, out, {});
  refused("rows (output) is f32", {.quantise = Quantise::row}, in, view(scales.data(), {6, 4}),
          row_scales);
  refused("scales is given", {}, in, view(scales.data(), {6, 4}), row_scales);
  refused("scale_upper_bound is nan",
          {.quantise = Quantise::row, .scale_upper_bound = std::nanf("")}, in, out, row_scales);
  refused("quantise is 3", {.quantise = static_cast<Quantise>(3)}, in, out, row_scales);
  GatherInputs bad = in;
  bad.inverse = view(permutation.data(), {6});
  refused("inverse is i32 [6]", {.quantise = Quantise::row}, bad, out, row_scales);
}

}  // namespace
}  // namespace shunt::test
