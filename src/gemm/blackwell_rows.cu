// Grouped GEMM for many rows a group on a B200: prepared weights of 16 bits, rows in groups one
// after the other, read where they lie. Compiled, not run: no such GPU was at hand.
//
// A block computes tiles of 128 rows of weights by up to 256 rows of a group, tile numbers
// blockIdx.x, blockIdx.x + gridDim.x, ..; tile_list.cuh says where a tile lies. Weights are the A
// operand: row i of the tile is lane i of tensor memory, row j of the group is column j, and k goes
// by in steps of 64 through a ring of four stages of 48 KB. Tensor memory holds two tiles of sums,
// so that one ends while the next is multiplied. 6 warps:
//   warp 0     one thread of it orders copies: a prepared tile of 16 KB as it lies, and boxes of 64
//              rows by a tensor map; what lies beyond the rows comes as zeros
//   warp 1     allocates and frees tensor memory; one thread of it begins the products
//   warps 2-5  add the bias, activate, round and store: warp w reads lanes 32 (w % 4) and up, a
//              lane has one row of weights. Where gate and up take turns, lane i + 8 has the up of
//              lane i's gate
//   full[s]    the bytes of stage s are there: 1 arrival, that of the copying thread
//   empty[s]   the products that read stage s are done: 1 arrival, by tcgen05.commit
//   sums[a]    all products of the tile in half a are done: 1 arrival, by tcgen05.commit
//   free[a]    half a has been read: an arrival a warp of 2-5
//
// Bytes: weights of a group once a 256 rows, rows once a 128 rows of weights, from L2 for the most
// part. Predicted on a B200 (148 multiprocessors, 1.9 GHz): a step takes 256 cycles of products,
// its 48 KB at 64 bytes a cycle 770: 16 groups x 1024 rows, N 2048, K 5120, 140 us. First to try
// where there is a GPU to measure on: pairs of blocks that share the rows (cta_group::2).
#include "activate/activation.cuh"
#include "cuda/blackwell.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/tile_list.cuh"

#ifndef SHUNT_BUILT_FOR_SM_100A
#define SHUNT_BUILT_FOR_SM_100A 0
#endif

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 192;
constexpr int step = 64;  // along k
constexpr int unit = 64;  // rows of a box
constexpr int most_units = 4;
constexpr int stages = 4;
constexpr unsigned weight_bytes = 128 * step * 2;
constexpr unsigned unit_bytes = unit * step * 2;
constexpr unsigned stage_bytes = weight_bytes + most_units * unit_bytes;
constexpr unsigned half = most_units * unit;  // columns of tensor memory of a tile

using Tiles = TileList<unit, most_units>;

std::size_t shared_bytes(int groups) {
  return 1024 + stages * stage_bytes + static_cast<std::size_t>(Tiles::bytes(groups));
}

#if defined(SHUNT_SM_100A)

using Ring = StageRing<stages>;

// Out of line: a copy for each of 32 columns would compile for a minute.
__device__ __noinline__ float finished(const Finish& f, float gate, float up, int group,
                                       std::int64_t column) {
  const auto biased = [&](float sum, std::int64_t at) {
    if (f.bias == nullptr) return sum;
    return __fadd_rn(
        sum, load_element(f.bias, f.bias_dtype, group * f.bias_group_stride + at * f.bias_stride));
  };
  if (f.paired) return activated(f.rule, biased(gate, column), biased(up, f.out_columns + column));
  const float sum = biased(gate, column);
  return f.activates ? activated(f.rule, 0.0f, sum) : sum;
}

// By one warp: a tile's sums, those of its 32 rows of weights, to memory.
__device__ __forceinline__ void write_rows(const Finish& f, const GroupTile& at, std::uint32_t sums,
                                           int quarter, int lane) {
  const std::int64_t row = std::int64_t{at.column} * 128 + quarter * 32 + lane;
  const std::int64_t column = f.paired ? row / 16 * 8 + row % 8 : row;
  const bool mine = column < f.out_columns && (!f.paired || lane % 16 < 8);
  const std::uint32_t from = sums + (static_cast<std::uint32_t>(quarter * 32) << 16);
#pragma unroll 1
  for (int first = 0; first < at.count; first += 32) {
    std::uint32_t r[32];
    tcgen05_ld_32(r, from + static_cast<std::uint32_t>(first));
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float gate = __uint_as_float(r[j]);
      const float up = f.paired ? __shfl_down_sync(0xffffffffu, gate, 8) : 0.0f;
      if (!mine || first + j >= at.count) continue;
      store_element(f.out, f.out_dtype, (std::int64_t{at.row} + first + j) * f.out_stride + column,
                    finished(f, gate, up, at.group, column));
    }
  }
}

#endif

__global__ void __launch_bounds__(threads, 1)
    multiply_on_blackwell(const __grid_constant__ HopperArgs args,
                          const __grid_constant__ CUtensorMap tokens, const bool bf16) {
#if defined(SHUNT_SM_100A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[stages], empty[stages], sums[2], free[2];
  __shared__ std::uint32_t sums_address;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  unsigned char* const ring_memory = shared + (1024 - shared_address(shared) % 1024) % 1024;
  if (thread == 0) {
    prefetch_tensor_map(&tokens);
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 1);
    }
    for (int a = 0; a < 2; ++a) {
      mbarrier_init(&sums[a], 1);
      mbarrier_init(&free[a], 4);
    }
    mbarrier_init_fence();
  }
  if (warp == 1) {
    tcgen05_alloc(&sums_address, 2 * half);
    tcgen05_relinquish_alloc_permit();
  }
  wait_for_predecessor();
  let_successor_start();
  Tiles list(ring_memory + stages * stage_bytes, args.walk, args.groups, args.columns);
  tcgen05_fence_before();
  list.build(args.walk, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
             0);  // ends with a barrier
  tcgen05_fence_after();
  const std::uint32_t memory = sums_address;
  const int tiles = list.tiles(), apart = static_cast<int>(gridDim.x);

  if (warp == 0) {
    Ring ring;
    bool again = false;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart) {
      const GroupTile at = list.find(tile);
      if (lane == 0) {
        const int units = (at.count + unit - 1) / unit;
        const char* const from = args.tiles + at.group * args.group_bytes +
                                 std::int64_t{at.column} * args.steps * weight_bytes;
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          unsigned char* const stage = ring_memory + ring.stage * stage_bytes;
          std::uint64_t* const barrier = &full[ring.stage];
          mbarrier_arrive_expect(barrier, weight_bytes + static_cast<unsigned>(units) * unit_bytes);
          copy_bytes(stage, from + std::int64_t{i} * weight_bytes, weight_bytes, barrier);
#pragma unroll 1
          for (int u = 0; u < units; ++u) {
            copy_box(stage + weight_bytes + u * unit_bytes, &tokens, barrier, step * i,
                     at.row + unit * u);
          }
          ring.next();
          again = again || ring.stage == 0;
        }
      }
      __syncwarp();
    }
  } else if (warp == 1) {
    Ring ring;
    int tile_of_block = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart, ++tile_of_block) {
      const GroupTile at = list.find(tile);
      const int a = tile_of_block % 2, turn = tile_of_block / 2;
      if (elect_one()) {
        // Read what was there, two tiles ago.
        if (turn > 0) mbarrier_wait(&free[a], static_cast<unsigned>(turn - 1) & 1);
        tcgen05_fence_after();
        const auto columns = static_cast<unsigned>((at.count + unit - 1) / unit * unit);
        const std::uint32_t instruction = tcgen05_instruction(bf16, columns);
        const std::uint32_t to = memory + static_cast<std::uint32_t>(a) * half;
        const std::uint32_t base = shared_address(ring_memory);
        Ring own = ring;
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          mbarrier_wait(&full[own.stage], own.parity);
          tcgen05_fence_after();
          const std::uint32_t stage = base + static_cast<std::uint32_t>(own.stage) * stage_bytes;
          const std::uint64_t weights = tcgen05_descriptor(stage);
          const std::uint64_t rows = tcgen05_descriptor(stage + weight_bytes);
#pragma unroll
          for (unsigned k = 0; k < step / 16; ++k) {
            tcgen05_mma(to, weights + 2 * k, rows + 2 * k, instruction, i > 0 || k > 0);
          }
          tcgen05_commit(&empty[own.stage]);
          own.next();
        }
        tcgen05_commit(&sums[a]);
      }
      __syncwarp();
      for (int i = 0; i < args.steps; ++i) ring.next();
    }
  } else {
    int tile_of_block = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart, ++tile_of_block) {
      const GroupTile at = list.find(tile);
      const int a = tile_of_block % 2, turn = tile_of_block / 2;
      mbarrier_wait(&sums[a], static_cast<unsigned>(turn) & 1);
      __syncwarp();
      tcgen05_fence_after();
      write_rows(args.finish, at, memory + static_cast<std::uint32_t>(a) * half, warp % 4, lane);
      tcgen05_fence_before();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&free[a]);
    }
  }
  // Every tile's sums have been waited for, and so every product and copy is done.
  __syncwarp();
  tcgen05_fence_before();
  __syncthreads();
  tcgen05_fence_after();
  // The last arrivals of tcgen05.commit at empty[] may still be on their way to this block.
  if (warp == 1) {
    const int own_tiles = tiles > static_cast<int>(blockIdx.x)
                              ? (tiles - 1 - static_cast<int>(blockIdx.x)) / apart + 1
                              : 0;
    const std::int64_t steps = std::int64_t{own_tiles} * args.steps;
    for (int s = 0; s < stages; ++s) {
      const std::int64_t uses = (steps - s + stages - 1) / stages;
      if (steps > s) mbarrier_wait(&empty[s], static_cast<unsigned>(uses - 1) & 1);
    }
    __syncwarp();
    tcgen05_dealloc(memory, 2 * half);
  }
#endif
}

}  // namespace

bool blackwell_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p,
                    HopperArgs args) {
  if (!SHUNT_BUILT_FOR_SM_100A || args.tiles == nullptr) return false;
  const bool bf16 = p.layout.dtype == DType::bf16;
  CUtensorMap tokens;
  if (!map_rows(tokens, p.rows.data, bf16, p.rows.shape[0], p.layout.k, p.rows.strides[0], unit)) {
    return false;
  }
  args.columns = args.row_tiles;
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(threads),
          .shared = shared_bytes(args.groups)},
         multiply_on_blackwell, args, tokens, bf16);
  return true;
}

}  // namespace shunt::cuda_engine
