// The vocabulary of cpu/simd_*.hpp for one CUDA thread: a vector of one lane. The formulas that are
// written in it (cpu/simd_math.hpp, activate/formulas.inl) then give the bits that they give on a
// CPU with FMA. Include inside a namespace of its own.

#define SHUNT_INLINE __device__ __forceinline__

struct F32 {
  float v;
};

SHUNT_INLINE F32 zero() { return {0.0f}; }
SHUNT_INLINE F32 set1(float x) { return {x}; }
// The intrinsics are never contracted: what is rounded twice stays so.
SHUNT_INLINE F32 add(F32 a, F32 b) { return {__fadd_rn(a.v, b.v)}; }
SHUNT_INLINE F32 sub(F32 a, F32 b) { return {__fsub_rn(a.v, b.v)}; }
SHUNT_INLINE F32 mul(F32 a, F32 b) { return {__fmul_rn(a.v, b.v)}; }
SHUNT_INLINE F32 div(F32 a, F32 b) { return {__fdiv_rn(a.v, b.v)}; }
SHUNT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {__fmaf_rn(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
SHUNT_INLINE F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
SHUNT_INLINE F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
SHUNT_INLINE F32 abs(F32 a) { return {fabsf(a.v)}; }
SHUNT_INLINE F32 round(F32 a) { return {rintf(a.v)}; }
// x where the sign bit of s is clear, else y.
SHUNT_INLINE F32 select_positive(F32 s, F32 x, F32 y) { return __float_as_int(s.v) < 0 ? y : x; }
// 2^n for integral n in [-126, 127].
SHUNT_INLINE F32 power_of_two(F32 n) { return {__int_as_float((__float2int_rn(n.v) + 127) << 23)}; }
