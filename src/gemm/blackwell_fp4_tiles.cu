// Grouped GEMM in NVFP4 for many rows a group on a B200: compiled, not run, as no such GPU was at
// hand. How everything lies: blackwell_fp4_tiles.hpp.
//
// A block computes tiles of 128 rows of weights by up to 192 rows of a group, tile numbers
// blockIdx.x, blockIdx.x + gridDim.x, ..; tile_list.cuh says where a tile lies. Weights are the A
// operand: row i of the tile is lane i of tensor memory, row j of the group is column j, and k goes
// by in steps of 256 through a ring of four stages of 46 KB:
//   18 KB  a prepared tile, codes and scales, by one bulk copy
//   24 KB  codes of rows, boxes of 64 rows by a tensor map
//   4 KB   scales of rows, two blocks of 128 for each 64 of k. Rows of a group begin anywhere, so
//          that no copy engine can bring them in that order: two warps do
// Tensor memory holds two tiles of sums, so that one ends while the next is multiplied, and the
// scales of one stage: 16 columns of weights', 32 of rows'. They are copied there by the thread
// that begins the products, in order with these, so that the products of the stage before have read
// theirs. 8 warps:
//   warp 0     one thread of it orders copies
//   warp 1     allocates and frees tensor memory; a thread of it copies scales, begins products
//   warps 2-5  multiply by the matrix's and the row's scale, add the bias, activate and store: warp
//              w reads lanes 32 (w % 4) and up, a lane has one row of weights. Where gate and up
//              take turns, lane i + 8 has the up of lane i's gate
//   warps 6-7  bring the rows' scales
//   full[s]    stage s is there: 3 arrivals, the copying thread with bytes, warps 6 and 7
//   empty[s]   the products that read stage s are done: 1 arrival, by tcgen05.commit
//   sums[a]    all products of the tile in half a are done: 1 arrival, by tcgen05.commit
//   free[a]    half a has been read: an arrival a warp of 2-5
//
// Sparse weights: five stages of 37 KB, of which a prepared tile has 11; two products a stage, of
// 128 along k. Positions have four columns more of tensor memory, copied there like scales.
//
// Bytes: weights of a group once a 192 rows, 0.5625 each, rows once a 128 rows of weights, from L2
// for the most part. Predicted on a B200 (148 multiprocessors, 1.9 GHz): a step takes 192 cycles of
// products and its 46 KB at 64 bytes a cycle 740.
#include "activate/activation.cuh"
#include "cuda/blackwell.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/blackwell_fp4_tiles.hpp"
#include "gemm/tile_list.cuh"

#ifndef SHUNT_BUILT_FOR_SM_100A
#define SHUNT_BUILT_FOR_SM_100A 0
#endif

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256;
constexpr int unit = Fp4Stage<false>::unit, most_units = Fp4Stage<false>::most_units;
template <bool sparse>
constexpr int stages_of = sparse ? 5 : 4;

using Tiles = TileList<unit, most_units>;

template <bool sparse>
std::size_t shared_bytes(int groups) {
  return 1024 + stages_of<sparse> * Fp4Stage<sparse>::bytes +
         static_cast<std::size_t>(Tiles::bytes(groups));
}

#if defined(SHUNT_SM_100A)

// Out of line: a copy for each of 32 columns would compile for a minute. `gate` and `up` times what
// their matrix and the row are scaled by.
__device__ __noinline__ float finished(const Fp4TileProduct& p, float gate, float up, int group,
                                       std::int64_t column) {
  if (p.bias != nullptr) {
    const auto bias = [&](std::int64_t of) {
      return load_element(p.bias, p.bias_dtype, group * p.bias_group_stride + of * p.bias_stride);
    };
    gate = __fadd_rn(gate, bias(column));
    if (p.layout.paired) up = __fadd_rn(up, bias(p.layout.out_columns() + column));
  }
  return activated(p.activation, p.layout.paired ? gate : 0.0f, p.layout.paired ? up : gate);
}

// By one warp: a tile's sums, those of its 32 rows of weights, to memory.
__device__ __forceinline__ void write_rows(const Fp4TileProduct& p, const GroupTile& at,
                                           std::uint32_t sums, int quarter, int lane) {
  const bool paired = p.layout.paired;
  const std::int64_t row = std::int64_t{at.column} * 128 + quarter * 32 + lane;
  const std::int64_t column = paired ? row / 16 * 8 + row % 8 : row;
  const bool mine = column < p.layout.out_columns() && (!paired || lane % 16 < 8);
  const auto* const globals = reinterpret_cast<const float*>(
      p.prepared + at.group * p.layout.group_bytes() + p.layout.globals_at());
  const float gate_scale = globals[0], up_scale = globals[1];
  const std::uint32_t from = sums + (static_cast<std::uint32_t>(quarter * 32) << 16);
#pragma unroll 1
  for (int first = 0; first < at.count; first += 32) {
    std::uint32_t r[32];
    tcgen05_ld_32(r, from + static_cast<std::uint32_t>(first));
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float sum = __uint_as_float(r[j]);
      const float second = paired ? __shfl_down_sync(0xffffffffu, sum, 8) : 0.0f;
      if (!mine || first + j >= at.count) continue;
      const std::int64_t to = std::int64_t{at.row} + first + j;
      const float scale = p.row_scales[to];
      const float gate = __fmul_rn(__fmul_rn(sum, gate_scale), scale);
      const float up = __fmul_rn(__fmul_rn(second, up_scale), scale);
      store_element(p.out, p.out_dtype, to * p.out_stride + column,
                    finished(p, gate, up, at.group, column));
    }
  }
}

// The four scales of a row of the group that a product takes, number `block` of these along k;
// zeros behind the ends.
__device__ __forceinline__ std::uint32_t row_scales_of(const Fp4TileProduct& p, const GroupTile& at,
                                                       int row, std::int64_t block) {
  const int scaled = p.layout.scaled_k();
  const std::int64_t left = (p.layout.k + scaled - 1) / scaled - block * 4;
  if (row >= at.count || left <= 0) return 0;
  const std::uint32_t four = *reinterpret_cast<const std::uint32_t*>(
      p.scales + (std::int64_t{at.row} + row) * p.scale_stride + block * 4);
  return left >= 4 ? four : four & (1u << 8 * static_cast<int>(left)) - 1;
}

#endif

template <bool sparse>
__global__ void __launch_bounds__(threads, 1)
    multiply_fp4_on_blackwell(const __grid_constant__ Fp4TileProduct p,
                              const __grid_constant__ CUtensorMap codes) {
#if defined(SHUNT_SM_100A)
  using Stage = Fp4Stage<sparse>;
  constexpr int stages = stages_of<sparse>, products = Stage::products;
  constexpr unsigned stage_bytes = Stage::bytes;
  using Ring = StageRing<stages>;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[stages], empty[stages], sums[2], free[2];
  __shared__ std::uint32_t sums_address;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  unsigned char* const ring_memory = shared + (1024 - shared_address(shared) % 1024) % 1024;
  if (thread == 0) {
    prefetch_tensor_map(&codes);
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(&full[s], 3);
      mbarrier_init(&empty[s], 1);
    }
    for (int a = 0; a < 2; ++a) {
      mbarrier_init(&sums[a], 1);
      mbarrier_init(&free[a], 4);
    }
    mbarrier_init_fence();
  }
  if (warp == 1) {
    tcgen05_alloc(&sums_address, 512);
    tcgen05_relinquish_alloc_permit();
  }
  wait_for_predecessor();
  let_successor_start();
  const GroupWalk walk = GroupWalk::of_rows(p.offsets, p.counts, p.groups, p.rows);
  Tiles list(ring_memory + stages * stage_bytes, walk, p.groups,
             static_cast<int>(p.layout.columns()));
  tcgen05_fence_before();
  list.build(walk);  // ends with a barrier
  tcgen05_fence_after();
  const std::uint32_t memory = sums_address;
  const int tiles = list.tiles(), apart = static_cast<int>(gridDim.x);
  const int steps = static_cast<int>(p.layout.steps());

  if (warp == 0) {
    Ring ring;
    bool again = false;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart) {
      const GroupTile at = list.find(tile);
      if (lane == 0) {
        const int units = (at.count + unit - 1) / unit;
        const char* const from = p.prepared + at.group * p.layout.group_bytes() +
                                 std::int64_t{at.column} * steps * Stage::weight_bytes;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
          if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
          unsigned char* const stage = ring_memory + ring.stage * stage_bytes;
          std::uint64_t* const barrier = &full[ring.stage];
          mbarrier_arrive_expect(
              barrier, Stage::weight_bytes + static_cast<unsigned>(units) * Stage::unit_bytes);
          copy_bytes(stage, from + std::int64_t{i} * Stage::weight_bytes, Stage::weight_bytes,
                     barrier);
#pragma unroll 1
          for (int u = 0; u < units; ++u) {
            // The map counts 16 bits at a time.
            copy_box(stage + Stage::weight_bytes + u * Stage::unit_bytes, &codes, barrier, 64 * i,
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
        const std::uint32_t instruction = tcgen05_fp4_instruction(columns, sparse);
        const std::uint32_t to = memory + static_cast<std::uint32_t>(a) * Stage::half;
        const std::uint32_t base = shared_address(ring_memory);
        Ring own = ring;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
          mbarrier_wait(&full[own.stage], own.parity);
          tcgen05_fence_after();
          const std::uint32_t stage = base + static_cast<std::uint32_t>(own.stage) * stage_bytes;
          Stage::multiply(
              stage, columns,
              [&](unsigned column, std::uint64_t from) {
                tcgen05_copy_scales(memory + column, from);
              },
              [&](unsigned column, std::uint64_t from) {
                tcgen05_copy_positions(memory + column, from);
              },
              [&](std::uint64_t weights, std::uint64_t rows, unsigned weight_scales,
                  unsigned row_scales, unsigned positions, unsigned k) {
                if constexpr (sparse) {
                  tcgen05_mma_sparse_fp4(to, weights, rows, memory + positions, instruction,
                                         memory + weight_scales, memory + row_scales,
                                         i > 0 || k > 0);
                } else {
                  tcgen05_mma_fp4(to, weights, rows, instruction, memory + weight_scales,
                                  memory + row_scales, i > 0 || k > 0);
                }
              });
          tcgen05_commit(&empty[own.stage]);
          own.next();
        }
        tcgen05_commit(&sums[a]);
      }
      __syncwarp();
      for (int i = 0; i < steps; ++i) ring.next();
    }
  } else if (warp < 6) {
    int tile_of_block = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart, ++tile_of_block) {
      const GroupTile at = list.find(tile);
      const int a = tile_of_block % 2, turn = tile_of_block / 2;
      mbarrier_wait(&sums[a], static_cast<unsigned>(turn) & 1);
      __syncwarp();
      tcgen05_fence_after();
      write_rows(p, at, memory + static_cast<std::uint32_t>(a) * Stage::half, warp % 4, lane);
      tcgen05_fence_before();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&free[a]);
    }
  } else {
    Ring ring;
    bool again = false;
    const int first_row = thread - 6 * 32;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += apart) {
      const GroupTile at = list.find(tile);
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        std::uint32_t four[most_units][products];
#pragma unroll
        for (int u = 0; u < most_units; ++u) {
#pragma unroll
          for (int k = 0; k < products; ++k) {
            four[u][k] = row_scales_of(p, at, first_row + unit * u, std::int64_t{i} * products + k);
          }
        }
        if (again) mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
        unsigned char* const to = ring_memory + ring.stage * stage_bytes + Stage::scales_at;
#pragma unroll
        for (int u = 0; u < most_units; ++u) {
#pragma unroll
          for (int k = 0; k < products; ++k) {
            constexpr int scaled = Stage::tiles.scaled_k();
            const int place =
                fp4_scale_at(first_row + unit * u, 4 * scaled * k, Stage::scale_blocks, scaled);
            *reinterpret_cast<std::uint32_t*>(to + place) = four[u][k];
          }
        }
        // Written here, read by tcgen05.cp.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&full[ring.stage]);
        ring.next();
        again = again || ring.stage == 0;
      }
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
    const std::int64_t all = std::int64_t{own_tiles} * steps;
    for (int s = 0; s < stages; ++s) {
      const std::int64_t uses = (all - s + stages - 1) / stages;
      if (all > s) mbarrier_wait(&empty[s], static_cast<unsigned>(uses - 1) & 1);
    }
    __syncwarp();
    tcgen05_dealloc(memory, 512);
  }
#endif
}

}  // namespace

bool multiply_fp4_tiles(const Gpu& gpu, const Fp4TileProduct& p) {
  constexpr bool built = SHUNT_BUILT_FOR_SM_100A != 0;
  constexpr double most = 0x1p31;
  const double tiles = static_cast<double>(p.layout.columns()) *
                       (static_cast<double>(p.rows) / (unit * most_units) + p.groups);
  if (!built || gpu.compute != 100 || p.layout.k < 1 || p.groups > most_listed_groups ||
      tiles >= most || static_cast<double>(p.rows) >= most) {
    return false;
  }
  if (p.rows == 0 || p.layout.out_columns() == 0) return true;
  // As numbers of 16 bits: bytes are what they are. A last one of half a row's k meets codes of
  // zero on the other side.
  CUtensorMap codes;
  if (!map_rows(codes, p.codes, true, p.rows, (p.layout.k + 3) / 4, p.code_stride / 2, unit)) {
    return false;
  }
  const double blocks = static_cast<double>(gpu.multiprocessors);
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(tiles < blocks ? tiles : blocks)),
          .block = dim3(threads),
          .shared = p.layout.sparse ? shared_bytes<true>(p.groups) : shared_bytes<false>(p.groups)},
         p.layout.sparse ? multiply_fp4_on_blackwell<true> : multiply_fp4_on_blackwell<false>, p,
         codes);
  return true;
}

}  // namespace shunt::cuda_engine
