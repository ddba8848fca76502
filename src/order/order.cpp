// order(): checks of everything it is given, then the engine.
#include "shunt/order.hpp"

#include <limits>
#include <string_view>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();

// The tensor's data, or null where it is not given.
template <class T>
T* optional(std::string_view name, const Tensor& tensor, DType dtype,
            std::initializer_list<std::int64_t> shape, Device device) {
  if (!tensor) return nullptr;
  check_tensor(name, tensor, {.dtypes = {dtype}, .shape = shape, .dense = true}, device);
  return tensor.as<T>();
}

void check_map(const OrderSpec& spec, const Tensor& map) {
  const std::int32_t* local = map.as<std::int32_t>();
  for (int e = 0; e < spec.experts; ++e) {
    if (local[e] < -1 || local[e] >= spec.locals()) {
      fail(Status::invalid_argument, "order: expert_map[{}] is {}: must be -1 to {}", e, local[e],
           spec.locals() - 1);
    }
  }
}

// Pairs are looked at twice, and while rows are written.
void check_memory_apart(const OrderInputs& in, const OrderOutputs& out, Workspace workspace,
                        std::size_t needed, Device device) {
  const NamedTensor written[] = {{"offsets", out.offsets},
                                 {"permutation", out.permutation},
                                 {"inverse", out.inverse},
                                 {"output weights", out.weights},
                                 {"sorted_token_ids", out.sorted_token_ids},
                                 {"sorted_weights", out.sorted_weights},
                                 {"sorted_expert_ids", out.sorted_expert_ids},
                                 {"num_tokens_post_padded", out.num_tokens_post_padded},
                                 {"num_sorted_tiles", out.num_sorted_tiles},
                                 {"padded_inverse", out.padded_inverse},
                                 {"zeroed", out.zeroed}};
  const NamedTensor read[] = {{"ids", in.ids},
                              {"weights", in.weights},
                              {"expert_map", in.expert_map},
                              {"valid_tokens", in.valid_tokens}};
  check_all_apart("order", written, read);
  check_workspace_apart("order", workspace, needed, device, written, read);
}

}  // namespace

OrderCall checked_order(const Context& context, const OrderSpec& spec, const OrderInputs& in,
                        const OrderOutputs& out, Workspace workspace) {
  const Device device = context.device();
  check_spec(spec, device);
  check_tensor("order: ids", in.ids,
               {.dtypes = {i32}, .shape = {any_size, spec.slots}, .dense = true}, device);
  const std::int64_t tokens = in.ids.shape[0];
  const std::int64_t pairs = checked_product("order: pairs", tokens, spec.slots);
  if (pairs > max_rows) {
    fail(Status::invalid_argument, "order: ids is {}: more than {} pairs", in.ids.describe(),
         max_rows);
  }
  if (spec.sentinel != -1 && spec.sentinel < tokens) {
    fail(Status::invalid_argument,
         "order: sentinel is {}: must be at least {}, the tokens, or -1 for that number",
         spec.sentinel, tokens);
  }

  const bool weighted = out.weights || out.sorted_weights;
  if (weighted && !in.weights) {
    fail(Status::invalid_argument,
         "order: weights is missing, and the outputs weights and sorted_weights carry it");
  }
  if (check_given("order: expert_map", in.expert_map, spec.expert_map, "OrderSpec.expert_map")) {
    check_tensor("order: expert_map", in.expert_map,
                 {.dtypes = {i32}, .shape = {spec.experts}, .dense = true}, device);
    if (device.type == DeviceType::cpu) check_map(spec, in.expert_map);
  }

  const bool padded = out.sorted_token_ids || out.sorted_weights || out.sorted_expert_ids ||
                      out.num_tokens_post_padded || out.num_sorted_tiles || out.padded_inverse;
  if (padded && spec.tile == 0) {
    fail(Status::invalid_argument,
         "order: tile is 0, so there is no padded form; its outputs need a tile of 1 or more");
  }
  if (!padded && !out.offsets && !out.permutation && !out.inverse && !out.weights && !out.zeroed) {
    fail(Status::invalid_argument, "order: no output is given");
  }
  const std::int64_t capacity = padded ? padded_rows_capacity(spec, tokens) : 0;
  if (capacity > max_rows) {
    fail(Status::invalid_argument, "order: tile {} needs {} padded rows, more than {}", spec.tile,
         capacity, max_rows);
  }
  const std::int64_t tiles = spec.tile > 0 ? capacity / spec.tile : 0;
  const int locals = spec.locals();

  OrderCall call{
      .tokens = tokens,
      .slots = spec.slots,
      .experts = spec.experts,
      .locals = locals,
      .first_expert = spec.first_expert,
      .tile = padded ? spec.tile : 0,
      .sentinel = spec.sentinel == -1 ? static_cast<std::int32_t>(tokens) : spec.sentinel,
      .tile_for_empty_expert = spec.tile_for_empty_expert,
      .capacity = capacity,
      .ids = in.ids.as<std::int32_t>(),
      .weights = optional<float>("order: weights", in.weights, f32, {tokens, spec.slots}, device),
      .expert_map = spec.expert_map ? in.expert_map.as<std::int32_t>() : nullptr,
      .valid_tokens =
          optional<std::int32_t>("order: valid_tokens", in.valid_tokens, i32, {1}, device),
  };
  const auto ints = [&](std::string_view name, const Tensor& tensor,
                        std::initializer_list<std::int64_t> shape) {
    return optional<std::int32_t>(name, tensor, i32, shape, device);
  };
  const auto floats = [&](std::string_view name, const Tensor& tensor, std::int64_t size) {
    return optional<float>(name, tensor, f32, {size}, device);
  };
  call.offsets = ints("order: offsets", out.offsets, {locals + 1});
  call.permutation = ints("order: permutation", out.permutation, {pairs});
  call.inverse = ints("order: inverse", out.inverse, {tokens, spec.slots});
  call.row_weights = floats("order: output weights", out.weights, pairs);
  call.sorted_token_ids = ints("order: sorted_token_ids", out.sorted_token_ids, {capacity});
  call.sorted_weights = floats("order: sorted_weights", out.sorted_weights, capacity);
  call.sorted_expert_ids = ints("order: sorted_expert_ids", out.sorted_expert_ids, {tiles});
  call.num_tokens_post_padded =
      ints("order: num_tokens_post_padded", out.num_tokens_post_padded, {1});
  call.num_sorted_tiles = ints("order: num_sorted_tiles", out.num_sorted_tiles, {1});
  call.padded_inverse = ints("order: padded_inverse", out.padded_inverse, {tokens, spec.slots});
  if (out.zeroed) {
    if (!out.zeroed.contiguous() || !(out.zeroed.device == device) ||
        (out.zeroed.data == nullptr && out.zeroed.elements() > 0)) {
      fail(Status::invalid_argument, "order: zeroed is {}: must be dense, on the context's device",
           out.zeroed.describe());
    }
    call.zeroed = out.zeroed.as<std::byte>();
    call.zeroed_bytes = static_cast<std::size_t>(out.zeroed.bytes());
  }
  check_memory_apart(in, out, workspace, order_workspace_bytes(context, spec, tokens), device);
  return call;
}

void order(const Context& context, const OrderSpec& spec, const OrderInputs& in,
           const OrderOutputs& out, Workspace workspace) {
  const cuda_engine::Current current(context);
  const OrderCall call = checked_order(context, spec, in, out, workspace);
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) return order_cuda(context, call);
  }
  order_cpu(context, call, workspace);
}

}  // namespace shunt
