// Grouped GEMM in NVFP4 on Blackwell, for GPUs whose tensor cores take it by `mma` (sm_120a).
// Compiled, not run: no such GPU was at hand. How everything lies: blackwell_fp4.hpp.
//
// A block computes tiles of 64 rows of weights by 32 rows of a group, tile numbers blockIdx.x,
// blockIdx.x + gridDim.x, ..; tile_search.cuh says where a tile lies. Each of its 4 warps has 16
// rows of weights and all 32 rows. k goes by in stages of 256:
//   rows      32 x 128 bytes of codes and 32 x 16 of scales through a ring of 4 stages in shared
//             memory by cp.async, a row's 16-byte pieces exchanged by the row (piece p of row r at
//             p ^ (r % 8)), so that the 8 rows of a fragment lie in different banks
//   weights   in the order of fragments, so that a warp reads 512 bytes in a row: straight to
//             registers, a stage ahead
// Sparse weights: half as many steps of twice the k, a word of positions a lane with each, and half
// the rows' scales.
// A barrier a stage: all rows have come, and the stage before may be overwritten.
// Then the sums go through shared memory to bias, activation and out, each times the row's scale
// and its matrix's.
//
// Bytes: weights once a 32 rows, 0.5625 bytes each. A step of 64 along k is 4 mma a warp, 0.52
// MFLOP a block for 2.3 KB of weights: memory-bound up to some 150 rows a group on a GPU of 1.8
// TB/s and 1 PFLOP/s, where one tile of 32 rows does; more rows read weights again, from L2.
#include "activate/activation.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "gemm/blackwell_fp4.hpp"
#include "gemm/tile_search.cuh"

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define SHUNT_SM_120A 1
#endif
#ifndef SHUNT_BUILT_FOR_SM_120A
#define SHUNT_BUILT_FOR_SM_120A 0
#endif

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 128;
constexpr int tile_weights = 64, tile_rows = 32;

#if defined(SHUNT_SM_120A)

constexpr int stage_k = 256, stages = 4;
constexpr int code_bytes = tile_rows * stage_k / 2;
constexpr int pitch = tile_weights + 4;  // floats of a row's sums

// The first `bytes` of 4 bytes, and zeros.
__device__ __forceinline__ void cp_async_4(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mma_fp4(float (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2], std::uint32_t a_scales,
                                        std::uint32_t b_scales) {
  const std::uint16_t zero = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1"
      ".f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, "
      "{%12, %12}, {%11}, {%12, %12};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales),
        "r"(b_scales), "h"(zero));
}
// The same with half of `a` left out; every lane hands over positions of its own.
__device__ __forceinline__ void mma_sparse_fp4(float (&d)[4], const std::uint32_t (&a)[4],
                                               std::uint32_t positions, const std::uint32_t (&b)[4],
                                               std::uint32_t a_scales, std::uint32_t b_scales) {
  const std::uint16_t zero = 0;
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k128"
      ".row.col.f32.e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "{%0, %1, %2, %3}, %12, 0x0, {%13}, {%15, %15}, {%14}, {%15, %15};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
        "r"(positions), "r"(a_scales), "r"(b_scales), "h"(zero));
}

#endif

template <bool sparse>
__global__ void __launch_bounds__(threads) multiply_nvfp4(const Fp4Product p) {
#if defined(SHUNT_SM_120A)
  constexpr int step_k = sparse ? 128 : 64, scaled_k = step_k / 4, stage_steps = stage_k / step_k;
  constexpr int row_scales = stage_k / scaled_k, scale_bytes = tile_rows * row_scales;
  constexpr int b_registers = step_k / 32;
  __shared__ alignas(128) unsigned char codes[stages][code_bytes];
  __shared__ alignas(128) unsigned char scales[stages][scale_bytes];
  __shared__ float sums[tile_rows][pitch];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t steps = p.layout.steps(), turns = (steps + stage_steps - 1) / stage_steps;
  const std::int64_t columns = (p.layout.rows() + tile_weights - 1) / tile_weights;
  const GroupWalk walk = GroupWalk::of_rows(p.offsets, p.counts, p.groups, p.rows);
  TileSearch search(walk, p.groups, tile_rows, columns);
  for (std::int64_t number = blockIdx.x;; number += gridDim.x) {
    const TileSearch::Tile at = search.find(number);
    if (at.group < 0) return;
    const char* const group = p.prepared + at.group * p.layout.group_bytes();
    const std::int64_t band = at.column * (tile_weights / 16) + warp;  // of 16 rows
    const bool inside = band * Fp4Layout::fragment_rows < p.layout.rows();

    // Bytes behind a row's end are zeros, in part: 16 bytes of codes, 4 of scales at once.
    const auto load_rows = [&](std::int64_t turn) {
      const auto slot = static_cast<int>(turn % stages);
      for (int i = thread; i < code_bytes / 16; i += threads) {
        const int line = i / 8, piece = i % 8;
        const std::int64_t row = at.row + line, from = turn * (stage_k / 2) + piece * 16;
        const std::int64_t left = (p.layout.k + 1) / 2 - from;
        const bool there = row < at.end && left > 0;
        cp_async_16(shared_address(&codes[slot][line * 128 + (piece ^ line % 8) * 16]),
                    there ? p.codes + row * p.code_stride + from : p.codes,
                    there ? static_cast<int>(min(left, std::int64_t{16})) : 0);
      }
      for (int i = thread; i < scale_bytes / 4; i += threads) {
        const int line = i / (row_scales / 4), word = i % (row_scales / 4);
        const std::int64_t row = at.row + line, from = turn * row_scales + word * 4;
        const std::int64_t left = (p.layout.k + scaled_k - 1) / scaled_k - from;
        const bool there = row < at.end && left > 0;
        cp_async_4(shared_address(&scales[slot][line * row_scales + word * 4]),
                   there ? p.scales + row * p.scale_stride + from : p.scales,
                   there ? static_cast<int>(min(left, std::int64_t{4})) : 0);
      }
    };
    std::uint32_t next[stage_steps][4], next_scales[stage_steps], next_positions[stage_steps];
    const auto load_weights = [&](std::int64_t turn) {
#pragma unroll
      for (int s = 0; s < stage_steps; ++s) {
        const std::int64_t step = turn * stage_steps + s;
        const bool there = inside && step < steps;
        const std::int64_t f = band * steps + step;
        uint4 four = make_uint4(0, 0, 0, 0);
        if (there) {
          four =
              __ldg(reinterpret_cast<const uint4*>(group + f * Fp4Layout::fragment_bytes) + lane);
        }
        next[s][0] = four.x, next[s][1] = four.y, next[s][2] = four.z, next[s][3] = four.w;
        next_scales[s] = there ? __ldg(reinterpret_cast<const std::uint32_t*>(
                                           group + p.layout.scales_at() + f * 64) +
                                       fp4_weight_scale_row(lane))
                               : 0;
        // 0 is no position: two equal ones. Of nothing 0 and 1.
        next_positions[s] = sparse && there ? __ldg(reinterpret_cast<const std::uint32_t*>(
                                                        group + p.layout.positions_at() + f * 128) +
                                                    lane)
                                            : 0x44444444;
      }
    };

    float d[tile_rows / 8][4] = {};
    load_weights(0);
#pragma unroll
    for (int turn = 0; turn < stages - 1; ++turn) {
      if (turn < turns) load_rows(turn);
      cp_async_commit();
    }
    for (std::int64_t turn = 0; turn < turns; ++turn) {
      cp_async_wait<stages - 2>();
      __syncthreads();
      if (turn + stages - 1 < turns) load_rows(turn + stages - 1);
      cp_async_commit();
      std::uint32_t a[stage_steps][4], a_scales[stage_steps], positions[stage_steps];
#pragma unroll
      for (int s = 0; s < stage_steps; ++s) {
        a_scales[s] = next_scales[s];
        positions[s] = next_positions[s];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[s][r] = next[s][r];
      }
      if (turn + 1 < turns) load_weights(turn + 1);
      const auto slot = static_cast<int>(turn % stages);
#pragma unroll
      for (int s = 0; s < stage_steps; ++s) {
#pragma unroll
        for (int j = 0; j < tile_rows / 8; ++j) {
          const int line = 8 * j + fp4_row_place(lane, 0, 0).row;
          std::uint32_t b[b_registers];
#pragma unroll
          for (int r = 0; r < b_registers; ++r) {
            const int byte = (step_k * s + fp4_row_place(lane, r, 0).k) / 2;
            b[r] = *reinterpret_cast<const std::uint32_t*>(
                &codes[slot][line * 128 + (byte / 16 ^ line % 8) * 16 + byte % 16]);
          }
          const std::uint32_t b_scales = *reinterpret_cast<const std::uint32_t*>(
              &scales[slot][(8 * j + fp4_row_scale_row(lane)) * row_scales + 4 * s]);
          if constexpr (sparse) {
            mma_sparse_fp4(d[j], a[s], positions[s], b, a_scales[s], b_scales);
          } else {
            mma_fp4(d[j], a[s], b, a_scales[s], b_scales);
          }
        }
      }
    }
    __syncthreads();  // stages are read, and the sums of the tile before
    cp_async_wait<0>();
#pragma unroll
    for (int j = 0; j < tile_rows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Fp4Sum place = fp4_sum_place(lane, i);
        sums[8 * j + place.row][16 * warp + place.weight_row] = d[j][i];
      }
    }
    __syncthreads();
    const auto* const globals = reinterpret_cast<const float*>(group + p.layout.globals_at());
    const bool paired = p.layout.paired;
    const int wide = paired ? tile_weights / 2 : tile_weights;
    const std::int64_t first = at.column * wide, end = p.layout.out_columns();
    for (int i = thread; i < tile_rows * wide; i += threads) {
      const int line = i / wide, o = i % wide;
      const std::int64_t row = at.row + line, column = first + o;
      if (row >= at.end || column >= end) continue;
      const float scale = p.row_scales[row];
      const float* const of_row = sums[line];
      const int r = paired ? o / 8 * 16 + o % 8 : o;
      const auto biased = [&](float sum, std::int64_t of) {
        if (p.bias == nullptr) return sum;
        return __fadd_rn(sum, load_element(p.bias, p.bias_dtype,
                                           at.group * p.bias_group_stride + of * p.bias_stride));
      };
      const float gate = biased(__fmul_rn(__fmul_rn(of_row[r], globals[0]), scale), column);
      float value;
      if (paired) {
        const float up =
            biased(__fmul_rn(__fmul_rn(of_row[r + 8], globals[1]), scale), end + column);
        value = activated(p.activation, gate, up);
      } else {
        value = activated(p.activation, 0.0f, gate);
      }
      store_element(p.out, p.out_dtype, row * p.out_stride + column, value);
    }
    __syncthreads();  // the sums are read
  }
#endif
}

}  // namespace

bool multiply_fp4(const Gpu& gpu, const Fp4Product& p) {
  constexpr bool built = SHUNT_BUILT_FOR_SM_120A != 0;
  constexpr double most = 0x1p31;
  const double columns = static_cast<double>((p.layout.rows() + tile_weights - 1) / tile_weights);
  const double down = static_cast<double>(p.rows / tile_rows + p.groups);
  if (!built || gpu.compute != 120 || p.layout.k < 1 || columns * down >= most) return false;
  if (p.rows == 0 || p.layout.out_columns() == 0) return true;
  const double tiles = columns * down, slots = 4.0 * gpu.multiprocessors;
  launch(
      "grouped_gemm", gpu,
      {.grid = dim3(static_cast<unsigned>(tiles < slots ? tiles : slots)), .block = dim3(threads)},
      p.layout.sparse ? multiply_nvfp4<true> : multiply_nvfp4<false>, p);
  return true;
}

}  // namespace shunt::cuda_engine
