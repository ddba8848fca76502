// For sets that look up a word's codes one by one: what packed_kernels.inl looks up together is the
// word. Include after the set's codes_*.hpp.

// The codes from `bit` and from `bit` + 16 on.
template <int bit>
struct E2m1Pair {
  Words words;
};
template <int bit>
SHUNT_INLINE E2m1Pair<bit> e2m1_pair(Words a) {
  return {a};
}
template <int i, int bit>
SHUNT_INLINE F32 e2m1_of(E2m1Pair<bit> a) {
  return e2m1_of<bit + 16 * i>(a.words);
}

// Four windows of six bits, three apart, from `shift` on.
template <int shift>
struct Dense3Four {
  Words words;
};
template <int shift>
SHUNT_INLINE Dense3Four<shift> dense3_four(Words a) {
  return {a};
}
template <int i, int shift>
SHUNT_INLINE F32 dense3_of(Dense3Four<shift> a) {
  return dense3_of<shift + 3 * i>(a.words);
}
