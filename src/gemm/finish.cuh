// The end of a tile of the Hopper kernels: from sums to out, rows clipped at the group's end by the
// caller's count.
//
// Sums have weights along rows and tokens along columns, as wgmma leaves them: of an m64 block,
// d[4 j + e] is row 16 warp + lane / 4 of the weights and token 8 j + 2 (lane % 4) + e, and
// d[4 j + 2 + e] the row 8 further. Where gate and up take turns in blocks of 8 rows, these two are
// the gate and the up of one element.
#pragma once

#include <type_traits>

#include "activate/activation.cuh"
#include "cuda/element.cuh"
#include "gemm/hopper_product.hpp"
#include "gemm/wgmma.cuh"

namespace shunt::cuda_engine {

// What a kernel knows of its tiles' ends, and has no code for otherwise.
enum class TileEnd {
  any,     // nothing: as the Finish says
  plain,   // results are plain
  places,  // they are, and have places; no others have
};

}  // namespace shunt::cuda_engine

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

// The same where nothing is limited: the same bits, for what `ftz` flushes is nothing beside 1.
__device__ __forceinline__ float unlimited_silu(const cpu_engine::ActivationRule& rule, float gate,
                                                float up) {
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate * (rule.alpha * -1.4426950408889634f)));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  return gate * inverse * (up + rule.up_offset);
}
__device__ __forceinline__ bool is_unlimited(const cpu_engine::ActivationRule& rule) {
  return rule.limit == __int_as_float(0x7f800000);
}

// tanh by the same, 1e-6 of it: where 1 - 2 / (1 + e^2x) would cancel, x + x^3 P(x^2).
__device__ __forceinline__ float fast_tanh(float x) {
  const float square = x * x;
  const float p = ((0.0208f * square - 0.05396f) * square + 0.1333333f) * square - 0.3333333f;
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.8853900817779268f));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  return square < 0.16f ? fmaf(p * square, x, x) : fmaf(-2.0f, inverse, 1.0f);
}
// Gated SiTU without limits, for results that are rounded to 16 bits.
__device__ __forceinline__ float fast_situ(const cpu_engine::ActivationRule& rule, float gate,
                                           float up) {
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate * -1.4426950408889634f));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  const float a = rule.beta * fast_tanh(gate * rule.inverse_beta) * inverse;
  const float u =
      rule.linear_beta == 0 ? up : rule.linear_beta * fast_tanh(up * rule.inverse_linear_beta);
  return a * (u + rule.up_offset);
}

// Of a pair of sums, as the Finish says.
__device__ __forceinline__ float activated_pair(const Finish& f, float gate, float up) {
  if (f.plain) return fast_silu(f.rule, gate, up);
  return f.situ ? fast_situ(f.rule, gate, up) : activated(f.rule, gate, up);
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

// Where row `row` of the product goes, and times what.
struct Place {
  std::int32_t row;
  float weight;
};
__device__ __forceinline__ Place place_of(const Finish& f, std::int64_t row) {
  const std::int32_t to = __ldg(f.places.rows + row);
  return {to, f.places.weights != nullptr ? __ldg(f.places.weights + to) : 1};
}
// Two results of 16 bits as combine() makes them of the only row of a token: sums of one product.
// Without weights too, for a -0 becomes a 0 there.
template <bool bf16>
__device__ __forceinline__ std::uint32_t weighed(std::uint32_t two, float weight) {
  const auto low = static_cast<std::uint16_t>(two), high = static_cast<std::uint16_t>(two >> 16);
  return pack<bf16>(__fmaf_rn(weight, bf16 ? bf16_to_f32(low) : f16_to_f32(low), 0.0f),
                    __fmaf_rn(weight, bf16 ? bf16_to_f32(high) : f16_to_f32(high), 0.0f));
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
      value = activated_pair(f, value, up);
    } else if (f.activates) {
      value = activated(f.rule, 0.0f, value);
    }
    store_element(f.out, f.out_dtype, (row + t) * f.out_stride + column, value);
  }
}

// The part of shared memory through which a warpgroup's results go out: `count` boxes (1 or 2) of
// 64 tokens x 64 or, paired, 32 results of 16 bits, swizzled as `map` says, or 32 tokens x 64
// floats. The warpgroup's first thread has them copied out, while the others write the next box or
// go on to another tile.
inline constexpr int box_bytes = 64 * 128;
struct Boxes {
  unsigned char* memory = nullptr;  // at a multiple of 1024
  int count = 1;
  const void* map = nullptr;  // map_row_ends()
  int barrier = 0;            // one of the warpgroup's own, 128 threads
  int next = 0;
};

// The end of a warpgroup's part of a tile: `blocks` m64 blocks of `floats` / 32 times 64 tokens.
// `first`: the first one's first row of weights. T: of the operands, and of plain results.
// brief: less is done for tiles that are not full, for SiLU without limits and for SiTU, by more
// code. Not for many_rows.cuh, whose ends hide (docs/notes/cuda-w4.md, "A form for plain results").
template <class T, int blocks, int floats, TileEnd end = TileEnd::any, bool brief = false>
class TileFinish {
 public:
  __device__ __forceinline__ TileFinish(const Finish& f, int group, int row, int count,
                                        std::int64_t first, Boxes& boxes)
      : f_(f),
        group_(group),
        row_(row),
        count_(count),
        first_(first),
        boxes_(boxes),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void write(float (&d)[blocks][floats]) const {
    if constexpr (end == TileEnd::any) {
      if (brief && f_.situ) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) through_16<true>(d[b], first_ + 64 * b);
        return;
      }
      if (!f_.plain) return through_f32(d);
    }
#pragma unroll
    for (int b = 0; b < blocks; ++b) through_16(d[b], first_ + 64 * b);
  }

 private:
  // Of one block, whose first row of weights is `first`.
  template <bool situ = false>
  __device__ __forceinline__ void through_16(float (&d)[floats], std::int64_t first) const {
    constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
    const int lane = thread_ % 32, warp = thread_ / 32;
    const std::int64_t first_column = f_.paired ? first / 2 : first;
    if (first_column >= f_.out_columns) return;
    float bias[2] = {0, 0};
    if (f_.bias != nullptr) {
      const int r = f_.paired ? 8 * warp + lane / 4 : 16 * warp + lane / 4;
      const std::int64_t column = first_column + r, last = f_.out_columns - 1;
      bias[0] = bias_of(f_, group_, min(column, last));
      bias[1] = f_.paired ? bias_of(f_, group_, f_.out_columns + min(column, last))
                          : bias_of(f_, group_, min(column + 8, last));
    }
#pragma unroll
    for (int c = 0; c < floats / 32; ++c) {
      if (64 * c >= count_) break;
      float* const e = d + 32 * c;
      if (f_.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 32; ++i) e[i] += bias[i / 2 % 2];
      }
      if (thread_ == 0) {
        boxes_.count == 1 ? wait_for_boxes_read<0>() : wait_for_boxes_read<1>();
      }
      __syncwarp();
      named_barrier(boxes_.barrier, 128);  // the box is free
      const std::uint32_t box =
          shared_address(boxes_.memory) + static_cast<std::uint32_t>(boxes_.next * box_bytes);
      // Piece p of 16 bytes of a token's line lies at p ^ (the token's part of the swizzle).
      const bool unlimited = brief && is_unlimited(f_.rule);
      if (f_.paired) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          if (brief && 64 * c + 8 * j >= count_) break;
          std::uint32_t four[4];
          if constexpr (situ) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const float* const g = e + 4 * (j + q);
              four[q] = pack<bf16>(fast_situ(f_.rule, g[0], g[2]), fast_situ(f_.rule, g[1], g[3]));
            }
          } else if (unlimited) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const float* const g = e + 4 * (j + q);
              four[q] = pack<bf16>(unlimited_silu(f_.rule, g[0], g[2]),
                                   unlimited_silu(f_.rule, g[1], g[3]));
            }
          } else {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const float* const g = e + 4 * (j + q);
              four[q] = pack<bf16>(fast_silu(f_.rule, g[0], g[2]), fast_silu(f_.rule, g[1], g[3]));
            }
          }
          const int token = 8 * (j + lane / 8) + lane % 8, piece = warp ^ (token / 2 % 4);
          stmatrix_x4_transposed(box + static_cast<std::uint32_t>(token * 64 + 16 * piece), four);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          if (brief && 64 * c + 8 * j >= count_) break;
          const float* const g = e + 4 * j;
          const std::uint32_t four[4] = {pack<bf16>(g[0], g[1]), pack<bf16>(g[2], g[3]),
                                         pack<bf16>(g[4], g[5]), pack<bf16>(g[6], g[7])};
          const int token = 8 * (j + lane / 16) + lane % 8;
          const int piece = (2 * warp + lane / 8 % 2) ^ (token % 8);
          stmatrix_x4_transposed(box + static_cast<std::uint32_t>(token * 128 + 16 * piece), four);
        }
      }
      const int tokens = min(64, count_ - 64 * c);
      fence_for_async();
      named_barrier(boxes_.barrier, 128);  // the box is full
      if constexpr (end == TileEnd::places) {
        to_places<bf16>(first_column, box, row_ + 64 * c, tokens);
      } else if (thread_ == 0) {
        store_box(boxes_.map, box, static_cast<int>(first_column), 64 - tokens,
                  row_ + 64 * c + tokens);
      }
      __syncwarp();
      if (++boxes_.next == boxes_.count) boxes_.next = 0;
    }
  }

  // The box's first lines, each to its place: by 8 lanes, 16 bytes each. Where they go is looked up
  // for all of a thread's four at once; one line after the other is then copied, for sums fill the
  // registers.
  template <bool bf16>
  __device__ __forceinline__ void to_places(std::int64_t column, std::uint32_t box, int row,
                                            int tokens) const {
    const int piece = thread_ % 8;
    column += 8 * piece;
    if (column >= f_.out_columns) return;
    Place place[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      place[i] = place_of(f_, row + min(thread_ / 8 + 16 * i, tokens - 1));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = thread_ / 8 + 16 * i;
      if (line >= tokens) break;
      std::uint32_t x[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(box + static_cast<std::uint32_t>(line * 128 + (piece ^ line % 8) * 16)));
#pragma unroll
      for (std::uint32_t& two : x) two = weighed<bf16>(two, place[i].weight);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                       static_cast<std::uint16_t*>(f_.out) + place[i].row * f_.out_stride + column),
                   "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                   : "memory");
    }
  }

  // The code of all epilogues once: pieces of 32 tokens one after the other.
  __device__ __forceinline__ void through_f32(float (&d)[blocks][floats]) const {
    constexpr int pieces = floats / 16;
    const int lane = thread_ % 32, warp = thread_ / 32;
    auto* const box = reinterpret_cast<float*>(boxes_.memory);
    // Swizzled: lanes of one instruction differ in two bits of the token and three of the row.
    const auto at = [](int token, int r) { return token * 64 + (r ^ token / 2 % 4 * 8); };
#pragma unroll 1
    for (int piece = 0; piece < blocks * pieces; ++piece) {
      const int b = piece / pieces, token = piece % pieces * 32;
      if (token >= count_) continue;
#pragma unroll
      for (int p = 0; p < blocks * pieces; ++p) {
        if (p != piece) continue;  // registers have no index
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          box[at(i / 4 * 8 + 2 * (lane % 4) + i % 2, 16 * warp + lane / 4 + i / 2 % 2 * 8)] =
              d[p / pieces][16 * (p % pieces) + i];
        }
      }
      named_barrier(boxes_.barrier, 128);
      finish_sums<64>(
          f_, group_, row_ + token, min(32, count_ - token), first_ + 64 * b,
          [&](int t, int r) { return box[at(t, r)]; }, thread_, 128);
      named_barrier(boxes_.barrier, 128);
    }
  }

  const Finish& f_;
  int group_;
  int row_;
  int count_;
  std::int64_t first_;
  Boxes& boxes_;
  int thread_;
};

}  // namespace shunt::cuda_engine

#endif
