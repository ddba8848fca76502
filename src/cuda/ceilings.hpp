// What a GPU can do at most, measured: the limits that times are compared with.
#pragma once

#include "shunt/context.hpp"

namespace shunt::cuda_engine {

// Each a median of graph replays, over memory far past the L2.
struct Ceilings {
  double launch_us = 0;      // one kernel of one element after another that it depends on
  double read_start_us = 0;  // of a launch that only reads: its time is at least
  double read = 0;           //   read_start_us + bytes / read, in bytes a second
  double copy = 0;           // bytes a second, read and written
  double bf16_flops = 0;     // a second, of the tensor cores on random bf16; 0 except on Hopper

  // The least time in microseconds that one launch with so many bytes and operations needs;
  // operations count where there is a peak for them.
  double floor_us(double bytes, double operations) const;
};

// Takes half a second and about 1 GB. The context's stream is not the default one.
Ceilings measure_ceilings(const Context& context);

}  // namespace shunt::cuda_engine
