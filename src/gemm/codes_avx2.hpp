// Codes of packed weights taken apart with AVX2: the names of codes_avx512.hpp and, since bytes are
// looked up here, not words, of codes_by_words.inl. Include inside the unnamed namespace, after
// simd_avx2.hpp.

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

// Two numbers of bf16 in each word: the lower one is a column's weight at some k, the upper one
// that of the k behind it.
struct Bf16Pair {
  __m256i v;
};
template <int i>
SHUNT_INLINE F32 number_of(Bf16Pair a) {
  if constexpr (i == 0) return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))};
  return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(-0x10000)))};
}
// 16 bytes in both halves of a register.
SHUNT_INLINE __m256i byte_table(const std::uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Look-ups are of bytes, a bf16's one after the other, for there are eight codes of 32 bits to a
// look-up of words, but 32 bytes to one of bytes.
template <int bit>
using E2m1Pair = Bf16Pair;
template <int bit>
SHUNT_INLINE E2m1Pair<bit> e2m1_pair(Words a) {
  alignas(16) static constexpr std::uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                                         0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  alignas(16) static constexpr std::uint8_t upper[16] = {
      0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  const __m256i codes = _mm256_and_si256(shifted<bit>(a), _mm256_set1_epi32(0x000f000f));
  const __m256i low = _mm256_shuffle_epi8(byte_table(lower), codes);
  const __m256i high = _mm256_shuffle_epi8(byte_table(upper), codes);
  return {_mm256_or_si256(low, _mm256_slli_epi16(high, 8))};
}
template <int i, class Pair>
SHUNT_INLINE F32 e2m1_of(Pair a) {
  return number_of<i>(a);
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
// Four windows of six bits, three apart, are looked up at once, a byte of each word for each: in
// the four quarters of the table, of which the windows' two upper bits then choose one.
template <int shift>
struct Dense3Four {
  Bf16Pair of[2];
};
template <int shift, int i>
SHUNT_INLINE __m256i dense3_window(Words a) {  // into byte i
  return _mm256_and_si256(shifted<shift - 5 * i>(a), _mm256_set1_epi32(63 << (8 * i)));
}
template <int shift>
SHUNT_INLINE __m256i dense3_from(Words a) {
  return _mm256_or_si256(_mm256_or_si256(dense3_window<shift, 0>(a), dense3_window<shift, 1>(a)),
                         _mm256_or_si256(dense3_window<shift, 2>(a), dense3_window<shift, 3>(a)));
}
// Of k from 4 p on in a column's three words.
template <int p>
SHUNT_INLINE __m256i dense3_windows(const Words (&word)[3]) {
  constexpr int bit = 12 * p - 3, at = bit < 0 ? 0 : bit / 32, shift = bit - 32 * at;
  if constexpr (shift > 32 - 15) {
    return dense3_from<0>(funnel<shift>(word[at], word[at < 2 ? at + 1 : 2]));
  } else {
    return dense3_from<shift>(word[at]);
  }
}
SHUNT_INLINE __m256i dense3_bytes(const std::uint8_t* table, __m256i windows) {
  const __m256i odd = _mm256_slli_epi16(windows, 3), last = _mm256_slli_epi16(windows, 2);
  const __m256i a = _mm256_shuffle_epi8(byte_table(table), windows);
  const __m256i b = _mm256_shuffle_epi8(byte_table(table + 16), windows);
  const __m256i c = _mm256_shuffle_epi8(byte_table(table + 32), windows);
  const __m256i d = _mm256_shuffle_epi8(byte_table(table + 48), windows);
  return _mm256_blendv_epi8(_mm256_blendv_epi8(a, b, odd), _mm256_blendv_epi8(c, d, odd), last);
}
template <int shift>
SHUNT_INLINE Dense3Four<shift> dense3_four(Words a) {
  const __m256i windows = dense3_from<shift>(a);
  const __m256i low = dense3_bytes(dense3_bytes_of_bf16.lower, windows);
  const __m256i high = dense3_bytes(dense3_bytes_of_bf16.upper, windows);
  // Woven, a column's four numbers are in two words side by side.
  const __m256 first = _mm256_castsi256_ps(_mm256_unpacklo_epi8(low, high));
  const __m256 second = _mm256_castsi256_ps(_mm256_unpackhi_epi8(low, high));
  return {{{_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88))},
           {_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd))}}};
}
template <int i, int shift>
SHUNT_INLINE F32 dense3_of(const Dense3Four<shift>& a) {
  return number_of<i % 2>(a.of[i / 2]);
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
