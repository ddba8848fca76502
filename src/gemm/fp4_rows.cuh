// Rows become NVFP4 as pack() rounds matrices [1, k], bit by bit: e2m1, an e4m3 for 16 of k and one
// f32 for the row; with `scaled` = 32 one e4m3 for 32, as pack_in_pairs() has it.
//
// Nothing but f32 is needed for what pack() decides with doubles: what a number is compared with is
// t * scale of the row, t of seven bits, and the sign of fma(t, scale, -x) is that of t * scale -
// x.
#pragma once

#include <cstdint>

namespace shunt::cuda_engine {

// The f32 of a row: its largest magnitude over the largest that codes reach; never 0.
__device__ __forceinline__ float fp4_row_scale(float amax) {
  return amax == 0 ? 1.0f : fmaxf(amax / (6 * 448), 0x1p-126f);
}
// What x and the row's scale are multiplied with, so that no remainder of fma is too small for f32.
__device__ __forceinline__ float fp4_lift(float row_scale) {
  return row_scale < 0x1p-60f ? 0x1p64f : 1.0f;
}
// An e4m3 without its sign, at most 126.
__device__ __forceinline__ float fp4_scale_value(int code) {
  return code < 8 ? static_cast<float>(code) * 0x1p-9f
                  : static_cast<float>(8 + code % 8) * __int_as_float((code / 8 + 117) << 23);
}
// The e4m3 of a block whose largest magnitude is amax. Both numbers lifted.
__device__ __forceinline__ int fp4_block_scale(float amax, float row_scale) {
  if (amax == 0) return 0x38;
  const float near = amax / (6 * row_scale);
  // The code at or below `near`, or one off where that was rounded up.
  int code = near < 0x1p-6f ? static_cast<int>(near * 512)
                            : static_cast<int>(__float_as_uint(near) >> 20) - (120 << 3);
  code = min(code, 126);
  const float middle = (fp4_scale_value(code) + fp4_scale_value(code + 1)) * 3;  // times 6
  const float below = fmaf(middle, row_scale, -amax);
  if (below < 0 || (below == 0 && code % 2 == 1)) ++code;
  return max(min(code, 126), 1);
}
// The e2m1 of x under block_scale * row_scale; x and row_scale lifted.
__device__ __forceinline__ unsigned fp4_code(float x, float block_scale, float row_scale) {
  const float size = fabsf(x);
  const auto below = [&](float bound) { return fmaf(bound * block_scale, row_scale, -size); };
  const unsigned code = static_cast<unsigned>(below(0.25f) < 0) + (below(0.75f) <= 0) +
                        (below(1.25f) < 0) + (below(1.75f) <= 0) + (below(2.5f) < 0) +
                        (below(3.5f) <= 0) + (below(5.0f) < 0);
  return code | (__float_as_uint(x) >> 28 & 8);
}

// By a warp: load(i) is number i of the row. ceil(k / 2) bytes to `codes` (the nibble past an odd k
// is 0), ceil(k / scaled) to `scales`. The row's scale comes back on every lane: NaN where a number
// is NaN or infinite, so that what is multiplied with it is.
template <int scaled, class Load>
__device__ __forceinline__ float round_row_to_fp4(const Load& load, std::int64_t k,
                                                  std::uint8_t* codes, std::uint8_t* scales,
                                                  int lane) {
  constexpr unsigned infinity = 0x7f800000u;
  unsigned most = 0;  // magnitudes order as their bits do, NaN and infinities last
  for (std::int64_t i = lane; i < k; i += 32) {
    most = max(most, __float_as_uint(load(i)) & 0x7fffffffu);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
  }
  const bool finite = most < infinity;
  const float row_scale = finite ? fp4_row_scale(__uint_as_float(most)) : 1.0f;
  const float lift = fp4_lift(row_scale), unit = row_scale * lift;
  for (std::int64_t first = std::int64_t{lane} * scaled; first < k; first += 32 * scaled) {
    float x[scaled], amax = 0;
#pragma unroll
    for (int i = 0; i < scaled; ++i) {
      x[i] = first + i < k ? load(first + i) * lift : 0.0f;
      amax = fmaxf(amax, fabsf(x[i]));
    }
    const int code = fp4_block_scale(finite ? amax : 0.0f, unit);
    scales[first / scaled] = static_cast<std::uint8_t>(code);
    const float scale = fp4_scale_value(code);
#pragma unroll
    for (int i = 0; i < scaled; i += 2) {
      if (first + i >= k) break;
      const unsigned low = fp4_code(x[i], scale, unit);
      const unsigned high = first + i + 1 < k ? fp4_code(x[i + 1], scale, unit) : 0;
      codes[(first + i) / 2] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
  return finite ? row_scale : __uint_as_float(0x7fffffffu);
}

}  // namespace shunt::cuda_engine
