// The router's product. Included by files compiled for one instruction set, inside its unnamed
// namespace, after simd_rows.hpp.
//
// Both operands run along H, so a tile of M tokens x N experts needs no packing: a step loads M + N
// vectors for M N FMAs. A chunk of the tile's rows stays in the L1 cache, a chunk of the block's
// tokens in L2, and the router is read once for a block of tokens. Each of the M N sums keeps its
// own order over H, so bits do not depend on M, N or the block.

constexpr int parts = dot_lanes / F32::width;
// As many sums as registers hold.
constexpr int tile_m = F32::width == 16 ? 4 : F32::width == 8 ? 3 : 1;
constexpr int tile_n = F32::width == 16 ? 4 : 2;

// Lane i adds lane i + 8, then i + 4, i + 2, i + 1: the same sums on every instruction set.
SHUNT_INLINE float fold(const F32 (&sum)[parts]) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256(sum[0].v), _mm512_extractf32x8_ps(sum[0].v, 1));
#else
  const __m256 eight = _mm256_add_ps(sum[0].v, sum[1].v);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  const F32 four = add(add(sum[0], sum[2]), add(sum[1], sum[3]));
  return (four.v[0] + four.v[2]) + (four.v[1] + four.v[3]);
#endif
}

template <int M, int N>
SHUNT_INLINE void step(const float* x, std::int64_t x_stride, const float* w, std::int64_t w_stride,
                       F32 (&sum)[M][N][parts]) {
#pragma GCC unroll 4
  for (int v = 0; v < parts; ++v) {
    F32 a[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) a[m] = load(x + m * x_stride + v * F32::width);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const F32 b = load(w + n * w_stride + v * F32::width);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m][n][v] = fma(a[m], b, sum[m][n][v]);
    }
  }
}

// M tokens by N experts over one chunk: out = sums, or out += sums after the first chunk.
template <int M, int N>
void tile(const float* x, std::int64_t x_stride, const float* w, std::int64_t w_stride,
          std::int64_t count, float* out, std::int64_t out_stride, bool first) {
  F32 sum[M][N][parts];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < parts; ++v) sum[m][n][v] = zero();
    }
  }
  const std::int64_t whole = count / dot_lanes * dot_lanes;
  for (std::int64_t i = 0; i < whole; i += dot_lanes) {
    step<M, N>(x + i, x_stride, w + i, w_stride, sum);
  }
  if (whole < count) {
    alignas(64) float x_rest[M * dot_lanes] = {};
    alignas(64) float w_rest[N * dot_lanes] = {};
    const auto rest = static_cast<std::size_t>(count - whole) * sizeof(float);
    for (int m = 0; m < M; ++m) {
      __builtin_memcpy(x_rest + m * dot_lanes, x + m * x_stride + whole, rest);
    }
    for (int n = 0; n < N; ++n) {
      __builtin_memcpy(w_rest + n * dot_lanes, w + n * w_stride + whole, rest);
    }
    step<M, N>(x_rest, dot_lanes, w_rest, dot_lanes, sum);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const float s = fold(sum[m][n]);
      float& logit = out[m * out_stride + n];
      logit = first ? s : logit + s;
    }
  }
}

// M tokens by `experts` <= tile_rows experts.
template <int M, int N>
void row_of_tiles(const float* x, std::int64_t x_stride, const float* w, std::int64_t w_stride,
                  std::int64_t experts, std::int64_t count, float* out, std::int64_t out_stride,
                  bool first) {
  std::int64_t n = 0;
  for (; n + N <= experts; n += N) {
    tile<M, N>(x, x_stride, w + n * w_stride, w_stride, count, out + n, out_stride, first);
  }
  for (; n < experts; ++n) {
    tile<M, 1>(x, x_stride, w + n * w_stride, w_stride, count, out + n, out_stride, first);
  }
}

void widen(const Rows& rows, std::int64_t row, std::int64_t begin, std::int64_t count,
           float* values) {
  const char* from =
      static_cast<const char*>(rows.data) +
      (row * rows.stride + begin) * static_cast<std::int64_t>(cpu_engine::form_bytes(rows.form));
  const auto convert = [&](Form form) __attribute__((always_inline)) {
    std::int64_t i = 0;
    for (; i + F32::width <= count; i += F32::width) {
      store(values + i, load_row(from, form, static_cast<std::size_t>(i)));
    }
    if (i < count) {
      const auto rest = static_cast<std::size_t>(count - i);
      alignas(64) float lanes[F32::width];
      store(lanes, load_row_part(from, form, static_cast<std::size_t>(i), rest));
      __builtin_memcpy(values + i, lanes, rest * sizeof(float));
    }
  };
  switch (rows.form) {
    case Form::bf16:
      return convert(Form::bf16);
    case Form::f16:
      return convert(Form::f16);
    default:
      return convert(Form::f32);
  }
}

// Rows [first, first + count) over one chunk as f32: in `space`, where rows lie in different sets
// of the L1 cache, or where they are when that would not pay.
struct Floats {
  const float* data;
  std::int64_t stride;
};
Floats floats_of(const Rows& rows, std::int64_t first, std::int64_t count, std::int64_t begin,
                 std::int64_t length, bool reused, float* space) {
  if (rows.form == Form::f32 && !reused) {
    return {static_cast<const float*>(rows.data) + first * rows.stride + begin, rows.stride};
  }
  for (std::int64_t r = 0; r < count; ++r) {
    widen(rows, first + r, begin, length, space + r * space_stride);
  }
  return {space, space_stride};
}

void dots(const Rows& x, std::int64_t first_token, std::int64_t tokens, const Rows& w,
          std::int64_t begin, std::int64_t end, std::int64_t hidden, float* logits,
          std::int64_t stride, float* space) {
  for (std::int64_t h = 0; h < hidden; h += chunk) {
    const std::int64_t length = hidden - h < chunk ? hidden - h : chunk;
    const Floats xs = floats_of(x, first_token, tokens, h, length, tokens > 1, space);
    for (std::int64_t c = begin; c < end; c += tile_rows) {
      const std::int64_t experts = end - c < tile_rows ? end - c : tile_rows;
      const Floats ws =
          floats_of(w, c, experts, h, length, tokens > tile_m, space + tokens * space_stride);
      std::int64_t t = 0;
      for (; t + tile_m <= tokens; t += tile_m) {
        row_of_tiles<tile_m, tile_n>(xs.data + t * xs.stride, xs.stride, ws.data, ws.stride,
                                     experts, length, logits + t * stride + c, stride, h == 0);
      }
      for (; t < tokens; ++t) {
        row_of_tiles<1, 4>(xs.data + t * xs.stride, xs.stride, ws.data, ws.stride, experts, length,
                           logits + t * stride + c, stride, h == 0);
      }
    }
  }
}
