// The arithmetic of routing that every engine shares, so that the same logits give the same ids and
// weights to the bit, on any instruction set and on a GPU: IEEE operations in one written order.
//
// Compile with contraction off (-ffp-contract=off, nvcc -fmad=false): where a product and a sum are
// to be fused, the source says so. Functions have internal linkage, because files compiled for
// different instruction sets include this.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SHUNT_HD static __host__ __device__ __forceinline__
#else
#define SHUNT_HD static inline __attribute__((always_inline, unused))
#endif

namespace shunt::routing {

constexpr float largest = 0x1.fffffep+127F;

SHUNT_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHUNT_HD std::int32_t bits_of(float x) { return __builtin_bit_cast(std::int32_t, x); }
SHUNT_HD float float_of(std::int32_t bits) { return __builtin_bit_cast(float, bits); }
SHUNT_HD float larger(float a, float b) { return a > b ? a : b; }
SHUNT_HD float smaller(float a, float b) { return a < b ? a : b; }

// NaN and -inf become -FLT_MAX, +inf becomes FLT_MAX, and -0 becomes 0, which it ties with.
SHUNT_HD float sanitised(float x) {
  const float above = x >= -largest ? x : -largest;
  return smaller(above, largest) + 0.0F;
}

// A weight that leaves the engine: NaN becomes 0.
SHUNT_HD float finite_weight(float w) {
  const float number = w == w ? w : 0.0F;
  return smaller(larger(number, -largest), largest);
}

// e^x for x <= 0, -inf included. Within 1 ulp; below ln(2^-150) it is 0, and subnormal results are
// rounded once.
SHUNT_HD float exp_of_negative(float x) {
  const float bounded = larger(x, -104.0F);
  // Adding 1.5 * 2^23 rounds to an integer n, which the low bits of the sum hold.
  constexpr float shift = 0x1.8p+23F;
  const float shifted = fused(bounded, 0x1.715476p+0F, shift);
  const float n = shifted - shift;
  const std::int32_t exponent = bits_of(shifted) - bits_of(shift);
  // r = x - n ln 2 with ln 2 in two parts.
  const float r = fused(n, -0x1.7f7d1cp-20F, fused(n, -0x1.62e4p-1F, bounded));
  float p = 0x1.6a23d0p-10F;
  p = fused(p, r, 0x1.123a20p-7F);
  p = fused(p, r, 0x1.5558f2p-5F);
  p = fused(p, r, 0x1.555492p-3F);
  p = fused(p, r, 0x1.fffffcp-2F);
  p = fused(p, r * r, r) + 1.0F;
  // 2^n in two factors: n may be below the exponents of normal numbers.
  const std::int32_t half = exponent >> 1;
  const float first = float_of((half + 127) << 23);
  const float second = float_of((exponent - half + 127) << 23);
  return p * first * second;
}

// log(1 + e) for e in [0, 1] = 2 artanh(e / (2 + e)).
SHUNT_HD float log1p_of_unit(float e) {
  const float s = e / (2.0F + e);
  const float z = s * s;
  float p = 0x1.1ef870p-3F;
  p = fused(p, z, 0x1.1eb612p-3F);
  p = fused(p, z, 0x1.99d27cp-3F);
  p = fused(p, z, 0x1.555500p-2F);
  const float twice = s + s;
  return fused(twice, p * z, twice);
}

SHUNT_HD float sigmoid(float l) {
  const float e = exp_of_negative(l < 0 ? l : -l);
  return (l < 0 ? e : 1.0F) / (1.0F + e);
}

SHUNT_HD float sqrt_softplus(float l) {
  const float e = exp_of_negative(l < 0 ? l : -l);
  return __builtin_sqrtf(larger(l, 0.0F) + log1p_of_unit(e));
}

SHUNT_HD float hyperbolic_tangent(float x) {
  const float magnitude = x < 0 ? -x : x;
  const float z = x * x;
  float p = -0x1.76ac1ap-8F;
  p = fused(p, z, 0x1.5256d8p-6F);
  p = fused(p, z, -0x1.b84448p-5F);
  p = fused(p, z, 0x1.110768p-3F);
  p = fused(p, z, -0x1.555534p-2F);
  const float small = fused(x, p * z, x);
  const float e = exp_of_negative(-2.0F * magnitude);
  const float large = (1.0F - e) / (1.0F + e);
  return magnitude < 0.625F ? small : (x < 0 ? -large : large);
}

SHUNT_HD float soft_capped(float l, float cap) { return cap * hyperbolic_tangent(l / cap); }

// ---- selection
// ----------------------------------------------------------------------------------- A key orders
// (value, id) totally: the greater value first, then the lower id.
SHUNT_HD std::int32_t ordered(float x) {
  const std::int32_t bits = bits_of(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
SHUNT_HD std::int64_t key_of(float value, std::int32_t id) {
  // The two halves do not overlap, so + is |; the id's half is an unsigned 32-bit ~id.
  return static_cast<std::int64_t>(ordered(value)) * (std::int64_t{1} << 32) +
         (std::int64_t{0xffffffff} - id);
}
SHUNT_HD std::int32_t id_of(std::int64_t key) {
  return static_cast<std::int32_t>(0xffffffff - (static_cast<std::uint64_t>(key) & 0xffffffff));
}
// Below the key of every sanitised value: masked, taken, or past the end.
constexpr std::int64_t no_key = INT64_MIN;

// ---- sums
// ---------------------------------------------------------------------------------------- Sums
// over the experts run in 32 strided lanes, lane j adding j, j + 32, .. in this order; then lane i
// adds lane i ^ 16, i ^ 8, i ^ 4, i ^ 2, i ^ 1. That is one warp with shuffles. Sums over the
// selected run from the best on.
constexpr int sum_lanes = 32;

// ---- weights
// -------------------------------------------------------------------------------------
SHUNT_HD float renormalised(float p, float sum, float epsilon, bool epsilon_is_floor) {
  const float denominator = epsilon_is_floor ? larger(sum, epsilon) : sum + epsilon;
  return denominator == 0 ? 0.0F : p / denominator;
}

// Phi-3.5: whether an expert not yet taken belongs to the softmax of this round. 0 / 0 does.
SHUNT_HD bool sparsemixer_keeps(float l, float best, float twice_jitter) {
  const float magnitude = l < 0 ? -l : l;
  return !((best - l) / larger(magnitude, best) > twice_jitter);
}

}  // namespace shunt::routing
