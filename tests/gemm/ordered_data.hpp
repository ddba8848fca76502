// Matrices in GPTQ's order of activations, for tests of what multiplies them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "format/plain.hpp"

namespace shunt::test {

// A matrix of GPTQ's, its groups shuffled, and the same weights with groups in a row.
struct Ordered {
  Packed sorted;
  std::vector<std::int32_t> group_of, place;  // of each k
  std::vector<std::uint8_t> codes;
  PackedMatrix shuffled;

  Ordered(std::int64_t n, std::int64_t k, int group, unsigned seed)
      : sorted(Packed::of({Format::int4, group}, normal_values(n * k, seed), n, k)),
        place(static_cast<std::size_t>(k)),
        codes(static_cast<std::size_t>(n * ((k + 1) / 2))) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> order;
    for (std::int32_t i = 0; i < k; ++i) order.push_back(i / group);
    std::shuffle(order.begin(), order.end(), random);
    group_of = order;
    std::vector<std::int32_t> next;
    for (std::int32_t at = 0; at < k; at += group) next.push_back(at);
    for (std::size_t i = 0; i < place.size(); ++i) {
      place[i] = next[static_cast<std::size_t>(order[i])]++;
    }
    const std::int64_t row_bytes = (k + 1) / 2;
    const auto* const from = sorted.packed.values.as<std::uint8_t>();
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int64_t at = place[static_cast<std::size_t>(i)];
        const int code = from[row * row_bytes + at / 2] >> (at % 2 * 4) & 15;
        std::uint8_t& byte = codes[static_cast<std::size_t>(row * row_bytes + i / 2)];
        byte = static_cast<std::uint8_t>(byte | code << (i % 2 * 4));
      }
    }
    shuffled = sorted.packed;
    shuffled.values = view(static_cast<const void*>(codes.data()), DType::u8, {n, row_bytes});
    shuffled.group_of = view(group_of.data(), {k});
  }
};

}  // namespace shunt::test
