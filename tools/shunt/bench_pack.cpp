// shunt bench pack: matrices of an expert into a format, as `shunt convert` packs them.
#include <fmt/core.h>

#include "bench.hpp"
#include "bench_tensors.hpp"
#include "cost.hpp"
#include "cpu/features.hpp"
#include "options.hpp"
#include "shunt/format.hpp"

namespace shunt::tool {

void bench_pack(const BenchPlan& plan, const Context& context, Emit& emit) {
  if (plan.format == FormatSpec{}) return;  // of `all`
  // Packing takes free cores, not a context's threads.
  const cpu_engine::CoreLimit limit(context.threads());
  const std::int64_t hidden = plan.spec.experts.hidden, inner = plan.spec.experts.intermediate;
  struct Matrix {
    const char* name;
    std::int64_t n, k;
  };
  for (const Matrix& m : {Matrix{"gate", inner, hidden}, Matrix{"down", hidden, inner}}) {
    const std::size_t packed = packed_bytes(plan.format, m.n, m.k);
    const double once =
        element_bytes(plan.dtype) * static_cast<double>(m.n * m.k) + static_cast<double>(packed);
    constexpr std::int64_t most_copies = 64;  // a matrix takes long: its bytes are no matter
    const std::int64_t copies = copies_to_rotate(plan, once, most_copies);
    require_memory(plan, once * static_cast<double>(copies));
    RandomPool pool(context, plan.dtype, m.n * m.k * copies);
    std::vector<Tensor> matrices;
    for (std::int64_t i = 0; i < copies; ++i) matrices.push_back(pool.take(m.n, m.k));
    const Buffer memory = context.allocate(packed);
    const Cost cost{once, 0};
    run_case(plan, context, emit,
             {.op = "pack",
              .label = fmt::format("{} {} N{} K{}", m.name, to_string(plan.format), m.n, m.k),
              .dtype = plan.dtype,
              .variants = copies,
              .call = [&](std::int64_t i) { pack(plan.format, matrices[at(i)], memory); },
              .cost = [&](std::int64_t) { return cost; }});
  }
}

}  // namespace shunt::tool
