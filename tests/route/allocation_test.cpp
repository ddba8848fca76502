// The hot path does not allocate.
#include "allocations.hpp"
#include "route/route_util.hpp"

#if !SHUNT_SANITIZED

namespace shunt::test {
namespace {

TEST(RouteAllocation, NoneInACall) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 2});
  for (const std::int64_t tokens : {1, 200}) {
    const std::vector<float> x(at(tokens * 96), 0.5F);
    for (NamedRule& rule : rules(64, 6, 8, 3)) {
      const RouteCase c = random_case(rule.spec, tokens, 1);
      const std::vector<float> w(at(c.columns() * 96), 0.25F);
      RouteInputs from_hidden = c.extras();
      from_hidden.hidden = view(x.data(), {tokens, 96});
      from_hidden.router_weight = view(w.data(), {c.columns(), 96});
      const RouteInputs from_logits = c.inputs();
      const RouteResult result(rule.spec, tokens);
      const RouteOutputs out = result.outputs(rule.spec, tokens);
      const Buffer workspace =
          context.allocate(route_workspace_bytes(context, rule.spec, tokens, 96));
      const long before = allocations();
      route(context, rule.spec, from_hidden, out, workspace);
      route(context, rule.spec, from_logits, out, workspace);
      EXPECT_EQ(allocations(), before) << rule.name;
    }
  }
}

}  // namespace
}  // namespace shunt::test

#endif
