// gather of hidden states, and to rows, whose offsets are past 2^31 elements: what dense ones give,
// in 16 bits and rounded to fp8.
#include "far_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "shunt/order.hpp"

namespace shunt::test {
namespace {

constexpr std::int64_t tokens = 520, slots = 2, pairs = tokens * slots, width = 256;

TEST(Gather, RowsFarApart) {
  const Context context = engine(2);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> states(static_cast<std::size_t>(tokens * width));
  for (std::uint16_t& state : states) state = f32_to_bf16(normal(random));
  std::vector<std::int32_t> permutation(static_cast<std::size_t>(pairs)), inverse(permutation);
  std::iota(permutation.begin(), permutation.end(), 0);
  std::shuffle(permutation.begin(), permutation.end(), random);
  for (std::size_t r = 0; r < permutation.size(); ++r) {
    inverse[static_cast<std::size_t>(permutation[r])] = static_cast<std::int32_t>(r);
  }
  const auto count = static_cast<std::int32_t>(pairs);
  FarRows far(context, bf16, tokens, width, (std::int64_t{1} << 22) + 64);
  far.put(states.data());
  Mirror mirror(context);
  const Tensor near = mirror.in(view(states.data(), bf16, {tokens, width}));
  for (const Quantise quantise : {Quantise::none, Quantise::row, Quantise::block_128}) {
    const bool fp8 = quantise != Quantise::none;
    const DType dtype = fp8 ? DType::f8_e4m3 : bf16;
    FarRows far_rows(context, dtype, pairs, width, (std::int64_t{1} << 21) + 64);
    for (const bool with_inverse : {false, true}) {
      SCOPED_TRACE(testing::Message() << "fp8 " << static_cast<int>(quantise)
                                      << ", with the inverse " << with_inverse);
      const std::vector<std::uint16_t> nothing(static_cast<std::size_t>(pairs * width), 0);
      far_rows.put(nothing.data());
      std::vector<std::uint16_t> near_rows(nothing), got(nothing);
      std::vector<float> near_scales(static_cast<std::size_t>(2 * pairs)), scales(near_scales);
      const auto run = [&](const Tensor& hidden, const Tensor& rows, std::vector<float>& of) {
        GatherInputs in{.hidden = hidden,
                        .permutation = mirror.in(view(permutation.data(), {pairs})),
                        .rows = mirror.in(view(&count, {1}))};
        if (with_inverse) in.inverse = mirror.in(view(inverse.data(), {tokens, slots}));
        Mirror out(context);
        const Tensor to = quantise == Quantise::row ? out.out(view(of.data(), {pairs}))
                          : fp8                     ? out.out(view(of.data(), {pairs, 2}))
                                                    : Tensor{};
        gather(context, {.slots = static_cast<int>(slots), .quantise = quantise}, in, rows, to);
        out.fetch();
      };
      Mirror there(context);
      run(near, there.out(view(static_cast<const void*>(near_rows.data()), dtype, {pairs, width})),
          near_scales);
      run(far.tensor(), far_rows.tensor(), scales);
      there.fetch();
      far_rows.get(got.data());
      EXPECT_EQ(got, near_rows);
      EXPECT_EQ(scales, near_scales);
      EXPECT_NE(got, nothing);
    }
  }
}

}  // namespace
}  // namespace shunt::test
