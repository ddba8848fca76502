// One token's rows added up by the product that makes them (PairSum): a block has the same columns
// of all groups hit, a set of warps each, so that neither results nor a launch that combines them
// pass through memory. Of the same results combine()'s bits. Predicted on an H200: 0.1 us behind
// the last results, where a launch of combine() takes an edge, a read and its stores, 1.5.
#pragma once

#include "gemm/few_chain.hpp"
#include "gemm/finish.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// `rows` of weights, a warp's; box: of a block, slots * rows floats.

// Sums d of 16 rows of weights from row 16 b of the warp's on, as mma.sync leaves them, rounded as
// if they were stored; `number`: of the group hit.
template <int rows>
__device__ __forceinline__ void put_rounded(const Finish& f, float* box, int group,
                                            std::int64_t first, int b, int number,
                                            const float (&d)[4], int lane) {
  if (lane % 4 != 0) return;  // token 0 is in the first of four
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * b + 8 * half + lane / 4;
    float value = d[2 * half];
    if (f.bias != nullptr && first + row < f.out_columns) {
      value = __fadd_rn(value, bias_of(f, group, first + row));
    }
    box[number * rows + row] = f.out_dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(value))
                                                          : f16_to_f32(f32_to_f16(value));
  }
}

// By a warp, when all are there: `weight` is lane's slot's, `firsts` has a bit for each slot of a
// group.
template <int rows>
__device__ __forceinline__ void add_up(const PairSum& s, const Finish& f, const float* box,
                                       std::int64_t first, unsigned firsts, float weight,
                                       int lane) {
  const std::int64_t column = first + lane;
  const bool mine = lane < rows && column < f.out_columns;
  float sum = 0;
#pragma unroll 1
  for (; firsts != 0; box += 8 * rows) {  // eight at a time: what a read takes is latency
    float times[8], value[8];
    bool there[8];
#pragma unroll
    for (int n = 0; n < 8; ++n, firsts &= firsts - 1) {
      there[n] = firsts != 0;
      times[n] =
          __shfl_sync(0xffffffffu, weight, there[n] ? __ffs(static_cast<int>(firsts)) - 1 : 0);
      value[n] = there[n] && mine ? box[n * rows + lane] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (there[n]) sum = __fmaf_rn(times[n], value[n], sum);
    }
  }
  if (!mine) return;
  // A token that is not valid has no groups either.
  if (s.residual != nullptr && (s.valid == nullptr || __ldcg(s.valid) > 0)) {
    sum = __fadd_rn(load_element(s.residual, s.residual_dtype, column), sum);
  }
  store_element(s.out, s.out_dtype, column, sum);
}

}  // namespace shunt::cuda_engine

#endif
