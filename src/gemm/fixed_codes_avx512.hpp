// What packed_fixed.inl computes with, in AVX-512 with VNNI: the names of fixed_codes_avx2.hpp.
// Include inside the unnamed namespace, after codes_avx512.hpp.

struct Whole {
  __m512i v;
};
SHUNT_INLINE Whole whole(std::int32_t n) { return {_mm512_set1_epi32(n)}; }
SHUNT_INLINE Whole times(Whole a, Whole b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
SHUNT_INLINE F32 to_f32(Whole a) { return {_mm512_cvtepi32_ps(a.v)}; }
SHUNT_INLINE Whole widen_bytes(const char* p) { return {_mm512_cvtepu8_epi32(load_bytes(p))}; }

SHUNT_INLINE Whole add_products(Whole sum, Words a, Words b) {
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
}
SHUNT_INLINE Words each_word(std::int32_t two) { return {_mm512_set1_epi32(two)}; }

template <int j>
SHUNT_INLINE Words nibble_pair(Words a) {
  return {_mm512_and_si512(shifted<4 * j>(a), _mm512_set1_epi32(0x000f000f))};
}

// Of bytes, as with AVX2: half as many look-ups as vpermw would take.
struct E2m1Sums {
  __m512i even, odd;
};
SHUNT_INLINE E2m1Sums e2m1_doubled(Words a) {
  const __m512i table = _mm512_set4_epi32(0x00040608, 0x090a0b0c, 0x18141210, 0x0f0e0d0c);
  const __m512i mask = _mm512_set1_epi32(0x0f0f0f0f);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(a.v, mask)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(shifted<4>(a), mask))};
}
template <int j>
SHUNT_INLINE Words doubled_pair(const E2m1Sums& a) {
  const __m512i bytes = j % 2 == 0 ? a.even : a.odd;
  if constexpr (j < 2) return {_mm512_and_si512(bytes, _mm512_set1_epi32(0x00ff00ff))};
  return {_mm512_srli_epi16(bytes, 8)};
}
