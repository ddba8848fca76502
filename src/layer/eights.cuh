// Eight numbers of a row of f32, bf16 or f16, by a thread.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

// Eight numbers of a row from `column` on, 0 where it has ended.
__device__ __forceinline__ void load_eight(const char* row, DType dtype, std::int64_t column,
                                           std::int64_t columns, float (&x)[8]) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 == 0 && column + 8 <= columns) {
    if (dtype == DType::f32) return widen<8, Form::f32>(load_raw<32>(row + 4 * column), x);
    const Raw<16> raw = load_raw<16>(row + 2 * column);
    dtype == DType::bf16 ? widen<8, Form::bf16>(raw, x) : widen<8, Form::f16>(raw, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = column + i < columns ? load_element(row, dtype, column + i) : 0.0f;
  }
}

// The same way back, up to the row's end. Not by store_raw(): the next kernel reads it.
__device__ __forceinline__ void store_eight(char* row, DType dtype, std::int64_t column,
                                            std::int64_t columns, const float (&x)[8]) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 == 0 && column + 8 <= columns) {
    const auto store = [&]<int bytes>(const Raw<bytes>& raw) {
      auto* const to = reinterpret_cast<uint4*>(row + bytes / 8 * column);
#pragma unroll
      for (int i = 0; i < bytes / 16; ++i) {
        to[i] = make_uint4(raw.word[4 * i], raw.word[4 * i + 1], raw.word[4 * i + 2],
                           raw.word[4 * i + 3]);
      }
    };
    if (dtype == DType::f32) return store(narrow<8, Form::f32>(x));
    return dtype == DType::bf16 ? store(narrow<8, Form::bf16>(x)) : store(narrow<8, Form::f16>(x));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) store_element(row, dtype, column + i, x[i]);
  }
}

}  // namespace shunt::cuda_engine
