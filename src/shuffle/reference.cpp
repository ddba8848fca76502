#include "shuffle/reference.hpp"

#include <cstring>

#include "core/convert.hpp"

namespace shunt {

namespace {

// The formulas of the header.
struct Orders {
  const ShuffleSpec& spec;
  const std::int32_t* n;
  std::int64_t rows;  // T

  std::int64_t count(int r, int e) const { return n[std::int64_t{r} * spec.experts + e]; }
  std::int64_t rank_order(int r, int e) const {
    std::int64_t row = 0;
    for (int before = 0; before < r && !spec.padded; ++before) {
      for (int other = 0; other < spec.experts; ++other) row += count(before, other);
    }
    if (spec.padded) row = r * (rows / spec.ranks);
    for (int before = 0; before < e; ++before) row += count(r, before);
    return row;
  }
  std::int64_t expert_order(int r, int e) const {
    std::int64_t row = 0;
    for (int before = spec.first_expert; before < e; ++before) {
      for (int other = 0; other < spec.ranks; ++other) row += count(other, before);
    }
    for (int before = 0; before < r; ++before) row += count(before, e);
    return row;
  }
};

void copy_row(const Tensor& from, std::int64_t a, const Tensor& to, std::int64_t b) {
  std::memcpy(to[b].data, from[a].data, static_cast<std::size_t>(from[a].bytes()));
}

}  // namespace

void combine_shuffling_reference(const ShuffleSpec& spec, Tensor tokens, Tensor token_counts,
                                 Tensor rows, Tensor counts) {
  const Orders orders{spec, token_counts.as<std::int32_t>(), tokens.shape[0]};
  std::int32_t all = 0;
  for (int e = spec.first_expert; e < spec.end(); ++e) {
    const std::int32_t before = all;
    for (int r = 0; r < spec.ranks; ++r) {
      for (std::int64_t i = 0; i < orders.count(r, e); ++i, ++all) {
        copy_row(tokens, orders.rank_order(r, e) + i, rows, orders.expert_order(r, e) + i);
      }
    }
    if (counts) counts.as<std::int32_t>()[e - spec.first_expert] = all - before;
  }
  if (counts) counts.as<std::int32_t>()[spec.end() - spec.first_expert] = all;
}

void split_shuffling_reference(const ShuffleSpec& spec, Tensor rows, Tensor token_counts,
                               Tensor tokens) {
  for (std::int64_t t = 0; t < tokens.shape[0] && spec.zero_fill; ++t) {
    std::memset(tokens[t].data, 0, static_cast<std::size_t>(tokens[t].bytes()));
  }
  const Orders orders{spec, token_counts.as<std::int32_t>(), tokens.shape[0]};
  for (int e = spec.first_expert; e < spec.end(); ++e) {
    for (int r = 0; r < spec.ranks; ++r) {
      for (std::int64_t i = 0; i < orders.count(r, e); ++i) {
        copy_row(rows, orders.expert_order(r, e) + i, tokens, orders.rank_order(r, e) + i);
      }
    }
  }
}

void scatter_add_padded_reference(const ScatterAddSpec& spec, const ScatterAddInputs& in,
                                  Tensor out) {
  const std::int64_t experts = in.token_counts.shape[0], ranks = in.rows.shape[0];
  for (std::int64_t t = 0; t < out.shape[0]; ++t) {
    for (std::int64_t h = 0; h < out.shape[1]; ++h) {
      double sum = 0;
      std::int64_t p = 0;
      for (std::int64_t e = 0; e < experts; ++e) {
        const Tensor rows = in.rows[e / (experts / ranks)];
        for (std::int32_t i = 0; i < in.token_counts.as<std::int32_t>()[e]; ++i, ++p) {
          if (in.token_indices.as<std::int32_t>()[p] != t) continue;
          sum += static_cast<double>(load_f32(rows[p].data, rows.dtype, h));
        }
      }
      const std::int64_t at = t * out.strides[0] + h;
      if (spec.accumulate) sum += static_cast<double>(load_f32(out.data, out.dtype, at));
      store_f32(out.data, out.dtype, at, static_cast<float>(sum));
    }
  }
}

}  // namespace shunt
