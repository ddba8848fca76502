// Which rows a shuffle moves, computed on the host, and the CPU engine that moves them.
#include <algorithm>
#include <cstring>

#include "core/check.hpp"
#include "core/workspace.hpp"
#include "cpu/pool.hpp"
#include "shuffle/engine.hpp"

namespace shunt {

Segments carve_segments(const ShuffleSpec& spec, Workspace workspace, std::size_t& bytes) {
  Carver carver(workspace);
  const std::int64_t pairs = std::int64_t{spec.ranks} * spec.experts;
  Segments s;
  s.to = carver.take<std::int32_t>(pairs);
  s.count = carver.take<std::int32_t>(pairs);
  s.from = carver.take<std::int32_t>(pairs);
  s.counts = carver.take<std::int32_t>(pairs);
  s.rank_totals = carver.take<std::int32_t>(spec.ranks);
  s.rank_starts = carver.take<std::int64_t>(spec.ranks);
  s.expert_starts = carver.take<std::int32_t>(spec.experts);
  bytes = carver.used();
  return s;
}

namespace {

// Both orders by one walk each; throws for counts that cannot be.
void fill_segments(const ShuffleCall& call, const Segments& s) {
  const ShuffleSpec& spec = call.spec;
  const char* const what = call.combines ? "combine_shuffling" : "split_shuffling";
  const std::int64_t rows = call.from.shape[0];
  const std::int64_t room = spec.padded ? rows / spec.ranks : rows;
  const auto n = [&](int r, int e) {
    return call.token_counts[std::int64_t{r} * spec.experts + e];
  };
  std::int64_t used = 0;
  for (int r = 0; r < spec.ranks; ++r) {
    if (spec.padded) used = 0;
    s.rank_starts[r] = spec.padded ? r * room : used;
    for (int e = 0; e < spec.experts; ++e) {
      if (n(r, e) < 0) {
        fail(Status::invalid_argument, "{}: token_counts[{}, {}] is {}: must be 0 or more", what, r,
             e, n(r, e));
      }
      used += n(r, e);
    }
    if (used > room) {
      fail(Status::invalid_argument,
           "{}: token_counts up to rank {} is {} rows: must be at most {}", what, r, used, room);
    }
  }
  std::int32_t total = 0;
  for (int e = spec.first_expert; e < spec.end(); ++e) {
    const std::int32_t before = total;
    s.expert_starts[e] = total;
    for (int r = 0; r < spec.ranks; ++r) total += n(r, e);
    if (call.counts != nullptr) call.counts[e - spec.first_expert] = total - before;
  }
  if (call.counts != nullptr) call.counts[spec.end() - spec.first_expert] = total;

  // Each rank's rows in rank order, each expert's in expert order, advance as they are met.
  for (int r = 0; r < spec.ranks; ++r) {
    std::int64_t row = s.rank_starts[r];
    for (int e = 0; e < spec.experts; ++e) {
      const bool moved = e >= spec.first_expert && e < spec.end();
      const auto in_rank_order = static_cast<std::int32_t>(row);
      row += n(r, e);
      if (call.combines) {
        if (!moved) continue;
        const std::int64_t segment = std::int64_t{e - spec.first_expert} * spec.ranks + r;
        s.to[segment] = s.expert_starts[e];
        s.from[segment] = in_rank_order;
        s.count[segment] = n(r, e);
      } else {
        const std::int64_t segment = std::int64_t{r} * spec.experts + e;
        s.to[segment] = in_rank_order;
        s.from[segment] = moved ? s.expert_starts[e] : -1;
        s.count[segment] = n(r, e);
      }
      if (moved) s.expert_starts[e] += n(r, e);
    }
  }
}

}  // namespace

void shuffle_cpu(const Context& context, const ShuffleCall& call) {
  const Segments& s = call.segments;
  fill_segments(call, s);
  const std::int64_t rows = call.to.shape[0];
  const auto row_bytes = static_cast<std::size_t>(bytes(call.to.dtype, call.to.shape[1]));
  if (row_bytes == 0) return;  // and perhaps no data
  const auto at = [](const Tensor& tensor, std::int64_t row) {
    return tensor.as<char>() + bytes(tensor.dtype, row * tensor.strides[0]);
  };
  const std::int64_t grain = std::max<std::int64_t>(
      1, 131072 / std::max<std::int64_t>(1, static_cast<std::int64_t>(row_bytes)));
  context.pool().split(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t segment = std::upper_bound(s.to, s.to + s.size, begin) - s.to - 1;
    for (std::int64_t row = begin; row < end; ++row) {
      while (segment + 1 < s.size && s.to[segment + 1] <= row) ++segment;
      const std::int64_t i = row - s.to[segment];
      if (i < s.count[segment] && s.from[segment] >= 0) {
        std::memcpy(at(call.to, row), at(call.from, s.from[segment] + i), row_bytes);
      } else if (call.spec.zero_fill && !call.combines) {
        std::memset(at(call.to, row), 0, row_bytes);
      }
    }
  });
}

}  // namespace shunt
