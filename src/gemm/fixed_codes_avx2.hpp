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

// The two codes of a pair of k, 16 bits apart.
template <int j>
SHUNT_INLINE Words nibble_pair(Words a) {
  return {_mm256_and_si256(shifted<4 * j>(a), _mm256_set1_epi32(0x000f000f))};
}

// A word's eight e2m1, doubled and 12 more: 0 to 24. Looked up a byte each, and so two registers.
struct E2m1Sums {
  __m256i even, odd;  // k 0, 4, 1, 5 and 2, 6, 3, 7
};
SHUNT_INLINE E2m1Sums e2m1_doubled(Words a) {
  alignas(16) static constexpr std::uint8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                          12, 11, 10, 9,  8,  6,  4,  0};
  const __m256i mask = _mm256_set1_epi8(15), table = byte_table(values);
  return {_mm256_shuffle_epi8(table, _mm256_and_si256(a.v, mask)),
          _mm256_shuffle_epi8(table, _mm256_and_si256(shifted<4>(a), mask))};
}
template <int j>
SHUNT_INLINE Words doubled_pair(const E2m1Sums& a) {
  const __m256i bytes = j % 2 == 0 ? a.even : a.odd;
  if constexpr (j < 2) return {_mm256_and_si256(bytes, _mm256_set1_epi16(255))};
  return {_mm256_srli_epi16(bytes, 8)};
}
