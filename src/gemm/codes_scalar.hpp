// Codes of packed weights taken apart in portable C++: the names of codes_avx512.hpp. Include
// inside the unnamed namespace, after simd_scalar.hpp.

struct Words {
  Word4 v;
};
struct Halves {
  Word4 v;
};
struct Four {
  Float4 v;
};

SHUNT_INLINE Words load_words(const char* p) {
  Words a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
SHUNT_INLINE Halves load_half_words(const char* p) {
  std::uint16_t h[4];
  std::memcpy(h, p, sizeof h);
  return {load_halves(h)};
}
SHUNT_INLINE Words widen_half_words(const char* p) { return {load_half_words(p).v}; }
template <int bits>
SHUNT_INLINE Word4 shifted(Words a) {
  if constexpr (bits >= 0) {
    return a.v >> static_cast<unsigned>(bits);
  } else {
    return a.v << static_cast<unsigned>(-bits);
  }
}
template <int shift>
SHUNT_INLINE Words funnel(Words low, Words high) {
  return {(low.v >> static_cast<unsigned>(shift)) | (high.v << static_cast<unsigned>(32 - shift))};
}
SHUNT_INLINE F32 to_floats(Word4 small) {
  return {__builtin_convertvector(reinterpret_cast<Int4>(small), Float4)};
}

template <int bit>
SHUNT_INLINE F32 e2m1_of(Words a) {
  static const float table[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                  -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
  const Word4 at = shifted<bit>(a) & 15U;
  return {Float4{table[at[0]], table[at[1]], table[at[2]], table[at[3]]}};
}
template <int bit>
SHUNT_INLINE F32 nibble_of(Words a) {
  return to_floats(shifted<bit>(a) & 15U);
}
template <int bit>
SHUNT_INLINE F32 signed_byte_of(Words a) {
  return {__builtin_convertvector(reinterpret_cast<Int4>(shifted<bit - 24>(a)) >> 24, Float4)};
}
// In the fields of an f16: 2^-8 of what they mean.
SHUNT_INLINE F32 e4m3_fields(Word4 bytes) {
  return widen_f16(((bytes & 0x80U) << 8) | ((bytes & 0x7fU) << 7));
}
template <int byte>
SHUNT_INLINE F32 e4m3_of(Halves a) {
  return e4m3_fields(byte == 0 ? a.v & 0xffU : a.v >> 8);
}
template <int bit>
SHUNT_INLINE F32 dense3_of(Words a) {
  const Word4 at = shifted<bit>(a) & 63U;
  return {floats(
      Word4{dense3_bf16[at[0]], dense3_bf16[at[1]], dense3_bf16[at[2]], dense3_bf16[at[3]]} << 16)};
}

SHUNT_INLINE Word4 widen_bytes(const char* p) {
  const auto* const b = reinterpret_cast<const unsigned char*>(p);
  return Word4{b[0], b[1], b[2], b[3]};
}
SHUNT_INLINE F32 bytes_to_f32(const char* p) { return to_floats(widen_bytes(p)); }
SHUNT_INLINE F32 e4m3_bytes(const char* p) { return mul(e4m3_fields(widen_bytes(p)), set1(256)); }
SHUNT_INLINE F32 e8m0_bytes(const char* p) {
  const Word4 exponent = widen_bytes(p) << 23;
  return {floats(blend(reinterpret_cast<Word4>(exponent == all(0)), all(0x400000U), exponent))};
}

SHUNT_INLINE Four load_four(const float* p) { return {load(p).v}; }
template <int bit>
SHUNT_INLINE F32 pick(Four x, Words place) {
  const Word4 at = shifted<bit>(place) & 3U;
  return {Float4{x.v[at[0]], x.v[at[1]], x.v[at[2]], x.v[at[3]]}};
}
