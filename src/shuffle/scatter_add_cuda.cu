// scatter_add_padded on a GPU: one kernel for few positions, three for others, no atomics on
// floats.
//
// find_and_sum_kernel: below.
// clear_kernel: every token's count to 0; block 0 also adds up where each rank's positions end
//   (a warp a rank, then one thread; barrier: the totals are there).
// list_kernel: a thread a position; it takes a place in its token's list by an atomic on the count,
//   so that the lists' order is anybody's.
// sum_kernel: a block takes a token and a span of columns. The first threads sort the token's list,
//   by counting how many of it are smaller, into terms in shared memory (barriers before and
//   after), and each thread sums its own columns in that order. A token of more positions than a
//   list holds (`listed`) finds them in order itself: 256 positions at a time become 256 terms, of
//   which those of other tokens are null.
//
// Bytes: every row in use read once, every output read and written once, 4 bytes a position and
// list; with few positions, those of all for each block, which the L2 has. 64 tokens of 512 rows of
// 4 kB: 4.5 us, by three kernels 7.3. Predicted for those: 3.5 us, and from some MB on 85 % of a
// copy. A token with more than `listed` positions costs a pass over all of them, some ms for 65536.
#include "core/workspace.hpp"
#include "cuda/launch.hpp"
#include "shuffle/engine.hpp"
#include "shuffle/terms.cuh"

namespace shunt {

namespace {

using namespace cuda_engine;

constexpr int together = 8;
constexpr int window = 256;  // terms in shared memory

// What find_and_sum_kernel takes: 16 kB of positions, and no more comparisons than it gains by
// (with 8192 x 1024 it is level).
constexpr std::int64_t most_found = 8192, most_comparisons = 1 << 22;
constexpr int most_found_ranks = 32;

struct ScatterCall {
  const std::int32_t* token_counts;
  const std::int32_t* token_of;
  std::int64_t experts, ranks, positions, tokens, width;
  RowsView rows;  // of rank 0
  std::int64_t rank_bytes;
  RowsView out;
  bool accumulate;
  int listed;               // positions that a list holds, a multiple of 8
  std::int32_t* rank_ends;  // [EP]: the position where rank r's end
  std::int32_t* counts;     // [T]
  std::int32_t* lists;      // [T, listed]
};

// Positions that all lists hold: twice as many as there are, and never less for more tokens.
std::int64_t list_room(std::int64_t tokens, std::int64_t positions) {
  return std::min(std::max(16 * tokens, 2 * positions + 9 * tokens), window * tokens);
}

std::size_t carve(Workspace workspace, std::int64_t tokens, std::int64_t positions,
                  std::int64_t ranks, ScatterCall* call) {
  Carver carver(workspace);
  const auto rank_ends = carver.take<std::int32_t>(ranks);
  const auto counts = carver.take<std::int32_t>(tokens);
  const auto lists = carver.take<std::int32_t>(list_room(tokens, positions));
  if (call != nullptr) {
    call->listed = tokens > 0 ? static_cast<int>(list_room(tokens, positions) / tokens / 8 * 8) : 0;
    call->rank_ends = rank_ends;
    call->counts = counts;
    call->lists = lists;
  }
  return carver.used();
}

__global__ void __launch_bounds__(1024) clear_kernel(ScatterCall call) {
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < call.tokens;
       t += step) {
    call.counts[t] = 0;
  }
  if (blockIdx.x != 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t each = call.experts / call.ranks;
  for (std::int64_t r = threadIdx.x / 32; r < call.ranks; r += blockDim.x / 32) {
    std::int64_t total = 0;
    for (std::int64_t e = lane; e < each; e += 32) {
      total += max(call.token_counts[r * each + e], 0);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, apart);
    }
    if (lane == 0) call.rank_ends[r] = static_cast<std::int32_t>(min(total, call.positions));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int64_t end = 0;
    for (std::int64_t r = 0; r < call.ranks; ++r) {
      end = min(end + call.rank_ends[r], call.positions);
      call.rank_ends[r] = static_cast<std::int32_t>(end);
    }
  }
}

__global__ void __launch_bounds__(256) list_kernel(ScatterCall call) {
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int32_t used = call.rank_ends[call.ranks - 1];
  for (std::int64_t p = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; p < used; p += step) {
    const std::int32_t token = call.token_of[p];
    if (token < 0 || token >= call.tokens) continue;
    const int place = atomicAdd(call.counts + token, 1);
    if (place < call.listed) {
      call.lists[std::int64_t{token} * call.listed + place] = static_cast<std::int32_t>(p);
    }
  }
}

__device__ Term term_of(const ScatterCall& call, std::int64_t position) {
  std::int64_t low = 0, high = call.ranks - 1;  // the first rank that ends past it
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (position < call.rank_ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return {call.rows.data + low * call.rank_bytes + position * call.rows.row_bytes, 1,
          call.rows.form};
}

// n columns of a token from h on: the sum, and what was there where it is added to.
template <int n>
__device__ __forceinline__ void finish_line(const ScatterCall& call, char* line, std::int64_t h,
                                            float (&sum)[n]) {
  if (call.accumulate) {
    float x[n];
    widen<n>(load_raw<n>(line, call.out.form, h), call.out.form, x);
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = __fadd_rn(sum[i], x[i]);
  }
  store_row<n>(line, call.out.form, h, sum);
}

template <Form form, int n>
__global__ void __launch_bounds__(256) sum_kernel(ScatterCall call) {
  __shared__ Term terms[window];
  __shared__ std::int32_t list[window];
  wait_for_predecessor();
  let_successor_start();
  const int threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  const std::int32_t used = call.rank_ends[call.ranks - 1];
  const std::int64_t span = std::int64_t{gridDim.x} * threads * n;

  for (std::int64_t token = blockIdx.y; token < call.tokens; token += gridDim.y) {
    const std::int32_t count = call.counts[token];
    char* const line = call.out.data + token * call.out.row_bytes;
    // All threads of a block stay together: the barriers are inside.
    for (std::int64_t left = std::int64_t{blockIdx.x} * threads * n; left < call.width;
         left += span) {
      const std::int64_t h = left + std::int64_t{me} * n;
      const bool inside = h < call.width;
      float sum[n] = {};
      const auto add = [&](int filled) {
        for (int first = 0; first < filled && inside; first += together) {
          add_terms<form, n, together>(terms + first, h, sum);
        }
      };
      if (count <= call.listed) {
        const int filled = (count + together - 1) / together * together;
        for (int i = me; i < count; i += threads) {
          list[i] = call.lists[token * call.listed + i];
        }
        __syncthreads();
        for (int i = me; i < filled; i += threads) {
          if (i >= count) {
            terms[i] = {};
            continue;
          }
          int place = 0;
          for (int other = 0; other < count; ++other) place += list[other] < list[i] ? 1 : 0;
          terms[place] = term_of(call, list[i]);
        }
        __syncthreads();
        add(filled);
        __syncthreads();
      } else {
        for (std::int64_t first = 0; first < used; first += window) {
          for (int i = me; i < window; i += threads) {
            const std::int64_t p = first + i;
            terms[i] = p < used && call.token_of[p] == token ? term_of(call, p) : Term{};
          }
          __syncthreads();
          add(window);
          __syncthreads();
        }
      }
      if (inside) finish_line<n>(call, line, h, sum);
    }
  }
}

// Few positions: a block finds its token's by itself. Each warp looks through `run` of them, and
// what it finds goes to its part of `found` in order (barrier: all is there, and the rows of each
// rank are counted). Those of all warps, 256 at a time, become terms (barriers before and after
// they are read).
template <Form form, int n>
__global__ void __launch_bounds__(256) find_and_sum_kernel(ScatterCall call, int run) {
  extern __shared__ std::uint16_t found[];  // [warps, run]: places in the warp's run
  __shared__ Term terms[window];
  __shared__ std::int32_t totals[most_found_ranks];  // of each rank
  __shared__ int counts[8];                          // found by each warp
  wait_for_predecessor();
  let_successor_start();
  const int threads = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  const int lane = me % 32, warp = me / 32, warps = threads / 32;
  const auto token = static_cast<std::int32_t>(blockIdx.y);
  const auto positions = static_cast<std::int32_t>(call.positions);
  const int ranks = static_cast<int>(call.ranks);
  std::int32_t sums[2] = {};
  const int each = static_cast<int>(call.experts) / ranks;
  const auto count_rank = [&](int r) {
    std::int32_t total = 0;
    for (int e = lane; e < each; e += 32) {
      total += min(max(call.token_counts[r * each + e], 0), positions);
    }
    return total;
  };
  if (warp < ranks) sums[0] = count_rank(warp);
  if (warp + warps < ranks) sums[1] = count_rank(warp + warps);
  int have = 0;
  std::uint16_t* const mine = found + warp * run;
  constexpr int ahead = 8;
#pragma unroll 1
  for (int first = 0; first < run; first += 32 * ahead) {
    std::int32_t of[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      const int at = first + 32 * j + lane, p = warp * run + at;
      of[j] = at < run && p < positions ? call.token_of[p] : -1;
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      const std::uint32_t here = __ballot_sync(0xffffffffu, of[j] == token);
      if (here == 0) continue;
      if (of[j] == token) {
        mine[have + __popc(here & ((1u << lane) - 1))] =
            static_cast<std::uint16_t>(first + 32 * j + lane);
      }
      have += __popc(here);
    }
  }
  if (lane == 0) counts[warp] = have;
  for (int i = 0, r = warp; r < ranks; ++i, r += warps) {
    const std::int32_t total = __reduce_add_sync(0xffffffffu, i == 0   ? sums[0]
                                                              : i == 1 ? sums[1]
                                                                       : count_rank(r));
    if (lane == 0) totals[r] = total;
  }
  __syncthreads();
  int all = 0;
  for (int w = 0; w < warps; ++w) all += counts[w];
  const auto term_at = [&](int i) -> Term {
    int w = 0;
    for (; i >= counts[w]; ++w) i -= counts[w];
    const std::int32_t p = w * run + found[w * run + i];
    std::int32_t end = 0;
    for (int r = 0; r < ranks; ++r) {
      end = min(end + totals[r], positions);
      if (p < end) {
        return {call.rows.data + r * call.rank_bytes + p * call.rows.row_bytes, 1, call.rows.form};
      }
    }
    return {};
  };
  const std::int64_t h = (std::int64_t{blockIdx.x} * threads + me) * n;
  float sum[n] = {};
  for (int first = 0; first < all; first += window) {
    const int filled = min(window, (all - first + together - 1) / together * together);
    for (int i = me; i < filled; i += threads) {
      terms[i] = first + i < all ? term_at(first + i) : Term{};
    }
    __syncthreads();
    for (int i = 0; i < filled && h < call.width; i += together) {
      add_terms<form, n, together>(terms + i, h, sum);
    }
    __syncthreads();
  }
  if (h >= call.width) return;
  char* const line = call.out.data + token * call.out.row_bytes;
  finish_line<n>(call, line, h, sum);
}

// Clears counts, lists every token's positions.
void list_positions(const Gpu& gpu, const ScatterCall& call) {
  const auto blocks = [&](std::int64_t size, int threads) {
    return static_cast<unsigned>(
        std::clamp<std::int64_t>((size + threads - 1) / threads, 1, 4 * gpu.multiprocessors));
  };
  launch("scatter_add_padded", gpu, {.grid = {blocks(call.tokens, 1024)}, .block = {1024}},
         clear_kernel, call);
  launch("scatter_add_padded", gpu, {.grid = {blocks(call.positions, 256)}, .block = {256}},
         list_kernel, call);
}

template <Form form, int n>
bool sum(const Gpu& gpu, const ScatterCall& call) {
  const int row_bytes = n * form_bytes(call.rows.form);
  if (call.width % n != 0 || !call.rows.aligned(row_bytes) ||
      call.rank_bytes % std::min(row_bytes, 16) != 0 ||
      !call.out.aligned(n * form_bytes(call.out.form))) {
    return false;
  }
  const std::int64_t vectors = call.width / n;
  const std::int64_t most = call.tokens < gpu.multiprocessors ? 64 : 256;
  const std::int64_t spans = (vectors + most - 1) / most;
  const std::int64_t across = ((vectors + spans - 1) / spans + 31) / 32 * 32;
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(spans, 1 << 30)),
                  static_cast<unsigned>(std::min<std::int64_t>(call.tokens, 65535)));
  const dim3 block(static_cast<unsigned>(across));
  if (call.positions <= most_found && call.ranks <= most_found_ranks && call.experts <= 1 << 17 &&
      call.tokens <= 65535 && call.tokens * spans * call.positions <= most_comparisons) {
    const std::int64_t warps = across / 32, run = (call.positions + across - 1) / across * 32;
    launch("scatter_add_padded", gpu,
           {.grid = grid,
            .block = block,
            .shared = static_cast<std::size_t>(warps * run) * sizeof(std::uint16_t)},
           find_and_sum_kernel<form, n>, call, static_cast<int>(run));
    return true;
  }
  list_positions(gpu, call);
  launch("scatter_add_padded", gpu, {.grid = grid, .block = block}, sum_kernel<form, n>, call);
  return true;
}

}  // namespace

std::size_t scatter_add_cuda_workspace_bytes(std::int64_t tokens, std::int64_t positions) {
  return carve({}, tokens, positions, max_scatter_ranks, nullptr);
}

void scatter_add_cuda(const Context& context, const ScatterAddSpec& spec,
                      const ScatterAddInputs& in, const Tensor& out, Workspace workspace) {
  const Gpu& on = gpu(context);
  ScatterCall call{.token_counts = in.token_counts.as<std::int32_t>(),
                   .token_of = in.token_indices.as<std::int32_t>(),
                   .experts = in.token_counts.shape[0],
                   .ranks = in.rows.shape[0],
                   .positions = in.rows.shape[1],
                   .tokens = out.shape[0],
                   .width = out.shape[1],
                   .rows = RowsView(in.rows),
                   .rank_bytes = bytes(in.rows.dtype, in.rows.strides[0]),
                   .out = RowsView(out),
                   .accumulate = spec.accumulate};
  if (call.tokens == 0 || call.width == 0) return;
  call.rows.row_bytes = bytes(in.rows.dtype, in.rows.strides[1]);
  carve(workspace, call.tokens, call.positions, call.ranks, &call);
  switch (call.rows.form) {
    case Form::f32:
      if (sum<Form::f32, 4>(on, call)) return;
      break;
    case Form::f16:
      if (sum<Form::f16, 8>(on, call)) return;
      break;
    default:
      if (sum<Form::bf16, 8>(on, call)) return;
  }
  sum<Form::any, 4>(on, call) || sum<Form::any, 1>(on, call);
}

}  // namespace shunt
