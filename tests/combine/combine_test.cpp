#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "combine/combine_case.hpp"

namespace shunt::test {
namespace {

// f32 sums of up to 12 terms against sums in double, then one rounding to the output.
void expect_near(const Matrix& got, const Matrix& want, const std::string& what) {
  const float unit = want.dtype == f32 ? 1e-6F : want.dtype == f16 ? 1e-3F : 8e-3F;
  for (std::int64_t t = 0; t < want.rows; ++t) {
    for (std::int64_t h = 0; h < want.width; ++h) {
      ASSERT_NEAR(got.at(t, h), want.at(t, h), unit * (4 + std::abs(want.at(t, h))))
          << what << " at " << t << ", " << h;
    }
  }
  // The gaps between the rows are nobody's to write.
  Matrix frame = got;
  for (std::int64_t t = 0; t < want.rows; ++t) {
    for (std::int64_t h = 0; h < want.width; ++h) frame.set(t, h, want.at(t, h));
  }
  ASSERT_EQ(frame, want) << what;
}

// Rows from the last to the first: a stride may be negative.
TEST(Combine, RowsInReverse) {
  const Context context = engine();
  std::mt19937 random(5);
  constexpr std::int64_t tokens = 5, width = 64;
  for (const int slots : {1, 2, 4, 8}) {
    for (const DType dtype : {f32, bf16}) {
      const std::int64_t count = tokens * slots;
      Matrix rows(dtype, count, width, 0);
      std::normal_distribution<float> normal;
      for (std::int64_t i = 0; i < count * width; ++i)
        rows.set(i / width, i % width, normal(random));
      Tensor reversed = rows.tensor();
      reversed.data = reversed[count - 1].data;
      reversed.strides[0] = -width;
      std::vector<std::int32_t> inverse, other;
      for (std::int64_t i = 0; i < count; ++i) {
        inverse.push_back(static_cast<std::int32_t>(i * 3 % count));
        other.push_back(static_cast<std::int32_t>(count - 1 - inverse.back()));
      }
      const std::vector<float> weights(static_cast<std::size_t>(count), 0.5F);
      const auto combined = [&](const Tensor& from, const std::vector<std::int32_t>& places) {
        Matrix out(dtype, tokens, width, 0);
        Mirror mirror(context);
        combine(context, {.slots = slots},
                {.rows = mirror.in(from),
                 .inverse = mirror.in(view(places.data(), {tokens, slots})),
                 .weights = mirror.in(view(weights.data(), {tokens, slots}))},
                mirror.out(out.tensor()));
        mirror.fetch();
        return out;
      };
      EXPECT_EQ(combined(reversed, other), combined(rows.tensor(), inverse))
          << slots << " slots, " << to_string(dtype);
    }
  }
}

TEST(Combine, EqualsTheReference) {
  const std::vector<CombineSpec> specs = {{},
                                          {.weighted = false},
                                          {.identity_from = 8},
                                          {.identity_from = 8, .identity_until = 10},
                                          {.weighted = false, .identity_from = 8}};
  for (const DType dtype : {f32, bf16, f16}) {
    for (const CombineSpec& spec : specs) {
      for (const std::int64_t tokens : {0, 1, 2, 7, 33}) {
        for (const std::int64_t width : {1, 5, 64, 1025}) {
          for (const int slots : {1, 2, 9}) {
            const CombineCase c =
                make_case(spec, {.tokens = tokens, .width = width, .slots = slots, .dtype = dtype});
            expect_near(
                c.engine(), c.reference(),
                fmt::format("{} T{} H{} {}", to_json(c.spec), tokens, width, to_string(dtype)));
          }
        }
      }
    }
  }
}

TEST(Combine, SharedExpertAndResidual) {
  for (const DType dtype : {f32, bf16, f16}) {
    for (const bool gated : {false, true}) {
      for (const float scale : {1.0F, 0.5F}) {
        for (const bool residual : {false, true}) {
          CombineCase c =
              make_case({.shared_gate = gated, .shared_scale = scale}, {.tokens = 19,
                                                                        .width = 130,
                                                                        .slots = 4,
                                                                        .dtype = dtype,
                                                                        .shared = true,
                                                                        .residual = residual});
          c.gate[3] = 200;  // sigmoid of the extremes: 1 and 0, never NaN
          c.gate[4] = -200;
          expect_near(c.engine(), c.reference(), to_json(c.spec));
        }
      }
    }
  }
}

TEST(Combine, PaddedRowsGiveTheSameBits) {
  for (const int tile : {1, 4, 64}) {
    const CombineShape shape{.tokens = 77, .width = 96, .experts = 12, .slots = 4};
    const CombineCase compact = make_case({}, shape);
    CombineShape padded_shape = shape;
    padded_shape.tile = tile;
    CombineCase padded = make_case({}, padded_shape);
    for (std::size_t pair = 0; pair < padded.inverse.size(); ++pair) {
      ASSERT_EQ(padded.inverse[pair] < 0, compact.inverse[pair] < 0);
      if (padded.inverse[pair] < 0) continue;
      for (std::int64_t h = 0; h < 96; ++h) {
        padded.rows.set(padded.inverse[pair], h, compact.rows.at(compact.inverse[pair], h));
      }
    }
    padded.weights = compact.weights;
    EXPECT_EQ(padded.engine(), compact.engine()) << tile;
  }
}

TEST(Combine, AnyThreadsGiveTheSameBits) {
  for (const std::int64_t tokens : {1, 3, 200}) {
    for (const DType dtype : {f32, bf16}) {
      const CombineCase c = make_case({.identity_from = 8, .shared_gate = true},
                                      {.tokens = tokens,
                                       .width = tokens < 100 ? 30001 : 1500,
                                       .slots = 8,
                                       .dtype = dtype,
                                       .shared = true,
                                       .residual = true});
      const Matrix one = c.engine(1);
      expect_near(one, c.reference(), "one thread");
      for (const int threads : {1, 2, 3, 4}) EXPECT_EQ(c.engine(threads), one) << threads;
    }
  }
}

TEST(Combine, BitsDoNotDependOnTheBatch) {
  const CombineCase c =
      make_case({}, {.tokens = 40, .width = 300, .slots = 6, .shared = true, .residual = true});
  const Matrix all = c.engine();
  for (const std::int64_t t : {0, 17, 39}) {
    CombineInputs in = c.inputs();
    for (Tensor* tensor : {&in.inverse, &in.weights, &in.shared, &in.residual}) {
      *tensor = tensor->rows(t, t + 1);
    }
    Matrix alone(f32, 1, 300);
    c.call(engine(), in, alone.tensor());
    for (std::int64_t h = 0; h < 300; ++h) ASSERT_EQ(alone.at(0, h), all.at(t, h));
  }
}

// Powers of two change no bit but the exponent; the sum over two halves of the weights is exact
// where the terms are.
TEST(Combine, LinearInTheWeights) {
  CombineCase c = make_case({.identity_from = 8}, {.tokens = 31, .width = 65, .slots = 5});
  const Matrix y = c.engine();
  CombineCase scaled = c;
  for (float& weight : scaled.weights) weight *= -8;
  const Matrix y8 = scaled.engine();
  CombineCase a = c, b = c;
  for (std::size_t p = 0; p < c.weights.size(); ++p) {
    a.weights[p] = p % 2 == 0 ? c.weights[p] : c.weights[p] / 4;
    b.weights[p] = c.weights[p] - a.weights[p];
  }
  const Matrix ya = a.engine();
  const Matrix yb = b.engine();
  for (std::int64_t t = 0; t < 31; ++t) {
    for (std::int64_t h = 0; h < 65; ++h) {
      ASSERT_EQ(y8.at(t, h), -8 * y.at(t, h));
      ASSERT_NEAR(ya.at(t, h) + yb.at(t, h), y.at(t, h), 1e-5F);
    }
  }
}

TEST(Combine, TokenPermutation) {
  const CombineCase c = make_case({}, {.tokens = 20, .width = 33, .slots = 3});
  CombineCase reversed = c;
  for (std::size_t t = 0; t < 20; ++t) {
    for (std::size_t s = 0; s < 3; ++s) {
      reversed.inverse[3 * t + s] = c.inverse[3 * (19 - t) + s];
      reversed.weights[3 * t + s] = c.weights[3 * (19 - t) + s];
    }
  }
  const Matrix y = c.engine(), r = reversed.engine();
  for (std::int64_t t = 0; t < 20; ++t) {
    for (std::int64_t h = 0; h < 33; ++h) ASSERT_EQ(r.at(t, h), y.at(19 - t, h));
  }
}

TEST(Combine, ValidTokens) {
  for (const std::int32_t valid : {-5, 0, 1, 6, 10, 99}) {
    CombineCase c =
        make_case({}, {.tokens = 10, .width = 40, .slots = 2, .shared = true, .residual = true});
    c.valid = {valid};
    const Matrix y = c.engine();
    expect_near(y, c.reference(), "valid");
    for (std::int64_t t = std::max(0, valid); t < 10; ++t) {
      for (std::int64_t h = 0; h < 40; ++h) ASSERT_EQ(y.at(t, h), 0.0F);
    }
  }
}

TEST(Combine, SkippedPairsAndDuplicateRows) {
  CombineCase c = make_case({}, {.tokens = 6, .width = 17, .slots = 4});
  std::fill(c.inverse.begin(), c.inverse.begin() + 8, -1);  // two tokens that nobody serves
  std::fill(c.inverse.begin() + 8, c.inverse.begin() + 12, 5);
  expect_near(c.engine(), c.reference(), "skipped");
  for (std::int64_t h = 0; h < 17; ++h) EXPECT_EQ(c.engine().at(1, h), 0.0F);
  // Skipped pairs are not read: a NaN in their weight does not matter.
  c.weights[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(c.engine().at(0, 0), 0.0F);
}

TEST(Combine, F16Saturates) {
  CombineCase c = make_case({}, {.tokens = 1, .width = 3, .experts = 2, .slots = 2, .dtype = f16});
  c.rows.set(0, 0, 60000), c.rows.set(1, 0, 60000);
  c.rows.set(0, 1, -60000), c.rows.set(1, 1, -60000);
  c.rows.set(0, 2, 60000), c.rows.set(1, 2, -60000);
  c.inverse = {0, 1};
  c.weights = {1.5F, 1.25F};
  const Matrix y = c.engine();
  EXPECT_EQ(y.at(0, 0), 65504.0F);
  EXPECT_EQ(y.at(0, 1), -65504.0F);
  EXPECT_EQ(y.at(0, 2), 15000.0F);
}

TEST(Combine, OutputMayBeAnInput) {
  const CombineCase c =
      make_case({.identity_from = 8},
                {.tokens = 9, .width = 1500, .slots = 3, .shared = true, .residual = true});
  const Matrix want = c.engine();
  for (Matrix CombineCase::*input :
       {&CombineCase::hidden, &CombineCase::shared, &CombineCase::residual}) {
    CombineCase in_place = c;
    in_place.call(engine(), in_place.*input);
    EXPECT_EQ(in_place.*input, want);
  }
}

TEST(Combine, MixedDtypes) {
  std::mt19937 random(5);
  for (const DType rows : {f32, bf16, f16}) {
    for (const DType out : {f32, bf16, f16}) {
      CombineCase c = make_case({}, {.tokens = 8, .width = 100, .slots = 3, .dtype = rows});
      c.shared = Matrix(out, 8, 100, random);
      c.residual = Matrix(bf16, 8, 100, random);
      c.out = out;
      expect_near(c.engine(), c.reference(), fmt::format("{} {}", to_string(rows), to_string(out)));
    }
  }
}

}  // namespace
}  // namespace shunt::test
