#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/kernels.hpp"

namespace shunt::cpu_engine::avx512_bf16 {
namespace {

#include "cpu/simd_avx512.hpp"
// The kernels.
#include "gemm/kernels.inl"

// vdpbf16ps: the products of a pair, then both sums, in f32 and rounded; subnormals are zero.
struct DotBf16 {
  using Row = std::uint16_t;
  using Weight = __m512bh;
  using Factor = __m512bh;
  static constexpr int parts = 1;
  static constexpr std::size_t k_step = 2, step_bytes = 256;
  SHUNT_INLINE static Weight weight(const char* step, int column, int) {
    return reinterpret_cast<__m512bh>(
        _mm512_loadu_si512(step + std::size_t{4} * static_cast<std::size_t>(column)));
  }
  SHUNT_INLINE static Factor factor(const Row* row, int) {
    std::int32_t pair;
    __builtin_memcpy(&pair, row, sizeof pair);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  SHUNT_INLINE static F32 add(Factor x, Weight w, F32 sum) {
    return {_mm512_dpbf16_ps(sum.v, x, w)};
  }
};

}  // namespace

const GemmKernels gemm_kernels{
    .f32 = multiply<WeightsF32>,
    .f16 = multiply<WeightsF16>,
    .bf16 = multiply<WeightsBf16>,
    .bf16_dot = multiply<DotBf16>,
    .widen_f16 = widen<WeightsF16>,
    .widen_bf16 = widen<WeightsBf16>,
    .tile_rows = tile_rows,
};

}  // namespace shunt::cpu_engine::avx512_bf16
