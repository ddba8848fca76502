// Grouped GEMM of fp8 for groups of many rows on Hopper: rows ("tokens") are wgmma's A, weights its
// B, so that a thread has whole rows: a scale of a row is one number, and the results of a row that
// are rounded to fp8 together lie in four threads, or four of either block.
//
// A cluster of two blocks takes tiles of up to 256 tokens by 256 rows of weights, tile numbers
// cluster, cluster + clusters, ..: each block all tokens and 128 of the weights. k goes by in steps
// of 128 through a ring of 11 or 12 units of 16 KB, of which a step takes one for the weights and
// one or two for tokens, as many as it has: five or six steps under way with up to 128 tokens, else
// three or four. 12 warps:
//   warp 0      one thread orders copies: its block's weights, and every other 64 tokens for both
//               blocks (tensor map; what lies behind the group's end is another group's and is not
//               stored)
//   warps 1, 2  the step's scales, 128 tokens each; warp 1 those of the weights too
//   warp 3      finds tiles ahead of the others
//   warps 4-11  two warpgroups: each has every other 64 tokens, by all 128 of the weights, one
//               after the other. Products of a step leave the tensor cores for the sums, times
//               their scales, while the other warpgroup multiplies
//   full[s]     step s is there: an arrival and its bytes, both blocks' copies, and 64 more where
//               there are scales
//   empty[s]    what step s had may be overwritten in both blocks: 16 arrivals
//   found, left a tile has been found, has been read by all warps but the one that finds
//   met[w]      the largest magnitudes of the other block's results for the rows of warp w
// The tile's end: scales a row and a column where those are the format's, bias, activation, and out
// in f32, 16 bits, or fp8 with a scale for 128 columns of a row; each warp turns its 16 rows in
// shared memory. The two ends of a layer's products have kernels of their own, for their code alone
// fits the instruction cache: 16 bits as they are, by bulk stores of boxes of 16 rows, and pairs
// that become fp8. The 128 columns of pairs that share a scale are both blocks': their warps
// exchange magnitudes. The last cluster barrier: no block leaves while the other writes into it.
//
// Bytes a step and block from L2 with 256 tokens: 32 KB for 8.4 MFLOP, 24 for 4.2 with 128. Shared
// memory is written 48 KB and read 96 in the former: 1152 clocks at 128 bytes a clock, and the
// tensor cores need 1024. Measured, and what has not been: docs/notes/cuda-fp8.md.
#include <type_traits>

#include "cuda/fp8.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/fp8_finish.cuh"
#include "gemm/fp8_mma.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/store_map.hpp"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 384, cluster = 2;
constexpr int step = 128;  // along k
constexpr int box = 64;    // tokens of a copy
constexpr int box_bytes = box * step;
constexpr int unit_bytes = 16384;     // 128 rows of weights of a step, or 128 tokens
constexpr int slots = 6;              // steps under way
constexpr int slot_scales = 256 + 4;  // floats: tokens', and gate's and up's
constexpr int places = 4;             // tiles that have been found

template <End end>
struct Room {
  static constexpr int units = end == End::plain16 ? 11 : 12;  // of the ring
  // Where a warp's results leave: by two boxes of 16 x 128 bytes, or 16 lines.
  static constexpr int turn = end == End::plain16 ? 4096 : 16 * pitch;
  static constexpr int scales = units * unit_bytes + 8 * turn;
  static constexpr int list = scales + slots * slot_scales * 4;
  static int bytes(int groups) { return 1024 + list + TileList<64, 4>::bytes(groups); }
};

// How many units a step of so many tokens has.
__device__ __forceinline__ int units_of(int count) { return count > 128 ? 3 : 2; }

template <End end>
__global__ void __launch_bounds__(threads, 1)
    many_rows(const __grid_constant__ PackedArgs args, const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap results) {
#if defined(SHUNT_SM_90A)
  constexpr int units = Room<end>::units;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[slots], empty[slots], met[8], found[places], left[places];
  __shared__ int4 found_tile[places];  // group (-1: no more), row, count, column
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  // The same offset in both blocks.
  unsigned char* const ring = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const turns = ring + units * unit_bytes;
  auto* const scales = reinterpret_cast<float*>(ring + Room<end>::scales);
  if (thread == 0) {
    prefetch_tensor_map(&tokens);
    for (int s = 0; s < slots; ++s) {
      mbarrier_init(&full[s], args.block_scales ? 1 + 64 : 1);
      mbarrier_init(&empty[s], 8 * cluster);
    }
    for (int w = 0; w < 8; ++w) mbarrier_init(&met[w], 1);
    for (int t = 0; t < places; ++t) {
      mbarrier_init(&found[t], 1);
      mbarrier_init(&left[t], 11);
    }
    mbarrier_init_fence();
  }
  wait_for_predecessor();
  let_successor_start();
  TileList<64, 4> list(ring + Room<end>::list, args.walk, args.groups, args.columns);
  list.build(args.walk);
  cluster_barrier();  // the other block's barriers are there

  const int rank = static_cast<int>(cluster_rank());
  int slot = 0, unit = 0;  // of the step
  unsigned parity = 0;
  const auto next_slot = [&] {
    if (++slot == slots) slot = 0, parity ^= 1;
  };
  // Tiles one after the other, as warp 3 finds them.
  int place = 0;
  unsigned place_parity = 0;
  const auto next_tile = [&](GroupTile& at) {
    mbarrier_wait(&found[place], place_parity);
    int4 tile = make_int4(0, 0, 0, 0);
    if (lane == 0) {
      tile = found_tile[place];
      mbarrier_arrive(&left[place]);
    }
    if (++place == places) place = 0, place_parity ^= 1;
    at.group = __shfl_sync(0xffffffffu, tile.x, 0);
    at.row = __shfl_sync(0xffffffffu, tile.y, 0);
    at.count = __shfl_sync(0xffffffffu, tile.z, 0);
    at.column = __shfl_sync(0xffffffffu, tile.w, 0);
    return at.group >= 0;
  };
  GroupTile at;
  const auto unit_after = [](int first, int n) {
    return first + n >= units ? first + n - units : first + n;
  };
  if (warp < 4) {
    fewer_registers<40>();
    if (warp == 0) {
      // Steps that have not been waited for: the first one's slot, how many units are free, and
      // which of them have three, by slots.
      int oldest = 0, free = units;
      unsigned oldest_parity = 0, large = 0;
      while (next_tile(at)) {
        if (lane == 0) {
          const int boxes = (at.count + box - 1) / box, taken = units_of(at.count);
          const int tile_at = cluster * at.column + rank;
          const bool some = tile_at < args.row_tiles;
          const char* const weights = args.tiles + at.group * args.group_bytes +
                                      std::int64_t{some ? tile_at : 0} * args.steps * unit_bytes;
          const auto bytes = static_cast<unsigned>((some ? unit_bytes : 0) + boxes * box_bytes);
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            while (free < taken) {
              mbarrier_wait(&empty[oldest], oldest_parity);
              free += 2 + static_cast<int>(large >> oldest & 1);
              if (++oldest == slots) oldest = 0, oldest_parity ^= 1;
            }
            free -= taken;
            large = (large & ~(1u << slot)) | static_cast<unsigned>(taken - 2) << slot;
            mbarrier_arrive_expect(&full[slot], bytes);
            if (some) {
              copy_bytes(ring + unit * unit_bytes, weights + std::int64_t{i} * unit_bytes,
                         unit_bytes, &full[slot]);
            }
#pragma unroll 1
            for (int b = rank; b < boxes; b += cluster) {
              copy_box_to_ranks(ring + unit_after(unit, 1 + b / 2) * unit_bytes + rank * box_bytes,
                                &tokens, &full[slot], box * i, at.row + box * b, 3);
            }
            unit = unit_after(unit, taken);
            next_slot();
          }
        }
        __syncwarp();
      }
    } else if (warp == 3) {
      const int clusters = static_cast<int>(gridDim.x) / cluster, tiles = list.tiles();
      bool more = true, again = false;
      for (int tile = static_cast<int>(blockIdx.x) / cluster; more; tile += clusters) {
        more = tile < tiles;
        GroupTile next{.group = -1};
        if (more) next = list.find(tile);
        if (lane == 0) {
          if (again) mbarrier_wait(&left[place], place_parity ^ 1);
          found_tile[place] = make_int4(next.group, next.row, next.count, next.column);
          mbarrier_arrive(&found[place]);
        }
        __syncwarp();
        if (++place == places) place = 0, place_parity ^= 1, again = true;
      }
    } else if (!args.block_scales) {
      while (next_tile(at)) {
      }
    } else {
      bool again = false;
      const int half = warp - 1;  // of the tokens
      const std::int64_t last = args.walk.rows - 1;
      while (next_tile(at)) {
        const bool some = half == 0 || at.count > 128;
        const float* of_rows[4];  // each lane has rows lane, lane + 32, ..
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          of_rows[r] =
              args.row_scales +
              min(std::int64_t{at.row} + 128 * half + lane + 32 * r, last) * args.row_scale_stride;
        }
        // And lanes 0 and 1 gate's and up's.
        const int tile_at = min(cluster * at.column + rank, args.row_tiles - 1);
        const float* of_weights = reinterpret_cast<const float*>(
                                      args.tiles + at.group * args.group_bytes + args.scales_at) +
                                  std::int64_t{tile_at} * args.steps * 4 + lane % 2;
        // Two steps ahead: what comes from memory takes longer than one.
        float row[2][4] = {}, weight[2] = {};
        const auto load = [&](int to) {
          if (!some) return;
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            row[to][r] = __ldg(of_rows[r]);
            of_rows[r] += args.row_scale_step;
          }
          weight[to] = __ldg(of_weights);
          of_weights += 4;
        };
        load(0);
        if (args.steps > 1) load(1);
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          if (again) mbarrier_wait(&empty[slot], parity ^ 1);
          float* const to = scales + slot * slot_scales + 128 * half;
          if (some) {
#pragma unroll
            for (int r = 0; r < 4; ++r) to[lane + 32 * r] = row[0][r];
            if (half == 0 && lane < 2) to[256 + lane] = weight[0];
          }
          mbarrier_arrive(&full[slot]);
#pragma unroll
          for (int r = 0; r < 4; ++r) row[0][r] = row[1][r];
          weight[0] = weight[1];
          if (i + 2 < args.steps) load(1);
          next_slot();
          if (slot == 0) again = true;
        }
      }
    }
  } else {
    more_registers<232>();
    const int group = warp / 4 - 1;  // of the warps that multiply
    const std::uint32_t base = shared_address(ring);
    const std::uint64_t a_first =
        wgmma_descriptor(base + static_cast<std::uint32_t>(group) * box_bytes);
    const std::uint64_t b_first = wgmma_descriptor(base);
    const auto of_unit = [](int n) { return static_cast<std::uint64_t>(n * (unit_bytes / 16)); };
    const int line = warp % 4 * 16;  // of 64 tokens, the warp's first
    unsigned char* const turn = turns + (warp - 4) * Room<end>::turn;
    const WarpFinish finish(args, turn, lane);
    unsigned turns_met = 0;  // of met
    while (next_tile(at)) {
      const int tile_at = cluster * at.column + rank, taken = units_of(at.count);
      const bool some = tile_at < args.row_tiles;
      // Of 64 tokens this warpgroup has the first, third, .. or the second, fourth, ..
      const int boxes = (at.count + box - 1) / box, mine = some ? (boxes + 1 - group) / 2 : 0;

      float acc[2][64];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0;
      const auto multiply = [&](auto of) {
        constexpr int parts = decltype(of)::value;
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          // By a reduction the compiler knows it to be one of a warp. Of this kernel alone it does
          // not otherwise, and computes descriptors in every lane, 25 instructions before a
          // product.
          const int first = end == End::plain16 ? __reduce_max_sync(0xffffffffu, unit) : unit;
          mbarrier_wait(&full[slot], parity);
          const float* const here = scales + slot * slot_scales;
          const auto leave = [&] {
            __syncwarp();  // all lanes have read their scales
            if (lane < cluster) mbarrier_free_at(&empty[slot], static_cast<unsigned>(lane));
          };
#pragma unroll
          for (int p = 0; p < parts; ++p) {
            float d[64];
            wgmma_fence();
            step_e4m3<128>(d, a_first + of_unit(unit_after(first, 1 + p)),
                           b_first + of_unit(first));
            wgmma_commit();
            float s[2][2] = {{1, 1}, {1, 1}};  // of rows lane / 4 and 8 further; of gate and of up
            if (args.block_scales) {
              const float2 weights = *reinterpret_cast<const float2*>(here + 256);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float of_row = here[64 * (group + 2 * p) + line + lane / 4 + 8 * r];
                s[r][0] = __fmul_rn(of_row, weights.x), s[r][1] = __fmul_rn(of_row, weights.y);
              }
            }
            wgmma_wait<0>();
            if (p + 1 == parts) leave();
#pragma unroll
            for (int e = 0; e < 64; ++e) {
              acc[p][e] = __fmaf_rn(d[e], s[e / 2 % 2][e / 4 % 2], acc[p][e]);
            }
          }
          if constexpr (parts == 0) leave();
          unit = unit_after(unit, taken);
          next_slot();
        }
      };
      if (mine == 2) {
        multiply(std::integral_constant<int, 2>{});
      } else if (mine == 1) {
        multiply(std::integral_constant<int, 1>{});
      } else {
        multiply(std::integral_constant<int, 0>{});
      }

      const auto where_of = [&](int p) {
        const int first = box * (group + 2 * p) + line;
        return Where{.group = at.group,
                     .row = at.row + first,
                     .count = at.count - first,
                     .first = std::int64_t{128} * tile_at};
      };
      const bool paired = end == End::pairs8 || (end == End::any && args.finish.paired);
      const bool fp8 = end == End::pairs8 || (end == End::any && args.out_scales != nullptr);
      float most[2][2] = {{0, 0}, {0, 0}};
      // A constant number: or else sums would have addresses, and lie in memory.
      const auto finish_part = [&](auto number) {
        constexpr int p = decltype(number)::value;
        if (p >= mine) return;
        const Where where = where_of(p);
        finish.scale(acc[p], where);
        if constexpr (end == End::plain16) {
          const std::uint32_t to = shared_address(turn);
          finish.free_boxes();
          args.finish.out_dtype == DType::bf16 ? finish.put_16<true>(acc[p], to)
                                               : finish.put_16<false>(acc[p], to);
          finish.send_boxes(to, &results, where);
        } else {
          finish.template activate<end>(acc[p], where);
          if (!fp8) {
            paired ? finish.write<64>(acc[p], where) : finish.write<128>(acc[p], where);
          } else if (!paired) {
            finish.round<128>(acc[p], args.between, where, most[p]);
            finish.write_fp8<128>(acc[p], where, most[p], true);
          } else {
            finish.round<64>(acc[p], args.between, where, most[p]);
          }
        }
      };
      finish_part(std::integral_constant<int, 0>{});
      finish_part(std::integral_constant<int, 1>{});
      if (end != End::plain16 && fp8 && paired && mine > 0) {
        // Columns 64 on of the 128 are the other block's. Magnitudes go behind the lines of the
        // warp there that has the same rows, at even and odd times to places of their own.
        if (cluster * at.column + 1 < args.row_tiles) {
          std::uint64_t* const here = &met[warp - 4];
          const auto there = static_cast<unsigned>(rank ^ 1);
          unsigned char* const first = turn + lane / 4 * pitch + 128 + 8 * (turns_met & 1);
          if (lane == 0) mbarrier_arrive_expect(here, static_cast<unsigned>(mine * 64));
          if (lane % 4 == 0) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
              if (p >= mine) continue;
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                store_at_rank(first + 8 * r * pitch + 4 * p, most[p][r], here, there);
              }
            }
          }
          mbarrier_wait_cluster(here, turns_met & 1);
#pragma unroll
          for (int p = 0; p < 2; ++p) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float other = *reinterpret_cast<const float*>(first + 8 * r * pitch + 4 * p);
              if (p < mine) most[p][r] = fmaxf(most[p][r], other);
            }
          }
          ++turns_met;
        }
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (p < mine) finish.write_fp8<64>(acc[p], where_of(p), most[p], rank == 0);
        }
      }
    }
    if (end == End::plain16 && lane == 0) wait_for_boxes_written();
  }
  __syncwarp();
  cluster_barrier();
#endif
}

End end_of(const PackedArgs& args, const Tensor& out) {
  const Finish& f = args.finish;
  const std::int64_t bytes = bits(f.out_dtype) / 8;
  const bool boxes = reinterpret_cast<std::uintptr_t>(f.out) % 16 == 0 &&
                     (out.shape[0] == 1 || (f.out_stride > 0 && f.out_stride * bytes % 16 == 0));
  if (f.bias != nullptr) return End::any;
  if (bytes == 2 && !f.paired && !f.activates && boxes) return End::plain16;
  if (bytes == 1 && f.paired && f.plain) return End::pairs8;
  return End::any;
}

}  // namespace

bool fp8_shared_rows(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p,
                     PackedArgs args) {
  args.columns = (args.row_tiles + cluster - 1) / cluster;
  CUtensorMap tokens, results{};
  // Bytes in twos: a box of 64 elements of 16 bits is one of 128 bytes.
  if (!map_rows(tokens, p.rows.data, true, p.rows.shape[0], (args.k + 1) / 2,
                args.source_row_bytes / 2, box)) {
    return false;
  }
  const End end = end_of(args, p.out);
  if (end == End::plain16 && !map_row_ends(results, p.out.data, true, p.out.shape[0],
                                           p.out.shape[1], p.out.strides[0], 64, 16)) {
    return false;
  }
  const auto start = [&](auto kernel, int shared) {
    launch("grouped_gemm", gpu,
           {.grid = dim3(static_cast<unsigned>(plan.blocks)),
            .block = dim3(threads),
            .shared = static_cast<std::size_t>(shared),
            .cluster = cluster},
           kernel, args, tokens, results);
  };
  if (end == End::plain16) {
    start(many_rows<End::plain16>, Room<End::plain16>::bytes(args.groups));
  } else if (end == End::pairs8) {
    start(many_rows<End::pairs8>, Room<End::pairs8>::bytes(args.groups));
  } else {
    start(many_rows<End::any>, Room<End::any>::bytes(args.groups));
  }
  return true;
}

}  // namespace shunt::cuda_engine
