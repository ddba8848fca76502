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
SHUNT_INLINE Words both(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
SHUNT_INLINE Words flipped(Words a, Words bits) { return {_mm512_xor_si512(a.v, bits.v)}; }
SHUNT_INLINE Words upper_bytes(Words a) { return {_mm512_srli_epi16(a.v, 8)}; }
SHUNT_INLINE Words look_up(const std::int32_t (&table)[4], Words bytes) {
  return {_mm512_shuffle_epi8(_mm512_set4_epi32(table[3], table[2], table[1], table[0]), bytes.v)};
}
