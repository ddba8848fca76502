// Sums of a block of the routers for few tokens: 8 NT tokens x 16 MT columns over a cut of H that
// its warps cut again, in chunks of 32 along H. Of a chunk, lane 4 g + q holds k = 8 q .. 8 q + 7
// of rows g and g + 8 of W and of row g of x: 16 bytes each, which are the registers of two k16
// products of mma.sync, W as A and x as B.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/vectors.cuh"
#include "route/cuda.hpp"
#include "route/router_meeting.cuh"

namespace shunt::routing {

namespace {

constexpr int slice_warps = 8;

template <int NT, int MT>
struct Tile {
  static constexpr int tokens = 8 * NT;
  static constexpr int columns = 16 * MT;
  static constexpr int stride = columns + 4;  // floats of a token's sums: no bank twice
  static constexpr int floats = tokens * stride;
  // Chunks on their way at once, as many as registers hold.
  static constexpr int batch = MT == 1 ? (NT == 1 ? 6 : 4) : NT == 4 ? 4 : 2;
  static constexpr int blocks = NT * MT <= 4 ? 2 : 1;  // of a multiprocessor
};

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

template <class T, int NT, int MT>
__device__ __forceinline__ void multiply(const uint4 (&a)[MT][2], const uint4 (&b)[NT],
                                         float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const std::uint32_t first[4] = {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y};
    const std::uint32_t second[4] = {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      cuda_engine::mma_16816(T{}, sums[m][n], first, b[n].x, b[n].y);
      cuda_engine::mma_16816(T{}, sums[m][n], second, b[n].z, b[n].w);
    }
  }
}

// A warp's chunks [begin, end) of its block's tokens and columns.
template <int NT, int MT>
__device__ __forceinline__ void multiply_slice(const WholeOperands& o, std::int64_t first_token,
                                               int tokens, int first_column, int columns, int begin,
                                               int end, int lane, float (&sums)[MT][NT][4]) {
  const int g = lane >> 2, q = lane & 3;
  const std::uint16_t* w[MT][2];
  const std::uint16_t* x[NT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_column + min(m * 16 + half * 8 + g, columns - 1);
      w[m][half] = static_cast<const std::uint16_t*>(o.w) + row * o.w_stride + 8 * q;
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const std::int64_t row = first_token + min(n * 8 + g, tokens - 1);
    x[n] = static_cast<const std::uint16_t*>(o.x) + row * o.x_stride + 8 * q;
  }
  constexpr int batch = Tile<NT, MT>::batch;
  for (int at = begin; at < end; at += batch) {
    uint4 a[batch][MT][2], b[batch][NT];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (at + i >= end) continue;
      const int h = (at + i) * 32;
      const bool there = h + 8 * q < o.hidden;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        a[i][m][0] = load_where(w[m][0] + h, there);
        a[i][m][1] = load_where(w[m][1] + h, there);
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) b[i][n] = load_where(x[n] + h, there);
    }
    if (o.bf16) {
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (at + i < end) multiply<__nv_bfloat16, NT, MT>(a[i], b[i], sums);
      }
    } else {
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (at + i < end) multiply<__half, NT, MT>(a[i], b[i], sums);
      }
    }
  }
}

}  // namespace

}  // namespace shunt::routing
