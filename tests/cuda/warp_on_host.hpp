// A warp, or a block of warps, on a host: threads that meet at every warp-wide function and at
// every barrier, so that device code written with them can be tested without a GPU. Include before
// that code, in one file of a program.
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

// CUDA's arithmetic and bit casts.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}

namespace shunt::test {

struct HostWarp {
  std::barrier<> meeting{32};
  std::uint64_t said[32];
  inline static thread_local HostWarp* own = nullptr;
  inline static thread_local std::barrier<>* block = nullptr;
  inline static thread_local int lane = 0;

  // Every lane says `value` and hears what lane `from` said.
  template <class T>
  static T hear(T value, int from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof value <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    own->said[lane] = bits;
    own->meeting.arrive_and_wait();
    bits = own->said[from];
    own->meeting.arrive_and_wait();
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // Every lane says `value`; then fold(sum, value) of all of them, from lane 0's on.
  template <class T, class Sum, class Fold>
  static Sum hear_all(T value, Sum sum, const Fold& fold) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof value <= 8);
    std::memcpy(&own->said[lane], &value, sizeof value);
    own->meeting.arrive_and_wait();
    for (const std::uint64_t& said : own->said) {
      std::memcpy(&value, &said, sizeof value);
      sum = fold(sum, value);
    }
    own->meeting.arrive_and_wait();
    return sum;
  }

  // Runs body(warp, lane) on each thread of a block.
  template <class Body>
  static void run_block(int warps, const Body& body) {
    std::vector<HostWarp> of(static_cast<std::size_t>(warps));
    std::barrier<> meeting{32 * warps};
    std::vector<std::thread> threads;
    for (int i = 0; i < 32 * warps; ++i) {
      threads.emplace_back([&, i] {
        own = &of[static_cast<std::size_t>(i / 32)];
        block = &meeting;
        lane = i % 32;
        body(i / 32, i % 32);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Runs body(lane) on each of 32 lanes.
  template <class Body>
  static void run(const Body& body) {
    run_block(1, [&body](int, int i) { body(i); });
  }
};

}  // namespace shunt::test

using std::max;
using std::min;

inline void __syncwarp() { shunt::test::HostWarp::own->meeting.arrive_and_wait(); }
inline void __syncthreads() { shunt::test::HostWarp::block->arrive_and_wait(); }
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
inline unsigned __ballot_sync(unsigned, bool vote) {  // the last lane's is the highest bit
  return shunt::test::HostWarp::hear_all(
      vote, 0U, [](unsigned votes, bool one) { return votes >> 1 | (one ? 1U << 31 : 0U); });
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0U; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <class T>
T __reduce_max_sync(unsigned, T value) {
  return shunt::test::HostWarp::hear_all(value, value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  return shunt::test::HostWarp::hear_all(value, value, [](T a, T b) { return std::min(a, b); });
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return by == 0 ? high : (high << by) | (low >> (32 - by));
}
