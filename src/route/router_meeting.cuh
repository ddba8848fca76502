// How a router's blocks that share out H read their operands, and how their sums meet in memory:
// each with the number of its launch beside it in one vector, which memory never parts. Who reads
// until all are of this launch needs no fence and no counting.
#pragma once

#include <cstdint>

namespace shunt::routing {

// 16 bytes, or zeros; not kept in L1.
__device__ __forceinline__ uint4 load_where(const std::uint16_t* from, bool there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from), "r"(static_cast<int>(there))
      : "memory");
  return v;
}

// `launches`: of all that went before. Never 0, which nothing was sent with.
__device__ __forceinline__ std::uint32_t this_launch(const std::uint32_t* launches) {
  return max(__ldcg(launches) + 1, 1U);
}

__device__ __forceinline__ void send(uint2* to, float sum, std::uint32_t launch) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(sum)),
               "r"(launch)
               : "memory");
}
__device__ __forceinline__ void send(uint4* to, float first, float second, std::uint32_t launch) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(to),
               "r"(__float_as_uint(first)), "r"(__float_as_uint(second)), "r"(launch)
               : "memory");
}
__device__ __forceinline__ uint2 receive(const uint2* from) {
  uint2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint4 receive(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

}  // namespace shunt::routing
