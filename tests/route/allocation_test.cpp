// The hot path does not allocate. Replaces operator new of this whole executable with one that
// counts; not under a sanitizer, which has its own.
#include <atomic>
#include <cstdlib>
#include <new>

#include "route/route_util.hpp"
#include "sanitizer.hpp"

#if !SHUNT_SANITIZED

namespace {
std::atomic<int> allocations{0};
}

// Not inlined: the compiler would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

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
      allocations = 0;
      route(context, rule.spec, from_hidden, out, workspace);
      route(context, rule.spec, from_logits, out, workspace);
      EXPECT_EQ(allocations.load(), 0) << rule.name;
    }
  }
}

}  // namespace
}  // namespace shunt::test

#endif
