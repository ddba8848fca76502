// The end of a tile of few rows from the registers that its sums are in: no shared memory and no
// barrier, some 150 clocks (predicted) where finish_sums() takes 600 and 200 more a row. The same
// bits.
#pragma once

#include "gemm/finish.cuh"

namespace shunt::cuda_engine {

// Whether finish_in_registers() serves: results of 16 bits, two at a time, SiLU of pairs or
// nothing.
SHUNT_BOTH inline bool ends_in_registers(const Finish& f) {
  return has_simple_bias(f) && f.out_dtype != DType::f32 && (f.paired ? f.plain : !f.activates) &&
         f.out_stride % 2 == 0 && f.out_columns % 2 == 0 &&
         reinterpret_cast<std::uintptr_t>(f.out) % 4 == 0;
}

#if defined(SHUNT_SM_90A)

// An 8 x 8 matrix of 16 bits, of which lane l has two of row l / 4, turned.
__device__ __forceinline__ std::uint32_t turned(std::uint32_t two) {
  std::uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(two));
  return out;
}

// A warp's sums as wgmma leaves them, of `count` of `tokens` rows: each times its row's weight.
template <int tokens>
__device__ __forceinline__ void weigh_sums(const float* weights, int count, float (&d)[tokens / 2],
                                           int lane) {
#pragma unroll
  for (int j = 0; j < tokens / 8; ++j) {
    if (8 * j >= count) break;
    const int token = 8 * j + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float by = weights[min(token + i, count - 1)];
      d[4 * j + i] = __fmul_rn(d[4 * j + i], by);
      d[4 * j + 2 + i] = __fmul_rn(d[4 * j + 2 + i], by);
    }
  }
}

// A warp's sums as wgmma leaves them, 16 rows of weights of a group from `first` on by `count` of
// `tokens` rows from `row` on. Not `biased`: there is no bias, which its code would slow down.
template <int tokens, bool bf16, bool biased = true>
__device__ __forceinline__ void finish_in_registers(const Finish& f, int group, std::int64_t row,
                                                    int count, std::int64_t first,
                                                    const float (&d)[tokens / 2], int lane) {
  const std::int64_t column = (f.paired ? first / 2 : first) + 2 * (lane % 4);
  auto* const out = static_cast<std::uint16_t*>(f.out) + row * f.out_stride + column;
  const auto store = [&](int token, int along, std::uint32_t two) {
    if (token < count && column + along < f.out_columns) {
      *reinterpret_cast<std::uint32_t*>(out + token * f.out_stride + along) = two;
    }
  };
  // Of the rows of weights that this lane has sums of.
  float bias[2] = {0, 0};
  if (biased && f.bias != nullptr) {
    const float* const of_group = static_cast<const float*>(f.bias) + group * f.bias_group_stride;
    const std::int64_t at = (f.paired ? first / 2 : first) + lane / 4,
                       further = f.paired ? f.out_columns : 8;
    if (at < f.out_columns) bias[0] = __ldg(of_group + at);
    if (f.paired ? at < f.out_columns : at + 8 < f.out_columns) {
      bias[1] = __ldg(of_group + at + further);
    }
  }
#pragma unroll
  for (int j = 0; j < tokens / 8; ++j) {
    if (8 * j >= count) break;
    const int token = 8 * j + lane / 4;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = biased && f.bias != nullptr ? __fadd_rn(d[4 * j + e], bias[e / 2]) : d[4 * j + e];
    }
    if (f.paired) {
      store(token, 0,
            turned(pack<bf16>(fast_silu(f.rule, x[0], x[2]), fast_silu(f.rule, x[1], x[3]))));
    } else {
      store(token, 0, turned(pack<bf16>(x[0], x[1])));
      store(token, 8, turned(pack<bf16>(x[2], x[3])));
    }
  }
}

#endif

}  // namespace shunt::cuda_engine
