// Viterbi's algorithm: each of the eight codes of a weight keeps the cheapest way to it. Include
// with `wide`, how many scales share a vector.
#define SHUNT_INLINE inline __attribute__((always_inline))

constexpr int lanes = dense3_codes * wide;
constexpr std::size_t row_bytes = sizeof(float) * dense3_codes;  // of one scale
// clang-format off
typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef std::uint8_t Bytes __attribute__((vector_size(lanes)));
// clang-format on

// The cost of one code, for all that may follow it.
template <int code, class Numbers>
SHUNT_INLINE void of_code(const Numbers& cost, Numbers& to) {
  constexpr int next = code + dense3_codes;
  if constexpr (sizeof to == row_bytes) {
    to = __builtin_shufflevector(cost, cost, code, code, code, code, code, code, code, code);
  } else {
    to = __builtin_shufflevector(cost, cost, code, code, code, code, code, code, code, code, next,
                                 next, next, next, next, next, next, next);
  }
}

struct Least {
  Floats cost;
  Ints code;
};

// Of codes first .. first + count: a tree, so that few comparisons wait for each other.
template <int first, int count>
SHUNT_INLINE void find_least(const Floats (&sets)[dense3_codes], const Floats& x,
                             const Floats& before, Least& least) {
  if constexpr (count == 1) {
    const Floats distance = x - sets[first];
    of_code<first>(before, least.cost);
    least.cost += distance * distance;
    least.code = Ints{} + first;
  } else {
    Least other;
    find_least<first, count / 2>(sets, x, before, least);
    find_least<first + count / 2, count / 2>(sets, x, before, other);
    const Ints better = other.cost < least.cost;
    least.cost = better ? other.cost : least.cost;
    least.code = better ? other.code : least.code;
  }
}

// The same number for all of a scale's codes.
template <class Numbers>
SHUNT_INLINE void share(const float (*scaled)[dense3_weights], int i, Numbers& to) {
  to = scaled[0][i] - Numbers{};
  if constexpr (sizeof to > row_bytes) {
    const Numbers second = scaled[1][i] - Numbers{};
    to = __builtin_shufflevector(to, second, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30,
                                 31);
  }
}

// The scales of `vectors` vectors, whose chains of comparisons fill each other's gaps.
template <int vectors>
SHUNT_INLINE void search_some(const Floats (&sets)[dense3_codes], const float* x, int count,
                              const double* units, int many, Dense3Costs* to) {
  alignas(64) float scaled[vectors * wide][dense3_weights];
  for (int u = 0; u < vectors * wide; ++u) {
    const double unit = units[u < many ? u : many - 1];
    for (int i = 0; i < count; ++i) {
      scaled[u][i] = static_cast<float>(static_cast<double>(x[i]) / unit);
    }
  }
  Floats cost[vectors];
  for (int v = 0; v < vectors; ++v) {
    Floats distance;
    share(&scaled[v * wide], 0, distance);
    distance -= sets[0];
    cost[v] = distance * distance;
  }
  for (int i = 1; i < count; ++i) {
    for (int v = 0; v < vectors; ++v) {
      Floats x_here;
      share(&scaled[v * wide], i, x_here);
      Least least;
      find_least<0, dense3_codes>(sets, x_here, cost[v], least);
      cost[v] = least.cost;
      const Bytes codes = __builtin_convertvector(least.code, Bytes);
      for (int w = 0; w < wide; ++w) {
        const auto* const own = reinterpret_cast<const std::uint8_t*>(&codes);
        __builtin_memcpy(to[v * wide + w].before[i], own + std::ptrdiff_t{w} * dense3_codes,
                         dense3_codes);
      }
    }
  }
  for (int u = 0; u < vectors * wide; ++u) {
    const auto* const own = reinterpret_cast<const float*>(&cost[u / wide]);
    __builtin_memcpy(to[u].last, own + std::ptrdiff_t{u % wide} * dense3_codes, sizeof to[u].last);
  }
}

void search(const Dense3Sets& sets, const float* x, int count, const double* units, int many,
            Dense3Costs* to) {
  Floats numbers[dense3_codes];
  for (int code = 0; code < dense3_codes; ++code) {
    auto* const all = reinterpret_cast<float*>(&numbers[code]);
    for (int w = 0; w < wide; ++w) {
      __builtin_memcpy(all + std::ptrdiff_t{w} * dense3_codes, sets.of[code],
                       sizeof sets.of[code]);
    }
  }
  constexpr int most = 3;
  for (int done = 0; done < many; done += most * wide) {
    const int left = many - done, vectors = (left + wide - 1) / wide;
    if (vectors >= most) {
      search_some<most>(numbers, x, count, units + done, left, to + done);
    } else if (vectors == 2) {
      search_some<2>(numbers, x, count, units + done, left, to + done);
    } else {
      search_some<1>(numbers, x, count, units + done, left, to + done);
    }
  }
}
