// Calls of the shuffles and of the scatter-add over random counts.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "shuffle/reference.hpp"
#include "shunt/shuffle.hpp"

namespace shunt::test {

// Rows of bytes with a gap after each; unwritten memory is 0x4d.
struct Rows {
  std::vector<std::uint32_t> memory;  // 4-byte aligned, whatever the dtype
  Tensor tensor;

  Rows(DType dtype, std::int64_t rows, std::int64_t width, std::int64_t gap)
      : memory(static_cast<std::size_t>(bytes(dtype, rows * (width + gap)) / 4 + 1), 0x4d4d4d4d) {
    tensor = view(memory.data(), dtype, {rows, width});
    tensor.strides[0] = width + gap;
  }
  void randomise(std::mt19937& random) {
    for (auto& word : memory) word = static_cast<std::uint32_t>(random());
  }
};

struct ShuffleCase {
  ShuffleSpec spec;
  std::int64_t rows = 0;  // T
  std::vector<std::int32_t> n;

  std::int64_t locals() const { return spec.end() - spec.first_expert; }
  Tensor counts() const { return view(n.data(), {spec.ranks, spec.experts}); }
};

// `most`: rows of a pair; every third pair has none. Padded: with room left, most often.
inline ShuffleCase make_case(ShuffleSpec spec, int most, std::uint32_t seed, int spare = 3) {
  std::mt19937 random(seed);
  ShuffleCase c{.spec = spec};
  std::int64_t total = 0, fullest = 0;
  for (int r = 0; r < spec.ranks; ++r) {
    std::int64_t of_rank = 0;
    for (int e = 0; e < spec.experts; ++e) {
      const auto count = static_cast<std::int32_t>(random() % static_cast<unsigned>(most + 1));
      c.n.push_back(random() % 3 == 0 ? 0 : count);
      of_rank += c.n.back();
    }
    total += of_rank;
    fullest = std::max(fullest, of_rank);
  }
  c.rows = spec.padded ? spec.ranks * (fullest + spare) : total + spare;
  return c;
}

// What the operation leaves in `to`, and combine_shuffling's counts.
struct Shuffled {
  std::vector<std::uint32_t> to;
  std::vector<std::int32_t> counts;
  bool operator==(const Shuffled&) const = default;
};

struct ShuffleLayout {
  DType dtype = bf16;
  std::int64_t width = 0, gap = 0;
};

inline Shuffled shuffle_on(const Context& context, const ShuffleCase& c, bool combines,
                           const ShuffleLayout& layout, const Rows& from) {
  Rows to(layout.dtype, c.rows, layout.width, layout.gap);
  Shuffled result{.counts =
                      std::vector<std::int32_t>(static_cast<std::size_t>(c.locals() + 1), 77)};
  const Buffer workspace = context.allocate(shuffle_workspace_bytes(context, c.spec));
  Mirror mirror(context);
  if (combines) {
    combine_shuffling(context, c.spec, mirror.in(from.tensor), mirror.in(c.counts()),
                      mirror.out(to.tensor),
                      mirror.out(view(result.counts.data(), {c.locals() + 1})), workspace);
  } else {
    split_shuffling(context, c.spec, mirror.in(from.tensor), mirror.in(c.counts()),
                    mirror.out(to.tensor), workspace);
  }
  mirror.fetch();
  result.to = to.memory;
  return result;
}

inline Shuffled shuffle_reference(const ShuffleCase& c, bool combines, const ShuffleLayout& layout,
                                  const Rows& from) {
  Rows to(layout.dtype, c.rows, layout.width, layout.gap);
  Shuffled result{.counts =
                      std::vector<std::int32_t>(static_cast<std::size_t>(c.locals() + 1), 77)};
  if (combines) {
    combine_shuffling_reference(c.spec, from.tensor, c.counts(), to.tensor,
                                view(result.counts.data(), {c.locals() + 1}));
  } else {
    split_shuffling_reference(c.spec, from.tensor, c.counts(), to.tensor);
  }
  result.to = to.memory;
  return result;
}

inline std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "not refused";
}
inline void expect(const std::string& what, const std::string& words) {
  EXPECT_NE(what.find(words), std::string::npos) << "no '" << words << "' in: " << what;
}

}  // namespace shunt::test
