// Rows as integers of two bytes, with AVX-512: fix_row() of fixed_blocks.inl, whose numbers are
// stored otherwise. Include after it.

// store(numbers, i, n): the 16 numbers from i on, in 32 bits each, where the row's numbers begin.
template <std::uint32_t less, class Store>
bool fix_blocks(const float* from, std::size_t k, std::size_t group, void* to, float unit,
                std::int32_t more, const Store& store) {
  const std::size_t padded = (k + fixed_step - 1) / fixed_step * fixed_step;
  auto* block = static_cast<FixedBlock*>(to);
  auto* const numbers = static_cast<char*>(to) + fixed_numbers_at(k, group);
  for (std::size_t begin = 0; begin < k; begin += group, ++block) {
    const std::size_t end = begin + group < padded ? begin + group : padded;
    __m512i largest = _mm512_setzero_si512();
    for (std::size_t i = begin; i < end; i += 16) {
      const __m512 x = _mm512_abs_ps(_mm512_loadu_ps(from + i));
      largest = _mm512_max_epu32(largest, _mm512_castps_si512(x));
    }
    const std::uint32_t exponent = block_exponent(_mm512_reduce_max_epu32(largest));
    if (exponent == 255) return false;
    const __m512 factor = _mm512_set1_ps(power_of_bits(268 - less - exponent));
    __m512i sum = _mm512_setzero_si512();
    for (std::size_t i = begin; i < end; i += 16) {
      const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + i), factor));
      store(numbers, i, n);
      sum = _mm512_add_epi32(sum, n);
    }
    *block = {power_of_bits(exponent - 14 + less) * unit, -more * _mm512_reduce_add_epi32(sum)};
  }
  return true;
}
