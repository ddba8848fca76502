// Codes of packed weights taken apart with AVX-512: the names stand in codes_avx2.hpp and
// codes_scalar.hpp too. Include inside the unnamed namespace, after simd_avx512.hpp.

struct Words {
  __m512i v;
};
struct Halves {
  __m256i v;
};
struct Four {
  __m512 v;
};

SHUNT_INLINE Words load_words(const char* p) { return {_mm512_loadu_si512(p)}; }
SHUNT_INLINE Halves load_half_words(const char* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
SHUNT_INLINE Words widen_half_words(const char* p) {
  return {_mm512_cvtepu16_epi32(load_half_words(p).v)};
}
// Positive: to the right.
template <int bits>
SHUNT_INLINE __m512i shifted(Words a) {
  if constexpr (bits > 0) {
    return _mm512_srli_epi32(a.v, bits);
  } else if constexpr (bits < 0) {
    return _mm512_slli_epi32(a.v, -bits);
  } else {
    return a.v;
  }
}
// The words `shift` bits further along low, high.
template <int shift>
SHUNT_INLINE Words funnel(Words low, Words high) {
  return {_mm512_or_si512(_mm512_srli_epi32(low.v, shift), _mm512_slli_epi32(high.v, 32 - shift))};
}

template <int bit>
SHUNT_INLINE F32 e2m1_of(Words a) {
  const __m512 table = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F,
                                      -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
  return {_mm512_permutexvar_ps(shifted<bit>(a), table)};
}
template <int bit>
SHUNT_INLINE F32 nibble_of(Words a) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(shifted<bit>(a), table)};
}
template <int bit>
SHUNT_INLINE F32 signed_byte_of(Words a) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(shifted<bit - 24>(a), 24))};
}
SHUNT_INLINE F32 e4m3_fields(__m256i high_bytes) {
  const __m256i fields = _mm256_and_si256(_mm256_srai_epi16(high_bytes, 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return {_mm512_cvtph_ps(fields)};
}
template <int byte>
SHUNT_INLINE F32 e4m3_of(Halves a) {
  return e4m3_fields(byte == 0 ? _mm256_slli_epi16(a.v, 8) : a.v);
}
// The window from `bit` on, in the upper half of each lane, looks up a bf16: an f32 with its lower
// half cleared.
template <int bit>
SHUNT_INLINE F32 dense3_of(Words a) {
  const auto* const table = dense3_bf16;
  const __m512i low = _mm512_loadu_si512(table), high = _mm512_loadu_si512(table + 32);
  return {_mm512_castsi512_ps(
      _mm512_maskz_permutex2var_epi16(0xaaaaaaaaU, low, shifted<bit - 16>(a), high))};
}

SHUNT_INLINE __m128i load_bytes(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
SHUNT_INLINE F32 bytes_to_f32(const char* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(p)))};
}
SHUNT_INLINE F32 e4m3_bytes(const char* p) {
  const __m256i fields = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return mul({_mm512_cvtph_ps(fields)}, set1(256));
}
SHUNT_INLINE F32 e8m0_bytes(const char* p) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_bytes(p)), 23);
  return {_mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x400000)))};
}

SHUNT_INLINE Four load_four(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
// Of four numbers that which bits `bit`, `bit` + 1 of the lane name.
template <int bit>
SHUNT_INLINE F32 pick(Four x, Words place) {
  return {_mm512_permutevar_ps(x.v, shifted<bit>(place))};
}
