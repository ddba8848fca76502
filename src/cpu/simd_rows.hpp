// Rows of numbers as memory holds them, read and written through the vectors of simd_*.hpp. Include
// after one of those, in the same unnamed namespace.

SHUNT_INLINE F32 load_row(const void* row, Form form, std::size_t i) {
  switch (form) {
    case Form::bf16:
      return load_bf16(static_cast<const std::uint16_t*>(row) + i);
    case Form::f16:
      return load_f16(static_cast<const std::uint16_t*>(row) + i);
    default:
      return load(static_cast<const float*>(row) + i);
  }
}

SHUNT_INLINE void store_row(void* row, Form form, std::size_t i, F32 a) {
  switch (form) {
    case Form::f32:
      return store(static_cast<float*>(row) + i, a);
    case Form::bf16:
      return store_bf16(static_cast<std::uint16_t*>(row) + i, a);
    case Form::f16:
      return store_f16(static_cast<std::uint16_t*>(row) + i, a);
    case Form::f32_of_bf16:
      return store(static_cast<float*>(row) + i, round_to_bf16(a));
    case Form::f32_of_f16:
      return store(static_cast<float*>(row) + i, round_to_f16(a));
  }
}

// The first `count` < width lanes only; the others read as zero.
SHUNT_INLINE F32 load_row_part(const void* row, Form form, std::size_t i, std::size_t count) {
  alignas(64) float lanes[F32::width] = {};
  const std::size_t size = form_bytes(form);
  __builtin_memcpy(lanes, static_cast<const char*>(row) + i * size, count * size);
  return load_row(lanes, form, 0);
}

SHUNT_INLINE void store_row_part(void* row, Form form, std::size_t i, std::size_t count, F32 a) {
  alignas(64) float lanes[F32::width];
  const std::size_t size = form_bytes(form);
  store_row(lanes, form, 0, a);
  __builtin_memcpy(static_cast<char*>(row) + i * size, lanes, count * size);
}
