// Router for many tokens on a B200: hidden states [T, H] times router weights [C, H], then the
// whole of routing, one launch. x and W of one 16-bit type, rows at multiples of 16 bytes; any H,
// up to 512 columns. Compiled, not run: no such GPU was at hand.
//
// A block computes 128 tokens x all columns over all of H, in steps of 64; its sums lie in tensor
// memory, 64, 128, 256 or 512 columns of it: token i is lane i, column c is column c. 8 warps:
//   warp 0     one thread of it orders bulk tensor copies of x and W into a ring of stages, rows of
//              128 bytes swizzled; what lies beyond T, C and H comes as zeros
//   warp 1     allocates and frees tensor memory; one thread of it begins the products, of up to
//              256 columns each, 16 elements along H
//   full[s]    the bytes of stage s are there: 1 arrival, that of the copying thread
//   empty[s]   the products that read stage s are done: 1 arrival, by tcgen05.commit
//   done       so are all: 1 arrival
// Then no copy and no product is under way, and rows of sums take the place of the stages: all of
// them, or 64 at a time of 512 columns. Warp i reads lanes 32 (i % 4) to 32 (i % 4) + 31, one half
// of the columns each of i < 4 and i >= 4; a lane of the warp has one token's, so that a place is a
// row and a column, and nothing depends on how sums are dealt out to threads. All warps route, a
// row each. A tile past the valid count is only cleared.
//
// Bytes: x once, W once a tile of tokens, mostly from L2. Time predicted on a B200 (148
// multiprocessors, 1.9 GHz): a product of 256 columns takes 64 cycles, its operands at 64 bytes a
// cycle into a multiprocessor three times that: 2 H (128 + tile) bytes / 122 GB/s a wave of 148
// tiles, 2 us until the first product and 5 for routing 128 rows: 4096 x 256 x 7168 52 us (32
// blocks only), 8192 x 512 x 2048 28. First to try where there is a GPU to measure on: H cut over a
// cluster, W sent to all of its blocks at once.
#include "cuda/blackwell.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "route/cuda.hpp"
#include "route/fast_shared_rows.cuh"
#include "route/plain_shared_rows.cuh"

#ifndef SHUNT_BUILT_FOR_SM_100A
#define SHUNT_BUILT_FOR_SM_100A 0
#endif

namespace shunt::routing {

namespace {

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int tokens_of_block = 128;
constexpr int step = 64;  // elements along H

struct Layout {
  int hidden = 0;
  bool bf16 = false;  // or f16
};

template <int tile_>
struct Shape {
  static constexpr int tile = tile_;
  static constexpr int columns = tile < 256 ? tile : 256;  // of a product and of a copy
  static constexpr int x_bytes = tokens_of_block * step * 2, w_bytes = tile * step * 2;
  static constexpr int stage_bytes = x_bytes + w_bytes;
  static constexpr int fit = 200 * 1024 / stage_bytes;
  static constexpr int stages = fit < 8 ? fit : 8;
  // Floats of a row of sums; 4 more: 8 lanes that store 16 bytes each to rows of their own hit no
  // bank twice.
  static constexpr int stride = tile + 4;
  static constexpr int batch = tile == 512 ? 64 : tokens_of_block;  // rows at a time
  static constexpr int row_bytes = 4 * batch * stride;
  static constexpr int bytes =
      1024 + (stages * stage_bytes > row_bytes ? stages * stage_bytes : row_bytes);
};

#if defined(SHUNT_SM_100A)

// By one thread: fills stages as they become empty.
template <class S>
__device__ __forceinline__ void copy(const CUtensorMap& x, const CUtensorMap& w,
                                     unsigned char* stages, std::uint64_t* full,
                                     std::uint64_t* empty, int steps, int first_token) {
  int s = 0;
  unsigned round = 0;
  for (int i = 0; i < steps; ++i) {
    if (round > 0) cuda_engine::mbarrier_wait(&empty[s], (round - 1) & 1);
    unsigned char* const stage = stages + s * S::stage_bytes;
    cuda_engine::mbarrier_arrive_expect(&full[s], S::stage_bytes);
    cuda_engine::copy_box(stage, &x, &full[s], i * step, first_token);
#pragma unroll
    for (int c = 0; c < S::tile; c += S::columns) {
      cuda_engine::copy_box(stage + S::x_bytes + c * step * 2, &w, &full[s], i * step, c);
    }
    if (++s == S::stages) s = 0, ++round;
  }
}

// By one thread: begins all products, into tensor memory from `sums` on.
template <class S>
__device__ __forceinline__ void multiply(const unsigned char* stages, std::uint64_t* full,
                                         std::uint64_t* empty, std::uint64_t* done, int steps,
                                         std::uint32_t sums, bool bf16) {
  const std::uint32_t base = cuda_engine::shared_address(stages);
  const std::uint32_t instruction = cuda_engine::tcgen05_instruction(bf16, S::columns);
  int s = 0;
  unsigned parity = 0;
  for (int i = 0; i < steps; ++i) {
    cuda_engine::mbarrier_wait(&full[s], parity);
    cuda_engine::tcgen05_fence_after();
    const std::uint32_t stage = base + static_cast<std::uint32_t>(s * S::stage_bytes);
    const std::uint64_t a = cuda_engine::tcgen05_descriptor(stage);
#pragma unroll
    for (int c = 0; c < S::tile; c += S::columns) {
      const std::uint64_t b = cuda_engine::tcgen05_descriptor(stage + S::x_bytes + c * step * 2);
#pragma unroll
      for (unsigned k = 0; k < step / 16; ++k) {
        cuda_engine::tcgen05_mma(sums + c, a + 2 * k, b + 2 * k, instruction, i > 0 || k > 0);
      }
    }
    // Only where someone waits for it: no arrival may come after the block has ended.
    if (i + S::stages < steps) cuda_engine::tcgen05_commit(&empty[s]);
    if (++s == S::stages) s = 0, parity ^= 1;
  }
  cuda_engine::tcgen05_commit(done);
}

// A warp's half of the columns of its 32 lanes, to rows of floats; `row`: the lane's own.
template <class S>
__device__ __forceinline__ void load_sums(std::uint32_t sums, float* row, int warp) {
  const int first = warp / 4 * (S::tile / 2);
  const std::uint32_t from = sums + (static_cast<std::uint32_t>(warp % 4 * 32) << 16);
#pragma unroll 1
  for (int c = first; c < first + S::tile / 2; c += 32) {
    std::uint32_t r[32];
    cuda_engine::tcgen05_ld_32(r, from + static_cast<std::uint32_t>(c));
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      *reinterpret_cast<uint4*>(row + c + j) = make_uint4(r[j], r[j + 1], r[j + 2], r[j + 3]);
    }
  }
}

#endif

template <class S>
__global__ void __launch_bounds__(threads, 1)
    blackwell(const __grid_constant__ DeviceRoute r, const __grid_constant__ CUtensorMap x,
              const __grid_constant__ CUtensorMap w, const __grid_constant__ Layout o) {
#if defined(SHUNT_SM_100A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::stages], empty[S::stages], done;
  __shared__ std::uint32_t sums_address;
  __shared__ FastSharedScratch scratch[warps];
  __shared__ PlainScratch plain[warps];
  __shared__ SharedRoute route;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  route.fill(r, thread, threads);
  unsigned char* const stages = shared + (1024 - cuda_engine::shared_address(shared) % 1024) % 1024;
  if (thread == 0) {
    cuda_engine::prefetch_tensor_map(&x);
    cuda_engine::prefetch_tensor_map(&w);
    for (int s = 0; s < S::stages; ++s) {
      cuda_engine::mbarrier_init(&full[s], 1);
      cuda_engine::mbarrier_init(&empty[s], 1);
    }
    cuda_engine::mbarrier_init(&done, 1);
    cuda_engine::mbarrier_init_fence();
  }
  if (warp == 1) {
    cuda_engine::tcgen05_alloc(&sums_address, S::tile);
    cuda_engine::tcgen05_relinquish_alloc_permit();
  }
  cuda_engine::tcgen05_fence_before();
  __syncthreads();
  cuda_engine::tcgen05_fence_after();
  const std::uint32_t sums = sums_address;
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();

  const std::int64_t first = std::int64_t{blockIdx.x} * tokens_of_block;
  if (valid_tokens(r) <= first) {
    if (warp == 1) cuda_engine::tcgen05_dealloc(sums, S::tile);
    clear_rows(r, first, tokens_of_block, warp, warps, lane);
    return;
  }
  const int steps = (o.hidden + step - 1) / step;
  if (warp == 0) {
    if (lane == 0) copy<S>(x, w, stages, full, empty, steps, static_cast<int>(first));
    __syncwarp();
  } else if (warp == 1) {
    if (cuda_engine::elect_one()) {
      multiply<S>(stages, full, empty, &done, steps, sums, o.bf16);
    }
    __syncwarp();
  }
  cuda_engine::mbarrier_wait(&done, 0);
  __syncwarp();
  cuda_engine::tcgen05_fence_after();

  auto* const rows = reinterpret_cast<float*>(stages);
  const int own = warp % 4 * 32 + lane;  // the token whose sums this lane reads
  for (int begin = 0; begin < tokens_of_block; begin += S::batch) {
    if (begin > 0) __syncthreads();            // the rows before have been routed
    if (own / S::batch * S::batch == begin) {  // the same for the whole warp
      load_sums<S>(sums, rows + (own - begin) * S::stride, warp);
    }
    cuda_engine::tcgen05_fence_before();
    __syncthreads();
    if (begin + S::batch == tokens_of_block && warp == 1) {
      cuda_engine::tcgen05_fence_after();
      cuda_engine::tcgen05_dealloc(sums, S::tile);
    }
    const auto plain_rows = [&]<int best>() {
      using F = FastShape<8, best, S::tile / 32, Ranked::logit>;
      const auto load = [rows](int row, int q, float(&v)[F::held]) {
#pragma unroll
        for (int n = 0; n < F::held; ++n) v[n] = rows[row * S::stride + F::expert(n, q)];
      };
      route_shared_rows_plain<F>(r, load, rows, S::stride, first + begin, S::batch, warp, warps,
                                 plain[warp], lane);
    };
    if (r.plain_best != 0) {
      r.plain_best == 4 ? plain_rows.template operator()<4>() : plain_rows.template operator()<8>();
    } else if (!route_shared_rows_fast<S::tile, false>(route.get(), rows, S::stride, first + begin,
                                                       S::batch, warp, warps, scratch, lane)) {
      route_shared_rows<S::tile>(route.get(), rows, S::stride, first + begin, S::batch, warp, warps,
                                 lane);
    }
  }
#endif
}

template <int tile>
bool launch_tile(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands) {
  using S = Shape<tile>;
  static_assert(S::stages >= 2 && S::stage_bytes % 1024 == 0 && S::tile % 64 == 0);
  CUtensorMap x, w;
  const bool mapped = cuda_engine::map_rows(x, operands.x, operands.bf16, r.tokens, operands.hidden,
                                            operands.x_stride, tokens_of_block) &&
                      cuda_engine::map_rows(w, operands.w, operands.bf16, r.rule.columns,
                                            operands.hidden, operands.w_stride, S::columns);
  if (!mapped) return false;
  const Layout o{.hidden = operands.hidden, .bf16 = operands.bf16};
  const auto tiles = static_cast<unsigned>((r.tokens + tokens_of_block - 1) / tokens_of_block);
  const cuda_engine::Shape shape{
      .grid = {tiles, 1, 1}, .block = {threads, 1, 1}, .shared = std::size_t{S::bytes}};
  cuda_engine::launch("route: router", gpu, shape, blackwell<S>, r, x, w, o);
  return true;
}

}  // namespace

bool router_blackwell(const cuda_engine::Gpu& gpu, const DeviceRoute& r,
                      const WholeOperands& operands, const RouterPlan& plan) {
  if (!SHUNT_BUILT_FOR_SM_100A) return false;
  if (plan.columns == 64) return launch_tile<64>(gpu, r, operands);
  if (plan.columns == 128) return launch_tile<128>(gpu, r, operands);
  if (plan.columns == 256) return launch_tile<256>(gpu, r, operands);
  return launch_tile<512>(gpu, r, operands);
}

}  // namespace shunt::routing
