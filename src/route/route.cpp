// route(): checks of everything that a caller hands in.
#include "shunt/route.hpp"

#include <cstdlib>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "route/engine.hpp"

namespace shunt {

namespace {

constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
constexpr std::int64_t max_hidden = std::int64_t{1} << 24;
constexpr std::initializer_list<DType> index_dtypes = {DType::i32, DType::i64};

void check_vector(std::string_view name, const Tensor& tensor, bool wanted, const char* why,
                  std::int64_t size, Device device) {
  if (!check_given(name, tensor, wanted, why)) return;
  check_tensor(name, tensor, {.dtypes = float_dtypes, .shape = {size}, .dense = true}, device);
}

// The table decides ids, so it must not send a token to an expert that is not there.
void check_hash(const RouteSpec& spec, const RouteInputs& in, std::int64_t tokens) {
  const std::int64_t vocabulary = in.hash_table.shape[0];
  if (tokens > 0 && vocabulary == 0) {
    fail(Status::invalid_argument, "route: hash_table is {}: must have a row for every token id",
         in.hash_table.describe());
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t token = index_at(in.token_ids, t * in.token_ids.strides[0]);
    if (token < 0 || token >= vocabulary) {
      fail(Status::invalid_argument, "route: token_ids[{}] is {}: must be 0 to {}", t, token,
           vocabulary - 1);
    }
    for (int k = 0; k < spec.top_k; ++k) {
      const std::int64_t id =
          index_at(in.hash_table, token * in.hash_table.strides[0] + k * in.hash_table.strides[1]);
      if (id < 0 || id >= spec.experts) {
        fail(Status::invalid_argument, "route: hash_table[{}, {}] is {}: must be 0 to {}", token, k,
             id, spec.experts - 1);
      }
    }
  }
}

void check_spec(const RouteSpec& spec, Device device) {
  require_legal(legal(spec), "route");
  require(supports(spec, device), "route");
}

}  // namespace

RouteShape route_shape(const RouteSpec& spec, const RouteInputs& in, Device device) {
  const bool from_hidden = static_cast<bool>(in.hidden);
  if (from_hidden == static_cast<bool>(in.logits)) {
    fail(Status::invalid_argument, "route: logits and hidden are both {}: give one of them",
         from_hidden ? "given" : "missing");
  }
  if (!from_hidden) {
    check_tensor("route: logits", in.logits,
                 {.dtypes = float_dtypes, .shape = {any_size, spec.columns()}, .rows_dense = true},
                 device);
    return {in.logits.shape[0], 0};
  }
  check_tensor("route: hidden", in.hidden,
               {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true}, device);
  const std::int64_t hidden = in.hidden.shape[1];
  if (hidden < 1 || hidden > max_hidden) {
    fail(Status::invalid_argument, "route: hidden is {}: its width must be 1 to {}",
         in.hidden.describe(), max_hidden);
  }
  return {in.hidden.shape[0], hidden};
}

RouteCall checked_route(const Context& context, const RouteSpec& spec, const RouteInputs& in,
                        const RouteOutputs& out, Workspace workspace) {
  const Device device = context.device();
  const RouteShape shape = route_shape(spec, in, device);
  const RouteCall call{spec, in, out, shape.tokens, shape.hidden};
  const std::int64_t columns = spec.columns();
  const bool from_hidden = shape.hidden > 0;
  if (check_given("route: router_weight", in.router_weight, from_hidden, "hidden that is given")) {
    check_tensor("route: router_weight", in.router_weight,
                 {.dtypes = float_dtypes, .shape = {columns, call.hidden}, .rows_dense = true},
                 device);
  }
  const std::int64_t tokens = call.tokens;
  check_vector("route: router_bias", in.router_bias, spec.router_bias, "RouteSpec.router_bias",
               columns, device);
  check_vector("route: selection_bias", in.selection_bias, spec.selection_bias,
               "RouteSpec.selection_bias", spec.experts, device);
  check_vector("route: per_expert_scale", in.per_expert_scale, spec.per_expert_scale,
               "RouteSpec.per_expert_scale", columns, device);
  if (check_given("route: shared_logits", in.shared_logits,
                  spec.shared.count > 0 && spec.shared.weight == SharedWeight::sigmoid_gate,
                  "RouteSpec.shared.weight sigmoid_gate")) {
    check_tensor("route: shared_logits", in.shared_logits,
                 {.dtypes = {DType::f32}, .shape = {tokens, spec.shared.count}, .rows_dense = true},
                 device);
  }
  if (in.valid_tokens) {
    check_tensor("route: valid_tokens", in.valid_tokens,
                 {.dtypes = {DType::i32}, .shape = {1}, .dense = true}, device);
  }
  check_given("route: token_ids", in.token_ids, spec.hashed, "RouteSpec.hashed");
  if (check_given("route: hash_table", in.hash_table, spec.hashed, "RouteSpec.hashed")) {
    check_tensor("route: token_ids", in.token_ids, {.dtypes = index_dtypes, .shape = {tokens}},
                 device);
    check_tensor("route: hash_table", in.hash_table,
                 {.dtypes = index_dtypes, .shape = {any_size, spec.top_k}}, device);
  }

  if (!out.ids && !out.weights && !out.dense && !out.logits && !out.replay) {
    fail(Status::invalid_argument,
         "route: no output is given: give one or more of ids, weights, dense, logits, replay");
  }
  const auto check_output = [&](const char* name, const Tensor& tensor, DType dtype,
                                std::int64_t width) {
    if (!tensor) return;
    check_tensor(name, tensor,
                 {.dtypes = {dtype}, .shape = {tokens, width}, .rows_dense = true, .written = true},
                 device);
  };
  check_output("route: ids", out.ids, DType::i32, spec.slots());
  check_output("route: weights", out.weights, DType::f32, spec.slots());
  check_output("route: dense", out.dense, DType::f32, spec.experts + spec.shared.count);
  check_output("route: logits out", out.logits, DType::f32, columns);
  check_output("route: replay", out.replay, DType::i16, spec.top_k);
  // Rows are written while others are read.
  const NamedTensor written[] = {{"ids", out.ids},
                                 {"weights", out.weights},
                                 {"dense", out.dense},
                                 {"logits out", out.logits},
                                 {"replay", out.replay}};
  const NamedTensor read[] = {{"logits", in.logits},
                              {"hidden", in.hidden},
                              {"router_weight", in.router_weight},
                              {"router_bias", in.router_bias},
                              {"selection_bias", in.selection_bias},
                              {"per_expert_scale", in.per_expert_scale},
                              {"token_ids", in.token_ids},
                              {"hash_table", in.hash_table},
                              {"shared_logits", in.shared_logits},
                              {"valid_tokens", in.valid_tokens}};
  check_all_apart("route", written, read);
  if (tokens > 0) {
    check_workspace_apart("route", workspace,
                          route_workspace_bytes(context, spec, tokens, call.hidden), device,
                          written, read);
  }
  if (spec.hashed && device.type == DeviceType::cpu) check_hash(spec, in, valid_tokens(call));
  return call;
}

std::size_t route_workspace_bytes(const Context& context, const RouteSpec& spec,
                                  std::int64_t tokens, std::int64_t hidden) {
  check_spec(spec, context.device());
  if (tokens < 0 || tokens > max_tokens) {
    fail(Status::invalid_argument, "route: tokens is {}: must be 0 to {}", tokens, max_tokens);
  }
  if (hidden < 0 || hidden > max_hidden) {
    fail(Status::invalid_argument, "route: hidden is {}: must be 0 (from logits) to {}", hidden,
         max_hidden);
  }
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      return route_cuda_workspace_bytes(context.gpu(), spec, tokens, hidden);
    }
  }
  return route_cpu_workspace_bytes(context.threads(), spec, tokens, hidden);
}

void route(const Context& context, const RouteSpec& spec, const RouteInputs& in,
           const RouteOutputs& out, Workspace workspace) {
  const cuda_engine::Current current(context);
  check_spec(spec, context.device());
  const RouteCall call = checked_route(context, spec, in, out, workspace);
  if (call.tokens == 0) return;
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) return route_cuda(context, call, workspace);
  }
  route_cpu(context, call, workspace);
}

}  // namespace shunt
