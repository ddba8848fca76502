// How the sort of sort.cuh is laid over the GPU. Plain data, decided on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "order/engine.hpp"

namespace shunt::ordering {

// `parts` clusters of `cluster` blocks. Block b of every cluster counts segment b of the pairs, so
// that each cluster knows all counts without asking another one; block b of cluster p places part p
// of segment b. `rows` warps of a block place `chunks` * 32 consecutive pairs each.
struct SortPlan {
  unsigned cluster = 1;
  unsigned parts = 1;
  unsigned threads = 128;  // a block
  unsigned rows = 1;       // at most threads / 32
  unsigned chunks = 1;
  // Pairs are below 2^31, and all segments together below 2^32.
  std::uint32_t share = 32;    // pairs that a block places: rows * chunks * 32
  std::uint32_t segment = 32;  // parts * share
  // Few pairs: not counted but compared (sort_few.cuh; sort_few_tiles.cuh where `padded`). How many
  // lanes share the comparisons of one pair with all others, a power of two to 32; 0: counted.
  unsigned compare_lanes = 0;
  unsigned few_keys = 0;     // ints that the keys take in shared memory, where `padded`
  unsigned zero_blocks = 0;  // further blocks that only zero; a multiple of `cluster`
  unsigned bits = 1;         // of a local expert's index
  std::size_t few_shared_bytes = 0;
  unsigned stride = 0;    // ints from table to table in shared memory
  bool padded = false;    // the padded form is wanted: two more tables
  bool staged = false;    // rows are gathered in shared memory and stored in their order
  bool wide_ids = false;  // ids are 16-byte aligned
  bool weighted = false;  // an output carries weights

  constexpr std::size_t shared_bytes() const {
    if (compare_lanes > 0) return few_shared_bytes;
    const std::size_t tables = 2 + rows + (padded ? 2 : 0) + (staged ? 1 : 0);
    return (sums + tables * stride + (staged ? share * (weighted ? 2 : 1) : 0)) *
           sizeof(std::int32_t);
  }
  static constexpr unsigned sums = 192;  // of the warps in a scan: three scans, two buffers
};

// The parameter of every kernel that sorts.
struct SortJob {
  OrderCall call;
  SortPlan plan;
};

// A sort that ends a kernel of another stage, which wrote the ids.
struct SortTail {
  SortJob job;
  // Counts the blocks that are done, to `arrivals`, so that the last one sorts. Null: the blocks
  // have met, or there is only one.
  std::uint32_t* ticket = nullptr;
  unsigned arrivals = 1;
};

// What the GPU offers.
struct SortLimits {
  int multiprocessors = 1;
  int shared_bytes = 48 << 10;
  unsigned largest_cluster = 1;
};

inline constexpr unsigned pair_bits = 12;  // of a key in sort_few.cuh
inline constexpr std::int64_t most_compared = std::int64_t{1} << pair_bits;
inline constexpr std::int64_t worth_comparing = 2048;  // pairs; more are counted

// Most local experts of any GPU, with and without the padded form: their tables fit the shared
// memory of Hopper.
inline constexpr int most_locals = 16384;
inline constexpr int most_locals_padded = 8192;
// Those whose tables fit `shared_bytes`, for any cluster and number of threads.
constexpr int most_locals_in(int shared_bytes, bool padded) {
  const int tables = padded ? 5 : 3;
  const int stride = (shared_bytes / 4 - static_cast<int>(SortPlan::sums)) / tables;
  const int most = padded ? most_locals_padded : most_locals;
  return stride / 4 * 4 - 1 < most ? stride / 4 * 4 - 1 : most;
}

// The plan for a cluster size, a number of clusters and threads a block. Throws
// Error{unsupported} where the tables do not fit.
SortPlan make_plan(const OrderCall& call, const SortLimits& limits, unsigned cluster,
                   unsigned parts, unsigned threads, bool stage = true);
// The plan that compares, with `parts` blocks. Not for padded outputs or more than most_compared.
SortPlan make_few_plan(const OrderCall& call, unsigned parts, unsigned threads, unsigned lanes);
// The same for padded outputs: at most most_few_tiles pairs and local experts, with a thread for
// each expert.
inline constexpr int most_few_tiles = 1024;
SortPlan make_few_tiles_plan(const OrderCall& call, unsigned parts, unsigned threads,
                             unsigned lanes);
// The plan that is expected to be fastest.
SortPlan choose_plan(const OrderCall& call, const SortLimits& limits);
// The plan for `blocks` blocks of `threads` that a kernel of another stage has at its end: they
// compare, or count together as one cluster, or (`alone`) the first of them counts.
SortPlan make_tail_plan(const OrderCall& call, const SortLimits& limits, unsigned blocks,
                        unsigned threads, bool alone);
// Adds blocks that only zero where the buffer is large.
void add_zero_blocks(SortPlan& plan, const OrderCall& call, const SortLimits& limits);

}  // namespace shunt::ordering
