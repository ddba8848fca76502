#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gemm/dense3_bf16.hpp"
#include "gemm/packed_kernels.hpp"

namespace shunt::cpu_engine::avx512 {
namespace {

#include "cpu/simd_avx512.hpp"
// What they decode.
#include "gemm/codes_avx512.hpp"
// Word by word.
#include "gemm/codes_by_words.inl"
// The kernels.
#include "gemm/packed_tiles.inl"
// For rows in f32.
#include "gemm/packed_kernels.inl"

}  // namespace

const PackedKernels packed_kernels = all_packed_kernels;

}  // namespace shunt::cpu_engine::avx512
