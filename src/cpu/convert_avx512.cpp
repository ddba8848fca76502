#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu/convert_kernels.hpp"

namespace shunt::cpu_engine::avx512 {
namespace {

#include "cpu/simd_avx512.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernels.
#include "cpu/convert.inl"

}  // namespace

const ConvertKernels convert_kernels{convert_row};

}  // namespace shunt::cpu_engine::avx512
