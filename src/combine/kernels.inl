// The kernel of kernels.hpp, for the set whose simd_*.hpp was included before. Sums stay in
// registers over all terms of a strip of columns; bound by the reads of the rows, which run as so
// many streams side by side.

template <int vectors>
SHUNT_INLINE void strip(const Term* terms, std::size_t count, void* out, Form out_form,
                        std::size_t h) {
  constexpr auto width = static_cast<std::size_t>(F32::width);
  F32 sums[vectors];
#pragma GCC unroll 8
  for (std::size_t v = 0; v < vectors; ++v) sums[v] = zero();
  for (std::size_t i = 0; i < count; ++i) {
    const F32 weight = set1(terms[i].weight);
    const void* row = terms[i].row;
    switch (terms[i].form) {
      case Form::bf16:
#pragma GCC unroll 8
        for (std::size_t v = 0; v < vectors; ++v) {
          sums[v] = fma(weight, load_row(row, Form::bf16, h + v * width), sums[v]);
        }
        break;
      case Form::f16:
#pragma GCC unroll 8
        for (std::size_t v = 0; v < vectors; ++v) {
          sums[v] = fma(weight, load_row(row, Form::f16, h + v * width), sums[v]);
        }
        break;
      default:
#pragma GCC unroll 8
        for (std::size_t v = 0; v < vectors; ++v) {
          sums[v] = fma(weight, load_row(row, Form::f32, h + v * width), sums[v]);
        }
    }
  }
#pragma GCC unroll 8
  for (std::size_t v = 0; v < vectors; ++v) store_row(out, out_form, h + v * width, sums[v]);
}

void combine_columns(const Term* terms, std::size_t count, void* out, Form out_form,
                     std::size_t begin, std::size_t end) {
  constexpr auto width = static_cast<std::size_t>(F32::width);
  std::size_t h = begin;
  for (; h + 8 * width <= end; h += 8 * width) strip<8>(terms, count, out, out_form, h);
  for (; h + width <= end; h += width) strip<1>(terms, count, out, out_form, h);
  if (h == end) return;
  F32 sum = zero();
  for (std::size_t i = 0; i < count; ++i) {
    sum = fma(set1(terms[i].weight), load_row_part(terms[i].row, terms[i].form, h, end - h), sum);
  }
  store_row_part(out, out_form, h, end - h, sum);
}
