// The router's product. Included by files compiled for one instruction set, inside its unnamed
// namespace, after simd_rows.hpp.
//
// Both operands run along H, so a tile of M tokens x N experts needs no packing: a step loads M + N
// vectors, widens them on the way, and does M N FMAs. A chunk of the tile's experts stays in the L1
// cache, a chunk of the block's tokens in L2, and the router is read from memory once for a block.
// Each of the M N sums keeps its own order over H, so bits depend on neither M, N nor the block.

constexpr int parts = dot_lanes / F32::width;
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

template <Form form>
struct ElementOf {
  using Type = std::uint16_t;
};
template <>
struct ElementOf<Form::f32> {
  using Type = float;
};

// Rows as a tile reads them: elements of one form, from row to row `stride` of them.
template <Form form>
struct Operand {
  using Element = typename ElementOf<form>::Type;
  const Element* data;
  std::int64_t stride;

  SHUNT_INLINE const Element* row(std::int64_t r) const { return data + r * stride; }
  SHUNT_INLINE Operand from(std::int64_t r, std::int64_t column) const {
    return {data + r * stride + column, stride};
  }
};

// The first R rows, as pointers that stay in registers.
template <Form form, int R>
struct Pointers {
  const typename Operand<form>::Element* row[R];
  SHUNT_INLINE explicit Pointers(const Operand<form>& rows) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = rows.row(r);
  }
};

template <int M, int N, Form X, Form W>
SHUNT_INLINE void step(const Pointers<X, M>& x, const Pointers<W, N>& w, std::int64_t i,
                       F32 (&sum)[M][N][parts]) {
#pragma GCC unroll 4
  for (int v = 0; v < parts; ++v) {
    const auto at = static_cast<std::size_t>(i + std::int64_t{v} * F32::width);
    F32 a[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) a[m] = load_row(x.row[m], X, at);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const F32 b = load_row(w.row[n], W, at);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m][n][v] = fma(a[m], b, sum[m][n][v]);
    }
  }
}

// The last lanes of a chunk that is no multiple of dot_lanes, with zeros after them.
template <Form form, int R>
struct Rest {
  alignas(64) typename Operand<form>::Element lanes[R * dot_lanes] = {};
  Rest(const Pointers<form, R>& rows, std::int64_t begin, std::int64_t count) {
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(lanes + r * dot_lanes, rows.row[r] + begin,
                       static_cast<std::size_t>(count) * sizeof lanes[0]);
    }
  }
  SHUNT_INLINE Pointers<form, R> pointers() const {
    return Pointers<form, R>(Operand<form>{lanes, dot_lanes});
  }
};

// M tokens by N experts over one chunk: out = sums, or out += sums after the first chunk.
// `prefetch`: as many rows on are fetched for a later tile; 0: none.
template <int M, int N, Form X, Form W>
void tile(const Operand<X>& x_rows, const Operand<W>& w_rows, std::int64_t count,
          std::int64_t prefetch, float* out, std::int64_t out_stride, bool first) {
  F32 sum[M][N][parts];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < parts; ++v) sum[m][n][v] = zero();
    }
  }
  const Pointers<X, M> x(x_rows);
  const Pointers<W, N> w(w_rows);
  const std::int64_t whole = count / dot_lanes * dot_lanes;
  if (prefetch > 0) {
    const std::int64_t distance = prefetch * w_rows.stride;
    for (std::int64_t i = 0; i < whole; i += dot_lanes) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) __builtin_prefetch(w.row[n] + distance + i, 0, 2);
      step<M, N, X, W>(x, w, i, sum);
    }
  } else {
    for (std::int64_t i = 0; i < whole; i += dot_lanes) step<M, N, X, W>(x, w, i, sum);
  }
  if (whole < count) {
    const Rest<X, M> x_rest(x, whole, count - whole);
    const Rest<W, N> w_rest(w, whole, count - whole);
    step<M, N, X, W>(x_rest.pointers(), w_rest.pointers(), 0, sum);
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

template <Form form>
Operand<form> operand(const Rows& rows, std::int64_t first) {
  return Operand<form>{static_cast<const typename Operand<form>::Element*>(rows.data), rows.stride}
      .from(first, 0);
}

// One tile of the router, its first row at expert c, over one chunk.
template <Form X, Form W>
void row_of_tiles(const Operand<X>& x, std::int64_t tokens, const Operand<W>& w,
                  std::int64_t experts, std::int64_t ahead, std::int64_t length, float* out,
                  std::int64_t stride, bool first) {
  std::int64_t t = 0;
  const auto take = [&]<int M, int N>() {
    for (; t + M <= tokens; t += M) {
      const Operand<X> rows = x.from(t, 0);
      std::int64_t n = 0;
      for (; n + N <= experts; n += N) {
        tile<M, N>(rows, w.from(n, 0), length, t == 0 ? ahead : 0, out + t * stride + n, stride,
                   first);
      }
      for (; n < experts; ++n) {
        tile<M, 1>(rows, w.from(n, 0), length, 0, out + t * stride + n, stride, first);
      }
    }
  };
  // As many sums as registers hold.
  if constexpr (F32::width == 16) {
    take.template operator()<4, 4>();
    take.template operator()<2, 4>();
  } else if constexpr (F32::width == 8) {
    take.template operator()<3, 2>();
  }
  take.template operator()<1, F32::width == 4 ? 2 : 4>();
}

template <Form X, Form W>
void dots_of(const Rows& x_rows, std::int64_t first_token, std::int64_t tokens, const Rows& w_rows,
             std::int64_t begin, std::int64_t end, std::int64_t hidden, float* logits,
             std::int64_t stride) {
  const Operand<X> x = operand<X>(x_rows, first_token);
  const Operand<W> w = operand<W>(w_rows, 0);
  const auto part = [&](std::int64_t c, std::int64_t h) {
    const std::int64_t experts = end - c < tile_rows ? end - c : tile_rows;
    const std::int64_t length = hidden - h < chunk ? hidden - h : chunk;
    const std::int64_t ahead = end - c >= 2 * tile_rows ? tile_rows : 0;
    row_of_tiles(x.from(0, h), tokens, w.from(c, h), experts, ahead, length, logits + c, stride,
                 h == 0);
  };
  if (tokens < 16) {  // rows of the router in the order of memory
    for (std::int64_t c = begin; c < end; c += tile_rows) {
      for (std::int64_t h = 0; h < hidden; h += chunk) part(c, h);
    }
  } else {  // a chunk of the tokens stays in the L2 cache
    for (std::int64_t h = 0; h < hidden; h += chunk) {
      for (std::int64_t c = begin; c < end; c += tile_rows) part(c, h);
    }
  }
}

void dots(const Rows& x, std::int64_t first_token, std::int64_t tokens, const Rows& w,
          std::int64_t begin, std::int64_t end, std::int64_t hidden, float* logits,
          std::int64_t stride) {
  const auto both = [&]<Form X, Form W>() {
    dots_of<X, W>(x, first_token, tokens, w, begin, end, hidden, logits, stride);
  };
  const auto with_x = [&]<Form X>() {
    switch (w.form) {
      case Form::bf16:
        return both.template operator()<X, Form::bf16>();
      case Form::f16:
        return both.template operator()<X, Form::f16>();
      default:
        return both.template operator()<X, Form::f32>();
    }
  };
  switch (x.form) {
    case Form::bf16:
      return with_x.template operator()<Form::bf16>();
    case Form::f16:
      return with_x.template operator()<Form::f16>();
    default:
      return with_x.template operator()<Form::f32>();
  }
}
