// Where a product's rows go, other than to their own place: where every token has one expert, a
// layer's second product writes its rows to their tokens, and nothing is left to combine.
#pragma once

#include <cmath>
#include <cstdint>

#include "activate/kernels.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Row r of the product is row `rows`[r] of out, which has as many: of 16 bits, rounded, then times
// weights[rows[r]] and rounded again, as combine() reads and writes them.
struct RowPlaces {
  const std::int32_t* rows = nullptr;  // null: row r is row r
  const float* weights = nullptr;      // [rows]; null: all 1
};

// Whether results may have places, as far as the product's own terms go.
template <class Product>
bool places_fit(const Product& p, DType dtype) {
  const Tensor& out = p.out;
  return out.dtype == dtype && dtype != DType::f32 && !p.layout.paired &&
         p.activation.kind == cpu_engine::ActivationRule::identity &&
         !(p.activation.limit < INFINITY) && out.shape[1] % 8 == 0 && out.strides[1] == 1 &&
         out.strides[0] % 8 == 0 && reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0;
}

}  // namespace shunt::cuda_engine
