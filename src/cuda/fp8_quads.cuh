// Rows to fp8 in chunks of 128 columns, four a lane of a warp: lane i has 4 i .. 4 i + 3 where rows
// are aligned, else i, i + 32, i + 64 and i + 96. For .cu files.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

constexpr int chunk = 128;

// Four elements a lane of the chunk at column h.
template <Form form, bool aligned>
struct Quad {
  Raw<4 * form_bytes(form)> raw;

  __device__ void load(const char* row, std::int64_t h, std::int64_t width, int lane) {
    if constexpr (aligned) {
      raw = {};
      if (h + 4 * lane < width) {
        raw = load_raw<4 * form_bytes(form)>(row + (h + 4 * lane) * form_bytes(form));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t at = h + 32 * i + lane;
        const std::uint32_t word =
            at < width ? load_raw<form_bytes(form)>(row + at * form_bytes(form)).word[0] : 0;
        if constexpr (form == Form::f32) {
          raw.word[i] = word;
        } else {
          raw.word[i / 2] = i % 2 == 0 ? word : raw.word[i / 2] | word << 16;
        }
      }
    }
  }
  __device__ void values(float weight, float (&x)[4]) const {
    widen<4, form>(raw, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(weight, x[i]);
  }
};

// Bits of the largest magnitude, in which infinities and NaN count as 0.
template <int count>
__device__ __forceinline__ std::uint32_t amax_bits(const float (&x)[count]) {
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = __float_as_uint(x[i]) & 0x7fffffffu;
    most = max(most, size < 0x7f800000u ? size : 0);
  }
  return most;
}

// A lane's four as e4m3, the first in the low byte.
__device__ __forceinline__ std::uint32_t quad_to_e4m3(const float (&x)[4], float factor) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(x[i], factor);
  return to_e4m3x2(y[0], y[1]) | to_e4m3x2(y[2], y[3]) << 16;
}

// Into the chunk at column h of `row`.
template <bool aligned>
__device__ __forceinline__ void store_quad(char* row, std::uint32_t word, std::int64_t h,
                                           std::int64_t width, int lane) {
  if constexpr (aligned) {
    if (h + 4 * lane < width) store_raw<4>(row + h + 4 * lane, {word});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (h + 32 * i + lane < width) {
        store_raw<1>(row + h + 32 * i + lane, {(word >> (8 * i)) & 0xffu});
      }
    }
  }
}

}  // namespace shunt::cuda_engine
