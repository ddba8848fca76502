// The kernels of kernels.hpp, for the set whose simd_*.hpp was included before.
//
// A register tile is `rows` x (`vectors` * width) sums, held from the first k to the last. A step
// loads the weights of one k (two for bf16 pairs) as `vectors` vectors and multiplies them with one
// number of each row. With AVX-512 that is 6 x 4 vectors: 24 FMA for 4 loads and 6 broadcasts; a
// step lasts 24 or 12 cycles (one or two FMA a cycle) and takes 256 bytes of the panel, which the
// L2 delivers in 4 to 8. One row alone is 4 FMA for 256 bytes: as fast as memory comes.
//
// Prefetch: one tile of rows reads the panel once, from memory; lines 2 kB ahead are asked for.
// Several tiles read it from the L2 after the first, and meanwhile fetch what comes next.
//
// Every loop over sums is unrolled by force: one that is not would put them on the stack.

#define SHUNT_UNROLL _Pragma("GCC unroll 16")

constexpr std::size_t near_bytes = 2048;

// How weights are read and multiplied. `parts`: how many k a step holds, one after the other.
struct WeightsF32 {
  using Row = float;
  using Weight = F32;
  using Factor = F32;
  static constexpr int parts = 1;
  static constexpr std::size_t k_step = 1, step_bytes = 256;
  SHUNT_INLINE static Weight weight(const char* step, int column, int) {
    return load(reinterpret_cast<const float*>(step) + column);
  }
  SHUNT_INLINE static Factor factor(const Row* row, int part) { return set1(row[part]); }
  SHUNT_INLINE static F32 add(Factor x, Weight w, F32 sum) { return fma(x, w, sum); }
};

struct WeightsF16 : WeightsF32 {
  static constexpr std::size_t step_bytes = 128;
  SHUNT_INLINE static Weight weight(const char* step, int column, int) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(step) + column);
  }
};

struct WeightsBf16 : WeightsF32 {
  static constexpr int parts = 2;
  static constexpr std::size_t k_step = 2;
  SHUNT_INLINE static Weight weight(const char* step, int column, int part) {
    const auto* pair = reinterpret_cast<const std::uint16_t*>(step) + std::ptrdiff_t{2} * column;
    return part == 0 ? load_pair_first(pair) : load_pair_second(pair);
  }
};

template <class Weights, int rows, int vectors, bool near>
__attribute__((noinline)) void multiply_tile(const Product& p, std::size_t first_row, int column,
                                             const char** fetch, const char* fetch_end,
                                             std::size_t fetch_step) {
  using Row = typename Weights::Row;
  const Row* row[rows];
  F32 sum[rows][vectors];
  float* const sums = p.sums + 64 * first_row + column;
  SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
    row[r] = reinterpret_cast<const Row*>(
        static_cast<const char*>(p.rows[first_row + static_cast<std::size_t>(r)]) + p.row_offset);
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) sum[r][v] = load(sums + std::ptrdiff_t{64} * r + std::ptrdiff_t{F32::width} * v);
  }

  const char* step = static_cast<const char*>(p.weights) +
                     Weights::step_bytes / 64 * static_cast<std::size_t>(column);
  const auto multiply_part = [&](std::size_t k, int part) __attribute__((always_inline)) {
    typename Weights::Weight w[vectors];
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) {
      w[v] = Weights::weight(step, v * F32::width, part);
    }
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      const typename Weights::Factor x = Weights::factor(row[r] + k, part);
      SHUNT_UNROLL for (int v = 0; v < vectors; ++v) sum[r][v] = Weights::add(x, w[v], sum[r][v]);
    }
  };

  constexpr std::size_t near_lines = (vectors * F32::width * Weights::step_bytes / 64 + 63) / 64;
  const char* ahead = *fetch;
  std::size_t k = 0;
  for (; k + Weights::k_step <= p.k; k += Weights::k_step) {
    SHUNT_UNROLL for (int part = 0; part < Weights::parts; ++part) multiply_part(k, part);
    if (near) {
      SHUNT_UNROLL for (std::size_t line = 0; line < near_lines; ++line) {
        __builtin_prefetch(step + near_bytes + 64 * line, 0, 3);
      }
    } else {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      ahead += fetch_step;
      ahead = ahead < fetch_end ? ahead : fetch_end;
    }
    step += Weights::step_bytes;
  }
  // The last of an odd number, whose partner is padding.
  if (Weights::parts == 2 && k < p.k) multiply_part(k, 0);
  *fetch = ahead;

  SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
    SHUNT_UNROLL for (int v = 0; v < vectors; ++v) store(sums + std::ptrdiff_t{64} * r + std::ptrdiff_t{F32::width} * v, sum[r][v]);
  }
}

// Sums that stay in registers: 24 of 32 with AVX-512, 12 of 16 elsewhere.
constexpr int tile_rows = F32::width == 16 ? 6 : F32::width == 8 ? 6 : 3;
constexpr int most_vectors(int rows) {
  if (F32::width == 16) return 4;
  if (rows == 1) return 8;
  return F32::width == 8 && rows > 2 ? 2 : 4;
}

template <class Weights, int rows, bool near>
SHUNT_INLINE void multiply_rows(const Product& p, std::size_t first_row, int column, int vectors,
                                const char** fetch, const char* fetch_end, std::size_t fetch_step) {
  constexpr int most = most_vectors(rows);
  constexpr int least = 16 / F32::width;
  if (vectors == most) {
    multiply_tile<Weights, rows, most, near>(p, first_row, column, fetch, fetch_end, fetch_step);
  } else if (vectors == least) {
    multiply_tile<Weights, rows, least, near>(p, first_row, column, fetch, fetch_end, fetch_step);
  } else {
    constexpr int middle = 2 * least < most ? 2 * least : most;
    multiply_tile<Weights, rows, middle, near>(p, first_row, column, fetch, fetch_end, fetch_step);
  }
}

template <class Weights>
void multiply(const Product& p) {
  const std::size_t tiles = (p.count + tile_rows - 1) / tile_rows;
  if (tiles == 0) return;
  const std::size_t even = p.count / tiles, larger = p.count % tiles;
  const int vectors = most_vectors(static_cast<int>(even)) * F32::width < p.columns
                          ? most_vectors(static_cast<int>(even))
                          : p.columns / F32::width;

  const int width = vectors * F32::width;
  const std::size_t steps = (p.k + Weights::k_step - 1) / Weights::k_step;
  const std::size_t lines = steps * tiles * static_cast<std::size_t>(p.columns / width);
  static const char nothing[128] = {};
  const char* fetch = p.ahead != nullptr ? p.ahead : nothing;
  const char* const fetch_end = p.ahead != nullptr ? p.ahead + p.ahead_bytes - 64 : nothing;
  const std::size_t fetch_step = p.ahead_bytes > 64 * lines ? 128 : 64;

  for (int column = 0; column < p.columns; column += width) {
    std::size_t row = 0;
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t rows = even + (tile < larger ? 1 : 0);
      const auto run = [&]<int count>() {
        if constexpr (count <= tile_rows) {
          if (tiles == 1) {
            multiply_rows<Weights, count, true>(p, row, column, vectors, &fetch, fetch_end, 0);
          } else {
            multiply_rows<Weights, count, false>(p, row, column, vectors, &fetch, fetch_end,
                                                 fetch_step);
          }
        }
      };
      switch (rows) {
        case 1:
          run.template operator()<1>();
          break;
        case 2:
          run.template operator()<2>();
          break;
        case 3:
          run.template operator()<3>();
          break;
        case 4:
          run.template operator()<4>();
          break;
        case 5:
          run.template operator()<5>();
          break;
        default:
          run.template operator()<6>();
          break;
      }
      row += rows;
    }
  }
}

template <class Weights>
void widen(const void* weights, std::size_t k, float* to) {
  const char* step = static_cast<const char*>(weights);
  for (std::size_t i = 0; i < k; i += Weights::k_step) {
    for (int part = 0; part < Weights::parts && i + static_cast<std::size_t>(part) < k; ++part) {
      for (int column = 0; column < 64; column += F32::width) {
        store(to + column, Weights::weight(step, column, part));
      }
      to += 64;
    }
    step += Weights::step_bytes;
  }
}
