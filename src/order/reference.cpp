#include "order/reference.hpp"

#include <algorithm>
#include <cmath>
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

namespace {

// Values of one scale, as the header defines it.
void quantise(const GatherSpec& spec, const double* values, std::int64_t n, std::uint8_t* to,
              float& scale) {
  double amax = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isfinite(values[i])) amax = std::max(amax, std::abs(values[i]));
  }
  if (spec.scale_upper_bound > 0) {
    amax = std::min(amax, static_cast<double>(spec.scale_upper_bound));
  }
  amax = std::max(amax, static_cast<double>(1e-12F));
  scale = static_cast<float>(amax / 448);
  if (spec.power_of_two_scales) scale = std::exp2(std::ceil(std::log2(scale)));
  const double factor = spec.power_of_two_scales
                            ? 1 / static_cast<double>(scale)
                            : static_cast<double>(static_cast<float>(448 / amax));
  for (std::int64_t i = 0; i < n; ++i) to[i] = to_e4m3(static_cast<float>(values[i] * factor));
}

}  // namespace

void gather_reference(const GatherSpec& spec, const GatherInputs& in, Tensor rows, Tensor scales) {
  const std::int64_t width = in.hidden.shape[1];
  std::vector<double> values(static_cast<std::size_t>(width));
  for (std::int64_t r = 0; r < *in.rows.as<std::int32_t>(); ++r) {
    const Tensor from = in.hidden[in.permutation.as<std::int32_t>()[r] / spec.slots];
    const double weight = spec.scale_by_weight ? static_cast<double>(in.weights.as<float>()[r]) : 1;
    for (std::int64_t h = 0; h < width; ++h) {
      const double product = weight * static_cast<double>(load_f32(from.data, from.dtype, h));
      values[static_cast<std::size_t>(h)] = static_cast<double>(static_cast<float>(product));
      if (spec.quantise == Quantise::none) {
        store_f32(rows[r].data, rows.dtype, h, static_cast<float>(product));
      }
    }
    const bool whole = spec.quantise == Quantise::row;
    const std::int64_t block = whole ? width : 128;
    const std::int64_t blocks = spec.quantise == Quantise::none ? 0
                                : whole                         ? 1
                                                                : (width + 127) / 128;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t at = r * scales.strides[0] + (scales.rank > 1 ? b * scales.strides[1] : 0);
      quantise(spec, values.data() + b * block, std::min(block, width - b * block),
               rows[r].as<std::uint8_t>() + b * block, scales.as<float>()[at]);
    }
  }
}

}  // namespace shunt
