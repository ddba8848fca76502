// Rows of logits and of hidden states whose offsets are past 2^31 elements: what the same rows give
// one behind the other.
#include <fmt/core.h>

#include "far_rows.hpp"
#include "route/route_util.hpp"

namespace shunt::test {
namespace {

struct Far {
  std::int64_t rows, stride;
};
// Two rows, as few tokens' kernels see them, and many; past 2^31 elements in all.
constexpr Far distances[] = {{2, (std::int64_t{1} << 31) + 64},
                             {4104, (std::int64_t{1} << 19) + 64}};

// Rows and all else are on the context's device; outputs are mirrored.
RouteResult run_there(const Context& context, const RouteSpec& spec, const Tensor& rows,
                      const Tensor& weight) {
  RouteResult out(spec, rows.shape[0]);
  Mirror mirror(context);
  const Buffer workspace = context.allocate(
      route_workspace_bytes(context, spec, rows.shape[0], weight ? rows.shape[1] : 0));
  RouteInputs in;
  if (weight) {
    in.hidden = rows, in.router_weight = mirror.in(weight);
  } else {
    in.logits = rows;
  }
  RouteOutputs outputs = out.outputs(spec, rows.shape[0]);
  outputs.replay = {};
  if (!weight) outputs.logits = {};  // as most callers: kernels for ids and weights alone
  if (rows.shape[0] > 2) outputs.dense = {};
  route(context, spec, in, mirrored(mirror, outputs), workspace);
  mirror.fetch();
  return out;
}

std::vector<std::uint16_t> stored_in(DType dtype, const std::vector<float>& values) {
  std::vector<std::uint16_t> memory(values.size() * (dtype == f32 ? 2 : 1));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_f32(memory.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return memory;
}

std::vector<float> normal_numbers(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(at(count));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(RouteFarRows, OfLogits) {
  const Context context = engine(2);
  for (const DType dtype : {bf16, f16, f32}) {
    for (const auto& [rows, stride] : distances) {
      for (const auto& [experts, top_k] :
           {std::pair{16, 1}, {32, 4}, {128, 8}, {256, 8}, {512, 10}}) {
        const RouteSpec spec{.experts = experts, .top_k = top_k};
        const auto values = stored_in(dtype, normal_numbers(rows * experts, 3));
        FarRows far(context, dtype, rows, experts, stride);
        far.put(values.data());
        Mirror mirror(context);
        const Tensor near = mirror.in(view(values.data(), dtype, {rows, experts}));
        EXPECT_TRUE(run_there(context, spec, far.tensor(), {}) ==
                    run_there(context, spec, near, {}))
            << fmt::format("{} {} of {}", to_string(dtype), rows, experts);
      }
    }
  }
}

TEST(RouteFarRows, OfHiddenStates) {
  const Context context = engine(2);
  constexpr std::int64_t hidden = 128;
  for (const DType dtype : {bf16, f32}) {
    for (const auto& [rows, stride] : distances) {
      for (const int experts : {16, 128}) {
        const RouteSpec spec{.experts = experts, .top_k = 4};
        const auto weight = stored_in(dtype, normal_numbers(experts * hidden, 4));
        const auto values = stored_in(dtype, normal_numbers(rows * hidden, 5));
        const Tensor w = view(weight.data(), dtype, {experts, hidden});
        FarRows far(context, dtype, rows, hidden, stride);
        far.put(values.data());
        Mirror mirror(context);
        const Tensor near = mirror.in(view(values.data(), dtype, {rows, hidden}));
        EXPECT_TRUE(run_there(context, spec, far.tensor(), w) == run_there(context, spec, near, w))
            << fmt::format("{} {} of {}", to_string(dtype), rows, experts);
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
