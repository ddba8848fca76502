// Vector operations of AVX2 with FMA and F16C for the kernels: the names of simd_avx512.hpp.
// Include inside the unnamed namespace of a file compiled for this set, after <immintrin.h>.

#define SHUNT_INLINE inline __attribute__((always_inline))

struct F32 {
  static constexpr int width = 8;
  __m256 v;
};

SHUNT_INLINE F32 zero() { return {_mm256_setzero_ps()}; }
SHUNT_INLINE F32 set1(float x) { return {_mm256_set1_ps(x)}; }
SHUNT_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
SHUNT_INLINE void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }

SHUNT_INLINE F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
SHUNT_INLINE F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
SHUNT_INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
SHUNT_INLINE F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
SHUNT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
SHUNT_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
SHUNT_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
SHUNT_INLINE F32 abs(F32 a) {
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))};
}
SHUNT_INLINE F32 round(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
SHUNT_INLINE F32 select_positive(F32 s, F32 x, F32 y) { return {_mm256_blendv_ps(x.v, y.v, s.v)}; }
SHUNT_INLINE F32 power_of_two(F32 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}

SHUNT_INLINE F32 load_bf16(const std::uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
SHUNT_INLINE F32 load_f16(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
SHUNT_INLINE F32 round_to_bf16(F32 a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i r = _mm256_blendv_epi8(up, quiet, nan);
  return {
      _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000U))))};
}
SHUNT_INLINE void store_bf16(std::uint16_t* p, F32 a) {
  const __m256i u = _mm256_srli_epi32(_mm256_castps_si256(round_to_bf16(a).v), 16);
  const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
}
SHUNT_INLINE __m128i to_f16(F32 a) {
  const F32 s = min(set1(65504.0F), max(set1(-65504.0F), a));
  const __m256 infinite = _mm256_cmp_ps(abs(a).v, set1(__builtin_inff()).v, _CMP_EQ_OQ);
  return _mm256_cvtps_ph(_mm256_blendv_ps(s.v, a.v, infinite),
                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
SHUNT_INLINE F32 round_to_f16(F32 a) { return {_mm256_cvtph_ps(to_f16(a))}; }
SHUNT_INLINE void store_f16(std::uint16_t* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_f16(a));
}
SHUNT_INLINE F32 load_pair_first(const std::uint16_t* p) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(u, 16))};
}
SHUNT_INLINE F32 load_pair_second(const std::uint16_t* p) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {
      _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000U))))};
}
