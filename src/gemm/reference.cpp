#include "gemm/reference.hpp"

#include <cmath>
#include <cstddef>

#include "core/convert.hpp"
#include "format/pairs.hpp"
#include "format/rules.hpp"
#include "gemm/group_walk.hpp"

namespace shunt {
namespace {

float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (dtype == DType::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

// A row as what it becomes in NVFP4: a matrix [1, k] of its own; with sparse weights a scale is for
// 32. NaN where a number is not finite.
std::vector<double> in_nvfp4(const std::vector<float>& row, bool sparse) {
  const auto k = static_cast<std::int64_t>(row.size());
  for (const float x : row) {
    if (!std::isfinite(x)) return std::vector<double>(row.size(), std::nan(""));
  }
  const Buffer memory = cpu({.threads = 1}).allocate(packed_bytes({Format::nvfp4}, 1, k));
  const PackedMatrix packed = sparse ? pack_in_pairs(Format::nvfp4, row.data(), 1, k, memory)
                                     : pack({Format::nvfp4}, view(row.data(), {1, k}), memory);
  std::vector<double> values(row.size());
  nvfp4_rules.decode(packed, 0, values.data());
  return values;
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
  const bool four_bits = spec.rows == RowFormat::nvfp4;
  const auto elements = static_cast<std::size_t>(rows * spec.n);
  std::vector<double> out(elements, 0.0), size(elements, 0.0);
  for (int g = 0; g < spec.groups; ++g) {
    const Tensor w = in.weights[g];
    const GroupRows here = walk.of(g);
    for (std::int64_t r = here.begin; r < here.end; ++r) {
      std::vector<float> row(static_cast<std::size_t>(spec.k));
      for (std::int64_t k = 0; k < spec.k; ++k) {
        row[static_cast<std::size_t>(k)] = load_f32(in.rows.data, in.rows.dtype, element(r, k));
      }
      std::vector<double> x(row.size());
      for (std::size_t k = 0; k < x.size(); ++k) {
        x[k] = static_cast<double>(rounded(row[k], spec.dtype));
      }
      if (four_bits) x = in_nvfp4(row, spec.format.format == Format::sparse_nvfp4);
      for (std::int64_t j = 0; j < spec.n; ++j) {
        const auto at = static_cast<std::size_t>(r * spec.n + j);
        const auto add = [&](double y) { out[at] += y, size[at] += std::abs(y); };
        if (spec.bias) {
          const Tensor bias = in.bias[g];
          add(static_cast<double>(load_f32(bias.data, bias.dtype, j * bias.strides[0])));
        }
        for (std::int64_t k = 0; k < spec.k; ++k) {
          const float weight = load_f32(w.data, w.dtype, j * w.strides[0] + k * w.strides[1]);
          add(static_cast<double>(four_bits ? weight : rounded(weight, spec.dtype)) *
              x[static_cast<std::size_t>(k)]);
        }
      }
    }
  }
  if (magnitude != nullptr) *magnitude = std::move(size);
  return out;
}

}  // namespace shunt
