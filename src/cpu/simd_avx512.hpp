// Vector operations of AVX-512 for the kernels. The same names stand in simd_avx2.hpp and
// simd_scalar.hpp. Include inside the unnamed namespace of a file compiled for this set, after
// <immintrin.h>.

#define SHUNT_INLINE inline __attribute__((always_inline))

struct F32 {
  static constexpr int width = 16;
  __m512 v;
};

SHUNT_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
SHUNT_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
SHUNT_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SHUNT_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }

SHUNT_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
SHUNT_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SHUNT_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SHUNT_INLINE F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
SHUNT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN.
SHUNT_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
SHUNT_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
SHUNT_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
SHUNT_INLINE F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// x where the sign bit of s is clear, else y.
SHUNT_INLINE F32 select_positive(F32 s, F32 x, F32 y) {
  return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(s.v)), x.v, y.v)};
}
// 2^n for integral n in [-126, 127].
SHUNT_INLINE F32 power_of_two(F32 n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

SHUNT_INLINE F32 load_bf16(const std::uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
SHUNT_INLINE F32 load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Nearest even, in the upper half of each lane; a NaN stays one.
SHUNT_INLINE F32 round_to_bf16(F32 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i r = _mm512_mask_blend_epi32(nan, up, quiet);
  return {
      _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
}
SHUNT_INLINE void store_bf16(std::uint16_t* p, F32 a) {
  const __m512i u = _mm512_srli_epi32(_mm512_castps_si512(round_to_bf16(a).v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(u));
}
SHUNT_INLINE __m256i to_f16(F32 a) {
  const F32 s = min(set1(65504.0F), max(set1(-65504.0F), a));
  const __mmask16 infinite = _mm512_fpclass_ps_mask(a.v, 0x18);
  const __m512 r = _mm512_mask_mov_ps(s.v, infinite, a.v);
  return _mm512_cvtps_ph(r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Nearest even; finite values saturate.
SHUNT_INLINE F32 round_to_f16(F32 a) { return {_mm512_cvtph_ps(to_f16(a))}; }
SHUNT_INLINE void store_f16(std::uint16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(a));
}
// Of pairs of bf16, 2 * width of them: the first and the second of each.
SHUNT_INLINE F32 load_pair_first(const std::uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
SHUNT_INLINE F32 load_pair_second(const std::uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
}
