// The end of a tile of the kernels that any GPU since compute capability 8.0 runs: from sums in
// shared memory to out, eight of a row at a time.
#pragma once

#include "activate/activation.cuh"
#include "cuda/element.cuh"
#include "gemm/hopper_product.hpp"

namespace shunt::cuda_engine {

namespace {

// Out of line: there once for each of the eight that finish_eight() has.
__device__ __noinline__ float joined(const cpu_engine::ActivationRule& rule, float gate, float up) {
  return activated(rule, gate, up);
}

// Eight sums of a row, with their ups where a column is of two, as results of `column` and the
// next: times row_scale[row] where there is one. `sums` is aligned to 16 bytes, the ups lie eight
// further.
template <bool bf16>
__device__ __forceinline__ void finish_eight(const Finish& f, const float* row_scale, int group,
                                             std::int64_t row, std::int64_t column,
                                             const float* sums) {
  const int valid = f.out_columns - column < 8 ? static_cast<int>(f.out_columns - column) : 8;
  alignas(16) float x[8], up[8] = {};  // as float4, in memory too where nothing is optimised
  const auto read = [&](const float* from, std::int64_t first, float(&to)[8]) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(from + 4);
    if (row_scale != nullptr) {
      const float scale = row_scale[row];
#pragma unroll
      for (float& value : to) value = __fmul_rn(value, scale);
    }
    if (f.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= valid) break;
      to[i] =
          __fadd_rn(to[i], load_element(f.bias, f.bias_dtype,
                                        group * f.bias_group_stride + (first + i) * f.bias_stride));
    }
  };
  read(sums, column, x);
  if (f.paired) {
    read(sums + 8, f.out_columns + column, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = joined(f.rule, x[i], up[i]);
  } else if (f.activates) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = joined(f.rule, 0.0f, x[i]);
  }
  const std::int64_t at = row * f.out_stride + column;
  if (valid == 8 && f.out_dtype == (bf16 ? DType::bf16 : DType::f16)) {
    auto* const to = static_cast<std::uint16_t*>(f.out) + at;
    if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
      const auto two = [&](int i) {
        const std::uint32_t low = bf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
        const std::uint32_t high = bf16 ? f32_to_bf16(x[i + 1]) : f32_to_f16(x[i + 1]);
        return low | high << 16;
      };
      *reinterpret_cast<uint4*>(to) = make_uint4(two(0), two(2), two(4), two(6));
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) store_element(f.out, f.out_dtype, at + i, x[i]);
  }
}

}  // namespace

}  // namespace shunt::cuda_engine
