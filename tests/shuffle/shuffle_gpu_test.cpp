// What only a GPU's shuffles have: counts that nobody checked, graphs, the CPU engine's bits.
#include <algorithm>
#include <limits>
#include <numeric>

#include "shuffle/scatter_case.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt::test {
namespace {

TEST(ShuffleOnGpu, IllegalCountsStayInsideTheMemory) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda();
  for (const bool padded : {false, true}) {
    for (const bool combines : {true, false}) {
      const ShuffleSpec spec{.ranks = 5, .experts = 50, .first_expert = 3, .padded = padded};
      const ShuffleCase good = make_case(spec, 4, 21, 0);
      const ShuffleLayout layout{f32, 12, 0};
      std::mt19937 random(4);
      Rows from(f32, good.rows, 12, 0);
      from.randomise(random);
      for (const std::int32_t value : {-1, INT32_MIN, 1000, INT32_MAX}) {
        ShuffleCase bad = good, legal = good;
        for (std::size_t i = 0; i < bad.n.size(); i += 7) {
          bad.n[i] = value;
          legal.n[i] = 0;
        }
        const Shuffled got = shuffle_on(gpu, bad, combines, layout, from);
        if (value < 0) {
          EXPECT_EQ(got.to, shuffle_reference(legal, combines, layout, from).to);
        }
        if (combines) {
          EXPECT_LE(got.counts.back(), good.rows);
        }
        EXPECT_EQ(got, shuffle_on(gpu, bad, combines, layout, from));
      }
    }
  }
}

TEST(ShuffleOnGpu, GraphFollowsTheDevice) {
  SHUNT_ON_GPU_ONLY();
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const ShuffleSpec spec{.ranks = 4, .experts = 12, .padded = true};
    ShuffleCase c = make_case(spec, 20, 1);
    std::mt19937 random(8);
    Rows from(bf16, c.rows, 136, 0), middle(bf16, c.rows, 136, 0), back(bf16, c.rows, 136, 0);
    from.randomise(random);
    Mirror mirror(gpu);
    std::vector<std::int32_t> counts(13);
    const Tensor x = mirror.in(from.tensor), n = mirror.in(c.counts()),
                 y = mirror.out(middle.tensor), z = mirror.out(back.tensor),
                 total = mirror.out(view(counts.data(), {13}));
    const Buffer workspace = gpu.allocate(shuffle_workspace_bytes(gpu, spec));
    const Graph graph(stream, [&] {
      combine_shuffling(gpu, spec, x, n, y, total, workspace);
      split_shuffling(gpu, spec, y, n, z, workspace);
    });
    Rows want_middle = middle, want_back = back;
    for (int turn = 0; turn < 5; ++turn) {
      std::shuffle(c.n.begin(), c.n.end(), random);
      // Counts of other ranks: a rank may have more rows now than there is room for; halve them.
      for (auto& count : c.n) count /= turn == 0 ? 2 : 1;
      gpu.copy(n.data, c.n.data(), 4 * c.n.size());
      want_middle.tensor.data = want_middle.memory.data();
      want_back.tensor.data = want_back.memory.data();
      std::vector<std::int32_t> want(13);
      combine_shuffling_reference(spec, from.tensor, c.counts(), want_middle.tensor,
                                  view(want.data(), {13}));
      split_shuffling_reference(spec, want_middle.tensor, c.counts(), want_back.tensor);
      for (int again = 0; again < 2; ++again) {
        graph.replay();
        mirror.fetch();
        ASSERT_EQ(counts, want);
        ASSERT_EQ(middle.memory, want_middle.memory) << turn;
        ASSERT_EQ(back.memory, want_back.memory) << turn;
      }
    }
  }
}

TEST(ScatterAddOnGpu, HasTheBitsOfTheCpu) {
  SHUNT_ON_GPU_ONLY();
  for (const DType from : {f32, bf16, f16}) {
    for (const DType to : {f32, bf16, f16}) {
      for (const std::int64_t width : {1, 4, 20, 520, 2880}) {
        for (const std::int64_t gap : {0, 1, 8}) {
          const ScatterCase c = make_scatter({}, 4, 16, 60, 9, width, gap, from, to);
          ASSERT_EQ(c.on(cuda()), c.on(cpu({.threads = 1})))
              << to_string(from) << " to " << to_string(to) << " width " << width << " gap " << gap;
        }
      }
    }
  }
}

TEST(ScatterAddOnGpu, IllegalValuesAreSkipped) {
  SHUNT_ON_GPU_ONLY();
  ScatterCase c = make_scatter({}, 4, 8, 30, 4, 64, 0, f32, f32);
  ScatterCase legal = c;
  const std::int32_t illegal[] = {-2, 30, INT32_MIN, INT32_MAX};
  for (std::size_t p = 0; p < c.token_of.size(); p += 5) {
    c.token_of[p] = illegal[p / 5 % 4];
    legal.token_of[p] = -1;
  }
  c.counts[2] = INT32_MIN, legal.counts[2] = 0;
  EXPECT_EQ(c.on(cuda()), legal.on(cuda()));
  // Counts past the positions: the last expert's end where they do.
  const std::int32_t before = std::accumulate(legal.counts.begin(), legal.counts.end() - 1, 0);
  c.counts.back() = INT32_MAX;
  legal.counts.back() = static_cast<std::int32_t>(legal.positions()) - before;
  EXPECT_EQ(c.on(cuda()), legal.on(cuda()));
}

TEST(ScatterAddOnGpu, GraphFollowsTheDevice) {
  SHUNT_ON_GPU_ONLY();
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    ScatterCase c = make_scatter({.accumulate = false}, 4, 16, 90, 5, 264, 0, bf16, bf16);
    Mirror mirror(gpu);
    std::vector<std::uint32_t> memory = c.out;
    const ScatterAddInputs in = c.inputs();
    const ScatterAddInputs there = {.rows = mirror.in(in.rows),
                                    .token_counts = mirror.in(in.token_counts),
                                    .token_indices = mirror.in(in.token_indices)};
    const Tensor y = mirror.out(c.out_of(memory));
    const Buffer workspace =
        gpu.allocate(scatter_add_workspace_bytes(gpu, c.spec, c.tokens, c.positions()));
    const Graph graph(stream, [&] { scatter_add_padded(gpu, c.spec, there, y, workspace); });
    std::mt19937 random(6);
    for (int turn = 0; turn < 4; ++turn) {
      std::shuffle(c.counts.begin(), c.counts.end(), random);
      std::shuffle(c.token_of.begin(), c.token_of.end(), random);
      if (turn == 2) std::fill(c.counts.begin(), c.counts.end(), 0);
      gpu.copy(there.token_counts.data, c.counts.data(), 4 * c.counts.size());
      gpu.copy(there.token_indices.data, c.token_of.data(), 4 * c.token_of.size());
      const auto want = c.on(cpu({.threads = 1}));
      for (int again = 0; again < 2; ++again) {
        graph.replay();
        mirror.fetch();
        ASSERT_EQ(memory, want) << turn;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
#endif
