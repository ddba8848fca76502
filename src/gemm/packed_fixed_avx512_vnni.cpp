#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx512_vnni {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/codes_avx512.hpp"
#include "gemm/fixed_codes_avx512.hpp"
// The kernels.
#include "gemm/packed_tiles.inl"
// For rows in blocks of integers.
#include "gemm/fixed_blocks.inl"
#include "gemm/packed_fixed.inl"

}  // namespace

const FixedKernels fixed_kernels = all_fixed_kernels;

}  // namespace shunt::cpu_engine::avx512_vnni
