// The kernels of convert_kernels.hpp, for the set whose simd_*.hpp was included before.

void convert_row(const void* from, Form from_form, float scale, void* to, Form to_form,
                 std::size_t n) {
  constexpr std::size_t width = F32::width;
  const F32 factor = set1(scale);
  std::size_t i = 0;
  for (; i + width <= n; i += width) {
    store_row(to, to_form, i, mul(factor, load_row(from, from_form, i)));
  }
  if (i < n) {
    const F32 last = load_row_part(from, from_form, i, n - i);
    store_row_part(to, to_form, i, n - i, mul(factor, last));
  }
}
