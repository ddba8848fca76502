// The end of a tile of the Hopper kernels: from sums to out, rows clipped at the group's end by the
// caller's count.
//
// Sums have weights along rows and tokens along columns, as wgmma leaves them: of an m64 block,
// d[4 j + e] is row 16 warp + lane / 4 of the weights and token 8 j + 2 (lane % 4) + e, and
// d[4 j + 2 + e] the row 8 further. Where gate and up take turns in blocks of 8 rows, these two are
// the gate and the up of one element.
#pragma once

#include "activate/activation.cuh"
#include "cuda/element.cuh"
#include "gemm/hopper_product.hpp"
#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

__device__ __forceinline__ float bias_of(const Finish& f, int group, std::int64_t column) {
  return load_element(f.bias, f.bias_dtype, group * f.bias_group_stride + column * f.bias_stride);
}

// Gated SiLU by the fast exp and reciprocal: some 4 units in the last place of f32, for results
// that are rounded to 16 bits. NaN passes the limits.
__device__ __forceinline__ float fast_silu(const cpu_engine::ActivationRule& rule, float gate,
                                           float up) {
  const auto at_most = [](float x, float limit) { return x > limit ? limit : x; };
  const float infinity = __int_as_float(0x7f800000);
  const float x = at_most(gate, rule.limit_output ? infinity : rule.limit);
  float e, inverse;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(x * (rule.alpha * -1.4426950408889634f)));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  const float a = at_most(x * inverse, rule.limit_output ? rule.limit : infinity);
  const float u = at_most(up, rule.limit);
  return a * ((u < -rule.limit ? -rule.limit : u) + rule.up_offset);
}

// `count` tokens from row `row` of out, and `span` rows of weights from `first`, 64 or 128: sums
// lie at sums[token * pitch + row]. By `threads` threads, 32 * thread / 32 of one warp.
template <int span, class Sum>
__device__ __forceinline__ void finish_sums(const Finish& f, int group, std::int64_t row, int count,
                                            std::int64_t first, const Sum& sum, int thread,
                                            int threads) {
  static_assert(span == 64 || span == 128);
  const int shift = (span == 128 ? 7 : 6) - (f.paired ? 1 : 0), wide = 1 << shift;
  const std::int64_t first_column = f.paired ? first / 2 : first;
#pragma unroll 1
  for (int i = thread; i < count * wide; i += threads) {
    const int t = i >> shift, o = i & (wide - 1);
    const std::int64_t column = first_column + o;
    if (column >= f.out_columns) continue;
    const int r = f.paired ? o / 8 * 16 + o % 8 : o;
    float value = sum(t, r);
    if (f.bias != nullptr) value = __fadd_rn(value, bias_of(f, group, column));
    if (f.paired) {
      float up = sum(t, r + 8);
      if (f.bias != nullptr) up = __fadd_rn(up, bias_of(f, group, f.out_columns + column));
      value = f.plain ? fast_silu(f.rule, value, up) : activated(f.rule, value, up);
    } else if (f.activates) {
      value = activated(f.rule, 0.0f, value);
    }
    store_element(f.out, f.out_dtype, (row + t) * f.out_stride + column, value);
  }
}

// Two results as 16 bits each, the first in the low half.
template <bool bf16>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (bf16) {
    std::uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  } else {
    return f32_to_f16(low) | static_cast<std::uint32_t>(f32_to_f16(high)) << 16;
  }
}

// The part of shared memory through which a warpgroup turns 64 rows of weights x 64 tokens at a
// time: 64 lines of 144 bytes, or 32 of 272.
inline constexpr int turn_bytes = 64 * 144;

// An m64 block of a warpgroup: `floats` / 32 times 64 tokens. `first`: its first row of weights;
// `barrier`: one of the warpgroup's own, 128 threads.
template <int floats>
class BlockFinish {
 public:
  __device__ __forceinline__ BlockFinish(const Finish& f, int group, std::int64_t row, int count,
                                         std::int64_t first, unsigned char* turn, int barrier)
      : f_(f),
        group_(group),
        row_(row),
        count_(count),
        first_(first),
        turn_(turn),
        barrier_(barrier),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void write(float (&d)[floats]) const {
    if (!f_.plain) {
      through_f32(d);
    } else if (f_.out_dtype == DType::bf16) {
      through_16<true>(d);
    } else {
      through_16<false>(d);
    }
  }

 private:
  template <bool bf16>
  __device__ __forceinline__ void through_16(float (&d)[floats]) const {
    const int lane = thread_ % 32, warp = thread_ / 32;
    const std::int64_t first_column = f_.paired ? first_ / 2 : first_;
    float bias[2] = {0, 0};
    if (f_.bias != nullptr) {
      const int r = f_.paired ? 8 * warp + lane / 4 : 16 * warp + lane / 4;
      const std::int64_t column = first_column + r, last = f_.out_columns - 1;
      bias[0] = bias_of(f_, group_, min(column, last));
      bias[1] = f_.paired ? bias_of(f_, group_, f_.out_columns + min(column, last))
                          : bias_of(f_, group_, min(column + 8, last));
    }
    const std::uint32_t turn = shared_address(turn_);
#pragma unroll
    for (int c = 0; c < floats / 32; ++c) {
      if (64 * c >= count_) break;
      if (c > 0) named_barrier(barrier_, 128);  // the chunk before has been read
      float* const e = d + 32 * c;
#pragma unroll
      for (int i = 0; i < 32; ++i) e[i] += bias[i / 2 % 2];
      if (f_.paired) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          std::uint32_t four[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float* const g = e + 4 * (j + q);
            four[q] = pack<bf16>(fast_silu(f_.rule, g[0], g[2]), fast_silu(f_.rule, g[1], g[3]));
          }
          const int token = 8 * (j + lane / 8) + lane % 8;
          stmatrix_x4_transposed(turn + static_cast<std::uint32_t>(token * 144 + 16 * warp), four);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* const g = e + 4 * j;
          const std::uint32_t four[4] = {pack<bf16>(g[0], g[1]), pack<bf16>(g[2], g[3]),
                                         pack<bf16>(g[4], g[5]), pack<bf16>(g[6], g[7])};
          const int token = 8 * (j + lane / 16) + lane % 8;
          stmatrix_x4_transposed(
              turn + static_cast<std::uint32_t>(token * 144 + 32 * warp + 16 * (lane / 8 % 2)),
              four);
        }
      }
      named_barrier(barrier_, 128);
      const int shift = f_.paired ? 2 : 3;  // 4 or 8 vectors of a token
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = thread_ + 128 * i;
        const int token = at >> shift, v = at & ((1 << shift) - 1);
        if (token >= 64 || 64 * c + token >= count_) continue;
        const std::int64_t column = first_column + 8 * v, left = f_.out_columns - column;
        const unsigned char* const from = turn_ + token * 144 + 16 * v;
        auto* const to =
            static_cast<std::uint16_t*>(f_.out) + (row_ + 64 * c + token) * f_.out_stride + column;
        if (left >= 8) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
          for (int n = 0; n < left; ++n) to[n] = reinterpret_cast<const std::uint16_t*>(from)[n];
        }
      }
    }
    named_barrier(barrier_, 128);  // the next block may write
  }

  __device__ __forceinline__ void through_f32(float (&d)[floats]) const {
    const int lane = thread_ % 32, warp = thread_ / 32;
    auto* const turn = reinterpret_cast<float*>(turn_);
    constexpr int pitch = 68;
#pragma unroll
    for (int c = 0; c < floats / 16; ++c) {
      if (32 * c >= count_) break;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        turn[token * pitch + 16 * warp + lane / 4 + i / 2 % 2 * 8] = d[16 * c + i];
      }
      named_barrier(barrier_, 128);
      finish_sums<64>(
          f_, group_, row_ + 32 * c, min(32, count_ - 32 * c), first_,
          [&](int token, int r) { return turn[token * pitch + r]; }, thread_, 128);
      named_barrier(barrier_, 128);
    }
  }

  const Finish& f_;
  int group_;
  std::int64_t row_;
  int count_;
  std::int64_t first_;
  unsigned char* turn_;
  int barrier_;
  int thread_;
};

}  // namespace shunt::cuda_engine

#endif
