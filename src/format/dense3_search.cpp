#include "format/dense3_search.hpp"

#include "cpu/features.hpp"

namespace shunt::cpu_engine {

Dense3Search dense3_search([[maybe_unused]] Isa isa) {
#if SHUNT_X86
  if (isa >= Isa::avx512) return avx512::dense3_search;
  if (isa >= Isa::avx2) return avx2::dense3_search;
#endif
  return scalar::dense3_search;
}

}  // namespace shunt::cpu_engine
