// Sorting networks over a few keys of one lane, in registers: greatest first.
#pragma once

#include <cstdint>
#include <utility>

#include "route/rows.cuh"

namespace shunt::routing {

// Comparators (i, j), i before j, of Batcher's odd-even merge sort of P, and of its last merge
// where the list falls and then rises.
struct Network {
  int count = 0;
  int first[64] = {}, second[64] = {};
  constexpr void add(int i, int j) {
    first[count] = i;
    second[count++] = j;
  }
};
constexpr Network sorting_network(int P) {
  Network n;
  for (int p = 1; p < P; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int j = k % p; j + k < P; j += 2 * k) {
        for (int i = 0; i < k && i + j + k < P; ++i) {
          if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) n.add(i + j, i + j + k);
        }
      }
    }
  }
  return n;
}
constexpr Network bitonic_network(int P) {
  Network n;
  for (int k = P / 2; k >= 1; k /= 2) {
    for (int i = 0; i < P; ++i) {
      if ((i & k) == 0) n.add(i, i + k);
    }
  }
  return n;
}
template <int P>
struct Networks {
  static constexpr Network sorting = sorting_network(P);
  static constexpr Network bitonic = bitonic_network(P);
};

__device__ __forceinline__ float larger_key(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float smaller_key(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ std::int32_t larger_key(std::int32_t a, std::int32_t b) {
  return max(a, b);
}
__device__ __forceinline__ std::int32_t smaller_key(std::int32_t a, std::int32_t b) {
  return min(a, b);
}
__device__ __forceinline__ std::int64_t larger_key(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
__device__ __forceinline__ std::int64_t smaller_key(std::int64_t a, std::int64_t b) {
  return a > b ? b : a;
}

template <int i, int j, class V, int P>
__device__ __forceinline__ void exchange_keys(V (&a)[P]) {
  const V x = a[i], y = a[j];
  a[i] = larger_key(x, y);
  a[j] = smaller_key(x, y);
}
// Unrolled by hand: the loops above are too deep for a compiler that keeps arrays in registers.
template <class V, int P, int... c>
__device__ __forceinline__ void sort_keys(V (&a)[P], std::integer_sequence<int, c...>) {
  (exchange_keys<Networks<P>::sorting.first[c], Networks<P>::sorting.second[c]>(a), ...);
}
template <class V, int P>
__device__ __forceinline__ void sort_keys(V (&a)[P]) {
  sort_keys(a, std::make_integer_sequence<int, Networks<P>::sorting.count>{});
}
template <class V, int P, int... c>
__device__ __forceinline__ void sort_bitonic_keys(V (&a)[P], std::integer_sequence<int, c...>) {
  (exchange_keys<Networks<P>::bitonic.first[c], Networks<P>::bitonic.second[c]>(a), ...);
}
// Sorts a list that falls and then rises.
template <class V, int P>
__device__ __forceinline__ void sort_bitonic_keys(V (&a)[P]) {
  sort_bitonic_keys(a, std::make_integer_sequence<int, Networks<P>::bitonic.count>{});
}

}  // namespace shunt::routing
