#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gemm/kernels.hpp"

namespace shunt::cpu_engine::scalar {
namespace {

#include "cpu/simd_scalar.hpp"
// The kernels.
#include "gemm/kernels.inl"

}  // namespace

const GemmKernels gemm_kernels{
    .f32 = multiply<WeightsF32>,
    .f16 = multiply<WeightsF16>,
    .bf16 = multiply<WeightsBf16>,
    .bf16_dot = nullptr,
    .widen_f16 = widen<WeightsF16>,
    .widen_bf16 = widen<WeightsBf16>,
    .tile_rows = tile_rows,
};

}  // namespace shunt::cpu_engine::scalar
