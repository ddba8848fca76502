// The case `chain`: route, order, gather and combine, one after the other, as a layer enqueues them
// around its experts. What dependent launches save is seen here.
#include <fmt/core.h>

#include <cmath>
#include <memory>

#include "bench_cases.hpp"
#include "bench_tensors.hpp"
#include "cuda/runtime.hpp"
#include "shunt/combine.hpp"
#include "shunt/order.hpp"
#include "shunt/route.hpp"

namespace shunt::tool {

namespace {

struct Chain {
  Context context;
  RouteSpec routing;
  OrderSpec ordering;
  GatherSpec gathering;
  CombineSpec combining;
  Variants states, router, router_bias, selection_bias, expert_scale, ids, weights, offsets,
      permutation, inverse, rows, out;
  Buffer workspace;

  void run(std::int64_t i) const {
    const int experts = ordering.experts;
    route(context, routing,
          {.hidden = states[i],
           .router_weight = router[i],
           .router_bias = router_bias[i],
           .selection_bias = selection_bias[i],
           .per_expert_scale = expert_scale[i]},
          {.ids = ids[i], .weights = weights[i]}, workspace);
    order(context, ordering, {.ids = ids[i]},
          {.offsets = offsets[i], .permutation = permutation[i], .inverse = inverse[i]}, workspace);
    const Tensor first = offsets[i];
    const Tensor count = view(first.as<std::int32_t>() + experts, DType::i32, {1}, first.device);
    gather(
        context, gathering,
        {.hidden = states[i], .permutation = permutation[i], .rows = count, .inverse = inverse[i]},
        rows[i]);
    combine(context, combining, {.rows = rows[i], .inverse = inverse[i], .weights = weights[i]},
            out[i]);
  }
};

// Without experts in between, a token's sum is itself times the sum of its weights.
void check_chain(const Chain& made, const std::string& label) {
  const OnHost x(made.context, made.states[0]), weights(made.context, made.weights[0]),
      got(made.context, made.out[0]), want(made.context, made.out[0]);
  const std::int64_t slots = made.ordering.slots, hidden = x.tensor.shape[1];
  for (std::int64_t t = 0; t < x.tensor.shape[0]; ++t) {
    float sum = 0;
    for (std::int64_t s = 0; s < slots; ++s) sum += weights.floats()[t * slots + s];
    for (std::int64_t h = 0; h < hidden; ++h) {
      put_element(want.tensor, t * hidden + h, sum * element(x.tensor, t * hidden + h));
    }
  }
  check_close(label, got, want);
}

}  // namespace

StageCase chain_case(const Context& given, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes) {
  const std::int64_t tokens = shape.tokens, hidden = shape.hidden;
  const RouteSpec& spec = shape.route;
  // The same stream.
  const Context context = shape.dependent_launch && given.device().type == DeviceType::cuda
                              ? cuda({.stream = given.gpu().stream,
                                      .index = given.device().index,
                                      .dependent_launch = true})
                              : given;
  auto made = std::make_shared<Chain>(Chain{.context = context, .routing = spec});
  made->ordering = {.experts = spec.experts + spec.shared.count, .slots = spec.slots()};
  made->gathering = {.slots = spec.slots()};
  made->combining = {.slots = spec.slots()};
  require(supports(spec, context.device()));
  const std::int64_t pairs = tokens * spec.slots();
  const double element = element_bytes(shape.dtype);
  const double written =
      element * static_cast<double>((pairs + tokens) * hidden) + 16 * static_cast<double>(pairs);
  // Tokens are read by route and by gather, rows by combine.
  const double moved =
      written + element * static_cast<double>((2 * tokens + pairs + spec.columns()) * hidden) +
      16 * static_cast<double>(pairs);
  const std::int64_t n = variants_for(moved, rotate_bytes);
  const auto tensors = [&](DType dtype, std::vector<std::int64_t> sizes) {
    return Variants(context, dtype, std::move(sizes), n);
  };
  made->states = tensors(shape.dtype, {tokens, hidden});
  made->router = tensors(shape.dtype, {spec.columns(), hidden});
  fill(context, made->states, 1, 1);
  fill(context, made->router, 1 / std::sqrt(static_cast<float>(hidden)), 2);
  steer_states(context, spec, spread, routers_of(context, spread, made->router), made->states);
  const auto vector = [&](bool wanted, std::int64_t size, std::uint64_t seed) {
    if (!wanted) return Variants();
    Variants made_of(context, DType::f32, {size}, 1);
    fill(context, made_of, 0.1f, seed);
    return made_of;
  };
  made->router_bias = vector(spec.router_bias, spec.columns(), 3);
  made->selection_bias = vector(spec.selection_bias, spec.experts, 4);
  made->expert_scale = vector(spec.per_expert_scale, spec.columns(), 5);
  made->ids = tensors(DType::i32, {tokens, spec.slots()});
  made->weights = tensors(DType::f32, {tokens, spec.slots()});
  made->offsets = tensors(DType::i32, {made->ordering.experts + 1});
  made->permutation = tensors(DType::i32, {pairs});
  made->inverse = tensors(DType::i32, {tokens, spec.slots()});
  made->rows = tensors(shape.dtype, {pairs, hidden});
  made->out = tensors(shape.dtype, {tokens, hidden});
  made->workspace =
      context.allocate(std::max(route_workspace_bytes(context, spec, tokens, hidden),
                                order_workspace_bytes(context, made->ordering, tokens)));
  const std::string label = fmt::format("T{} E{} k{} H{}{}", tokens, spec.experts, spec.top_k,
                                        hidden, shape.dependent_launch ? " dependent" : "");
  return {.op = "chain",
          .label = label,
          .dtype = shape.dtype,
          .variants = n,
          .cost = {moved, 2.0 * static_cast<double>(tokens * spec.columns() * hidden), written},
          .call = [made](std::int64_t i) { made->run(i); },
          .check = [made, label] { check_chain(*made, label); }};
}

}  // namespace shunt::tool
