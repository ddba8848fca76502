// What a GPU can do at most, measured: the limits that times are compared with.
#pragma once

#include "shunt/context.hpp"

namespace shunt::cuda_engine {

// Each a median of graph replays, over memory far past the L2.
struct Ceilings {
  double launch_us = 0;      // one kernel of one element after another that it depends on
  double read_start_us = 0;  // of a launch that only reads: its time is at least
  double read = 0;           //   read_start_us + bytes / read, in bytes a second
  // Launches that read and write side by side, which costs a memory more than either: the time of
  // one for each of mix_bytes, of both ways. In order of `written`.
  static constexpr int mix_sizes = 7;
  static constexpr double mix_bytes[mix_sizes] = {64e3, 1e6, 4e6, 16e6, 37.7e6, 75.5e6, 302e6};
  struct Mix {
    double written = 0;  // of all bytes, the part that is written
    double us[mix_sizes] = {};
    double rate() const;  // bytes a second, of many
  };
  Mix mixes[4];           // 8 read for 1 written, 1 for 1, 1 for 8, written only
  double bf16_flops = 0;  // a second, of the tensor cores on random bf16; 0 except on Hopper

  // The least time in microseconds that one launch with so many bytes and operations needs;
  // operations count where there is a peak for them. `written` of the bytes are written: their mix
  // lies between two of those measured.
  double floor_us(double bytes, double operations, double written = 0) const;
};

// Takes half a second and about 1 GB. The context's stream is not the default one.
Ceilings measure_ceilings(const Context& context);

}  // namespace shunt::cuda_engine
