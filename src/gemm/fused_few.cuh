// Both products of the experts' few rows in one launch on Hopper: gate_up with its activation, then
// down, of 8 rows of a group at a time. Weights stream without a break from the first product into
// the second.
//
// Work is cut into units: 32, 64 or 128 rows of weights of a group by up to 8 of its rows and all
// of k. All units of the first product come before those of the second, and blocks claim them one
// after the other from a counter, so that a block that waits for others' results waits for blocks
// that run: nothing hangs, however few blocks fit the GPU at a time. A block's units go through one
// ring of stages, a step of 128 of k each. 23 warps:
//   warp 0       claims units and says so in a queue
//   warp 1       one thread orders bulk copies of the weights
//   warp 2       the rows, likewise; of a unit of the second product once all units of the first
//                for these rows have been counted
//   warps 3-18   multiply (mma.sync, weights are A): 16 rows of weights each, in teams of
//                unit_rows / 16 warps that take turns with steps
//   warps 19-22  finish every fourth unit each, while the others go on: add up what the teams
//                have, in their order, and do the rest as finish.cuh says; count units of the
//                first product
//   full[s]      stage s is there: the ordering thread and the bytes, and the rows' 32 threads
//   empty[s]     stage s may be overwritten: 8 arrivals, shared out over the team that has it. A
//                team waits for it too: the stage's last step was another team's, and until that
//                has been full, the phase before it would pass for the one that is waited for
//   queued[q], freed[q]   place q of the queue was written; has been read by all
//   there[f], used[f]     the sums of a unit lie in the buffer of finishing warp f; were read
// A result's sum runs over k in an order that unit_rows decides.
//
// Bytes: weights of the groups hit, once for each 8 rows. Time predicted on an H200: 4 us + bytes /
// 4.5 TB/s: the start (offsets, a claim, first bytes) 2.5, one unit's way through both ends 1.5.
#pragma once

#include "cuda/launch.hpp"
#include "gemm/fused_units.cuh"

namespace shunt::cuda_engine {

namespace {

// W: PlainWeights or Lane.
template <class W>
__global__ void __launch_bounds__(FusedShape::threads, 1)
    fused_few(const __grid_constant__ FusedArgs args) {
#if defined(SHUNT_SM_90A)
  using S = FusedShape;
  using Units = typename UnitsOf<W>::Units;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t full[S::most_stages], empty[S::most_stages];
  __shared__ std::uint64_t queued[S::queue], freed[S::queue], there[S::finishing],
      used[S::finishing];
  __shared__ __align__(16) FusedUnit units[S::queue];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler sees: one of a warp
  const int stages = args.stages;
  const auto stage_bytes = static_cast<unsigned>(args.stage_bytes);
  unsigned char* const ring = shared + (128 - shared_address(shared) % 128) % 128;
  auto* const sums = reinterpret_cast<float*>(ring + stages * args.stage_bytes);
  auto* const listed = reinterpret_cast<uint2*>(sums + S::finishing * S::sum_floats);
  const auto address = [](const void* of) {
    return static_cast<std::uint32_t>(kept(static_cast<int>(shared_address(of))));
  };
  const std::uint32_t ring_at = address(ring), full_at = address(full), empty_at = address(empty);
  const std::uint32_t queued_at = address(queued), freed_at = address(freed);
  const std::uint32_t there_at = address(there), used_at = address(used);
  if (thread == 0) {
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(&full[s], 1 + 32);
      mbarrier_init(&empty[s], 8);
    }
    for (int q = 0; q < S::queue; ++q) {
      mbarrier_init(&queued[q], 1);
      mbarrier_init(&freed[q], S::threads - 32);
    }
    for (int b = 0; b < S::finishing; ++b) {
      mbarrier_init(&there[b], 32 * S::multiplying);
      mbarrier_init(&used[b], 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();

  // The units of this block, one after the other.
  int place = 0;
  unsigned turn = 0;
  const auto next_place = [&] {
    if (++place == S::queue) place = 0, turn ^= 1;
  };
  const auto next_unit = [&] {
    wait_at(queued_at + 8 * static_cast<unsigned>(place), turn);
    const FusedUnit unit = units[place];
    arrive_at(freed_at + 8 * static_cast<unsigned>(place));
    next_place();
    return unit;
  };

  // A unit's steps into the ring, each to the stage that it finds empty: copy(step, stage, full).
  FusedPlace filled;
  const auto fill = [&](int steps, const auto& copy) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const auto stage = static_cast<unsigned>(filled.stage);
      if (filled.round > 0) wait_at(empty_at + 8 * stage, filled.parity ^ 1);
      copy(i, ring_at + stage * stage_bytes, full_at + 8 * stage);
      filled.go(1, stages);
    }
  };

  if (warp == 0) {
    int claimed = 0;
    const auto claim = [&] {
      if (lane == 0) claimed = static_cast<int>(atomicAdd(args.counters, 1u));
    };
    claim();
    // Every 8 rows of a group, listed.
    int tiles = 0;
    {
      const GroupWalk walk = args.part[0].of.walk;
      const int groups = args.part[0].of.groups;
      constexpr int at_once = 4;
      for (int base = 0; base < groups; base += 32 * at_once) {
        GroupRows rows[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          if (base + 32 * i + lane < groups) rows[i] = walk.of(base + 32 * i + lane);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int count = static_cast<int>(rows[i].end - rows[i].begin);
          const int mine = (count + S::tokens - 1) / S::tokens;
          int upto = mine;
#pragma unroll
          for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += below;
          }
          for (int t = 0; t < mine; ++t) {
            listed[tiles + upto - mine + t] = make_uint2(
                static_cast<unsigned>(rows[i].begin) + static_cast<unsigned>(t * S::tokens),
                static_cast<unsigned>(base + 32 * i + lane) << 8 |
                    static_cast<unsigned>(min(S::tokens, count - t * S::tokens)));
          }
          tiles += __shfl_sync(0xffffffffu, upto, 31);
        }
      }
      __syncwarp();
    }
    if (lane == 0) {
      const int first_units = tiles * args.part[0].units;
      const int all_units = first_units + tiles * args.part[1].units;
      bool again = false;
      for (;;) {
        const int number = claimed;
        const bool more = number < all_units;
        FusedUnit unit{.phase = 2};
        if (more) {
          claim();
          unit.phase = number >= first_units ? 1 : 0;
          const int local = number - unit.phase * first_units;
          const FusedPart& part = args.part[unit.phase];
          unit.tile = local / part.units;
          unit.first = (local - unit.tile * part.units) * part.unit_rows;
          const uint2 entry = listed[unit.tile];
          unit.row = static_cast<int>(entry.x);
          unit.group = static_cast<int>(entry.y >> 8);
          unit.count = static_cast<int>(entry.y & 255);
        }
        if (again) wait_at(freed_at + 8 * static_cast<unsigned>(place), turn ^ 1);
        units[place] = unit;
        arrive_at(queued_at + 8 * static_cast<unsigned>(place));
        next_place();
        again = again || place == 0;
        if (!more) break;
      }
    }
  } else if (warp == 1) {
    const BulkCopies bulk;
    for (;;) {
      const FusedUnit unit = next_unit();
      if (unit.phase == 2) break;
      const FusedPart& part = args.part[unit.phase];
      if (lane == 0) {
        const typename Units::Source source(part, unit);
        fill(part.of.steps, [&](int i, std::uint32_t to, std::uint32_t barrier) {
          source.copy(i, to + S::token_bytes, barrier, bulk);
        });
      }
      __syncwarp();
    }
  } else if (warp == 2) {
    const BulkCopies bulk;
    for (;;) {
      const FusedUnit unit = next_unit();
      if (unit.phase == 2) break;
      const FusedPart& part = args.part[unit.phase];
      if (unit.phase == 1) {
        const auto all = static_cast<std::uint32_t>(args.part[0].units);
        while (load_acquire(args.counters + 1 + unit.tile) < all) {
        }
        fence_for_async_global();
      }
      const UnitRows<Units::bf16> rows(part.of, unit, lane);
      fill(part.of.steps, [&](int i, std::uint32_t to, std::uint32_t barrier) {
        rows.copy(i, to, barrier, bulk);
      });
    }
  } else if (warp < S::finishing_from) {
    const int mine = warp - S::multiplying_from;
    const std::uint32_t tokens_at =
        ring_at + static_cast<std::uint32_t>(lane % 8 * fused_pitch + lane / 8 * 16);
    FusedPlace first_place;  // of the unit's first step
    int buffer = 0;
    unsigned round = 0;
    bool again = false;
    for (;;) {
      const FusedUnit unit = next_unit();
      if (unit.phase == 2) break;
      const FusedPart& part = args.part[unit.phase];
      const int bits = 27 - __clz(part.unit_rows), blocks = 1 << bits;  // of 16 rows
      const int teams = S::multiplying >> bits;
      const int team = mine >> bits, block = mine & (blocks - 1);
      Units sum;
      sum.clear();
      FusedPlace at = first_place;
      at.go(team, stages);
#pragma unroll 1
      for (int i = team; i < part.of.steps; i += teams) {
        const auto stage = static_cast<unsigned>(at.stage);
        if (at.round > 0) wait_at(empty_at + 8 * stage, at.parity ^ 1);
        wait_at(full_at + 8 * stage, at.parity);
        const unsigned offset = stage * stage_bytes;
        sum.add(part, i, ring + offset + S::token_bytes, tokens_at + offset, block, lane);
        __syncwarp();
        if (lane == 0) arrive_times_at(empty_at + 8 * stage, 8 >> bits);
        at.go(teams, stages);
      }
      first_place.go(part.of.steps, stages);
      if (again) wait_at(used_at + 8 * static_cast<unsigned>(buffer), round ^ 1);
      const int pitch = part.unit_rows + 4;
      float* const to = sums + buffer * S::sum_floats + team * S::tokens * pitch +
                        2 * (lane % 4) * pitch + 16 * block + lane / 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e % 2 * pitch + e / 2 * 8] = sum.of(e);
      arrive_at(there_at + 8 * static_cast<unsigned>(buffer));
      if (++buffer == S::finishing) buffer = 0, round ^= 1, again = true;
    }
  } else {
    const int mine = warp - S::finishing_from;
    unsigned round = 0;
    for (int number = 0;; ++number) {
      const FusedUnit unit = next_unit();
      if (unit.phase == 2) break;
      if (number % S::finishing != mine) continue;
      const UnitFinish<Units::factors> finish(args.part[unit.phase], unit, lane);
      wait_at(there_at + 8 * static_cast<unsigned>(mine), round);
      finish.write(sums + mine * S::sum_floats);
      arrive_at(used_at + 8 * static_cast<unsigned>(mine));
      if (unit.phase == 0) {
        fence_for_async_global();
        __syncwarp();
        if (lane == 0) add_release(args.counters + 1 + unit.tile);
      }
      round ^= 1;
    }
  }
#endif
}

template <class W>
void launch_fused(const Gpu& gpu, const FusedPlan& plan, const FusedArgs& args) {
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(plan.blocks)),
          .block = dim3(FusedShape::threads),
          .shared = static_cast<std::size_t>(fused_fixed_bytes + plan.stages * plan.stage_bytes)},
         fused_few<W>, args);
}

}  // namespace

}  // namespace shunt::cuda_engine
