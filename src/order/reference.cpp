#include "order/reference.hpp"

#include <algorithm>
#include <vector>

#include "core/convert.hpp"

namespace shunt {

void order_reference(const OrderSpec& spec, const OrderInputs& in, const OrderOutputs& out) {
  const std::int64_t tokens = in.ids.shape[0];
  const std::int64_t slots = in.ids.shape[1];
  const std::int64_t valid =
      in.valid_tokens ? std::min<std::int64_t>(*in.valid_tokens.as<std::int32_t>(), tokens)
                      : tokens;
  const auto put = [](const Tensor& tensor, std::int64_t at, auto value) {
    if (tensor) tensor.as<decltype(value)>()[at] = value;
  };

  std::vector<std::vector<std::int32_t>> pairs(static_cast<std::size_t>(spec.locals()));
  for (std::int64_t pair = 0; pair < tokens * slots; ++pair) {
    put(out.inverse, pair, std::int32_t{-1});
    put(out.padded_inverse, pair, std::int32_t{-1});
    const std::int32_t id = in.ids.as<std::int32_t>()[pair];
    if (pair / slots >= valid || id < 0 || id >= spec.experts) continue;
    const int local =
        spec.expert_map ? in.expert_map.as<std::int32_t>()[id] : id - spec.first_expert;
    if (local < 0 || local >= spec.locals()) continue;
    pairs[static_cast<std::size_t>(local)].push_back(static_cast<std::int32_t>(pair));
  }
  const auto weight = [&](std::int32_t pair) { return in.weights.as<float>()[pair]; };

  std::int32_t row = 0;
  std::int32_t padded = 0;
  const std::int32_t sentinel =
      spec.sentinel == -1 ? static_cast<std::int32_t>(tokens) : spec.sentinel;
  const auto pad_to = [&](std::int64_t end) {
    for (; padded < end; ++padded) {
      put(out.sorted_token_ids, padded, sentinel);
      put(out.sorted_weights, padded, 0.0F);
    }
  };
  put(out.offsets, 0, row);
  for (std::int32_t expert = 0; expert < spec.locals(); ++expert) {
    const std::int32_t first = padded;
    for (const std::int32_t pair : pairs[static_cast<std::size_t>(expert)]) {
      put(out.permutation, row, pair);
      put(out.inverse, pair, row);
      if (out.weights) put(out.weights, row, weight(pair));
      put(out.sorted_token_ids, padded, static_cast<std::int32_t>(pair / slots));
      if (out.sorted_weights) put(out.sorted_weights, padded, weight(pair));
      put(out.padded_inverse, pair, padded);
      ++row, ++padded;
    }
    put(out.offsets, expert + 1, row);
    if (spec.tile == 0) continue;
    if (padded == first && spec.tile_for_empty_expert) pad_to(padded + 1);
    pad_to((padded + spec.tile - 1) / spec.tile * std::int64_t{spec.tile});
    for (std::int32_t tile = first / spec.tile; tile < padded / spec.tile; ++tile) {
      put(out.sorted_expert_ids, tile, expert);
    }
  }
  if (spec.tile > 0) {
    put(out.num_tokens_post_padded, 0, padded);
    put(out.num_sorted_tiles, 0, padded / spec.tile);
    const std::int64_t capacity = padded_rows_capacity(spec, tokens);
    for (std::int64_t tile = padded / spec.tile; tile < capacity / spec.tile; ++tile) {
      put(out.sorted_expert_ids, tile, std::int32_t{-1});
    }
    pad_to(capacity);
  }
  std::fill_n(out.zeroed.as<char>(), out.zeroed ? out.zeroed.bytes() : 0, '\0');
}

void gather_reference(const GatherSpec& spec, const GatherInputs& in, Tensor rows) {
  for (std::int64_t r = 0; r < *in.rows.as<std::int32_t>(); ++r) {
    const Tensor from = in.hidden[in.permutation.as<std::int32_t>()[r] / spec.slots];
    const double weight = spec.scale_by_weight ? static_cast<double>(in.weights.as<float>()[r]) : 1;
    for (std::int64_t h = 0; h < from.shape[0]; ++h) {
      const double product = weight * static_cast<double>(load_f32(from.data, from.dtype, h));
      store_f32(rows[r].data, rows.dtype, h, static_cast<float>(product));
    }
  }
}

}  // namespace shunt
