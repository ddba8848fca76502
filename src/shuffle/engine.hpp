// What the engines of the shuffles and the scatter-add work on, checked by them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/shuffle.hpp"

namespace shunt {

// The rows written, in their order: segment s writes rows [to[s], to[s] + count[s]) from rows that
// begin at from[s], or has none of its own when from[s] is -1. Ascending in `to`. Lives in the
// workspace.
struct Segments {
  std::int32_t* to = nullptr;
  std::int32_t* count = nullptr;
  std::int32_t* from = nullptr;
  // Scratch of who fills them.
  std::int32_t* counts = nullptr;         // [EP, E], made legal
  std::int32_t* rank_totals = nullptr;    // [EP]
  std::int64_t* rank_starts = nullptr;    // [EP]
  std::int32_t* expert_starts = nullptr;  // [E]
  std::int64_t size = 0;
};
// Measures when workspace.data is null. Enough for either shuffle.
Segments carve_segments(const ShuffleSpec& spec, Workspace workspace, std::size_t& bytes);

struct ShuffleCall {
  ShuffleSpec spec;
  bool combines = true;
  Tensor from, to;
  const std::int32_t* token_counts = nullptr;
  std::int32_t* counts = nullptr;  // [L + 1], or null
  Segments segments;
};

void shuffle_cpu(const Context& context, const ShuffleCall& call);
void shuffle_cuda(const Context& context, const ShuffleCall& call);

void offsets_cuda(const Context& context, int locals, const std::int32_t* counts,
                  std::int32_t* offsets);
void counts_cuda(const Context& context, int locals, bool with_all, const std::int32_t* offsets,
                 std::int32_t* counts);

inline constexpr std::int64_t max_scatter_ranks = 4096;

std::size_t scatter_add_cuda_workspace_bytes(std::int64_t tokens, std::int64_t positions);
void scatter_add_cuda(const Context& context, const ScatterAddSpec& spec,
                      const ScatterAddInputs& in, const Tensor& out, Workspace workspace);

}  // namespace shunt
