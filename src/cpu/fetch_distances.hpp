// Where lines of packed weights come to the L2 first and then to the L1: so many bytes before they
// are read (docs/notes/cpu-packed.md). Included by files that are compiled for one instruction set.
#pragma once

#include <cstddef>

namespace shunt::cpu_engine {

inline constexpr std::size_t fetch_far_bytes = 8192, fetch_near_bytes = 832;

}  // namespace shunt::cpu_engine
