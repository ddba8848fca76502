// One call of order with every output, run by the engine or by the reference.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine.hpp"
#include "order/reference.hpp"
#include "shunt/order.hpp"

namespace shunt::test {

struct OrderResult {
  std::vector<std::int32_t> offsets, permutation, inverse;
  std::vector<float> weights;
  std::vector<std::int32_t> sorted_token_ids, sorted_expert_ids, post_padded, tiles, padded_inverse;
  std::vector<float> sorted_weights;
  std::vector<unsigned char> zeroed;
  bool operator==(const OrderResult&) const = default;
};

inline OrderInputs mirrored(Mirror& there, const OrderInputs& in) {
  return {.ids = there.in(in.ids),
          .weights = there.in(in.weights),
          .expert_map = there.in(in.expert_map),
          .valid_tokens = there.in(in.valid_tokens)};
}
inline OrderOutputs mirrored(Mirror& there, const OrderOutputs& out) {
  return {.offsets = there.out(out.offsets),
          .permutation = there.out(out.permutation),
          .inverse = there.out(out.inverse),
          .weights = there.out(out.weights),
          .sorted_token_ids = there.out(out.sorted_token_ids),
          .sorted_weights = there.out(out.sorted_weights),
          .sorted_expert_ids = there.out(out.sorted_expert_ids),
          .num_tokens_post_padded = there.out(out.num_tokens_post_padded),
          .num_sorted_tiles = there.out(out.num_sorted_tiles),
          .padded_inverse = there.out(out.padded_inverse),
          .zeroed = there.out(out.zeroed)};
}

struct OrderCase {
  OrderSpec spec;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> map;
  std::vector<std::int32_t> valid;  // empty, or one number
  std::size_t zeroed_bytes = 40;

  std::int64_t tokens() const { return static_cast<std::int64_t>(ids.size()) / spec.slots; }

  OrderInputs inputs() const {
    OrderInputs in{.ids = view(ids.data(), {tokens(), spec.slots}),
                   .weights = view(weights.data(), {tokens(), spec.slots})};
    if (spec.expert_map) {
      in.expert_map = view(map.data(), {static_cast<std::int64_t>(map.size())});
    }
    if (!valid.empty()) in.valid_tokens = view(valid.data(), {1});
    return in;
  }

  // `run` is called with (spec, inputs, outputs). What it leaves alone stays 77.
  template <class Run>
  OrderResult with(Run&& run) const {
    const auto pairs = static_cast<std::int64_t>(ids.size());
    const std::int64_t padded = padded_rows_capacity(spec, tokens());
    OrderResult r;
    const auto ints = [](std::vector<std::int32_t>& v, std::int64_t n) {
      v.assign(static_cast<std::size_t>(n), 77);
      return view(v.data(), {n});
    };
    const auto floats = [](std::vector<float>& v, std::int64_t n) {
      v.assign(static_cast<std::size_t>(n), 77.0F);
      return view(v.data(), {n});
    };
    OrderOutputs out{.offsets = ints(r.offsets, spec.locals() + 1),
                     .permutation = ints(r.permutation, pairs),
                     .inverse = ints(r.inverse, pairs),
                     .weights = floats(r.weights, pairs)};
    out.inverse = view(r.inverse.data(), {tokens(), spec.slots});
    if (spec.tile > 0) {
      out.sorted_token_ids = ints(r.sorted_token_ids, padded);
      out.sorted_weights = floats(r.sorted_weights, padded);
      out.sorted_expert_ids = ints(r.sorted_expert_ids, padded / spec.tile);
      out.num_tokens_post_padded = ints(r.post_padded, 1);
      out.num_sorted_tiles = ints(r.tiles, 1);
      ints(r.padded_inverse, pairs);
      out.padded_inverse = view(r.padded_inverse.data(), {tokens(), spec.slots});
    }
    if (zeroed_bytes > 0) {
      r.zeroed.assign(zeroed_bytes, 77);
      out.zeroed = view(r.zeroed.data(), DType::u8, {static_cast<std::int64_t>(zeroed_bytes)});
    }
    run(spec, inputs(), out);
    return r;
  }

  // `call` is called with (spec, inputs, outputs) on the context's device.
  template <class Call>
  OrderResult on(const Context& context, Call&& call) const {
    return with([&](const OrderSpec& s, const OrderInputs& in, const OrderOutputs& out) {
      Mirror there(context);
      const OrderInputs inputs = mirrored(there, in);
      const OrderOutputs outputs = mirrored(there, out);
      call(s, inputs, outputs);
      there.fetch();
    });
  }
  OrderResult engine(const Context& context) const {
    const Buffer workspace = context.allocate(order_workspace_bytes(context, spec, tokens()));
    return on(context, [&](const OrderSpec& s, const OrderInputs& in, const OrderOutputs& out) {
      order(context, s, in, out, workspace);
    });
  }
  OrderResult reference() const { return with(order_reference); }
};

enum class Pattern { distinct, hot, poison, duplicates, last_two, skipped };
inline constexpr Pattern patterns[] = {Pattern::distinct,   Pattern::hot,      Pattern::poison,
                                       Pattern::duplicates, Pattern::last_two, Pattern::skipped};

inline OrderCase make_case(const OrderSpec& spec, std::int64_t tokens, Pattern pattern,
                           std::uint32_t seed = 1) {
  OrderCase c{.spec = spec};
  std::mt19937 random(seed);
  const auto below = [&](int n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n));
  };
  const std::int32_t poison[] = {-1, spec.experts, INT32_MIN, INT32_MAX, -spec.experts};
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> row;
    while (static_cast<int>(row.size()) < spec.slots) {
      std::int32_t id = below(spec.experts);
      if (pattern == Pattern::distinct && spec.slots <= spec.experts) {
        bool taken = false;
        for (const std::int32_t other : row) taken |= other == id;
        if (taken) continue;
      }
      if (pattern == Pattern::hot) id = spec.experts - 1;
      if (pattern == Pattern::poison && below(3) == 0) id = poison[below(5)];
      if (pattern == Pattern::duplicates && !row.empty()) id = row[0];
      if (pattern == Pattern::last_two) id = std::max(0, spec.experts - 1 - below(2));
      if (pattern == Pattern::skipped) id = -1;
      row.push_back(id);
    }
    c.ids.insert(c.ids.end(), row.begin(), row.end());
    for (int s = 0; s < spec.slots; ++s) {
      c.weights.push_back(static_cast<float>(below(1000)) / 1000.0F + 0.5F);
    }
  }
  return c;
}

inline std::string name(const OrderCase& c) {
  return to_json(c.spec) + " tokens " + std::to_string(c.tokens()) + " valid " +
         (c.valid.empty() ? "all" : std::to_string(c.valid[0]));
}

}  // namespace shunt::test
