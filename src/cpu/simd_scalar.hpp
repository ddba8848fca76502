// Vector operations in portable C++ for the kernels: the names of simd_avx512.hpp. Four lanes as a
// compiler's vector type, which every baseline has registers for. Include inside the unnamed
// namespace of a file, after <cstring>.

#define SHUNT_INLINE inline __attribute__((always_inline))

typedef float Float4 __attribute__((vector_size(16)));
typedef std::uint32_t Word4 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));

struct F32 {
  static constexpr int width = 4;
  Float4 v;
};

SHUNT_INLINE Word4 words(Float4 a) { return reinterpret_cast<Word4>(a); }
SHUNT_INLINE Float4 floats(Word4 a) { return reinterpret_cast<Float4>(a); }
SHUNT_INLINE Word4 all(std::uint32_t x) { return Word4{x, x, x, x}; }
// x where the mask is set, else y.
SHUNT_INLINE Word4 blend(Word4 mask, Word4 x, Word4 y) { return (x & mask) | (y & ~mask); }

SHUNT_INLINE F32 set1(float x) { return {Float4{x, x, x, x}}; }
SHUNT_INLINE F32 zero() { return set1(0); }
SHUNT_INLINE F32 load(const float* p) {
  F32 a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
SHUNT_INLINE void store(float* p, F32 a) { std::memcpy(p, &a.v, sizeof a.v); }

SHUNT_INLINE F32 add(F32 a, F32 b) { return {a.v + b.v}; }
SHUNT_INLINE F32 sub(F32 a, F32 b) { return {a.v - b.v}; }
SHUNT_INLINE F32 mul(F32 a, F32 b) { return {a.v * b.v}; }
SHUNT_INLINE F32 div(F32 a, F32 b) { return {a.v / b.v}; }
// Rounded twice: a baseline need not have FMA.
SHUNT_INLINE F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
SHUNT_INLINE F32 min(F32 a, F32 b) {
  return {floats(blend(reinterpret_cast<Word4>(a.v < b.v), words(a.v), words(b.v)))};
}
SHUNT_INLINE F32 max(F32 a, F32 b) {
  return {floats(blend(reinterpret_cast<Word4>(a.v > b.v), words(a.v), words(b.v)))};
}
SHUNT_INLINE F32 abs(F32 a) { return {floats(words(a.v) & 0x7fffffffU)}; }
// For |a| < 2^22.
SHUNT_INLINE F32 round(F32 a) {
  const F32 shift = set1(12582912.0F);
  return sub(add(a, shift), shift);
}
SHUNT_INLINE F32 select_positive(F32 s, F32 x, F32 y) {
  return {floats(
      blend(reinterpret_cast<Word4>(reinterpret_cast<Int4>(s.v) < 0), words(y.v), words(x.v)))};
}
SHUNT_INLINE F32 power_of_two(F32 n) {
  const Int4 e = __builtin_convertvector(n.v, Int4) + 127;
  return {floats(reinterpret_cast<Word4>(e) << 23)};
}

SHUNT_INLINE Word4 load_halves(const std::uint16_t* p) { return Word4{p[0], p[1], p[2], p[3]}; }
SHUNT_INLINE void store_halves(std::uint16_t* p, Word4 h) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::uint16_t>(h[i]);
}

SHUNT_INLINE F32 load_bf16(const std::uint16_t* p) { return {floats(load_halves(p) << 16)}; }
SHUNT_INLINE F32 round_to_bf16(F32 a) {
  const Word4 u = words(a.v);
  const Word4 up = u + ((u >> 16) & 1U) + 0x7fffU;
  const Word4 nan = reinterpret_cast<Word4>(a.v != a.v);
  return {floats(blend(nan, u | 0x400000U, up) & 0xffff0000U)};
}
SHUNT_INLINE void store_bf16(std::uint16_t* p, F32 a) {
  store_halves(p, words(round_to_bf16(a).v) >> 16);
}

SHUNT_INLINE F32 widen_f16(Word4 h) {
  // The exponent's bias differs by 112: a multiplication by 2^112 is exact, subnormals included.
  const Word4 magnitude = (h & 0x7fffU) << 13;
  const Word4 finite = words(floats(magnitude) * 0x1p112F);
  const Word4 special = reinterpret_cast<Word4>(magnitude >= all(0x0f800000U));
  const Word4 r = blend(special, magnitude | 0x7f800000U, finite);
  return {floats(r | ((h & 0x8000U) << 16))};
}
SHUNT_INLINE F32 load_f16(const std::uint16_t* p) { return widen_f16(load_halves(p)); }
SHUNT_INLINE Word4 to_f16(F32 a) {
  const Word4 u = words(a.v);
  const F32 m = min(set1(65504.0F), abs(a));
  // Normal results: round the 13 bits that go away, then change the bias.
  const Word4 w = words(m.v);
  const Word4 normal = (w + ((w >> 13) & 1U) + 0xfffU - (112U << 23)) >> 13;
  // Below 2^-14: adding 0.5 leaves a unit of 2^-24 in the last place, rounded by the addition.
  const Word4 tiny = words(m.v + 0.5F) - 0x3f000000U;
  const Word4 is_tiny = reinterpret_cast<Word4>(w < all(0x38800000U));
  const Word4 nan = reinterpret_cast<Word4>(a.v != a.v);
  const Word4 infinite = reinterpret_cast<Word4>((u & 0x7fffffffU) == all(0x7f800000U));
  const Word4 special = all(0x7c00U) | (nan & 0x200U);
  const Word4 h = blend(nan | infinite, special, blend(is_tiny, tiny, normal));
  return h | ((u >> 16) & 0x8000U);
}
SHUNT_INLINE F32 round_to_f16(F32 a) { return widen_f16(to_f16(a)); }
SHUNT_INLINE void store_f16(std::uint16_t* p, F32 a) { store_halves(p, to_f16(a)); }
SHUNT_INLINE F32 load_pair_first(const std::uint16_t* p) {
  Word4 u;
  std::memcpy(&u, p, sizeof u);
  return {floats(u << 16)};
}
SHUNT_INLINE F32 load_pair_second(const std::uint16_t* p) {
  Word4 u;
  std::memcpy(&u, p, sizeof u);
  return {floats(u & 0xffff0000U)};
}
