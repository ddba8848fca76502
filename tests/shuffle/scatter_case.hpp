// One call of scatter_add_padded.
#pragma once

#include "shuffle/shuffle_case.hpp"

namespace shunt::test {

struct ScatterCase {
  ScatterAddSpec spec;
  std::int64_t ranks = 0, tokens = 0, width = 0, gap = 0;
  DType from = f32, to = f32;
  std::vector<std::uint32_t> rows, out;  // out: what it holds before
  std::vector<std::int32_t> counts, token_of;

  std::int64_t positions() const { return static_cast<std::int64_t>(token_of.size()); }
  ScatterAddInputs inputs() const {
    Tensor blocks = view(rows.data(), from, {ranks, positions(), width});
    blocks.strides[1] = width + gap;
    blocks.strides[0] = (positions() + gap) * (width + gap);
    return {.rows = blocks,
            .token_counts = view(counts.data(), {static_cast<std::int64_t>(counts.size())}),
            .token_indices = view(token_of.data(), {positions()})};
  }
  Tensor out_of(std::vector<std::uint32_t>& memory) const {
    Tensor y = view(memory.data(), to, {tokens, width});
    y.strides[0] = width + gap;
    return y;
  }
  void row(std::int64_t rank, std::int64_t p, std::int64_t h, float value) {
    const Tensor blocks = inputs().rows;
    store_f32(rows.data(), from, rank * blocks.strides[0] + p * blocks.strides[1] + h, value);
  }
  std::vector<std::uint32_t> on(const Context& context) const {
    std::vector<std::uint32_t> memory = out;
    const Buffer workspace =
        context.allocate(scatter_add_workspace_bytes(context, spec, tokens, positions()));
    Mirror mirror(context);
    const ScatterAddInputs in = inputs();
    scatter_add_padded(context, spec,
                       {.rows = mirror.in(in.rows),
                        .token_counts = mirror.in(in.token_counts),
                        .token_indices = mirror.in(in.token_indices)},
                       mirror.out(out_of(memory)), workspace);
    mirror.fetch();
    return memory;
  }
  std::vector<std::uint32_t> reference() const {
    std::vector<std::uint32_t> memory = out;
    scatter_add_padded_reference(spec, inputs(), out_of(memory));
    return memory;
  }
};

// `slots` pairs a token, some of them skipped, over `experts` experts; or `positions` of them.
inline ScatterCase make_scatter(ScatterAddSpec spec, int ranks, int experts, std::int64_t tokens,
                                int slots, std::int64_t width, std::int64_t gap, DType from,
                                DType to, int positions = -1) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  ScatterCase c{.spec = spec,
                .ranks = ranks,
                .tokens = tokens,
                .width = width,
                .gap = gap,
                .from = from,
                .to = to};
  const std::int64_t all = positions < 0 ? tokens * slots + 2 : positions;
  c.counts.assign(static_cast<std::size_t>(experts), 0);
  // Two positions stay unused, where there is room.
  for (std::int64_t p = 0; p < (positions < 0 ? all - 2 : all); ++p) {
    ++c.counts[random() % static_cast<unsigned>(experts)];
  }
  for (std::int64_t p = 0; p < all; ++p) {
    c.token_of.push_back(tokens == 0 || random() % 9 == 0
                             ? -1
                             : static_cast<std::int32_t>(random() % static_cast<unsigned>(tokens)));
  }
  c.rows.resize(static_cast<std::size_t>(ranks * (all + gap) * (width + gap) + 1));
  for (std::int64_t i = 0; i < ranks * (all + gap) * (width + gap); ++i) {
    store_f32(c.rows.data(), from, i, normal(random));
  }
  c.out.resize(static_cast<std::size_t>(tokens * (width + gap) + 1));
  for (std::int64_t i = 0; i < tokens * (width + gap); ++i) {
    store_f32(c.out.data(), to, i, normal(random));
  }
  return c;
}

}  // namespace shunt::test
