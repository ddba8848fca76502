// Experts' rows, the residual and the output with offsets past 2^31 elements: what dense ones give.
#include "far_rows.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "core/convert.hpp"
#include "shunt/combine.hpp"

namespace shunt::test {
namespace {

constexpr std::int64_t width = 64, far_apart = (std::int64_t{1} << 19) + 64;

std::vector<std::uint16_t> normal_numbers(std::int64_t rows, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(static_cast<std::size_t>(rows * width));
  for (std::uint16_t& value : values) value = f32_to_bf16(normal(random));
  return values;
}

TEST(Combine, RowsFarApart) {
  const Context context = engine(2);
  for (const int slots : {1, 8, 9}) {
    constexpr std::int64_t rows = 4608;
    const std::int64_t tokens = rows / slots;
    const auto experts = normal_numbers(rows, 1), rest = normal_numbers(tokens, 2);
    std::vector<std::int32_t> inverse(static_cast<std::size_t>(tokens * slots));
    std::iota(inverse.rbegin(), inverse.rend(), 0);  // token 0 has the farthest rows
    std::vector<float> weights(inverse.size());
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 0.1F + static_cast<float>(i % 7);

    FarRows far(context, bf16, rows, width, far_apart);
    FarRows far_rest(context, bf16, tokens, width, far_apart);
    FarRows far_out(context, bf16, tokens, width, far_apart);
    far.put(experts.data());
    far_rest.put(rest.data());
    std::vector<std::uint16_t> near_out(rest.size()), got(rest.size());
    Mirror mirror(context);
    const auto sum = [&](const Tensor& from, const Tensor& residual, const Tensor& to) {
      combine(context, {.slots = slots},
              {.rows = from,
               .inverse = mirror.in(view(inverse.data(), {tokens, slots})),
               .weights = mirror.in(view(weights.data(), {tokens, slots})),
               .residual = residual},
              to);
    };
    sum(mirror.in(view(experts.data(), bf16, {rows, width})),
        mirror.in(view(rest.data(), bf16, {tokens, width})),
        mirror.out(view(near_out.data(), bf16, {tokens, width})));
    sum(far.tensor(), far_rest.tensor(), far_out.tensor());
    mirror.fetch();
    far_out.get(got.data());
    EXPECT_EQ(got, near_out) << slots << " slots";
  }
}

}  // namespace
}  // namespace shunt::test
