// A warp on a host: 32 threads that meet at every warp-wide function, so that device code written
// with them can be tested without a GPU. Include before that code, in one file of a program.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace shunt::test {

struct HostWarp {
  inline static std::barrier<> meeting{32};
  inline static std::uint64_t said[32];
  inline static thread_local int lane = 0;

  // Every lane says `value` and hears what lane `from` said.
  template <class T>
  static T hear(T value, int from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof value <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    said[lane] = bits;
    meeting.arrive_and_wait();
    bits = said[from];
    meeting.arrive_and_wait();
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // Runs body(lane) on each of 32 lanes.
  template <class Body>
  static void run(const Body& body) {
    std::vector<std::thread> lanes;
    for (int i = 0; i < 32; ++i) {
      lanes.emplace_back([&body, i] {
        lane = i;
        body(i);
      });
    }
    for (std::thread& thread : lanes) thread.join();
  }
};

}  // namespace shunt::test

using std::max;
using std::min;

inline void __syncwarp() { shunt::test::HostWarp::meeting.arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return shunt::test::HostWarp::hear(value, shunt::test::HostWarp::lane ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const int base = shunt::test::HostWarp::lane & ~(width - 1);
  return shunt::test::HostWarp::hear(value, base | (from & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  const int lane = shunt::test::HostWarp::lane, from = lane - by;
  return shunt::test::HostWarp::hear(value, from < (lane & ~(width - 1)) ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = shunt::test::HostWarp::lane;
  return shunt::test::HostWarp::hear(value, lane + by > 31 ? lane : lane + by);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) {
    votes |= static_cast<unsigned>(shunt::test::HostWarp::hear<int>(vote, i)) << i;
  }
  return votes;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0U; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <class T>
T __reduce_max_sync(unsigned, T value) {
  T best = value;
  for (int i = 0; i < 32; ++i) best = std::max(best, shunt::test::HostWarp::hear(value, i));
  return best;
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  T best = value;
  for (int i = 0; i < 32; ++i) best = std::min(best, shunt::test::HostWarp::hear(value, i));
  return best;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return by == 0 ? high : (high << by) | (low >> (32 - by));
}
