// Routes two tokens over four experts with the installed library alone.
#include <array>
#include <cstdio>
#include <shunt/shunt.hpp>

int main() {
  const shunt::RouteSpec spec{
      .experts = 4, .top_k = 2, .score = shunt::Score::softmax, .renormalize = true};
  const std::array<float, 8> logits{0, 1, 2, 3, 3, 1, 2, 0};
  std::array<std::int32_t, 4> ids{};
  std::array<float, 4> weights{};

  const shunt::Context context = shunt::cpu();
  const shunt::Buffer workspace =
      context.allocate(shunt::route_workspace_bytes(context, spec, 2, 0));
  shunt::route(
      context, spec, {.logits = shunt::view(logits.data(), {2, 4})},
      {.ids = shunt::view(ids.data(), {2, 2}), .weights = shunt::view(weights.data(), {2, 2})},
      workspace);

  const bool right = ids == std::array<std::int32_t, 4>{3, 2, 0, 2};
  std::printf("c++: token 0 goes to experts %d and %d: %s\n", ids[0], ids[1],
              right ? "right" : "WRONG");
  return right ? 0 : 1;
}
