// Grouped GEMM of fp8 for groups of many rows on Hopper: rows ("tokens") are wgmma's A, weights its
// B, so that a thread has whole rows: a scale of a row is one number, and 128 results of a row,
// which share a scale when they are rounded to fp8, lie in four threads.
//
// A cluster of two blocks takes tiles of up to 256 tokens by 256 rows of weights, tile numbers
// cluster, cluster + clusters, ..; k goes by in steps of 128 through a ring of stages of 48 KB.
// Each block orders one half of the weights for both. More than 128 tokens ("tall"): a block has
// 128, each of its warpgroups 64 of them and all weights. Else ("flat"): a block has 64 tokens,
// each warpgroup those and one half of the weights. 12 warps:
//   warp 0      one thread orders copies: 128 x 128 weights for both blocks (tensor map), 64 or 128
//               tokens for its own (tensor map; what lies behind the group's end is another
//               group's and is not stored)
//   warp 1      the step's scales, of this block's tokens and of the weights, where it has any
//   warps 2, 3  nothing
//   warps 4-11  two warpgroups: the step's tokens to registers, then products with 64 rows of
//               weights after the other by wgmma, two under way; what is done is added to the
//               sums, times its scales, while the next is multiplied
//   full[s]     stage s is there: an arrival and its bytes, of both blocks' copies, and 32 more
//               where there are scales
//   empty[s]    stage s may be overwritten in both blocks: 16 arrivals
// The tile's end: scales a row and a column where those are the format's, bias, activation, and out
// in f32, 16 bits, or fp8 with a scale for 128 columns of a row; each warp turns its 16 rows in
// shared memory. The two ends of a layer's products have kernels of their own, for their code alone
// fits the instruction cache: 16 bits as they are, and pairs that become fp8. Their results leave
// by bulk stores, a box of 16 rows a warp, while the warp goes on. Only the exchange of the largest
// magnitudes in a flat tile of pairs needs both warpgroups (barrier 1). The last cluster barrier:
// no block leaves while the other copies into it.
//
// Bytes a step and block from L2: 32 KB tall, 24 flat, for 8.4 and 4.2 MFLOP. A tall step is 1024
// clocks of the tensor cores, for which shared memory is written 48 KB and read 80: 125 bytes a
// clock of 128. With tokens from shared memory, in halves of 128 rows of weights, it was 144 KB.
// Time predicted on an H200 at 1200 clocks a step and 2500 a tile's end: G16 M1024 N2048 K5120 270
// us, N5120 K1024 165, G128 M128 N2048 K5120 350, N5120 K1024 215. Measured: 329, 199, 445, 257:
// docs/notes/cuda-fp8.md says where the rest goes.
#include <type_traits>

#include "cuda/fp8.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/fp8_finish.cuh"
#include "gemm/fp8_mma.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/store_map.hpp"
#include "gemm/tile_list.cuh"
#include "gemm/tile_map.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 384, cluster = 2;
constexpr int step = 128;          // along k
constexpr int box = 64;            // tokens of a copy
constexpr int part_bytes = 16384;  // 128 tokens, or 128 rows of weights, of a step
constexpr int stage_bytes = 3 * part_bytes, stages = 4;
constexpr int turn_bytes = 3072;  // of a warp: 16 such rows, or a box of 16 x 128 bytes
constexpr int turn_bytes_all = 8 * turn_bytes;
// Behind the rows that are turned there is place for scales of a stage: of 128 tokens, of gate's
// and up's weights in both halves.
constexpr int scales_in_turn = 16 * pitch;
static_assert(scales_in_turn + 4 * (128 + 4) <= turn_bytes && stages <= 8);
constexpr int most_bytes = 64 * 2 * 4;  // magnitudes of a flat tile's rows, a warpgroup's

int shared_bytes(int groups) {
  return 1024 + stages * stage_bytes + turn_bytes_all + most_bytes + TileList<64, 4>::bytes(groups);
}

template <End end>
__global__ void __launch_bounds__(threads, 1)
    many_rows(const __grid_constant__ PackedArgs args, const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap weights,
              const __grid_constant__ CUtensorMap results) {
#if defined(SHUNT_SM_90A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[stages], empty[stages];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  // The same offset in both blocks. A stage: tokens, weights, weights.
  unsigned char* const ring = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const turns = ring + stages * stage_bytes;
  auto* const most_of_row = reinterpret_cast<float*>(turns + turn_bytes_all);
  if (thread == 0) {
    prefetch_tensor_map(&tokens);
    prefetch_tensor_map(&weights);
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(&full[s], args.block_scales ? 1 + 32 : 1);
      mbarrier_init(&empty[s], 8 * cluster);
    }
    mbarrier_init_fence();
  }
  wait_for_predecessor();
  let_successor_start();
  TileList<64, 4> list(turns + turn_bytes_all + most_bytes, args.walk, args.groups, args.columns);
  list.build(args.walk);
  cluster_barrier();  // the other block's barriers are there

  const int rank = static_cast<int>(cluster_rank());
  const int clusters = static_cast<int>(gridDim.x) / cluster, tiles = list.tiles();
  int tile = static_cast<int>(blockIdx.x) / cluster;
  int stage = 0;
  unsigned parity = 0;
  if (warp < 4) {
    fewer_registers<40>();
    if (warp == 0) {
      bool again = false;
      for (; tile < tiles; tile += clusters) {
        const GroupTile at = list.find(tile);
        if (lane == 0) {
          const int own = at.count > 128 ? 128 : 64;
          const int units = min(max(at.count - own * rank + box - 1, 0) / box, own / box);
          const int first = at.row + own * rank;
          const int tile_at = cluster * at.column, here = min(args.row_tiles - tile_at, cluster);
          const std::int64_t line = (at.group * args.group_bytes +
                                     std::int64_t{tile_at + rank} * args.steps * part_bytes) /
                                    128;
          const auto bytes = static_cast<unsigned>(here * part_bytes + units * (box * step));
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            if (again) mbarrier_wait(&empty[stage], parity ^ 1);
            unsigned char* const to = ring + stage * stage_bytes;
            mbarrier_arrive_expect(&full[stage], bytes);
            if (rank < here) {
              copy_box_to_ranks(to + (1 + rank) * part_bytes, &weights, &full[stage], 0,
                                static_cast<int>(line) + 128 * i, 3);
            }
#pragma unroll 1
            for (int u = 0; u < units; ++u) {
              copy_box(to + u * (box * step), &tokens, &full[stage], box * i, first + box * u);
            }
            if (++stage == stages) stage = 0, parity ^= 1, again = true;
          }
        }
        __syncwarp();
      }
    } else if (warp == 1 && args.block_scales) {
      bool again = false;
      const std::int64_t last = args.walk.rows - 1;
      for (; tile < tiles; tile += clusters) {
        const GroupTile at = list.find(tile);
        const int own = at.count > 128 ? 128 : 64, first = at.row + own * rank;
        const int tile_at = cluster * at.column, here = min(args.row_tiles - tile_at, cluster);
        const float* of_rows[4];  // each lane has rows lane, lane + 32, ..
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          of_rows[r] = args.row_scales +
                       min(std::int64_t{first} + lane + 32 * r, last) * args.row_scale_stride;
        }
        // And lanes 0 to 3 one of gate's and up's in both halves.
        const float* of_weights =
            reinterpret_cast<const float*>(args.tiles + at.group * args.group_bytes +
                                           args.scales_at) +
            std::int64_t{tile_at + min(lane / 2 % 2, here - 1)} * args.steps * 4 + lane % 2;
        float row[4], weight;
        const auto load = [&] {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            row[r] = __ldg(of_rows[r]);
            of_rows[r] += args.row_scale_step;
          }
          weight = __ldg(of_weights);
          of_weights += 4;
        };
        load();
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          if (again) mbarrier_wait(&empty[stage], parity ^ 1);
          auto* const to = reinterpret_cast<float*>(turns + stage * turn_bytes + scales_in_turn);
#pragma unroll
          for (int r = 0; r < 4; ++r) to[lane + 32 * r] = row[r];
          if (lane < 4) to[128 + lane] = weight;
          mbarrier_arrive(&full[stage]);
          if (i + 1 < args.steps) load();
          if (++stage == stages) stage = 0, parity ^= 1, again = true;
        }
      }
    }
  } else {
    more_registers<232>();
    const int group = warp / 4 - 1;  // of the warps that multiply
    const std::uint32_t base = shared_address(ring);
    unsigned char* const turn = turns + (warp - 4) * turn_bytes;  // of lines, or a box
    const std::uint32_t box_address = shared_address(turn);
    const WarpFinish finish(args, turn, lane);
    for (; tile < tiles; tile += clusters) {
      const GroupTile at = list.find(tile);
      const bool tall = at.count > 128;
      const int tile_at = cluster * at.column, here = min(args.row_tiles - tile_at, cluster);
      const int offset = tall ? 128 * rank + 64 * group : 64 * rank;  // tokens
      const int halves = offset >= at.count ? 0 : tall ? here : group < here ? 1 : 0;
      const int half = tall ? 0 : group;  // the first
      const std::uint32_t a_base = base + (tall ? static_cast<std::uint32_t>(group) * 8192 : 0);
      const std::uint32_t b_base = base + static_cast<std::uint32_t>(1 + half) * part_bytes;
      const std::uint64_t b_first = wgmma_descriptor(b_base);
      // Of ldmatrix: this lane's line, and where in it the first 16 numbers of a step lie for it.
      const std::uint32_t a_line =
          a_base + static_cast<std::uint32_t>((warp % 4 * 16 + lane % 16) * 128);
      const auto a_piece = static_cast<std::uint32_t>((lane / 16 ^ lane % 8) * 16);
      const int row = at.row + offset + warp % 4 * 16;  // of the warp

      float acc[2][64];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0;
      // In a stage's scales: of this lane's first token, the second 8 further.
      const int scales_at = (tall ? 64 * group : 0) + warp % 4 * 16 + lane / 4;
      const auto multiply = [&](auto of) {
        constexpr int parts = 2 * decltype(of)::value;  // of 64 rows of weights
        if constexpr (parts == 0) {
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            mbarrier_wait(&full[stage], parity);
            __syncwarp();
            if (lane < cluster) mbarrier_free_at(&empty[stage], static_cast<unsigned>(lane));
            if (++stage == stages) stage = 0, parity ^= 1;
          }
        } else {
          float d[2][32];
          std::uint32_t a[4][4];
          // A step's tokens to registers.
          const auto load_tokens = [&](int of_stage) {
            const std::uint32_t line = a_line + static_cast<std::uint32_t>(of_stage * stage_bytes);
#pragma unroll
            for (std::uint32_t q = 0; q < 4; ++q) ldmatrix_x4(a[q], line + (a_piece ^ 32 * q));
          };
          mbarrier_wait(&full[stage], parity);
          load_tokens(stage);
#pragma unroll 1
          for (int i = 1; i <= args.steps; ++i) {
            const std::uint64_t b =
                b_first + static_cast<std::uint64_t>(stage * (stage_bytes / 16));
            const auto begin = [&](int part) {
              wgmma_fence();
              step_e4m3_64(d[part % 2], a,
                           b + static_cast<std::uint64_t>(part * (part_bytes / 32)));
              wgmma_commit();
            };
            begin(0);
            begin(1);
            const auto* const scales =
                reinterpret_cast<const float*>(turns + stage * turn_bytes + scales_in_turn);
            float s[2][2] = {{1, 1}, {1, 1}};  // of rows lane / 4 and 8 further; of gate and of up
            const auto scales_of = [&](int h) {
              if (!args.block_scales) return;
              const float2 weights =
                  *reinterpret_cast<const float2*>(scales + 128 + 2 * (half + h));
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float row = scales[scales_at + 8 * r];
                s[r][0] = __fmul_rn(row, weights.x), s[r][1] = __fmul_rn(row, weights.y);
              }
            };
            const auto add = [&](int part) {
              const int h = part / 2;
#pragma unroll
              for (int e = 0; e < 32; ++e) asm volatile("" : "+f"(d[part % 2][e])::"memory");
#pragma unroll
              for (int e = 0; e < 32; ++e) {
                float& sum = acc[h][32 * (part % 2) + e];
                sum = __fmaf_rn(d[part % 2][e], s[e / 2 % 2][e / 4 % 2], sum);
              }
            };
#pragma unroll
            for (int part = 0; part + 1 < parts; ++part) {
              if (part % 2 == 0) scales_of(part / 2);
              wgmma_wait<1>();
              add(part);
              if (part + 2 < parts) begin(part + 2);
            }
            // The next stage is waited for here: a loop, behind which the compiler does not move
            // what was added above.
            const int this_stage = stage;
            if (++stage == stages) stage = 0, parity ^= 1;
            if (i < args.steps) mbarrier_wait(&full[stage], parity);
            wgmma_wait<0>();
            __syncwarp();  // all lanes have read their scales
            if (lane < cluster) mbarrier_free_at(&empty[this_stage], static_cast<unsigned>(lane));
            if (i < args.steps) load_tokens(stage);
            add(parts - 1);
          }
        }
      };
      if (halves == 2) {
        multiply(std::integral_constant<int, 2>{});
      } else if (halves == 1) {
        multiply(std::integral_constant<int, 1>{});
      } else {
        multiply(std::integral_constant<int, 0>{});
      }

      Where where{.group = at.group,
                  .row = row,
                  .count = halves == 0 ? 0 : at.count - offset - warp % 4 * 16,
                  .first = std::int64_t{128} * (tile_at + half)};
      float most[2] = {0, 0};
      if constexpr (end == End::plain16) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (h < halves) {
            where.first = std::int64_t{128} * (tile_at + half + h);
            finish.scale(acc[h], where);
            args.finish.out_dtype == DType::bf16
                ? finish.store_16<true>(acc[h], where, box_address, &results)
                : finish.store_16<false>(acc[h], where, box_address, &results);
          }
        }
        continue;
      }
      const bool paired = end == End::pairs8 || args.finish.paired;
      const bool fp8 = end == End::pairs8 || args.out_scales != nullptr;
      const bool exchange = fp8 && paired && !tall;  // by both warpgroups, whatever they have
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h < halves) {
          where.first = std::int64_t{128} * (tile_at + half + h);
          finish.scale(acc[h], where);
          finish.template activate<end>(acc[h], where);
          if (!fp8) {
            paired ? finish.write<64>(acc[h], where) : finish.write<128>(acc[h], where);
          } else if (!paired) {
            most[0] = most[1] = 0;
            finish.round<128>(acc[h], args.between, where, most);
            finish.write_fp8<128>(acc[h], where, most, true);
          } else {
            finish.round<64>(acc[h], args.between, where, most);
          }
        }
      }
      if (exchange) {
        const int of_block = warp % 4 * 16 + lane / 4;
        if (lane % 4 == 0) {
          most_of_row[group * 64 + of_block] = most[0];
          most_of_row[group * 64 + of_block + 8] = most[1];
        }
        named_barrier(1, 256);
        most[0] = fmaxf(most[0], most_of_row[(group ^ 1) * 64 + of_block]);
        most[1] = fmaxf(most[1], most_of_row[(group ^ 1) * 64 + of_block + 8]);
        named_barrier(1, 256);
      }
      if (end == End::pairs8 && halves == 2) {
        where.first = std::int64_t{128} * tile_at;
        float factor[2];
        finish.scales_of(where, most, true, factor);
        finish.free_boxes();
        finish.put_fp8(acc[0], factor, turn, 0);
        finish.put_fp8(acc[1], factor, turn, 1);
        finish.send_box(box_address, &results, static_cast<int>(where.first / 4),
                        (args.finish.out_columns + 1) / 2, where);
      } else if (fp8 && paired) {
        if (end == End::pairs8) finish.free_boxes();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (h < halves) {
            where.first = std::int64_t{128} * (tile_at + half + h);
            finish.write_fp8<64>(acc[h], where, most, half + h == 0);
          }
        }
      }
    }
    if (end != End::any && lane == 0) wait_for_boxes_written();
  }
  __syncwarp();
  cluster_barrier();
#endif
}

End end_of(const PackedArgs& args, const Tensor& out) {
  const Finish& f = args.finish;
  const std::int64_t bytes = bits(f.out_dtype) / 8;
  const bool bulk = f.bias == nullptr && reinterpret_cast<std::uintptr_t>(f.out) % 16 == 0 &&
                    (out.shape[0] == 1 || (f.out_stride > 0 && f.out_stride * bytes % 16 == 0));
  if (!bulk) return End::any;
  if (bytes == 2 && !f.paired && !f.activates) return End::plain16;
  if (bytes == 1 && f.paired && f.plain && f.out_columns % 2 == 0) return End::pairs8;
  return End::any;
}

}  // namespace

bool fp8_many_rows(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p,
                   PackedArgs args) {
  args.columns = (args.row_tiles + cluster - 1) / cluster;
  CUtensorMap tokens, weights, results{};
  // Bytes in twos: a box of 64 elements of 16 bits is one of 128 bytes.
  if (!map_rows(tokens, p.rows.data, true, p.rows.shape[0], (args.k + 1) / 2,
                args.source_row_bytes / 2, box) ||
      !map_tiles(weights, args.tiles, p.groups * args.group_bytes / 128)) {
    return false;
  }
  const End end = end_of(args, p.out);
  const std::int64_t twos = end == End::pairs8 ? 2 : 1;  // elements of out in 16 bits
  if (end != End::any && !map_row_ends(results, p.out.data, true, p.out.shape[0],
                                       p.out.shape[1] / twos, p.out.strides[0] / twos, 64, 16)) {
    return false;
  }
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(threads),
          .shared = static_cast<std::size_t>(shared_bytes(args.groups)),
          .cluster = cluster},
         end == End::plain16  ? many_rows<End::plain16>
         : end == End::pairs8 ? many_rows<End::pairs8>
                              : many_rows<End::any>,
         args, tokens, weights, results);
  return true;
}

}  // namespace shunt::cuda_engine
