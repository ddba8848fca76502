// What this machine can do at most, measured: the limits that times are compared with.
//
// A figure holds for the moment it was taken. On a machine that others use as well, measure around
// each case, many times, and compare with the median of the ratios.
#pragma once

#include <cstddef>

#include "cpu/pool.hpp"

namespace shunt::cpu_engine {

// Bytes a second that all threads together read from `memory`, each its own contiguous part; the
// better of a plain and a prefetching loop. Memory beyond the caches says what DRAM gives; the
// weights of the case under test are a good choice. bytes >= 64 kB.
double read_bytes_per_second(Pool& pool, const void* memory, std::size_t bytes);

// Operations a second (a multiplication and an addition are two) of independent instructions on
// registers, all threads together, on the widest vectors that the CPU has, whatever SHUNT_ISA says.
// 0 where there is no such instruction. Each runs for about `seconds`.
double f32_fma_per_second(Pool& pool, double seconds = 0.01);
double bf16_dot_per_second(Pool& pool, double seconds = 0.01);    // vdpbf16ps
double bf16_tiles_per_second(Pool& pool, double seconds = 0.01);  // tdpbf16ps
double int8_dot_per_second(Pool& pool, double seconds = 0.01);    // vpdpbusd
double fp16_fma_per_second(Pool& pool, double seconds = 0.01);    // vfmadd231ph

}  // namespace shunt::cpu_engine
