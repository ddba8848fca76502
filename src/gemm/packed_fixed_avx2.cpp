#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx2 {
namespace {

#include "cpu/simd_avx2.hpp"
// What they decode.
#include "gemm/codes_avx2.hpp"
#include "gemm/fixed_codes_avx2.hpp"
// The kernels.
#include "gemm/packed_tiles.inl"
// For rows in blocks of integers.
#include "gemm/fixed_blocks.inl"
#include "gemm/packed_fixed.inl"

}  // namespace

const FixedKernels fixed_kernels = all_fixed_kernels;

}  // namespace shunt::cpu_engine::avx2
