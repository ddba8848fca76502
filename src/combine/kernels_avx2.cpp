#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "combine/kernels.hpp"

namespace shunt::cpu_engine::avx2 {
namespace {

#include "cpu/simd_avx2.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernel.
#include "combine/kernels.inl"

}  // namespace

const CombineKernels combine_kernels{combine_columns};

}  // namespace shunt::cpu_engine::avx2
