// The shuffles on a GPU: one kernel where pairs of a rank and an expert are few and dense, two
// otherwise.
//
// move_few_pairs, up to 128 pairs: a block moves one or two rows, a thread a vector of each; which
//   rows they come from its first warp finds (few_pairs.cuh; barrier: they are there).
// few_segments, up to 1024 pairs: each block finds all segments, in shared memory (two sums over
// the
//   block's threads, a barrier in each and one after each), and moves its rows. Counts are made
//   legal by sums that stop at `rows`.
// segments_kernel, one block of 1024 threads: which rows each (rank, expert) pair has in either
//   order. First a warp a rank: the rank's counts, made legal (barrier: the totals are there; then
//   one thread adds them up: where each rank starts); again a warp a rank: running sums over its
//   experts, cut off where the rank has no room (barrier: all counts are legal); then a thread an
//   expert: its rows over all ranks, and a scan over the block, 1024 experts at a time (barriers
//   of the scan), gives where each expert starts. What one step writes the next reads, through
//   memory.
// move_rows: an item is a row to write; a binary search over the segments says which row to read.
//
// Bytes: 16 EP E for the segments; every row that is moved read once and written once. 512, 4096
// and 32768 rows of 4 kB of 128 pairs: 3.7, 11.4 and 68.2 us (docs/notes/cuda-move.md); predicted
// for other segments 3 us, then 90 % of a copy.
#include "cuda/move_rows.cuh"
#include "shuffle/engine.hpp"
#include "shuffle/few_pairs.cuh"

namespace shunt {

namespace {

using namespace cuda_engine;

constexpr int segment_threads = 1024;

struct SegmentsCall {
  Segments out;
  const std::int32_t* token_counts;
  std::int32_t* counts;  // null: not asked for
  int ranks, experts, first, end;
  std::int64_t rows, room;  // of all, and of a rank
  bool padded, combines;
};

__device__ std::int64_t warp_sum_before(std::int64_t mine, int lane, std::int64_t& all) {
  std::int64_t sum = mine;
  for (int apart = 1; apart < 32; apart *= 2) {
    const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, apart);
    if (lane >= apart) sum += other;
  }
  all = __shfl_sync(0xffffffffu, sum, 31);
  return sum - mine;
}

__global__ void __launch_bounds__(segment_threads) segments_kernel(SegmentsCall call) {
  __shared__ std::int64_t warp_sums[32];
  wait_for_predecessor();
  let_successor_start();
  const Segments& s = call.out;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  for (int r = warp; r < call.ranks; r += 32) {
    std::int64_t total = 0;
    for (int e = lane; e < call.experts; e += 32) {
      total += max(call.token_counts[std::int64_t{r} * call.experts + e], 0);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, apart);
    }
    if (lane == 0) {
      s.rank_totals[r] = static_cast<std::int32_t>(min(total, call.room));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int64_t start = 0;
    for (int r = 0; r < call.ranks; ++r) {
      s.rank_starts[r] = start;
      start = call.padded ? start + call.room : min(start + s.rank_totals[r], call.rows);
    }
  }
  __syncthreads();
  for (int r = warp; r < call.ranks; r += 32) {
    const std::int64_t start = s.rank_starts[r];
    const std::int64_t room = call.padded ? call.room : call.rows - start;
    std::int64_t before = 0;
    for (int first = 0; first < call.experts; first += 32) {
      const int e = first + lane;
      const std::int64_t given =
          e < call.experts ? max(call.token_counts[std::int64_t{r} * call.experts + e], 0) : 0;
      std::int64_t all = 0;
      const std::int64_t at = before + warp_sum_before(given, lane, all);
      if (e < call.experts) {
        const std::int64_t n = max(min(given, room - at), std::int64_t{0});
        const auto row = static_cast<std::int32_t>(start + min(at, room));
        s.counts[std::int64_t{r} * call.experts + e] = static_cast<std::int32_t>(n);
        if (!call.combines) {
          s.to[std::int64_t{r} * call.experts + e] = row;
          s.count[std::int64_t{r} * call.experts + e] = static_cast<std::int32_t>(n);
        } else if (e >= call.first && e < call.end) {
          s.from[std::int64_t{e - call.first} * call.ranks + r] = row;
        }
      }
      before += all;
    }
  }
  __syncthreads();

  std::int64_t start_of_chunk = 0;
  for (int chunk = 0; chunk < call.experts; chunk += segment_threads) {
    const int e = chunk + static_cast<int>(threadIdx.x);
    const bool moved = e >= call.first && e < call.end;
    std::int64_t mine = 0;
    if (moved) {
#pragma unroll 8
      for (int r = 0; r < call.ranks; ++r) {
        mine += s.counts[std::int64_t{r} * call.experts + e];
      }
    }
    std::int64_t all = 0;
    std::int64_t start = warp_sum_before(mine, lane, all);
    if (lane == 0) warp_sums[warp] = all;
    __syncthreads();
    std::int64_t all_of_warp = 0;
    const std::int64_t warp_start = warp_sum_before(warp_sums[lane], lane, all_of_warp);
    start += start_of_chunk + __shfl_sync(0xffffffffu, warp_start, warp);
    start_of_chunk += all_of_warp;
    if (moved && call.counts != nullptr) {
      call.counts[e - call.first] = static_cast<std::int32_t>(mine);
    }
    if (e < call.experts) {
#pragma unroll 8
      for (int r = 0; r < call.ranks; ++r) {
        const std::int64_t pair = std::int64_t{r} * call.experts + e;
        const std::int32_t n = s.counts[pair];
        if (!call.combines) {
          s.from[pair] = moved ? static_cast<std::int32_t>(start) : -1;
        } else if (moved) {
          s.to[std::int64_t{e - call.first} * call.ranks + r] = static_cast<std::int32_t>(start);
          s.count[std::int64_t{e - call.first} * call.ranks + r] = n;
        }
        start += n;
      }
    }
    __syncthreads();  // warp_sums may be overwritten
  }
  if (threadIdx.x == 0 && call.counts != nullptr) {
    call.counts[call.end - call.first] = static_cast<std::int32_t>(start_of_chunk);
  }
}

struct ShuffleMap {
  const std::int32_t* to;
  const std::int32_t* count;
  const std::int32_t* from;
  std::int32_t segments;
  std::int64_t rows;
  bool combines, zero_fill;

  // In expert order the rows end with the last segment; in rank order what lies between may have to
  // be zeroed.
  __device__ std::int64_t items() const {
    return combines ? std::int64_t{to[segments - 1]} + count[segments - 1] : rows;
  }
  __device__ MoveItem item(std::int64_t row) const {
    std::int32_t low = 0, high = segments;  // the last segment that begins at or before `row`
    while (high - low > 1) {
      const std::int32_t middle = (low + high) / 2;
      (to[middle] <= row ? low : high) = middle;
    }
    const std::int64_t i = row - to[low];
    if (i < count[low] && from[low] >= 0) return {from[low] + i, row};
    return {zero_fill ? -2 : -1, row};
  }
};

// ---- few pairs ---------------------------------------------------------------------------------

// A block has `across` vectors of rows side by side, and `each` times as many rows as fit; all
// loads of a thread are in flight before its first store.
template <int bytes, int each>
__global__ void __launch_bounds__(256, 8)
    move_few_pairs(const __grid_constant__ FewPairs call, const RowsView from, const RowsView to,
                   const int across, const int down, const int vectors) {
  __shared__ PairTables tables;
  wait_for_predecessor();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = down * each;
  const std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * rows;
  if (thread < 32) find_rows(call, tables, first, rows, thread);
  __syncthreads();
  const int of_block = thread / across;
  const int column = static_cast<int>(blockIdx.y) * across + thread - of_block * across;
  if (column < vectors && of_block < down) {
    const std::int64_t at = std::int64_t{column} * bytes;
    Raw<bytes> raw[each] = {};
    std::int32_t row[each];
#pragma unroll
    for (int i = 0; i < each; ++i) row[i] = tables.from[of_block + i * down];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (row[i] >= 0) raw[i] = load_raw<bytes>(from.data + row[i] * from.row_bytes + at);
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const std::int64_t written = first + of_block + i * down;
      if (row[i] != -1) store_raw(to.data + written * to.row_bytes + at, raw[i]);
    }
  }
  if (call.counts != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && thread < 32) {
    store_counts(call, tables, thread);
  }
}

template <int bytes>
void launch_few_pairs(const char* what, const Gpu& gpu, const FewPairs& call, const RowsView& from,
                      const RowsView& to, std::int64_t row_bytes) {
  const std::int64_t vectors = row_bytes / bytes, spans = (vectors + 255) / 256;
  const std::int64_t across = (vectors + spans - 1) / spans;
  const auto go = [&]<int each>() {
    const std::int64_t down = std::min<std::int64_t>(256 / across, most_found_rows / each);
    const std::int64_t groups = (call.rows + down * each - 1) / (down * each);
    launch(what, gpu,
           {.grid = {static_cast<unsigned>(groups), static_cast<unsigned>(spans)},
            .block = {static_cast<unsigned>(std::max<std::int64_t>(across * down, 32))}},
           move_few_pairs<bytes, each>, call, from, to, static_cast<int>(across),
           static_cast<int>(down), static_cast<int>(vectors));
  };
  // Two rows a thread where blocks come and go.
  const std::int64_t down = std::min<std::int64_t>(256 / across, most_found_rows);
  const bool at_once =
      (call.rows + down - 1) / down * spans <= 8 * std::int64_t{gpu.multiprocessors};
  at_once ? go.template operator()<1>() : go.template operator()<2>();
}

// ---- few segments ------------------------------------------------------------------------------

constexpr int most_few = 1024;  // (rank, expert) pairs
constexpr int few_threads = 256;

struct FewCall {
  const std::int32_t* token_counts;
  std::int32_t* counts;  // null: not asked for
  int ranks, experts, first, end;
  std::int32_t rows;
  int vectors;  // of a row
  bool combines, zero_fill;
};

struct FewSegments {
  std::int32_t to[most_few], count[most_few], from[most_few];
  std::int32_t row[most_few];  // of pair r E + e, in the order of ranks
  std::int32_t legal[most_few];
  std::uint32_t sums[2][few_threads / 32];
};

__device__ __forceinline__ std::uint32_t sum_to(std::uint32_t a, std::uint32_t b,
                                                std::uint32_t most) {
  return min(a + b, most);  // both are below 2^31
}

// The sum of all threads before this one, none above `most`. By the whole block.
__device__ __forceinline__ std::uint32_t sum_before(std::uint32_t mine, std::uint32_t most,
                                                    std::uint32_t* sums, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  std::uint32_t sum = mine;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const std::uint32_t other = __shfl_up_sync(0xffffffffu, sum, apart);
    if (lane >= apart) sum = sum_to(sum, other, most);
  }
  if (lane == 31) sums[warp] = sum;
  const std::uint32_t within = __shfl_up_sync(0xffffffffu, sum, 1);
  __syncthreads();
  std::uint32_t before = lane == 0 ? 0 : within;
#pragma unroll
  for (int w = 0; w < few_threads / 32; ++w) {
    if (w < warp) before = sum_to(before, sums[w], most);
  }
  return before;
}

// By the whole block; ends with a barrier. A thread has a run of pairs, by rank and then by expert,
// and then one of those that are moved, by expert and then by rank.
__device__ __forceinline__ void find_segments(const FewCall& call, FewSegments& s, int thread) {
  const int pairs = call.ranks * call.experts;
  const int locals = call.end - call.first, moved = locals * call.ranks;
  const auto rows = static_cast<std::uint32_t>(call.rows);
  const int each = (pairs + few_threads - 1) / few_threads;
  const int first_pair = thread * each, end_pair = min(first_pair + each, pairs);
  const auto given = [&](int pair) {
    return static_cast<std::uint32_t>(min(max(__ldg(call.token_counts + pair), 0), call.rows));
  };
  std::uint32_t mine = 0;
  for (int i = first_pair; i < end_pair; ++i) mine = sum_to(mine, given(i), rows);
  std::uint32_t at = sum_before(mine, rows, s.sums[0], thread);
  for (int i = first_pair; i < end_pair; ++i) {
    const std::uint32_t n = min(given(i), rows - at);
    s.row[i] = static_cast<std::int32_t>(at);
    s.legal[i] = static_cast<std::int32_t>(n);
    if (!call.combines) {
      s.to[i] = static_cast<std::int32_t>(at);
      s.count[i] = static_cast<std::int32_t>(n);
      s.from[i] = -1;
    }
    at += n;
  }
  __syncthreads();
  const auto pair_of = [&](int j) {
    const int e = j / call.ranks;
    return (j - e * call.ranks) * call.experts + call.first + e;
  };
  const int of_thread = (moved + few_threads - 1) / few_threads;
  const int begin = thread * of_thread, end = min(begin + of_thread, moved);
  mine = 0;
  for (int j = begin; j < end; ++j) mine += static_cast<std::uint32_t>(s.legal[pair_of(j)]);
  auto row = static_cast<std::int32_t>(sum_before(mine, rows, s.sums[1], thread));
  for (int j = begin; j < end; ++j) {
    const int pair = pair_of(j);
    const std::int32_t n = s.legal[pair];
    if (call.combines) {
      s.to[j] = row;
      s.count[j] = n;
      s.from[j] = s.row[pair];
    } else {
      s.from[pair] = row;
    }
    row += n;
  }
  __syncthreads();
}

// By one warp.
__device__ __forceinline__ void store_counts(const FewCall& call, const FewSegments& s, int lane) {
  const int locals = call.end - call.first;
  std::int32_t all = 0;
  for (int e = lane; e < locals; e += 32) {
    std::int32_t sum = 0;
    for (int r = 0; r < call.ranks; ++r) sum += s.legal[r * call.experts + call.first + e];
    call.counts[e] = sum;
    all += sum;
  }
  all += __shfl_xor_sync(0xffffffffu, all, 16);
  all += __shfl_xor_sync(0xffffffffu, all, 8);
  all += __shfl_xor_sync(0xffffffffu, all, 4);
  all += __shfl_xor_sync(0xffffffffu, all, 2);
  all += __shfl_xor_sync(0xffffffffu, all, 1);
  if (lane == 0) call.counts[locals] = all;
}

// A thread moves one vector of a row at a time: of more at once, copies are slower
// (docs/notes/cuda-move.md). `down` rows of a block side by side.
template <int bytes>
__global__ void __launch_bounds__(few_threads, 8)
    few_segments(const __grid_constant__ FewCall call, const RowsView from, const RowsView to,
                 const int across) {
  __shared__ FewSegments s;
  wait_for_predecessor();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x);
  find_segments(call, s, thread);
  const int down = few_threads / across;
  const int of_block = thread / across,
            column = static_cast<int>(blockIdx.x) * across + thread % across;
  const ShuffleMap map{
      .to = s.to,
      .count = s.count,
      .from = s.from,
      .segments = (call.combines ? call.end - call.first : call.experts) * call.ranks,
      .rows = call.rows,
      .combines = call.combines,
      .zero_fill = call.zero_fill};
  const auto items = static_cast<std::int32_t>(map.items());
  if (column < call.vectors && of_block < down) {
    const std::int64_t step = std::int64_t{gridDim.y} * down;
    std::int64_t row = std::int64_t{blockIdx.y} * down + of_block;
    MoveItem next = row < items ? map.item(row) : MoveItem{};
    for (; row < items; row += step) {
      const MoveItem mine = next;
      Raw<bytes> raw{};
      if (mine.from >= 0) {
        raw =
            load_raw<bytes>(from.data + mine.from * from.row_bytes + std::int64_t{column} * bytes);
      }
      next = row + step < items ? map.item(row + step) : MoveItem{};
      if (mine.from != -1) {
        store_raw(to.data + row * to.row_bytes + std::int64_t{column} * bytes, raw);
      }
    }
  }
  if (call.counts != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && thread < 32) {
    store_counts(call, s, thread);
  }
}

template <int bytes>
void launch_few(const char* what, const Gpu& gpu, FewCall call, const RowsView& from,
                const RowsView& to, std::int64_t row_bytes) {
  const std::int64_t vectors = row_bytes / bytes;
  call.vectors = static_cast<int>(vectors);
  // Spans of one width; narrow rows share a block.
  const std::int64_t spans = (vectors + few_threads - 1) / few_threads;
  const std::int64_t across = (vectors + spans - 1) / spans, down = few_threads / across;
  const std::int64_t blocks = std::max<std::int64_t>(1, 8 * gpu.multiprocessors / spans);
  launch(what, gpu,
         {.grid = {static_cast<unsigned>(spans),
                   static_cast<unsigned>(std::min((call.rows + down - 1) / down, blocks))},
          .block = {few_threads}},
         few_segments<bytes>, call, from, to, static_cast<int>(across));
}

}  // namespace

void shuffle_cuda(const Context& context, const ShuffleCall& call) {
  const Gpu& on = gpu(context);
  const ShuffleSpec& spec = call.spec;
  const char* const what = call.combines ? "combine_shuffling" : "split_shuffling";
  const std::int64_t rows = call.from.shape[0];
  const RowsView from(call.from), to(call.to);
  const std::int64_t row_bytes = bytes(call.to.dtype, call.to.shape[1]);
  constexpr std::int64_t most_few_bytes = 1 << 24;  // spans of 256 vectors, in a grid's y
  if (!spec.padded && rows > 0 && rows <= most_few_rows && row_bytes > 0 &&
      row_bytes < most_few_bytes - 256 && spec.ranks * spec.experts <= most_few_pairs) {
    with_widest_copy(row_bytes, from, to, [&]<int n>() {
      launch_few_pairs<n>(what, on,
                          FewPairs{.token_counts = call.token_counts,
                                   .counts = call.counts,
                                   .ranks = spec.ranks,
                                   .experts = spec.experts,
                                   .first = spec.first_expert,
                                   .end = spec.end(),
                                   .rows = static_cast<std::int32_t>(rows),
                                   .by_rank = pair_reciprocal(spec.ranks),
                                   .by_expert = pair_reciprocal(spec.experts),
                                   .combines = call.combines,
                                   .zero_fill = spec.zero_fill && !call.combines},
                          from, to, row_bytes);
    });
    return;
  }
  if (!spec.padded && rows > 0 && row_bytes > 0 && spec.ranks * spec.experts <= most_few) {
    with_widest_copy(row_bytes, from, to, [&]<int n>() {
      launch_few<n>(what, on,
                    FewCall{.token_counts = call.token_counts,
                            .counts = call.counts,
                            .ranks = spec.ranks,
                            .experts = spec.experts,
                            .first = spec.first_expert,
                            .end = spec.end(),
                            .rows = static_cast<std::int32_t>(rows),
                            .combines = call.combines,
                            .zero_fill = spec.zero_fill && !call.combines},
                    from, to, row_bytes);
    });
    return;
  }
  launch(what, on, {.block = {segment_threads}}, segments_kernel,
         SegmentsCall{.out = call.segments,
                      .token_counts = call.token_counts,
                      .counts = call.counts,
                      .ranks = spec.ranks,
                      .experts = spec.experts,
                      .first = spec.first_expert,
                      .end = spec.end(),
                      .rows = rows,
                      .room = spec.padded ? rows / spec.ranks : rows,
                      .padded = spec.padded,
                      .combines = call.combines});
  const ShuffleMap map{.to = call.segments.to,
                       .count = call.segments.count,
                       .from = call.segments.from,
                       .segments = static_cast<std::int32_t>(call.segments.size),
                       .rows = rows,
                       .combines = call.combines,
                       .zero_fill = spec.zero_fill && !call.combines};
  with_widest_copy(row_bytes, from, to, [&]<int n>() {
    launch_rows(what, on, move_rows_kernel<CopyVector<n>, ShuffleMap>,
                move_shape(on, row_bytes / n, n, rows, 0), rows, map, from, to);
  });
}

}  // namespace shunt
