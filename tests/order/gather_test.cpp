#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "core/convert.hpp"
#include "engine.hpp"
#include "order/order_case.hpp"

namespace shunt::test {
namespace {

struct Rows {
  std::vector<std::uint32_t> memory;  // 4-byte aligned, whatever the dtype
  Tensor tensor;

  Rows(DType dtype, std::int64_t rows, std::int64_t width, std::int64_t stride)
      : memory(static_cast<std::size_t>(rows * stride + 1), 0x4d4d4d4d) {
    tensor = view(memory.data(), dtype, {rows, width});
    tensor.strides[0] = stride;
  }
};

// gather on a context, whatever device the tensors are for.
void call(const Context& context, const GatherSpec& spec, const GatherInputs& in,
          const Tensor& rows) {
  Mirror mirror(context);
  gather(context, spec,
         {.hidden = mirror.in(in.hidden),
          .permutation = mirror.in(in.permutation),
          .rows = mirror.in(in.rows),
          .weights = mirror.in(in.weights),
          .inverse = mirror.in(in.inverse)},
         mirror.out(rows));
  mirror.fetch();
}

struct GatherCase {
  std::int64_t tokens, width;
  int slots;
  bool scaled;
  DType from, to;
};

std::string name(const GatherCase& c) {
  return std::to_string(c.tokens) + " x " + std::to_string(c.width) + " x " +
         std::to_string(c.slots) + (c.scaled ? " scaled " : " ") + to_string(c.from) + " to " +
         to_string(c.to);
}

void check(const GatherCase& c, int threads) {
  const OrderSpec order_spec{.experts = 5, .slots = c.slots};
  const OrderCase o = make_case(order_spec, c.tokens, Pattern::poison);
  const OrderResult sorted = o.reference();

  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Rows hidden(c.from, c.tokens, c.width, c.width + 3);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < c.width; ++h) {
      store_f32(hidden.tensor.data, c.from, t * (c.width + 3) + h, normal(random));
    }
  }
  const std::int64_t pairs = c.tokens * c.slots;
  GatherInputs in{.hidden = hidden.tensor,
                  .permutation = view(sorted.permutation.data(), {pairs}),
                  .rows = view(&sorted.offsets.back(), {1})};
  if (c.scaled) in.weights = view(sorted.weights.data(), {pairs});
  const GatherSpec spec{.slots = c.slots, .scale_by_weight = c.scaled};
  Rows rows(c.to, pairs, c.width, c.width + 1);
  Rows expected(c.to, pairs, c.width, c.width + 1);
  gather_reference(spec, in, expected.tensor);
  call(engine(threads), spec, in, rows.tensor);
  // A product in f32 is the product in double, rounded once; into 16 bits the reference rounds from
  // f32 as well. So even the rows and gaps that are left alone agree, to the bit.
  ASSERT_EQ(rows.memory, expected.memory) << name(c) << " on " << threads;
  in.inverse = view(sorted.inverse.data(), {c.tokens, c.slots});
  Rows again(c.to, pairs, c.width, c.width + 1);
  call(engine(threads), spec, in, again.tensor);
  ASSERT_EQ(again.memory, expected.memory) << name(c) << " with the inverse, on " << threads;
}

TEST(Gather, EqualsTheReference) {
  for (const DType from : {f32, bf16, f16}) {
    for (const DType to : {f32, bf16, f16}) {
      for (const bool scaled : {false, true}) {
        for (const std::int64_t width : {1, 7, 64, 129, 1000}) {
          for (const std::int64_t tokens : {0, 1, 5, 33}) {
            check({tokens, width, 3, scaled, from, to}, 1);
          }
        }
        check({101, 2051, 4, scaled, from, to}, 3);
      }
    }
  }
}

TEST(Gather, F16Saturates) {
  const std::vector<float> hidden = {65504, 65520, 1e9F, -1e9F, 5.9604645e-8F, 1e-30F, -0.0F, 2};
  const std::int32_t permutation = 0, count = 1;
  const float weight = 4;
  std::vector<std::uint16_t> rows(8);
  const GatherInputs in{.hidden = view(hidden.data(), {1, 8}),
                        .permutation = view(&permutation, {1}),
                        .rows = view(&count, {1})};
  call(engine(1), {.slots = 1}, in, view(rows.data(), f16, {1, 8}));
  EXPECT_EQ(rows, (std::vector<std::uint16_t>{0x7bff, 0x7bff, 0x7bff, 0xfbff, 0x0001, 0, 0x8000,
                                              0x4000}));
  GatherInputs scaled = in;
  scaled.weights = view(&weight, {1});
  call(engine(1), {.slots = 1, .scale_by_weight = true}, scaled, view(rows.data(), f16, {1, 8}));
  EXPECT_EQ(rows, (std::vector<std::uint16_t>{0x7bff, 0x7bff, 0x7bff, 0xfbff, 0x0004, 0, 0x8000,
                                              0x4800}));
}

// Row offsets past 2^31 elements: a stride of 0 on input keeps the memory small, and only the last
// row is in use.
TEST(Gather, OffsetsAreWide) {
  SHUNT_ON_CPU_ONLY();  // there the memory is real: gather_gpu_test.cpp
  const std::int64_t width = 8, stride = (std::int64_t{1} << 31) + 16;
  std::vector<std::uint16_t> row(8);
  std::iota(row.begin(), row.end(), std::uint16_t{1});
  Tensor hidden = view(row.data(), bf16, {3, width});
  // Token 2 of a tensor that begins 2 strides before `row`: never read elsewhere.
  hidden.strides[0] = stride;
  hidden.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(row.data()) -
                                        static_cast<std::uintptr_t>(2 * stride * 2));
  const std::int32_t permutation[3] = {2, 0, 0}, count = 1;
  std::vector<std::uint16_t> out(24);
  gather(cpu({.threads = 1}), {.slots = 1},
         {.hidden = hidden, .permutation = view(permutation, {3}), .rows = view(&count, {1})},
         view(out.data(), bf16, {3, width}));
  EXPECT_EQ(std::vector<std::uint16_t>(out.begin(), out.begin() + 8), row);
}

TEST(Gather, RefusesBadArguments) {
  SHUNT_ON_CPU_ONLY();
  std::vector<float> hidden(12), rows(24), weights(6);
  const std::vector<std::int32_t> good = {0, 1, 2, 3, 4, 5};
  std::vector<std::int32_t> permutation = good;
  std::int32_t count = 6;
  GatherInputs in{.hidden = view(hidden.data(), {3, 4}),
                  .permutation = view(permutation.data(), {6}),
                  .rows = view(&count, {1})};
  const Tensor out = view(rows.data(), {6, 4});
  const Context context = cpu({.threads = 1});
  const auto message = [&](const GatherSpec& spec, const GatherInputs& inputs, Tensor to) {
    try {
      gather(context, spec, inputs, to);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](const std::string& what, const std::string& words) {
    EXPECT_NE(what.find(words), std::string::npos) << "no '" << words << "' in: " << what;
  };
  EXPECT_EQ(message({.slots = 2}, in, out), "");
  expect(message({.slots = 0}, in, out), "gather: slots is 0");
  expect(message({.slots = 3}, in, out), "gather: permutation is i32 [6]");
  expect(message({.slots = 2}, in, view(rows.data(), {6, 3})), "gather: rows (output)");
  expect(message({.slots = 2}, in, view(rows.data(), i32, {6, 4})), "gather: rows (output)");
  expect(message({.slots = 2, .scale_by_weight = true}, in, out), "gather: weights is missing");
  Tensor overlapping = out;
  overlapping.strides[0] = 3;
  expect(message({.slots = 2}, in, overlapping), "row stride of 3");
  std::vector<float> both(30);
  GatherInputs inside = in;
  inside.hidden = view(both.data(), {3, 4});
  expect(message({.slots = 2}, inside, view(both.data() + 6, {6, 4})),
         "gather: rows (output) overlaps hidden: must lie apart");
  GatherInputs shared = in;
  shared.permutation = view(both.data(), i32, {6});
  expect(message({.slots = 2}, shared, view(both.data() + 5, {6, 4})),
         "gather: rows (output) overlaps permutation: must lie apart");
  shared = in;
  shared.rows = view(both.data() + 23, i32, {1});
  expect(message({.slots = 2}, shared, view(both.data(), {6, 4})),
         "gather: rows (output) overlaps rows (count): must lie apart");
  shared = in;
  shared.inverse = view(both.data() + 23, i32, {3, 2});
  expect(message({.slots = 2}, shared, view(both.data(), {6, 4})),
         "gather: rows (output) overlaps inverse: must lie apart");
  GatherInputs weighted = in;
  weighted.weights = view(weights.data(), {6});
  std::vector<std::uint8_t> rounded(24);
  try {
    gather(context, {.slots = 2, .scale_by_weight = true, .quantise = Quantise::row}, weighted,
           view(rounded.data(), DType::f8_e4m3, {6, 4}), weighted.weights);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    expect(error.what(), "gather: scales overlaps weights: must lie apart");
  }
  Tensor transposed = view(hidden.data(), {4, 3}).transposed();
  GatherInputs bad = in;
  bad.hidden = transposed;
  expect(message({.slots = 2}, bad, out), "gather: hidden");
  bad = in;
  bad.weights = view(weights.data(), {6});
  expect(message({.slots = 2}, bad, out), "gather: weights is given");
  count = 7;
  expect(message({.slots = 2}, in, out), "rows (count) is 7: must be 0 to 6");
  count = -1;
  expect(message({.slots = 2}, in, out), "rows (count) is -1");
  count = 6;
  permutation[4] = 6;
  expect(message({.slots = 2}, in, out), "permutation[4] is 6: must be 0 to 5");
  permutation[4] = -1;
  expect(message({.slots = 2}, in, out), "permutation[4] is -1");
  count = 4;  // what lies past the count is not looked at
  EXPECT_EQ(message({.slots = 2}, in, out), "");
}

}  // namespace
}  // namespace shunt::test
