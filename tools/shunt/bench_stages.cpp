// shunt bench STAGE on the CPU: one stage alone.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "bench.hpp"
#include "bench_cases.hpp"
#include "bench_packed.hpp"
#include "bench_tensors.hpp"
#include "cost.hpp"
#include "shunt/activate.hpp"
#include "shunt/combine.hpp"
#include "shunt/gemm.hpp"
#include "shunt/order.hpp"

namespace shunt::tool {

namespace {

constexpr std::int64_t most_copies = 1024;

// Zero-compute experts have no weights and no rows: their ids, the last, fall out of range.
int computed_experts(const BenchPlan& plan) {
  return plan.spec.route.experts - plan.spec.zero_experts;
}

// Ids and weights of one batch of tokens, and their order.
struct Ordered {
  Ordered(const BenchPlan& plan, const Context& context, RoutingSource& source, std::int64_t tokens)
      : spec{.experts = computed_experts(plan), .slots = plan.spec.route.top_k},
        ids(source.next(tokens)),
        weights(ids.size(), 1.0f / static_cast<float>(spec.slots)),
        offsets(at(spec.experts + 1)),
        permutation(ids.size()),
        inverse(ids.size()),
        row_weights(ids.size()) {
    const Buffer workspace = context.allocate(order_workspace_bytes(context, spec, tokens));
    run(context, tokens, workspace);
  }
  void run(const Context& context, std::int64_t tokens, Workspace workspace) {
    const auto n = static_cast<std::int64_t>(ids.size());
    order(context, spec,
          {.ids = view(ids.data(), {tokens, spec.slots}),
           .weights = view(weights.data(), {tokens, spec.slots})},
          {.offsets = view(offsets.data(), {spec.experts + 1}),
           .permutation = view(permutation.data(), {n}),
           .inverse = view(inverse.data(), {tokens, spec.slots}),
           .weights = view(row_weights.data(), {n})},
          workspace);
  }
  std::int64_t rows() const { return offsets.back(); }

  OrderSpec spec;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> offsets, permutation, inverse;
  std::vector<float> row_weights;
};

Buffer rows_buffer(const Context& context, DType dtype, std::int64_t elements) {
  return context.allocate(
      static_cast<std::size_t>(bytes(dtype, std::max<std::int64_t>(elements, 1))));
}

}  // namespace

std::string token_label(const BenchPlan& plan, std::int64_t tokens) {
  return fmt::format(
      "T{}{}", tokens,
      plan.spread == Spread::uniform ? std::string() : fmt::format(" {}", to_string(plan.spread)));
}

void bench_route(const BenchPlan& plan, const Context& context, Emit& emit) {
  const RouteSpec& spec = plan.spec.route;
  const std::int64_t width = plan.spec.hidden;
  for (const auto tokens : plan.tokens) {
    const double once = element_bytes(plan.dtype) * static_cast<double>(width) *
                        static_cast<double>(tokens + spec.columns());
    const std::int64_t copies = copies_to_rotate(plan, once, most_copies);
    require_memory(plan, once * static_cast<double>(copies));
    RandomPool pool(context, plan.dtype, (tokens + spec.columns()) * width * copies + 4096);
    std::vector<Tensor> hidden;
    std::vector<Tensor> router;
    for (std::int64_t i = 0; i < copies; ++i) {
      hidden.push_back(pool.take(tokens, width));
      router.push_back(pool.take(spec.columns(), width));
    }
    RoutingSource source(spec, plan.spread, 1);
    for (std::int64_t i = 0; plan.spread != Spread::uniform && i < copies; ++i) {
      states_for(context, floats_of(context, router[at(i)]), source.next(tokens), spec.top_k,
                 hidden[at(i)]);
    }
    const auto vector = [&](bool wanted, std::int64_t n) {
      return wanted ? pool.take(n) : Tensor{};
    };
    const Tensor router_bias = vector(spec.router_bias, spec.columns());
    const Tensor selection_bias = vector(spec.selection_bias, spec.experts);
    const Tensor per_expert_scale = vector(spec.per_expert_scale, spec.columns());
    std::vector<std::int32_t> ids(at(tokens * spec.slots()));
    std::vector<float> weights(ids.size());
    const RouteOutputs out{.ids = view(ids.data(), {tokens, spec.slots()}),
                           .weights = view(weights.data(), {tokens, spec.slots()})};
    const Buffer workspace = context.allocate(route_workspace_bytes(context, spec, tokens, width));
    const Cost cost{once + 8.0 * static_cast<double>(ids.size()),
                    2.0 * static_cast<double>(tokens * spec.columns() * width)};
    run_case(plan, context, emit,
             {.op = "route",
              .label = fmt::format("T{} E{} k{} H{}", tokens, spec.experts, spec.top_k, width),
              .dtype = plan.dtype,
              .variants = copies,
              .call =
                  [&](std::int64_t i) {
                    route(context, spec,
                          {.hidden = hidden[at(i)],
                           .router_weight = router[at(i)],
                           .router_bias = router_bias,
                           .selection_bias = selection_bias,
                           .per_expert_scale = per_expert_scale},
                          out, workspace);
                  },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

namespace {

// What any device runs.
void bench_cases(const char* stage, const BenchPlan& plan, const Context& context, Emit& emit,
                 std::int64_t rotate_bytes) {
  for (const auto& shape : stage_shapes(plan, stage)) {
    const StageCase work = make_case(context, shape, plan.spread, rotate_bytes);
    run_case(plan, context, emit,
             {.op = work.op,
              .label = work.label,
              .dtype = work.dtype,
              .variants = work.variants,
              .call = work.call,
              .cost = [&](std::int64_t) { return work.cost; }});
  }
}

// Logits come out of the cache of the stage before: enough copies that no branch is learnt.
void bench_from_logits(const char* stage, const BenchPlan& plan, const Context& context,
                       Emit& emit) {
  bench_cases(stage, plan, context, emit, std::min<std::int64_t>(plan.rotate_bytes, 16'000'000));
}

}  // namespace

void bench_combine_shuffling(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_cases("combine_shuffling", plan, context, emit, plan.rotate_bytes);
}

void bench_split_shuffling(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_cases("split_shuffling", plan, context, emit, plan.rotate_bytes);
}

void bench_scatter_add(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_cases("scatter_add", plan, context, emit, plan.rotate_bytes);
}

void bench_chain(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_cases("chain", plan, context, emit, plan.rotate_bytes);
}

void bench_gate(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_from_logits("gate", plan, context, emit);
}

void bench_shuffle(const BenchPlan& plan, const Context& context, Emit& emit) {
  bench_from_logits("shuffle", plan, context, emit);
}

void bench_order(const BenchPlan& plan, const Context& context, Emit& emit) {
  for (const auto tokens : plan.tokens) {
    RoutingSource source(plan.spec.route, plan.spread, 1);
    // Ids come from the stage before, out of its cache: a few batches so that no branch is learnt.
    std::vector<Ordered> batches;
    batches.reserve(16);
    for (int i = 0; i < 16; ++i) batches.emplace_back(plan, context, source, tokens);
    const Buffer workspace =
        context.allocate(order_workspace_bytes(context, batches[0].spec, tokens));
    const auto pairs = static_cast<double>(batches[0].ids.size());
    const Cost cost{pairs * (8 + 12) + 4.0 * (batches[0].spec.experts + 1), 0};
    run_case(plan, context, emit,
             {.op = "order",
              .label = fmt::format("{} E{} k{}", token_label(plan, tokens), plan.spec.route.experts,
                                   plan.spec.route.top_k),
              .dtype = plan.dtype,
              .variants = static_cast<std::int64_t>(batches.size()),
              .call = [&](std::int64_t i) { batches[at(i)].run(context, tokens, workspace); },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

void bench_gather(const BenchPlan& plan, const Context& context, Emit& emit) {
  const std::int64_t width = plan.spec.experts.hidden;
  for (const auto tokens : plan.tokens) {
    RoutingSource source(plan.spec.route, plan.spread, 1);
    const Ordered ordered(plan, context, source, tokens);
    // Pairs with zero-compute experts have room in every tensor, but no row.
    const std::int64_t rows = ordered.rows();
    const auto pairs = static_cast<std::int64_t>(ordered.ids.size());
    const double once = element_bytes(plan.dtype) * static_cast<double>((tokens + rows) * width);
    const std::int64_t copies = copies_to_rotate(plan, once, most_copies);
    require_memory(
        plan, element_bytes(plan.dtype) * static_cast<double>((tokens + pairs) * width * copies));
    RandomPool pool(context, plan.dtype, (tokens * width + 64) * copies);
    const Buffer out = rows_buffer(context, plan.dtype, (pairs * width + 64) * copies);
    std::vector<Tensor> hidden;
    std::vector<Tensor> gathered;
    for (std::int64_t i = 0; i < copies; ++i) {
      hidden.push_back(pool.take(tokens, width));
      const auto offset = bytes(plan.dtype, (pairs * width + 63) / 64 * 64 * i);
      gathered.push_back(view(static_cast<char*>(out.data()) + offset, plan.dtype, {pairs, width}));
    }
    const GatherSpec spec{.slots = ordered.spec.slots,
                          .scale_by_weight = plan.spec.route.weight_on_input};
    const GatherInputs in{
        .permutation = view(ordered.permutation.data(), {pairs}),
        .rows = view(&ordered.offsets.back(), {1}),
        .weights = spec.scale_by_weight ? view(ordered.row_weights.data(), {pairs}) : Tensor{}};
    const Cost cost{once + 4.0 * static_cast<double>(rows), 0};
    run_case(plan, context, emit,
             {.op = "gather",
              .label = fmt::format("{} R{} H{}", token_label(plan, tokens), rows, width),
              .dtype = plan.dtype,
              .variants = copies,
              .call =
                  [&](std::int64_t i) {
                    GatherInputs one = in;
                    one.hidden = hidden[at(i)];
                    gather(context, spec, one, gathered[at(i)]);
                  },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

void bench_gemm(const BenchPlan& plan, const Context& context, Emit& emit) {
  const auto& experts = plan.spec.experts;
  const std::int64_t gate_up = experts.intermediate * (experts.activation.gated ? 2 : 1);
  struct Shape {
    const char* name;
    std::int64_t n, k;
  };
  const int groups = computed_experts(plan);
  for (const Shape shape : {Shape{"gate_up", gate_up, experts.hidden},
                            Shape{"down", experts.hidden, experts.intermediate}}) {
    const bool packed = plan.format != FormatSpec{};
    const double width = packed ? bits_per_weight(plan.format) / 8 : element_bytes(plan.dtype);
    const double matrix = width * static_cast<double>(shape.n * shape.k);
    // The copies that the fewest tokens need serve all; hits of a run are spread as in a layer.
    std::int64_t copies = 1;
    std::vector<std::int64_t> batches;
    for (const auto tokens : plan.tokens) {
      RoutingSource source(plan.spec.route, plan.spread, 1);
      const std::int64_t hit =
          std::max<std::int64_t>(1, distinct_experts(source.next(tokens), groups));
      batches.push_back(hit * 2 <= groups ? groups / hit : 1);
      const double rows = element_bytes(plan.dtype) *
                          static_cast<double>(tokens * plan.spec.route.top_k * (shape.n + shape.k));
      const double once = matrix * static_cast<double>(hit * batches.back());
      copies = std::max(copies, copies_to_rotate(plan, once, 4096, rows));
    }
    const std::size_t one =
        prepared_bytes(context, plan.dtype, plan.format, groups, shape.n, shape.k);
    require_memory(plan, static_cast<double>(one) * static_cast<double>(copies));
    RandomPool pool(context, bf16, shape.n * shape.k + (1 << 20));
    std::vector<Buffer> memory;
    std::vector<PreparedWeights> prepared;
    // Packed once: that takes longer than measuring.
    std::optional<BenchMatrix> one_matrix;
    if (packed) {
      one_matrix.emplace(context, plan.format, pool.take(shape.n, shape.k));
      const std::vector<PackedMatrix> all(at(groups), one_matrix->matrix());
      prepare_copies(context, plan.dtype, all, RowFormat::as_dtype, copies, memory, prepared);
    }
    for (std::int64_t i = 0; i < (packed ? 0 : copies); ++i) {
      memory.push_back(context.allocate(one));
      std::vector<Tensor> matrices;
      matrices.reserve(at(groups));
      for (int g = 0; g < groups; ++g) matrices.push_back(pool.take(shape.n, shape.k));
      prepared.push_back(prepare(context, plan.dtype, matrices, memory.back()));
    }
    const GroupedGemmSpec spec{.groups = groups,
                               .n = shape.n,
                               .k = shape.k,
                               .dtype = plan.dtype,
                               .prepared = true,
                               .format = plan.format};

    for (std::size_t t = 0; t < plan.tokens.size(); ++t) {
      const std::int64_t tokens = plan.tokens[t];
      const std::int64_t variants = copies * batches[t];
      const std::int64_t pairs = tokens * plan.spec.route.top_k;
      constexpr double of_pair = 20;  // ids, weights, permutation, inverse
      require_memory(plan,
                     static_cast<double>(pairs) *
                         (of_pair * static_cast<double>(variants) +
                          element_bytes(plan.dtype) * static_cast<double>(shape.n + shape.k)));
      std::vector<RoutingSource> sources;
      sources.reserve(at(copies));
      for (std::int64_t i = 0; i < copies; ++i) {
        sources.emplace_back(plan.spec.route, plan.spread, 1 + static_cast<std::uint64_t>(i));
      }
      std::vector<Ordered> ordered;
      ordered.reserve(at(variants));
      for (std::int64_t v = 0; v < variants; ++v) {
        ordered.emplace_back(plan, context, sources[at(v % copies)], tokens);
      }
      RandomPool input(context, plan.dtype, pairs * shape.k + 64);
      const Tensor in = input.take(pairs, shape.k);
      const Buffer out_memory = rows_buffer(context, plan.dtype, pairs * shape.n);
      const Tensor out = view(out_memory.data(), plan.dtype, {pairs, shape.n});
      const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, pairs));
      const auto cost = [&](std::int64_t v) {
        const auto hit = static_cast<double>(distinct_experts(ordered[at(v)].ids, groups));
        const std::int64_t used = ordered[at(v)].rows();
        return Cost{hit * matrix +
                        element_bytes(plan.dtype) * static_cast<double>(used * (shape.n + shape.k)),
                    2.0 * static_cast<double>(used * shape.n * shape.k)};
      };
      run_case(plan, context, emit,
               {.op = "grouped_gemm",
                .label = fmt::format("{} {} G{} M{} N{} K{}", shape.name, token_label(plan, tokens),
                                     groups, pairs, shape.n, shape.k),
                .dtype = plan.dtype,
                .variants = variants,
                .call =
                    [&](std::int64_t v) {
                      grouped_gemm(context, spec,
                                   {.rows = in,
                                    .offsets = view(ordered[at(v)].offsets.data(), {groups + 1}),
                                    .prepared = prepared[at(v % copies)]},
                                   out, workspace);
                    },
                .cost = cost});
    }
  }
}

void bench_activate(const BenchPlan& plan, const Context& context, Emit& emit) {
  const ActivationSpec& spec = plan.spec.experts.activation;
  const std::int64_t inner = plan.spec.experts.intermediate;
  const std::int64_t width = inner * (spec.gated ? 2 : 1);
  for (const auto tokens : plan.tokens) {
    const std::int64_t rows = tokens * plan.spec.route.top_k;
    const double once = element_bytes(plan.dtype) * static_cast<double>(rows * (width + inner));
    const std::int64_t copies = copies_to_rotate(plan, once, most_copies);
    require_memory(plan, once * static_cast<double>(copies));
    RandomPool pool(context, plan.dtype, (rows * width + 64) * copies);
    const Buffer out = rows_buffer(context, plan.dtype, (rows * inner + 64) * copies);
    std::vector<Tensor> gates;
    std::vector<Tensor> ups;
    std::vector<Tensor> outs;
    for (std::int64_t i = 0; i < copies; ++i) {
      // Gate and up are the halves of a row, as one GEMM leaves them.
      Tensor half = pool.take(rows, width);
      half.shape[1] = inner;
      gates.push_back(spec.gated ? half : Tensor{});
      if (spec.gated) half.data = half.as<char>() + bytes(plan.dtype, inner);
      ups.push_back(half);
      const auto offset = bytes(plan.dtype, (rows * inner + 63) / 64 * 64 * i);
      outs.push_back(view(static_cast<char*>(out.data()) + offset, plan.dtype, {rows, inner}));
    }
    const Cost cost{once, 0};
    run_case(plan, context, emit,
             {.op = "activate",
              .label = fmt::format("T{} R{} I{}", tokens, rows, inner),
              .dtype = plan.dtype,
              .variants = copies,
              .call =
                  [&](std::int64_t i) {
                    activate(context, spec, gates[at(i)], ups[at(i)], outs[at(i)]);
                  },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

void bench_combine(const BenchPlan& plan, const Context& context, Emit& emit) {
  const std::int64_t width = plan.spec.experts.hidden;
  for (const auto tokens : plan.tokens) {
    RoutingSource source(plan.spec.route, plan.spread, 1);
    const Ordered ordered(plan, context, source, tokens);
    const std::int64_t rows = ordered.rows();
    const double once = element_bytes(plan.dtype) * static_cast<double>((tokens + rows) * width);
    const std::int64_t copies = copies_to_rotate(plan, once, most_copies);
    require_memory(plan, once * static_cast<double>(copies));
    RandomPool pool(context, plan.dtype, (rows * width + 64) * copies);
    const Buffer out = rows_buffer(context, plan.dtype, (tokens * width + 64) * copies);
    std::vector<Tensor> inputs;
    std::vector<Tensor> outs;
    for (std::int64_t i = 0; i < copies; ++i) {
      inputs.push_back(pool.take(rows, width));
      const auto offset = bytes(plan.dtype, (tokens * width + 63) / 64 * 64 * i);
      outs.push_back(view(static_cast<char*>(out.data()) + offset, plan.dtype, {tokens, width}));
    }
    const CombineSpec spec{.slots = ordered.spec.slots,
                           .weighted = !plan.spec.route.weight_on_input};
    const auto n = static_cast<double>(ordered.ids.size());
    const Cost cost{once + 8 * n, 2 * n * static_cast<double>(width)};
    run_case(plan, context, emit,
             {.op = "combine",
              .label = fmt::format("{} R{} H{}", token_label(plan, tokens), rows, width),
              .dtype = plan.dtype,
              .variants = copies,
              .call =
                  [&](std::int64_t i) {
                    combine(context, spec,
                            {.rows = inputs[at(i)],
                             .inverse = view(ordered.inverse.data(), {tokens, spec.slots}),
                             .weights = spec.weighted
                                            ? view(ordered.weights.data(), {tokens, spec.slots})
                                            : Tensor{}},
                            outs[at(i)]);
                  },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

}  // namespace shunt::tool
