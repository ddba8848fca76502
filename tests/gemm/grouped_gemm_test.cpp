#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "engines.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/reference.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

using test::Array;
using test::random_array;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};

struct Problem {
  GroupedGemmSpec spec;
  std::vector<std::int32_t> offsets;
  DType rows_dtype = DType::f32, out_dtype = DType::f32, source_dtype = DType::f32;
};

struct Case {
  Problem p;
  Array rows, weights, bias;
  explicit Case(const Problem& problem, unsigned seed = 1)
      : p(problem),
        rows(random_array(p.rows_dtype, {p.offsets.back(), p.spec.k}, seed)),
        weights(random_array(p.source_dtype, {p.spec.groups, p.spec.n, p.spec.k}, seed + 1)),
        bias(random_array(DType::bf16, {p.spec.groups, p.spec.n}, seed + 2)) {}

  GroupedGemmInputs inputs() const {
    return {.rows = rows.tensor,
            .offsets = view(p.offsets.data(), {p.spec.groups + 1}),
            .weights = weights.tensor,
            .bias = p.spec.bias ? bias.tensor : Tensor{}};
  }
  Array run(const Context& context) const {
    Array out(p.out_dtype, {p.offsets.back(), p.spec.n});
    const Buffer workspace =
        context.allocate(grouped_gemm_workspace_bytes(context, p.spec, p.offsets.back()));
    test::Mirror mirror(context);
    GroupedGemmInputs in = inputs();
    in.rows = mirror.in(in.rows);
    in.offsets = mirror.in(in.offsets);
    in.weights = mirror.in(in.weights);
    in.bias = mirror.in(in.bias);
    Buffer memory;
    if (p.spec.prepared) {
      std::vector<Tensor> matrices;
      for (int g = 0; g < p.spec.groups; ++g) matrices.push_back(weights.tensor[g]);
      memory = context.allocate(
          prepared_bytes(context, p.spec.dtype, p.spec.groups, p.spec.n, p.spec.k));
      in.prepared = prepare(context, p.spec.dtype, matrices, memory);
      in.weights = {};
    }
    grouped_gemm(context, p.spec, in, mirror.out(out.tensor), workspace);
    mirror.fetch();
    return out;
  }
  void check(const Array& out) const {
    std::vector<double> magnitude;
    const std::vector<double> want = grouped_gemm_reference(p.spec, inputs(), &magnitude);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double bound = test::sum_bound(p.spec.k, magnitude[i]) +
                           test::rounding(p.out_dtype) * std::abs(want[i]) * 1.01 + 1e-7;
      ASSERT_NEAR(static_cast<double>(out.get(static_cast<std::int64_t>(i))), want[i], bound)
          << "row " << i / static_cast<std::size_t>(p.spec.n) << " column "
          << i % static_cast<std::size_t>(p.spec.n) << " of [" << p.spec.n << ", " << p.spec.k
          << "] " << to_string(p.spec.dtype);
    }
  }
};

bool same_bits(const Array& a, const Array& b) {
  return std::memcmp(a.tensor.data, b.tensor.data, static_cast<std::size_t>(a.tensor.bytes())) == 0;
}

class GroupedGemm : public testing::TestWithParam<test::Engine> {};

TEST_P(GroupedGemm, OddShapesAgreeWithTheReference) {
  const Context context = test::context_of(GetParam(), 2);
  const std::int64_t shapes[][2] = {{1, 1},   {3, 2},    {2, 3},    {63, 31},   {65, 48}, {31, 63},
                                    {48, 65}, {17, 768}, {130, 64}, {16, 2880}, {1, 200}};
  for (const DType dtype : dtypes) {
    unsigned seed = 10;
    for (const auto& [n, k] : shapes) {
      for (const bool prepared : {true, false}) {
        const bool bias = seed % 2 == 0;
        const Case c(
            {.spec =
                 {.groups = 4, .n = n, .k = k, .dtype = dtype, .bias = bias, .prepared = prepared},
             .offsets = {0, 0, 1, 13, 13},
             .rows_dtype = dtypes[seed % 3],
             .out_dtype = dtypes[seed / 3 % 3],
             .source_dtype = dtypes[seed / 9 % 3]},
            seed);
        c.check(c.run(context));
        ++seed;
      }
    }
  }
}

TEST_P(GroupedGemm, EveryDtypeOfRowsWeightsAndOut) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const DType rows : dtypes) {
      for (const DType out : dtypes) {
        const Case c({.spec = {.groups = 2, .n = 37, .k = 51, .dtype = dtype, .bias = true},
                      .offsets = {0, 4, 7},
                      .rows_dtype = rows,
                      .out_dtype = out,
                      .source_dtype = rows});
        c.check(c.run(context));
      }
    }
  }
}

// Every number of rows from 1 to 26: all register tiles, and every way to cut a count into them.
TEST_P(GroupedGemm, EveryNumberOfRows) {
  const Context context = test::context_of(GetParam(), 1);
  std::vector<std::int32_t> offsets = {0};
  for (std::int32_t rows = 1; rows <= 26; ++rows) offsets.push_back(offsets.back() + rows);
  for (const DType dtype : dtypes) {
    const Case c({.spec = {.groups = 26, .n = 80, .k = 22, .dtype = dtype}, .offsets = offsets});
    c.check(c.run(context));
  }
}

// Blocks of rows, and 16-bit weights widened for large ones.
TEST_P(GroupedGemm, ManyRows) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const bool prepared : {true, false}) {
      const Case c({.spec = {.groups = 3, .n = 70, .k = 45, .dtype = dtype, .prepared = prepared},
                    .offsets = {0, 40, 40, 250}});
      c.check(c.run(context));
    }
  }
}

TEST_P(GroupedGemm, SameBitsForAnyNumberOfThreads) {
  for (const DType dtype : dtypes) {
    for (const std::int64_t rows : {3, 40}) {
      const Case c(
          {.spec = {.groups = 4, .n = 100, .k = 120, .dtype = dtype, .bias = true},
           .offsets = {0, 1, static_cast<std::int32_t>(rows / 2),
                       static_cast<std::int32_t>(rows / 2), static_cast<std::int32_t>(rows)}});
      const Array first = c.run(test::context_of(GetParam(), 1));
      for (const int threads : {1, 2, 3, 4}) {
        const Context context = test::context_of(GetParam(), threads);
        EXPECT_TRUE(same_bits(c.run(context), first)) << threads << " threads";
        EXPECT_TRUE(same_bits(c.run(context), first)) << threads << " threads, again";
      }
    }
  }
}

// A row's result does not depend on the rows beside it, nor on whether weights were prepared.
TEST_P(GroupedGemm, SameBitsAloneAndInABatch) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const std::int64_t k : {77, 2100}) {
      const std::int32_t rows = k == 77 ? 200 : 41;
      const GroupedGemmSpec spec{.groups = 1, .n = 33, .k = k, .dtype = dtype, .bias = true};
      const Case batch({.spec = spec, .offsets = {0, rows}});
      const Array all = batch.run(context);
      GroupedGemmSpec plain = spec;
      plain.prepared = false;
      const Case unprepared({.spec = plain, .offsets = {0, rows}});
      EXPECT_TRUE(same_bits(unprepared.run(context), all));
      for (const std::int32_t row : {0, 1, 5, rows - 1}) {
        Case alone({.spec = spec, .offsets = {0, 1}});
        for (std::int64_t i = 0; i < k; ++i) alone.rows.set(i, batch.rows.get(row * k + i));
        std::memcpy(alone.weights.tensor.data, batch.weights.tensor.data,
                    static_cast<std::size_t>(batch.weights.tensor.bytes()));
        std::memcpy(alone.bias.tensor.data, batch.bias.tensor.data,
                    static_cast<std::size_t>(batch.bias.tensor.bytes()));
        const Array one = alone.run(context);
        for (std::int64_t j = 0; j < spec.n; ++j) {
          ASSERT_EQ(one.get(j), all.get(row * spec.n + j)) << "row " << row << " column " << j;
        }
      }
    }
  }
}

// Likewise where products and sums are next to the least numbers, which some sets take for zero.
TEST_P(GroupedGemm, TinyRowsHaveTheirBitsAloneAndInABatch) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const GroupedGemmSpec spec{.groups = 1, .n = 70, .k = 77, .dtype = dtype};
    Case batch({.spec = spec, .offsets = {0, 20}});
    for (std::int64_t i = 0; i < 20 * spec.k; ++i) {
      batch.rows.set(i, batch.rows.get(i) * (i % 3 == 0 ? 0x1p-128F : 0x1p-122F));
    }
    const Array all = batch.run(context);
    for (const std::int32_t row : {0, 7, 19}) {
      Case alone({.spec = spec, .offsets = {0, 1}});
      for (std::int64_t i = 0; i < spec.k; ++i) alone.rows.set(i, batch.rows.get(row * spec.k + i));
      std::memcpy(alone.weights.tensor.data, batch.weights.tensor.data,
                  static_cast<std::size_t>(batch.weights.tensor.bytes()));
      const Array one = alone.run(context);
      for (std::int64_t j = 0; j < spec.n; ++j) {
        ASSERT_EQ(one.get(j), all.get(row * spec.n + j)) << "row " << row << " column " << j;
      }
    }
  }
}

TEST_P(GroupedGemm, StridedRowsAndOutAndRowsPastTheLastOffset) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    const GroupedGemmSpec spec{.groups = 2, .n = 20, .k = 33, .dtype = dtype, .prepared = false};
    Array rows = random_array(DType::bf16, {9, 50}, 3);
    const Array weights = random_array(DType::f32, {2, 20, 33}, 4);
    Array out(DType::f32, {9, 30});
    for (std::int64_t i = 0; i < 9 * 30; ++i) out.set(i, 5);
    const std::vector<std::int32_t> offsets = {0, 2, 7};
    Tensor x = rows.tensor, y = out.tensor;
    x.shape[1] = 33, y.shape[1] = 20;
    const GroupedGemmInputs in{
        .rows = x, .offsets = view(offsets.data(), {3}), .weights = weights.tensor};
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, 9));
    test::Mirror mirror(context);
    grouped_gemm(context, spec,
                 {.rows = mirror.in(x),
                  .offsets = mirror.in(in.offsets),
                  .weights = mirror.in(weights.tensor)},
                 mirror.out(y), workspace);
    mirror.fetch();
    std::vector<double> magnitude;
    const std::vector<double> want = grouped_gemm_reference(spec, in, &magnitude);
    for (std::int64_t r = 0; r < 9; ++r) {
      for (std::int64_t j = 0; j < 30; ++j) {
        const float got = out.get(r * 30 + j);
        if (r >= 7 || j >= 20) {
          EXPECT_EQ(got, 5);
        } else {
          const auto at = static_cast<std::size_t>(r * 20 + j);
          EXPECT_NEAR(static_cast<double>(got), want[at], test::sum_bound(33, magnitude[at]));
        }
      }
    }
  }
}

TEST_P(GroupedGemm, F16OutSaturatesAndNanStaysInItsRow) {
  const Context context = test::context_of(GetParam(), 1);
  for (const DType dtype : dtypes) {
    Case c({.spec = {.groups = 1, .n = 3, .k = 5, .dtype = dtype},
            .offsets = {0, 3},
            .out_dtype = DType::f16});
    for (std::int64_t i = 0; i < 15; ++i) c.weights.set(i, 200);
    for (std::int64_t i = 0; i < 15; ++i) c.rows.set(i, i < 5 ? 100 : i < 10 ? -100 : 1);
    c.rows.set(12, std::nanf(""));
    const Array out = c.run(context);
    for (std::int64_t j = 0; j < 3; ++j) {
      EXPECT_EQ(out.get(j), 65504);
      EXPECT_EQ(out.get(3 + j), -65504);
      EXPECT_TRUE(std::isnan(out.get(6 + j)));
    }
  }
}

// Padding of odd sizes must not bring in what lies behind a row.
TEST_P(GroupedGemm, WhatFollowsARowIsNotRead) {
  const Context context = test::context_of(GetParam(), 1);
  for (const DType dtype : dtypes) {
    Case c({.spec = {.groups = 1, .n = 5, .k = 7, .dtype = dtype},
            .offsets = {0, 2},
            .rows_dtype = dtype});
    for (std::int64_t i = 0; i < 7; ++i) c.rows.set(7 + i, INFINITY);
    const Array out = c.run(context);
    for (std::int64_t j = 0; j < 5; ++j) EXPECT_TRUE(std::isfinite(out.get(j)));
  }
}

TEST_P(GroupedGemm, NothingToDoIsLegal) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    const Case no_rows(
        {.spec = {.groups = 3, .n = 5, .k = 7, .dtype = dtype}, .offsets = {0, 0, 0, 0}});
    no_rows.run(context);
    const Case no_columns(
        {.spec = {.groups = 1, .n = 0, .k = 7, .dtype = dtype}, .offsets = {0, 4}});
    no_columns.run(context);
    const Case no_k(
        {.spec = {.groups = 1, .n = 5, .k = 0, .dtype = dtype, .bias = true}, .offsets = {0, 4}});
    no_k.check(no_k.run(context));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGemm, testing::ValuesIn(test::all_engines()),
                         [](const auto& set) { return test::engine_name(set.param); });

}  // namespace
}  // namespace shunt
