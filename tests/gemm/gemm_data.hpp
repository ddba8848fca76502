// Random matrices of any float dtype for the tests of the GEMM.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "shunt/tensor.hpp"

namespace shunt::test {

// A dense tensor that owns its numbers.
struct Array {
  std::vector<std::uint32_t> data;
  Tensor tensor;

  Array(DType dtype, std::initializer_list<std::int64_t> shape) {
    tensor = view(static_cast<const void*>(nullptr), dtype, shape);
    data.resize(static_cast<std::size_t>(tensor.elements()) + 1);
    tensor.data = data.data();
  }
  Array(Array&&) = default;
  float get(std::int64_t i) const { return load_f32(tensor.data, tensor.dtype, i); }
  void set(std::int64_t i, float x) { store_f32(tensor.data, tensor.dtype, i, x); }
};

inline Array random_array(DType dtype, std::initializer_list<std::int64_t> shape, unsigned seed) {
  Array array(dtype, shape);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < array.tensor.elements(); ++i) array.set(i, normal(random));
  return array;
}

// Half a unit of the last place, relative.
inline double rounding(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

// Of a sum of k products in f32 one after the other, each step rounded twice at most.
inline double sum_bound(std::int64_t k, double magnitude) {
  return 2 * static_cast<double>(k + 2) * 0x1p-24 * magnitude + 1e-37;
}

}  // namespace shunt::test
