// Codes of packed weights taken apart with AVX2: the names of codes_avx512.hpp. Include inside the
// unnamed namespace, after simd_avx2.hpp.

struct Words {
  __m256i v;
};
struct Halves {
  __m128i v;
};
struct Four {
  __m256 v;
};

SHUNT_INLINE Words load_words(const char* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
SHUNT_INLINE Halves load_half_words(const char* p) {
  return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))};
}
SHUNT_INLINE Words widen_half_words(const char* p) {
  return {_mm256_cvtepu16_epi32(load_half_words(p).v)};
}
template <int bits>
SHUNT_INLINE __m256i shifted(Words a) {
  if constexpr (bits > 0) {
    return _mm256_srli_epi32(a.v, bits);
  } else if constexpr (bits < 0) {
    return _mm256_slli_epi32(a.v, -bits);
  } else {
    return a.v;
  }
}
template <int shift>
SHUNT_INLINE Words funnel(Words low, Words high) {
  return {_mm256_or_si256(_mm256_srli_epi32(low.v, shift), _mm256_slli_epi32(high.v, 32 - shift))};
}

template <int bit>
SHUNT_INLINE F32 e2m1_of(Words a) {
  const __m256 table = _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F);
  const __m256 magnitude = _mm256_permutevar8x32_ps(table, shifted<bit>(a));
  const __m256i sign = _mm256_and_si256(shifted<bit - 28>(a), _mm256_set1_epi32(INT32_MIN));
  return {_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))};
}
template <int bit>
SHUNT_INLINE F32 nibble_of(Words a) {
  return {_mm256_cvtepi32_ps(_mm256_and_si256(shifted<bit>(a), _mm256_set1_epi32(15)))};
}
template <int bit>
SHUNT_INLINE F32 signed_byte_of(Words a) {
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(shifted<bit - 24>(a), 24))};
}
SHUNT_INLINE F32 e4m3_fields(__m128i high_bytes) {
  const __m128i fields =
      _mm_and_si128(_mm_srai_epi16(high_bytes, 1), _mm_set1_epi16(static_cast<short>(0xbf80)));
  return {_mm256_cvtph_ps(fields)};
}
template <int byte>
SHUNT_INLINE F32 e4m3_of(Halves a) {
  return e4m3_fields(byte == 0 ? _mm_slli_epi16(a.v, 8) : a.v);
}
template <int bit>
SHUNT_INLINE F32 dense3_of(Words a) {
  const __m256i window = _mm256_and_si256(shifted<bit>(a), _mm256_set1_epi32(63));
  // Two bytes each: the lower half of a word is the number before it.
  const __m256i pair =
      _mm256_i32gather_epi32(reinterpret_cast<const int*>(dense3_bf16 - 1), window, 2);
  return {_mm256_castsi256_ps(
      _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000U))))};
}

SHUNT_INLINE __m128i load_bytes(const char* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
SHUNT_INLINE F32 bytes_to_f32(const char* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(p)))};
}
SHUNT_INLINE F32 e4m3_bytes(const char* p) {
  return mul(e4m3_fields(_mm_slli_epi16(_mm_cvtepu8_epi16(load_bytes(p)), 8)), set1(256));
}
SHUNT_INLINE F32 e8m0_bytes(const char* p) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(load_bytes(p)), 23);
  return {_mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x400000)))};
}

SHUNT_INLINE Four load_four(const float* p) {
  return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))};
}
template <int bit>
SHUNT_INLINE F32 pick(Four x, Words place) {
  return {_mm256_permutevar_ps(x.v, shifted<bit>(place))};
}
