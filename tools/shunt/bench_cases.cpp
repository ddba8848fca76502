// Cases of route, gate, order and shuffle; gather and combine are in bench_rows.cpp.
#include "bench_cases.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "bench_tensors.hpp"
#include "shunt/order.hpp"
#include "shunt/route.hpp"
#include "shunt/route_and_order.hpp"

namespace shunt::tool {

namespace {

std::string rule_label(const RouteSpec& spec) {
  std::string label = fmt::format("E{} k{}", spec.experts, spec.top_k);
  if (spec.groups.count > 1) label += fmt::format(" g{}/{}", spec.groups.count, spec.groups.keep);
  return label;
}

void check_same(const std::string& label, const char* what, const OnHost& got, const OnHost& want,
                std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) {
    if (got.ints()[i] == want.ints()[i]) continue;
    differs(label, fmt::format("{}[{}] is {}, not {}", what, i, got.ints()[i], want.ints()[i]));
  }
}

// Sums in another order and another exp may exchange experts whose scores all but tie: one row in a
// thousand may differ, and more where more than 8 of 256 experts, which are closer, are chosen.
void check_choice(const std::string& label, int experts, const OnHost& ids, const OnHost& weights,
                  const OnHost& want_ids, const OnHost& want_weights) {
  const std::int64_t tokens = ids.tensor.shape[0], slots = ids.tensor.shape[1];
  std::int64_t other = 0, first = -1;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t row = t * slots;
    if (std::memcmp(ids.ints() + row, want_ids.ints() + row, at(slots) * 4) != 0) {
      if (other++ == 0) first = t;
      continue;
    }
    for (std::int64_t i = row; i < row + slots; ++i) {
      const float want = want_weights.floats()[i];
      if (std::abs(weights.floats()[i] - want) <= 1e-3f * (1 + std::abs(want))) continue;
      differs(label, fmt::format("the weight of token {}, slot {} is {}, not {}", t, i - row,
                                 weights.floats()[i], want));
    }
  }
  if (other > std::max(tokens / 1000, tokens * slots * experts / 2'000'000)) {
    differs(label, fmt::format("{} of {} tokens chose other experts, token {} first", other, tokens,
                               first));
  }
}

// ---- route, gate, shuffle ----------------------------------------------------------------------

struct Routing {
  Context context;
  RouteSpec spec;
  OrderSpec ordering;
  std::int64_t tokens = 0, hidden = 0;
  Variants states, router, logits;                     // in: hidden states, or logits
  Variants router_bias, selection_bias, expert_scale;  // as the rule has them
  Variants ids, weights;                               // out
  Variants offsets, permutation, inverse;              // out, of shuffle
  Buffer workspace;

  RouteInputs in(std::int64_t i) const {
    return {.logits = logits[i],
            .hidden = states[i],
            .router_weight = router[i],
            .router_bias = router_bias[i],
            .selection_bias = selection_bias[i],
            .per_expert_scale = expert_scale[i]};
  }
  void route_only(std::int64_t i) const {
    route(context, spec, in(i), {.ids = ids[i], .weights = weights[i]}, workspace);
  }
  OrderOutputs orders(std::int64_t i) const {
    return {.offsets = offsets[i], .permutation = permutation[i], .inverse = inverse[i]};
  }
  void route_then_order(std::int64_t i) const {
    route_and_order(context, spec, in(i), {.ids = ids[i], .weights = weights[i]}, ordering,
                    orders(i), workspace);
  }
  std::size_t workspace_bytes() const {
    return offsets.count() > 0
               ? route_and_order_workspace_bytes(context, spec, ordering, tokens, hidden)
               : route_workspace_bytes(context, spec, tokens, hidden);
  }
};

void check_routing(const Routing& gpu, const std::string& label) {
  const OnHost ids(gpu.context, gpu.ids[0]), weights(gpu.context, gpu.weights[0]);
  const OnHost want_ids(gpu.context, gpu.ids[0]), want_weights(gpu.context, gpu.weights[0]);
  const RouteInputs there = gpu.in(0);
  const OnHost logits(gpu.context, there.logits), states(gpu.context, there.hidden),
      router(gpu.context, there.router_weight), router_bias(gpu.context, there.router_bias),
      selection_bias(gpu.context, there.selection_bias), scale(gpu.context, there.per_expert_scale);
  const Buffer workspace =
      host().allocate(route_workspace_bytes(host(), gpu.spec, gpu.tokens, gpu.hidden));
  route(host(), gpu.spec,
        {.logits = logits.tensor,
         .hidden = states.tensor,
         .router_weight = router.tensor,
         .router_bias = router_bias.tensor,
         .selection_bias = selection_bias.tensor,
         .per_expert_scale = scale.tensor},
        {.ids = want_ids.tensor, .weights = want_weights.tensor}, workspace);
  check_choice(label, gpu.spec.experts, ids, weights, want_ids, want_weights);
  if (gpu.offsets.count() == 0) return;

  // The order is that of the ids which were chosen, whichever.
  const OnHost offsets(gpu.context, gpu.offsets[0]), permutation(gpu.context, gpu.permutation[0]),
      inverse(gpu.context, gpu.inverse[0]);
  const OnHost want_offsets(gpu.context, gpu.offsets[0]),
      want_permutation(gpu.context, gpu.permutation[0]), want_inverse(gpu.context, gpu.inverse[0]);
  const Buffer scratch = host().allocate(order_workspace_bytes(host(), gpu.ordering, gpu.tokens));
  order(host(), gpu.ordering, {.ids = ids.tensor},
        {.offsets = want_offsets.tensor,
         .permutation = want_permutation.tensor,
         .inverse = want_inverse.tensor},
        scratch);
  check_same(label, "offsets", offsets, want_offsets, offsets.tensor.elements());
  check_same(label, "permutation", permutation, want_permutation, permutation.tensor.elements());
  check_same(label, "inverse", inverse, want_inverse, inverse.tensor.elements());
}

StageCase routing_case(const Context& context, const bench::StageShape& shape, Spread spread,
                       std::int64_t rotate_bytes) {
  const RouteSpec& spec = shape.route;
  const bool fused = shape.stage == "route", ordered = shape.stage == "shuffle";
  const std::int64_t tokens = shape.tokens, slots = spec.slots(), pairs = tokens * slots;
  const std::int64_t columns = spec.columns(), hidden = fused ? shape.hidden : 0;
  require(supports(spec, context.device()));
  auto made = std::make_shared<Routing>(Routing{.context = context, .spec = spec});
  made->tokens = tokens;
  made->hidden = hidden;

  const double width = element_bytes(shape.dtype);
  const double read = fused ? width * static_cast<double>((tokens + columns) * hidden)
                            : width * static_cast<double>(tokens * columns);
  double moved = read + 8.0 * static_cast<double>(pairs);
  if (spec.selection_bias) moved += 4.0 * spec.experts;
  if (ordered) moved += 8.0 * static_cast<double>(pairs) + 4.0 * (spec.experts + 1);
  const std::int64_t n = variants_for(moved, rotate_bytes);

  if (fused) {
    made->states = Variants(context, shape.dtype, {tokens, hidden}, n);
    made->router = Variants(context, shape.dtype, {columns, hidden}, n);
    fill(context, made->states, 1, 1);
    fill(context, made->router, 1 / std::sqrt(static_cast<float>(hidden)), 2);
    steer_states(context, spec, spread, routers_of(context, spread, made->router), made->states);
  } else {
    made->logits = Variants(context, shape.dtype, {tokens, columns}, n);
    fill(context, made->logits, 1, 1);
    steer_logits(context, spec, spread, made->logits);
  }
  const auto vector = [&](bool wanted, std::int64_t size, std::uint64_t seed) {
    if (!wanted) return Variants();
    Variants made_of(context, DType::f32, {size}, 1);
    fill(context, made_of, 0.1f, seed);
    return made_of;
  };
  made->router_bias = vector(spec.router_bias, columns, 3);
  made->selection_bias = vector(spec.selection_bias, spec.experts, 4);
  made->expert_scale = vector(spec.per_expert_scale, columns, 5);
  made->ids = Variants(context, DType::i32, {tokens, slots}, n);
  made->weights = Variants(context, DType::f32, {tokens, slots}, n);
  if (ordered) {
    made->ordering = {.experts = spec.experts + spec.shared.count, .slots = spec.slots()};
    require(supports(made->ordering, context.device()));
    made->offsets = Variants(context, DType::i32, {made->ordering.experts + 1}, n);
    made->permutation = Variants(context, DType::i32, {pairs}, n);
    made->inverse = Variants(context, DType::i32, {tokens, slots}, n);
  }

  made->workspace = context.allocate(made->workspace_bytes());

  std::string label = fmt::format("T{} {}", tokens, rule_label(spec));
  if (fused) label += fmt::format(" H{}", hidden);
  return {
      .op = shape.stage,
      .label = label,
      .dtype = shape.dtype,
      .variants = n,
      .cost = {moved, fused ? 2.0 * static_cast<double>(tokens * columns * hidden) : 0},
      .on_tensor_cores = fused && shape.dtype != DType::f32,
      .call = [made, ordered](
                  std::int64_t i) { ordered ? made->route_then_order(i) : made->route_only(i); },
      .check = [made, label] { check_routing(*made, label); }};
}

// ---- order -------------------------------------------------------------------------------------

struct Ordering {
  Context context;
  OrderSpec spec;
  Variants ids, offsets, permutation, inverse;  // compact
  Variants sorted, experts, count;              // in padded tiles
  Buffer workspace;

  OrderOutputs out(std::int64_t i) const {
    return {.offsets = offsets[i],
            .permutation = permutation[i],
            .inverse = inverse[i],
            .sorted_token_ids = sorted[i],
            .sorted_expert_ids = experts[i],
            .num_tokens_post_padded = count[i]};
  }
  void run(std::int64_t i) const { order(context, spec, {.ids = ids[i]}, out(i), workspace); }
};

void check_order(const Ordering& gpu, std::int64_t tokens, const std::string& label) {
  const OnHost ids(gpu.context, gpu.ids[0]);
  const Buffer workspace = host().allocate(order_workspace_bytes(host(), gpu.spec, tokens));
  const OrderOutputs there = gpu.out(0);
  const auto each = [&](auto visit) {
    visit("offsets", there.offsets);
    visit("permutation", there.permutation);
    visit("inverse", there.inverse);
    visit("sorted_token_ids", there.sorted_token_ids);
    visit("sorted_expert_ids", there.sorted_expert_ids);
    visit("num_tokens_post_padded", there.num_tokens_post_padded);
  };
  std::vector<OnHost> got, want;
  each([&](const char*, const Tensor& tensor) {
    got.emplace_back(gpu.context, tensor);
    want.emplace_back(gpu.context, tensor);
  });
  order(host(), gpu.spec, {.ids = ids.tensor},
        {.offsets = want[0].tensor,
         .permutation = want[1].tensor,
         .inverse = want[2].tensor,
         .sorted_token_ids = want[3].tensor,
         .sorted_expert_ids = want[4].tensor,
         .num_tokens_post_padded = want[5].tensor},
        workspace);
  std::size_t i = 0;
  each([&](const char* what, const Tensor& tensor) {
    if (tensor) check_same(label, what, got[i], want[i], tensor.elements());
    ++i;
  });
}

StageCase order_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes) {
  const std::int64_t tokens = shape.tokens;
  const Batches batches(shape.route, spread, tokens);
  auto made = std::make_shared<Ordering>(Ordering{.context = context, .spec = batches.spec});
  made->spec.tile = shape.tile;
  const OrderSpec& spec = made->spec;
  require(supports(spec, context.device()));
  const std::int64_t pairs = tokens * spec.slots;
  double moved = 4.0 * static_cast<double>(pairs);
  std::string label = fmt::format("T{} E{} k{}", tokens, spec.experts, spec.slots);
  if (shape.tile == 0) {
    moved += 8.0 * static_cast<double>(pairs) + 4.0 * (spec.experts + 1);
  } else {
    const std::int64_t rows = padded_rows_capacity(spec, tokens);
    const std::int64_t tiles = rows / spec.tile;
    moved += 4.0 * static_cast<double>(rows + tiles + 1);
    label += fmt::format(" tile {}", spec.tile);
  }
  const std::int64_t n = variants_for(moved, rotate_bytes);
  made->ids = Variants(context, DType::i32, {tokens, spec.slots}, n);
  upload(context, made->ids, batches.ids);
  if (shape.tile == 0) {
    made->offsets = Variants(context, DType::i32, {spec.experts + 1}, n);
    made->permutation = Variants(context, DType::i32, {pairs}, n);
    made->inverse = Variants(context, DType::i32, {tokens, spec.slots}, n);
  } else {
    const std::int64_t rows = padded_rows_capacity(spec, tokens);
    made->sorted = Variants(context, DType::i32, {rows}, n);
    made->experts = Variants(context, DType::i32, {rows / spec.tile}, n);
    made->count = Variants(context, DType::i32, {1}, n);
  }
  made->workspace = context.allocate(order_workspace_bytes(context, spec, tokens));
  return {.op = "order",
          .label = label,
          .dtype = DType::i32,
          .variants = n,
          .cost = {moved, 0},
          .call = [made](std::int64_t i) { made->run(i); },
          .check = [made, tokens, label] { check_order(*made, tokens, label); }};
}

}  // namespace

StageCase make_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes) {
  if (shape.route.hashed) {
    throw Error(Status::unsupported, "bench: a rule that looks ids up has no routing to time");
  }
  if (shape.stage == "order") return order_case(context, shape, spread, rotate_bytes);
  if (shape.stage == "gather" || shape.stage == "combine") {
    return rows_case(context, shape, spread, rotate_bytes);
  }
  if (shape.stage == "activate") return activate_case(context, shape, rotate_bytes);
  if (shape.stage == "layer") return layer_case(context, shape, spread, rotate_bytes);
  if (shape.stage == "gemm") return gemm_case(context, shape, spread, rotate_bytes);
  if (shape.stage == "indexed") return indexed_case(context, shape, spread, rotate_bytes);
  if (shape.stage == "chain") return chain_case(context, shape, spread, rotate_bytes);
  if (shape.ranks > 0) return ranks_case(context, shape, spread, rotate_bytes);
  return routing_case(context, shape, spread, rotate_bytes);
}

}  // namespace shunt::tool
