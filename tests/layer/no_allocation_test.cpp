// The hot path does not allocate: operator new is counted while a layer runs.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "engine.hpp"
#include "layer/random_layer.hpp"

namespace {
std::atomic<long> allocations{0};

void* counted(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
}  // namespace

// Not inlined: the compiler would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace shunt {
namespace {

TEST(Layer, ForwardDoesNotAllocate) {
  const Context context = test::engine(3);
  for (const auto& named : testing::layer_specs()) {
    testing::RandomLayer random(named.spec, 5);
    const Layer layer(random.spec, random.weights, context);
    for (const std::int64_t tokens : {1, 19, 150}) {
      LayerInputs in{.hidden = random.hidden_states(tokens)};
      if (named.spec.route.hashed) in.token_ids = random.token_ids(tokens);
      std::vector<float> output(static_cast<std::size_t>(tokens * named.spec.hidden));
      test::Mirror mirror(context);
      in.hidden = mirror.in(in.hidden);
      in.token_ids = mirror.in(in.token_ids);
      const Tensor y = mirror.out(view(output.data(), {tokens, named.spec.hidden}));
      const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
      layer.forward(in, {.output = y}, workspace);  // a GPU's driver loads kernels at first
      const long before = allocations;
      layer.forward(in, {.output = y}, workspace);
      EXPECT_EQ(allocations - before, 0) << named.name << ", " << tokens << " tokens";
    }
  }
}

}  // namespace
}  // namespace shunt
