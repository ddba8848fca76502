// The shuffles on a GPU: two kernels.
//
// segments_kernel, one block of 1024 threads: which rows each (rank, expert) pair has in either
//   order. First a warp a rank: the rank's counts, made legal (barrier: the totals are there; then
//   one thread adds them up: where each rank starts); again a warp a rank: running sums over its
//   experts, cut off where the rank has no room (barrier: all counts are legal); then a thread an
//   expert: its rows over all ranks, and a scan over the block, 1024 experts at a time (barriers
//   of the scan), gives where each expert starts. What one step writes the next reads, through
//   memory.
// move_rows: an item is a row to write; a binary search over the segments says which row to read.
//
// Bytes: 16 EP E for the segments; every row that is moved read once and written once. Predicted:
// 3 us for the segments, then 90 % of a copy.
#include "cuda/move_rows.cuh"
#include "shuffle/engine.hpp"

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

}  // namespace

void shuffle_cuda(const Context& context, const ShuffleCall& call) {
  const Gpu& on = gpu(context);
  const ShuffleSpec& spec = call.spec;
  const char* const what = call.combines ? "combine_shuffling" : "split_shuffling";
  const std::int64_t rows = call.from.shape[0];
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
  const RowsView from(call.from), to(call.to);
  const std::int64_t row_bytes = bytes(call.to.dtype, call.to.shape[1]);
  with_widest_copy(row_bytes, from, to, [&]<int n>() {
    launch_rows(what, on, move_rows_kernel<CopyVector<n>, ShuffleMap>,
                move_shape(on, row_bytes / n, n, rows, 0), rows, map, from, to);
  });
}

}  // namespace shunt
