#include "cpu/convert.hpp"

namespace shunt::cpu_engine {

const ConvertKernels& convert_kernels([[maybe_unused]] Isa isa) {
#if SHUNT_X86
  switch (isa) {
    case Isa::avx512_bf16:
    case Isa::amx_bf16:
    case Isa::avx512:
      return avx512::convert_kernels;
    case Isa::avx2:
      return avx2::convert_kernels;
    case Isa::scalar:
      break;
  }
#endif
  return scalar::convert_kernels;
}

}  // namespace shunt::cpu_engine
