// The search for the codes of a group of dense3 (dense3.hpp), for several scales at once. Included
// by files that are compiled for one instruction set: plain types only.
#pragma once

#include <cstdint>

namespace shunt::cpu_engine {

inline constexpr int dense3_codes = 8, dense3_weights = 32, most_dense3_units = 6;

// By the code before: the eight numbers that a code chooses from, in units of the scale. Infinite
// are those that times the scale are no f32.
struct Dense3Sets {
  alignas(32) float of[dense3_codes][dense3_codes];
};

// What the codes cost that lead to each last one, and how they got there.
struct Dense3Costs {
  float last[dense3_codes];  // squared error over unit^2
  // Of weights 1 and on, by code: the code before it, of equal ones the lowest.
  std::uint8_t before[dense3_weights][dense3_codes];
};

// to[u] of x[0 .. count) over units[u], for u below `many`; count 1 to 32, many 1 to 6, and 6 of
// `to` in any case. A squared error is rounded at each weight: (f32(x / unit) - number)^2 + what
// was before, in f32, without fusing. The same bits in every set.
using Dense3Search = void (*)(const Dense3Sets& sets, const float* x, int count,
                              const double* units, int many, Dense3Costs* to);
enum class Isa : int;
Dense3Search dense3_search(Isa isa);

namespace scalar {
extern const Dense3Search dense3_search;
}
namespace avx2 {
extern const Dense3Search dense3_search;
}
namespace avx512 {
extern const Dense3Search dense3_search;
}

}  // namespace shunt::cpu_engine
