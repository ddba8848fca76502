// A group of dense3, 16 columns of 32 k, as windows of bits (VBMI). Include inside the unnamed
// namespace, after codes_avx512.hpp.

struct Dense3Bits {
  // Two columns of four: k 0 to 15, before which three zeros stand, and 16 to 31.
  __m512i bits[2][2];

  SHUNT_INLINE explicit Dense3Bits(const char* words) {
    const __m512i a = load_words(words).v, b = load_words(words + 256).v,
                  c = load_words(words + 512).v;
    bits[0][0] = _mm512_slli_epi64(_mm512_unpacklo_epi32(a, b), 3);
    bits[0][1] = _mm512_unpacklo_epi32(b, c);
    bits[1][0] = _mm512_slli_epi64(_mm512_unpackhi_epi32(a, b), 3);
    bits[1][1] = _mm512_unpackhi_epi32(b, c);
  }
  // k from 8 * o on, a byte each: of columns 0 and 1 of every four, or 2 and 3.
  template <int o>
  SHUNT_INLINE __m512i windows(int half) const {
    constexpr int bit = o < 2 ? 24 * o : 24 * o - 35;
    const __m512i places = _mm512_set1_epi64(0x15120f0c09060300LL + 0x0101010101010101LL * bit);
    return _mm512_multishift_epi64_epi8(places, bits[half][o / 2]);
  }
};

// From bytes of eight k, of columns 0, 1 of every four and of 2, 3: four k of all columns, and the
// other four.
struct Dense3Fours {
  __m512i of[2];
  SHUNT_INLINE Dense3Fours(__m512i first, __m512i second) {
    const __m512 a = _mm512_castsi512_ps(first), b = _mm512_castsi512_ps(second);
    of[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    of[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
  }
};
