// shunt bench indexed on the CPU.
#include <algorithm>
#include <memory>
#include <vector>

#include "bench.hpp"
#include "bench_indexed.hpp"
#include "shunt/indexed_gemm.hpp"

namespace shunt::tool {

namespace {

// Runs of one shape before a copy of its matrices has been read whole.
struct Runs {
  std::int64_t hit = 1, in_a_copy = 1;
  Runs(const BenchPlan& plan, const bench::StageShape& shape) {
    RoutingSource source(shape.route, plan.spread, 1);
    const std::int64_t groups = shape.route.experts;
    hit = std::max<std::int64_t>(1, distinct_experts(source.next(shape.tokens), groups));
    if (hit * 2 <= groups) in_a_copy = groups / hit;
  }
};

void bench_shape(const BenchPlan& plan, const Context& context, Emit& emit,
                 const bench::StageShape& shape, const IndexedMatrices& matrices,
                 std::int64_t copies) {
  const GroupedGemmSpec& spec = matrices.spec();
  const IndexedSize size = indexed_size(shape);
  const std::int64_t variants = copies * Runs(plan, shape).in_a_copy;
  require_memory(plan, 4 * static_cast<double>(size.pairs() * variants) +
                           element_bytes(shape.dtype) *
                               static_cast<double>(size.rows * spec.k + size.pairs() * spec.n));
  std::vector<RoutingSource> sources;
  sources.reserve(at(copies));
  for (std::int64_t i = 0; i < copies; ++i) {
    sources.emplace_back(shape.route, plan.spread, 1 + static_cast<std::uint64_t>(i));
  }
  std::vector<std::vector<std::int32_t>> ids;
  std::vector<Cost> costs;
  for (std::int64_t v = 0; v < variants; ++v) {
    ids.push_back(sources[at(v % copies)].next(shape.tokens));
    costs.push_back(indexed_cost(shape, distinct_experts(ids.back(), spec.groups), size.pairs()));
  }
  const Variants rows(context, shape.dtype, {size.rows, spec.k}, 1),
      out(context, shape.dtype, {size.pairs(), spec.n}, 1);
  fill(context, rows, 1, 1);
  const Buffer workspace =
      context.allocate(indexed_gemm_workspace_bytes(context, spec, size.rows, size.slots));
  const auto tensors = [&](std::int64_t v) {
    return IndexedCall{rows[0], view(ids[at(v)].data(), {size.rows, size.slots}), out[0]};
  };
  const auto call = [&](std::int64_t v) {
    const IndexedCall one = tensors(v);
    indexed_gemm(context, spec,
                 {.rows = one.rows, .ids = one.ids, .prepared = matrices[v % copies]}, one.out,
                 workspace);
  };
  const std::string label = indexed_label(shape, token_label(plan, shape.tokens));
  call(0);
  check_indexed(label, context, matrices, tensors(0));
  run_case(plan, context, emit,
           {.op = "indexed_gemm",
            .label = label,
            .dtype = shape.dtype,
            .variants = variants,
            .call = call,
            .cost = [&](std::int64_t v) { return costs[at(v)]; }});
}

}  // namespace

// Gate and up, then down. The copies that the fewest tokens need serve all.
void bench_indexed(const BenchPlan& plan, const Context& context, Emit& emit) {
  for (const bool row_a_pair : {false, true}) {
    std::vector<bench::StageShape> shapes = stage_shapes(plan, "indexed");
    std::erase_if(shapes, [&](const auto& shape) { return shape.row_a_pair != row_a_pair; });
    std::int64_t copies = 1;
    for (bench::StageShape& shape : shapes) {
      shape.format = plan.format;
      const Runs runs(plan, shape);
      const std::int64_t pairs = indexed_size(shape).pairs();
      const double besides = indexed_cost(shape, 0, pairs).bytes;
      const double weights = indexed_cost(shape, runs.hit, pairs).bytes - besides;
      copies = std::max(
          copies,
          copies_to_rotate(plan, weights * static_cast<double>(runs.in_a_copy), 4096, besides));
    }
    const GroupedGemmSpec spec = indexed_spec(shapes.front());
    require(supports_indexed(spec, context.device()));
    require_memory(plan, static_cast<double>(prepared_bytes(context, spec.dtype, spec.format,
                                                            spec.groups, spec.n, spec.k)) *
                             static_cast<double>(copies));
    const IndexedMatrices matrices(context, spec, copies);
    for (const bench::StageShape& shape : shapes) {
      bench_shape(plan, context, emit, shape, matrices, copies);
    }
  }
}

}  // namespace shunt::tool
