// One MoE layer of a checkpoint over hidden states of your own: example_layer [DIR]
#include <cstdio>
#include <shunt/shunt.hpp>
#include <vector>

int main(int argc, char** argv) try {
  const auto model = shunt::Checkpoint::open(argc > 1 ? argv[1] : "models/tiny-moe");
  const auto engine = shunt::cpu();  // every core
  const shunt::Layer layer(model, model.first_moe_layer(), engine, {.dtype = shunt::bf16});
  std::printf("%s\n", describe(layer.spec()).c_str());

  const std::int64_t tokens = 4;
  const std::int64_t hidden = layer.spec().hidden;
  std::vector<float> x(static_cast<std::size_t>(tokens * hidden), 0.5f);
  std::vector<float> y(x.size());
  // Asked for once; forward() itself neither allocates nor waits.
  const auto workspace = engine.allocate(layer.workspace_bytes(tokens));
  layer.forward(shunt::view(x.data(), {tokens, hidden}), shunt::view(y.data(), {tokens, hidden}),
                workspace);
  std::printf("y[0, 0] = %g\n", static_cast<double>(y[0]));
  return 0;
} catch (const shunt::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
