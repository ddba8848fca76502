// What packed_fixed.inl computes with, in AVX2: integers of 32 bits, a column each, and pairs of 16
// bits. Include inside the unnamed namespace, after codes_avx2.hpp.

struct Whole {
  __m256i v;
};
SHUNT_INLINE Whole whole(std::int32_t n) { return {_mm256_set1_epi32(n)}; }
SHUNT_INLINE Whole times(Whole a, Whole b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
SHUNT_INLINE F32 to_f32(Whole a) { return {_mm256_cvtepi32_ps(a.v)}; }
SHUNT_INLINE Whole widen_bytes(const char* p) { return {_mm256_cvtepu8_epi32(load_bytes(p))}; }

// sum + the products of the lower halves + those of the upper ones.
SHUNT_INLINE Whole add_products(Whole sum, Words a, Words b) {
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v));
#if defined(__GNUC__)
  // Sums of integers may be put in another order: the compiler does, and runs out of registers.
  __asm__("" : "+x"(sum.v));
#endif
  return sum;
}
SHUNT_INLINE Words each_word(std::int32_t two) { return {_mm256_set1_epi32(two)}; }
SHUNT_INLINE Words both(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
SHUNT_INLINE Words flipped(Words a, Words bits) { return {_mm256_xor_si256(a.v, bits.v)}; }
SHUNT_INLINE Words upper_bytes(Words a) { return {_mm256_srli_epi16(a.v, 8)}; }
// For each byte, 0 to 15, one of the 16 bytes of four words.
SHUNT_INLINE Words look_up(const std::int32_t (&table)[4], Words bytes) {
  const __m256i both_halves =
      _mm256_broadcastsi128_si256(_mm_setr_epi32(table[0], table[1], table[2], table[3]));
  return {_mm256_shuffle_epi8(both_halves, bytes.v)};
}
