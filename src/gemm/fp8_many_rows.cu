// Grouped GEMM of fp8 for groups of many rows on Hopper: rows ("tokens") are wgmma's A, weights its
// B, so that a thread has whole rows: a scale of a row is one number, and the results of a row that
// are rounded to fp8 together lie in four threads, or four of either block.
//
// A cluster of two blocks takes tiles of up to 256 tokens by 256 rows of weights, tile numbers
// cluster, cluster + clusters, .., tall ones first: each block all tokens and 128 of the weights. k
// goes by in steps of 128 through a ring of units of 8 KB, of which a step takes two for the
// weights and one for 64 tokens: three or four steps under way with 256 tokens, five or six with
// 128. 12 warps:
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
// tensor cores need 1024. Measured: docs/notes/cuda-fp8.md.
#include <type_traits>

#include "cuda/fp8.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "gemm/fp8_finish.cuh"
#include "gemm/fp8_mma.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/store_map.hpp"
#include "gemm/tall_first.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int cluster = 2;
constexpr int teams = 2, parts = 2;  // of warps that multiply, and how often each has 64 tokens
constexpr int threads = 128 * (1 + teams), finishers = 4 * teams;
constexpr int step = 128;  // along k
constexpr int box = 64;    // tokens of a copy
constexpr int boxes_most = teams * parts;
constexpr int unit_bytes = 8192;                   // a box of a step, or 64 rows of weights
constexpr int slots = 8;                           // steps under way
constexpr int slot_scales = boxes_most * box + 4;  // floats: tokens', and gate's and up's
constexpr int places = 4;                          // tiles that have been found
using Tiles = TallFirst<boxes_most * box / 2>;

// Shared memory: the ring, where warps' results leave, scales, tiles.
template <End end>
struct Room {
  // Two boxes of 16 x 128 bytes, or 16 lines.
  static constexpr int turn = end == End::plain16 ? 4096 : 16 * pitch;
  static constexpr int scales = slots * slot_scales * 4;
  static int bytes(int units, int groups) {
    return 1024 + units * unit_bytes + finishers * turn + scales + Tiles::bytes(groups);
  }
  // Of the ring. Steps of one box are the shortest.
  static int units(int groups, int most_bytes) {
    for (int units = 3 * slots; units > 20; units -= 2) {
      if (bytes(units, groups) + 1024 <= most_bytes) return units;
    }
    return 20;
  }
};

// Where a step lies in the ring: its number among `slots`, and its first unit. Weights do not go
// around the ring's end; a unit that is left there is the step's before.
struct RingPlace {
  int units;
  int slot = 0, unit = 0;
  unsigned parity = 0;

  // Of box b of a step that begins with unit `first`.
  __device__ __forceinline__ int unit_of(int first, int b) const {
    const int at = first + 2 + b;
    return at >= units ? at - units : at;
  }
  // On to the next, from a step of so many boxes; how many units that had.
  __device__ __forceinline__ int end(int boxes) {
    unit = unit_of(unit, boxes);
    const bool skip = unit == units - 1;
    if (skip) unit = 0;
    if (++slot == slots) slot = 0, parity ^= 1;
    return 2 + boxes + (skip ? 1 : 0);
  }
};

#if defined(SHUNT_SM_90A)

// The compiler sees: the same in all lanes. It else computes descriptors in every lane, some 25
// instructions before each product.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) {
  return __reduce_max_sync(0xffffffffu, x);
}
// Keeps x, instead of working it out again wherever it is read.
__device__ __forceinline__ std::uint32_t once(std::uint32_t x) {
  asm volatile("mov.u32 %0, %0;" : "+r"(x));
  return x;
}
// Whether the phase of this parity has ended, for all that can be said at once.
__device__ __forceinline__ bool is_there(std::uint32_t barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// d = the products of a step; by lower halves of descriptors.
__device__ __forceinline__ void multiply_step(float (&d)[64], std::uint32_t a, std::uint32_t b) {
  const auto whole = [](std::uint32_t lower) {
    return std::uint64_t{0x40000040} << 32 | lower;  // of wgmma_descriptor()
  };
  wgmma_e4m3<128, 0>(d, whole(a), whole(b));
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3<128, 1>(d, whole(a + 2 * k), whole(b + 2 * k));
}

#endif

template <End end>
__global__ void __launch_bounds__(threads, 1)
    many_rows(const __grid_constant__ PackedArgs args, int units,
              const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap results) {
#if defined(SHUNT_SM_90A)
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[slots], empty[slots], met[finishers], found[places], left[places];
  __shared__ int4 found_tile[places];  // group (-1: no more), row, count, column
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  // The same offset in both blocks.
  unsigned char* const ring = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* const turns = ring + units * unit_bytes;
  unsigned char* const scales_at = turns + finishers * Room<end>::turn;
  auto* const scales = reinterpret_cast<float*>(scales_at);
  if (thread == 0) {
    prefetch_tensor_map(&tokens);
    for (int s = 0; s < slots; ++s) {
      mbarrier_init(&full[s], args.block_scales ? 1 + 64 : 1);
      mbarrier_init(&empty[s], finishers * cluster);
    }
    for (int w = 0; w < finishers; ++w) mbarrier_init(&met[w], 1);
    for (int t = 0; t < places; ++t) {
      mbarrier_init(&found[t], 1);
      mbarrier_init(&left[t], 3 + finishers);
    }
    mbarrier_init_fence();
  }
  wait_for_predecessor();
  let_successor_start();
  Tiles list(scales_at + Room<end>::scales, args.walk, args.groups, args.columns);
  list.build();
  cluster_barrier();  // the other block's barriers are there

  const int rank = static_cast<int>(cluster_rank());
  RingPlace at_step{.units = units};
  // Tiles one after the other, as warp 3 finds them.
  int place = 0;
  unsigned place_parity = 0;
  GroupTile at;
  const auto next_tile = [&] {
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
  const auto boxes_of_tile = [&] { return (at.count + box - 1) / box; };
  if (warp < 4) {
    fewer_registers<40>();
    if (warp == 0) {
      // Steps that have not been waited for: the first one's slot, how many units are free, and
      // four bits a slot for how many it has.
      int oldest = 0, free = units;
      unsigned oldest_parity = 0, taken_by = 0;
      while (next_tile()) {
        if (lane == 0) {
          const int boxes = boxes_of_tile(), tile_at = cluster * at.column + rank;
          const bool some = tile_at < args.row_tiles;
          const char* weights = args.tiles + at.group * args.group_bytes +
                                std::int64_t{some ? tile_at : 0} * args.steps * (2 * unit_bytes);
          const auto bytes =
              static_cast<unsigned>((some ? 2 * unit_bytes : 0) + boxes * unit_bytes);
#pragma unroll 1
          for (int i = 0; i < args.steps; ++i) {
            RingPlace next = at_step;
            const int taken = next.end(boxes), slot = at_step.slot;
            while (free < taken) {
              mbarrier_wait(&empty[oldest], oldest_parity);
              free += static_cast<int>(taken_by >> 4 * oldest & 15);
              if (++oldest == slots) oldest = 0, oldest_parity ^= 1;
            }
            free -= taken;
            taken_by = (taken_by & ~(15u << 4 * slot)) | static_cast<unsigned>(taken) << 4 * slot;
            mbarrier_arrive_expect(&full[slot], bytes);
            if (some) {
              copy_bytes(ring + at_step.unit * unit_bytes, weights, 2 * unit_bytes, &full[slot]);
            }
            weights += 2 * unit_bytes;
#pragma unroll 1
            for (int b = rank; b < boxes; b += cluster) {
              copy_box_to_ranks(ring + at_step.unit_of(at_step.unit, b) * unit_bytes, &tokens,
                                &full[slot], box * i, at.row + box * b, 3);
            }
            at_step = next;
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
      while (next_tile()) {
      }
    } else {
      constexpr int each = boxes_most * box / 2, rows = each / 32;  // of a warp, of a lane
      bool again = false;
      int slot = 0;
      unsigned parity = 0;
      const int first = each * (warp - 1);
      const auto last = static_cast<int>(args.walk.rows) - 1;
      const std::int64_t along = args.row_scale_step;
      while (next_tile()) {
        const bool some = at.count > first;
        const float* of_rows[rows];  // each lane has rows lane, lane + 32, ..
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          of_rows[r] =
              args.row_scales + min(at.row + first + lane + 32 * r, last) * args.row_scale_stride;
        }
        // And lanes 0 and 1 gate's and up's.
        const int tile_at = min(cluster * at.column + rank, args.row_tiles - 1);
        const float* of_weights = reinterpret_cast<const float*>(
                                      args.tiles + at.group * args.group_bytes + args.scales_at) +
                                  std::int64_t{tile_at} * args.steps * 4 + lane % 2;
        // Two steps ahead: what comes from memory takes longer than one.
        float row[2][rows] = {}, weight[2] = {};
        const auto load = [&](int to) {
          if (!some) return;
#pragma unroll
          for (int r = 0; r < rows; ++r) {
            row[to][r] = __ldg(of_rows[r]);
            of_rows[r] += along;
          }
          weight[to] = __ldg(of_weights);
          of_weights += 4;
        };
        load(0);
        if (args.steps > 1) load(1);
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          if (again) mbarrier_wait(&empty[slot], parity ^ 1);
          if (some) {
            float* const to = scales + slot * slot_scales;
#pragma unroll
            for (int r = 0; r < rows; ++r) to[first + lane + 32 * r] = row[0][r];
            if (first == 0 && lane < 2) to[boxes_most * box + lane] = weight[0];
          }
          mbarrier_arrive(&full[slot]);
#pragma unroll
          for (int r = 0; r < rows; ++r) row[0][r] = row[1][r];
          weight[0] = weight[1];
          if (i + 2 < args.steps) load(1);
          if (++slot == slots) slot = 0, parity ^= 1, again = true;
        }
      }
    }
  } else {
    more_registers<232>();
    const int team = warp / 4 - 1;
    const std::uint32_t full_at = once(shared_address(full));
    const std::uint32_t empty_at =
        once(address_of_rank(empty, static_cast<unsigned>(lane % cluster)));
    const std::uint32_t ring_at =
        once(static_cast<std::uint32_t>(wgmma_descriptor(shared_address(ring))));
    const auto of_unit = [&](int n) {
      return ring_at + static_cast<std::uint32_t>(n * (unit_bytes / 16));
    };
    const int line = warp % 4 * 16;  // of 64 tokens, the warp's first
    unsigned char* const turn = turns + (warp - 4) * Room<end>::turn;
    const WarpFinish finish(args, turn, lane);
    const auto leave = [&](int slot) {
      __syncwarp();  // all lanes have read their scales
      if (lane < cluster) mbarrier_free_at(empty_at + 8 * static_cast<unsigned>(slot));
    };
    unsigned turns_met = 0;  // of met
    while (next_tile()) {
      const int boxes = boxes_of_tile(), tile_at = cluster * at.column + rank;
      if (team >= boxes || tile_at >= args.row_tiles) {  // nothing of this tile
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          wait_at(full_at + 8 * static_cast<unsigned>(at_step.slot), at_step.parity);
          leave(at_step.slot);
          at_step.end(boxes);
        }
        continue;
      }

      const int mine = boxes > team + teams ? 2 : 1;  // of the boxes
      float acc[2][64];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0;
      // The next step's operands: descriptors but for the upper half, which is the same for all.
      std::uint32_t a_at[2], b_at;
      const auto find_operands = [&] {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          a_at[p] = once(of_unit(at_step.unit_of(at_step.unit, team + teams * p)));
        }
        b_at = once(of_unit(at_step.unit));
      };
      find_operands();
      bool ready = false;  // it is there
      const float* const of_row = scales + box * team + line + lane / 4;
      const auto multiply = [&](auto of) {
        constexpr int count = decltype(of)::value;
#pragma unroll 1
        for (int i = 0; i < args.steps; ++i) {
          const int slot = at_step.slot;
          const std::uint32_t b = uniform(b_at);
          const std::uint32_t a[2] = {uniform(a_at[0]), count == 2 ? uniform(a_at[1]) : 0};
          if (!ready) wait_at(full_at + 8 * static_cast<unsigned>(slot), at_step.parity);
#pragma unroll
          for (int p = 0; p < count; ++p) {
            float d[64];
            wgmma_fence();
            multiply_step(d, a[p], b);
            wgmma_commit();
            float s[2][2] = {{1, 1}, {1, 1}};  // of rows lane / 4 and 8 further; of gate and of up
            if (args.block_scales) {
              const float2 weights =
                  *reinterpret_cast<const float2*>(scales + slot * slot_scales + boxes_most * box);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float row = of_row[slot * slot_scales + box * teams * p + 8 * r];
                s[r][0] = __fmul_rn(row, weights.x), s[r][1] = __fmul_rn(row, weights.y);
              }
            }
            if (p + 1 == count) {
              at_step.end(boxes);
              find_operands();
              ready = __all_sync(0xffffffffu,
                                 is_there(full_at + 8 * static_cast<unsigned>(at_step.slot),
                                          at_step.parity)) != 0;
            }
            wgmma_wait<0>();
            if (p + 1 == count) leave(slot);
#pragma unroll
            for (int e = 0; e < 64; ++e) {
              acc[p][e] = __fmaf_rn(d[e], s[e / 2 % 2][e / 4 % 2], acc[p][e]);
            }
          }
        }
      };
      if (mine == 2) {
        multiply(std::integral_constant<int, 2>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }

      const auto where_of = [&](int p) {
        const int first = box * (team + teams * p) + line;
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
      if (end != End::plain16 && fp8 && paired) {
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

bool fp8_many_rows(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& p,
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
  const auto start = [&](auto kernel, auto room) {
    const int units = room.units(args.groups, gpu.shared_bytes);
    launch("grouped_gemm", gpu,
           {.grid = dim3(static_cast<unsigned>(plan.blocks)),
            .block = dim3(threads),
            .shared = static_cast<std::size_t>(room.bytes(units, args.groups)),
            .cluster = cluster},
           kernel, args, units, tokens, results);
  };
  if (end == End::plain16) {
    start(many_rows<End::plain16>, Room<End::plain16>{});
  } else if (end == End::pairs8) {
    start(many_rows<End::pairs8>, Room<End::pairs8>{});
  } else {
    start(many_rows<End::any>, Room<End::any>{});
  }
  return true;
}

}  // namespace shunt::cuda_engine
