// Codes of eight bits as bf16, by look-ups of bytes (VBMI). Include inside the unnamed namespace,
// after simd_avx512.hpp.

constexpr std::uint16_t bf16_of(int n) {
  std::uint32_t size = static_cast<std::uint32_t>(n < 0 ? -n : n), exponent = 127 + 7;
  if (n == 0) return 0;
  for (; size < 128; size *= 2) --exponent;
  return static_cast<std::uint16_t>((n < 0 ? 0x8000U : 0U) | (exponent << 7) | (size & 127U));
}
constexpr std::uint16_t bf16_of_e4m3(int code) {
  if (code >= 8) return static_cast<std::uint16_t>((120 << 7) + (code << 4));
  return static_cast<std::uint16_t>(code == 0 ? 0 : bf16_of(code) - (9 << 7));
}

// A code's bf16 by its lower seven bits: the upper byte and the lower.
struct Bytes {
  alignas(64) std::uint8_t upper[128];
  alignas(64) std::uint8_t lower[128];
};
constexpr Bytes bytes_of(std::uint16_t (*value)(int)) {
  Bytes table{};
  for (int i = 0; i < 128; ++i) {
    table.upper[i] = static_cast<std::uint8_t>(value(i) >> 8);
    table.lower[i] = static_cast<std::uint8_t>(value(i) & 255);
  }
  return table;
}
constexpr Bytes sizes = bytes_of(bf16_of);
constexpr Bytes e4m3 = bytes_of(bf16_of_e4m3);

struct ByteTables {
  __m512i upper[2], lower[2];
  SHUNT_INLINE explicit ByteTables(const Bytes& t)
      : upper{_mm512_load_si512(t.upper), _mm512_load_si512(t.upper + 64)},
        lower{_mm512_load_si512(t.lower), _mm512_load_si512(t.lower + 64)} {}
};
// 64 bf16 as their bytes, the sign that of the code.
struct SplitBytes {
  __m512i upper, lower;
  SHUNT_INLINE SplitBytes() = default;
  SHUNT_INLINE SplitBytes(const ByteTables& t, __m512i index, __m512i codes)
      : upper(_mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(t.upper[0], index, t.upper[1]),
                                        codes, _mm512_set1_epi8(-128), 0xf8)),
        lower(_mm512_permutex2var_epi8(t.lower[0], index, t.lower[1])) {}
  // The first or the second half of every 16.
  template <int j>
  SHUNT_INLINE __m512i half() const {
    return j == 0 ? _mm512_unpacklo_epi8(lower, upper) : _mm512_unpackhi_epi8(lower, upper);
  }
};
