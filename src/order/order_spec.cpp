// OrderSpec: what is legal, JSON, sizes.
#include <algorithm>
#include <limits>

#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/runtime.hpp"
#include "order/engine.hpp"
#include "order/sort_plan.hpp"

namespace shunt {

namespace {

constexpr int max_experts = 65536;
constexpr int max_slots = 128;
constexpr int max_tile = 65536;

Support legal(const OrderSpec& spec) {
  if (spec.experts < 1 || spec.experts > max_experts) {
    return refuse("experts is {}: must be 1 to {}", spec.experts, max_experts);
  }
  if (spec.slots < 1 || spec.slots > max_slots) {
    return refuse("slots is {}: must be 1 to {}", spec.slots, max_slots);
  }
  if (spec.expert_map && spec.first_expert != 0) {
    return refuse("first_expert is {}: must be 0 with expert_map, which renumbers by itself",
                  spec.first_expert);
  }
  if (spec.first_expert < 0 || spec.first_expert >= spec.experts) {
    return refuse("first_expert is {}: must be 0 to experts - 1, {}", spec.first_expert,
                  spec.experts - 1);
  }
  const int most = spec.experts - spec.first_expert;
  if (spec.local_experts != -1 && (spec.local_experts < 1 || spec.local_experts > most)) {
    return refuse("local_experts is {}: must be 1 to experts - first_expert, {}, or -1 for all",
                  spec.local_experts, most);
  }
  if (spec.tile < 0 || spec.tile > max_tile) {
    return refuse("tile is {}: must be 1 to {}, or 0 for the compact form only", spec.tile,
                  max_tile);
  }
  if (spec.sentinel < -1) {
    return refuse("sentinel is {}: must be at least the number of tokens, or -1 for that number",
                  spec.sentinel);
  }
  return {};
}

}  // namespace

Support supports(const OrderSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  if (Support support = cuda_engine::supported_device("order", device); !support) return support;
  if (device.type == DeviceType::cuda) {
    const bool padded = spec.tile > 0;
    int most = padded ? ordering::most_locals_padded : ordering::most_locals;
    if constexpr (cuda_engine::built) {
      if (const int bytes = cuda_engine::block_shared_bytes(device.index); bytes > 0) {
        most = ordering::most_locals_in(bytes, padded);
      }
    }
    if (spec.locals() > most) {
      return refuse("local_experts is {}: the CUDA engine sorts at most {}{}", spec.locals(), most,
                    padded ? " into padded tiles" : "");
    }
  }
  return {};
}

void check_spec(const OrderSpec& spec, Device device) {
  require_legal(legal(spec), "order");
  require(supports(spec, device), "order");
}

std::string to_json(const OrderSpec& spec) {
  return SpecWriter()
      .add("experts", spec.experts)
      .add("slots", spec.slots)
      .add("first_expert", spec.first_expert)
      .add("local_experts", spec.local_experts)
      .add("expert_map", spec.expert_map)
      .add("tile", spec.tile)
      .add("sentinel", spec.sentinel)
      .add("tile_for_empty_expert", spec.tile_for_empty_expert)
      .text();
}

OrderSpec order_spec_from_json(const std::string& json) {
  SpecReader reader("OrderSpec", json);
  OrderSpec spec;
  reader.require("experts");
  reader.require("slots");
  reader.read("experts", spec.experts, 1, max_experts);
  reader.read("slots", spec.slots, 1, max_slots);
  reader.read("first_expert", spec.first_expert, 0, max_experts - 1);
  reader.read("local_experts", spec.local_experts, -1, max_experts);
  reader.read("expert_map", spec.expert_map);
  reader.read("tile", spec.tile, 0, max_tile);
  reader.read("sentinel", spec.sentinel, -1, std::numeric_limits<std::int32_t>::max());
  reader.read("tile_for_empty_expert", spec.tile_for_empty_expert);
  reader.finish();
  require_legal(legal(spec), "OrderSpec");
  return spec;
}

std::int64_t padded_rows_capacity(const OrderSpec& spec, std::int64_t tokens) {
  require_legal(legal(spec), "padded_rows_capacity");
  if (tokens < 0) {
    fail(Status::invalid_argument, "padded_rows_capacity: tokens is {}: must be 0 or more", tokens);
  }
  if (spec.tile == 0) return 0;
  // n experts with tokens take n + floor((pairs - n) / tile) tiles at most, all but one tile of
  // each expert being full. Where empty experts take a tile too, that is worst for n = 1; else for
  // n as large as it can be, since a further expert adds a tile and loses one at most.
  const std::int64_t pairs = checked_product("order: pairs", tokens, spec.slots);
  const std::int64_t experts = spec.locals();
  std::int64_t tiles = experts;
  if (spec.tile_for_empty_expert) {
    if (pairs > 0) tiles += (pairs - 1) / spec.tile;
  } else {
    const std::int64_t n = std::min(experts, pairs);
    tiles = n + (pairs - n) / spec.tile;
  }
  return checked_product("order: padded rows", tiles, spec.tile);
}

std::size_t order_workspace_bytes(const Context& context, const OrderSpec& spec,
                                  std::int64_t tokens) {
  check_spec(spec, context.device());
  if (tokens < 0) fail(Status::invalid_argument, "order: tokens is {}: must be 0 or more", tokens);
  if (context.device().type == DeviceType::cuda) return 0;
  return order_cpu_workspace_bytes(context.threads(), spec.locals());
}

}  // namespace shunt
