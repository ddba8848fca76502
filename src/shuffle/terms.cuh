// Weighted sums of rows on a GPU, term by term in a fixed order.
#pragma once

#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

struct Term {
  const char* row;  // null: adds nothing
  float weight;
  Form form;
};

// sum[i] += weight * row[h + i] for `together` terms, first to last, each one FMA. All their loads
// are in flight before the first is added. form: of every row, or any; n: elements of a vector.
template <Form form, int n, int together>
__device__ __forceinline__ void add_terms(const Term* terms, std::int64_t h, float (&sum)[n]) {
  Raw<form == Form::any ? 4 * n : n * form_bytes(form)> raw[together];
  Term now[together];
#pragma unroll
  for (int j = 0; j < together; ++j) now[j] = terms[j];
#pragma unroll
  for (int j = 0; j < together; ++j) {
    if (now[j].row == nullptr) continue;
    if constexpr (form == Form::any) {
      raw[j] = load_raw<n>(now[j].row, now[j].form, h);
    } else {
      raw[j] = load_raw<n * form_bytes(form)>(now[j].row + h * form_bytes(form));
    }
  }
#pragma unroll
  for (int j = 0; j < together; ++j) {
    if (now[j].row == nullptr) continue;
    float x[n];
    if constexpr (form == Form::any) {
      widen<n>(raw[j], now[j].form, x);
    } else {
      widen<n, form>(raw[j], x);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = __fmaf_rn(now[j].weight, x[i], sum[i]);
  }
}

}  // namespace shunt::cuda_engine
