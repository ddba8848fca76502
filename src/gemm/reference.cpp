#include "gemm/reference.hpp"

#include <cmath>
#include <cstddef>

#include "core/convert.hpp"
#include "gemm/group_walk.hpp"

namespace shunt {
namespace {

float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (dtype == DType::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

}  // namespace

std::vector<double> grouped_gemm_reference(const GroupedGemmSpec& spec, const GroupedGemmInputs& in,
                                           std::vector<double>* magnitude) {
  // In three dimensions: rows of group g from g * capacity on.
  const bool apart = in.rows.rank == 3;
  const std::int64_t rows = apart ? in.rows.shape[0] * in.rows.shape[1] : in.rows.shape[0];
  const auto walk = GroupWalk::of_rows(in.offsets.as<const std::int32_t>(),
                                       in.counts.as<const std::int32_t>(), spec.groups, rows);
  const std::int64_t k_stride = in.rows.strides[apart ? 2 : 1];
  const auto element = [&](std::int64_t row, std::int64_t k) {
    return k * k_stride + (apart ? row / in.rows.shape[1] * in.rows.strides[0] +
                                       row % in.rows.shape[1] * in.rows.strides[1]
                                 : row * in.rows.strides[0]);
  };
  const auto elements = static_cast<std::size_t>(rows * spec.n);
  std::vector<double> out(elements, 0.0), size(elements, 0.0);
  for (int g = 0; g < spec.groups; ++g) {
    const Tensor w = in.weights[g];
    const GroupRows here = walk.of(g);
    for (std::int64_t r = here.begin; r < here.end; ++r) {
      for (std::int64_t j = 0; j < spec.n; ++j) {
        const auto at = static_cast<std::size_t>(r * spec.n + j);
        const auto add = [&](double x) { out[at] += x, size[at] += std::abs(x); };
        if (spec.bias) {
          const Tensor bias = in.bias[g];
          add(static_cast<double>(load_f32(bias.data, bias.dtype, j * bias.strides[0])));
        }
        for (std::int64_t k = 0; k < spec.k; ++k) {
          const float x = load_f32(in.rows.data, in.rows.dtype, element(r, k));
          const float weight = load_f32(w.data, w.dtype, j * w.strides[0] + k * w.strides[1]);
          add(static_cast<double>(rounded(weight, spec.dtype)) *
              static_cast<double>(rounded(x, spec.dtype)));
        }
      }
    }
  }
  if (magnitude != nullptr) *magnitude = std::move(size);
  return out;
}

}  // namespace shunt
