// How far the numbers of a row may move where it becomes blocks of integers (fixed_rows.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/features.hpp"
#include "gemm/packed_panels.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

inline bool fixes_rows(cpu_engine::Isa isa, const FormatSpec& format, DType dtype) {
  return cpu_engine::fixed_product(isa, {.format = resolved(format)}, dtype).row != nullptr;
}

// Of every number of `row`, as it is after rounding to `dtype`; none moves where rows stay floats.
inline std::vector<double> fixed_moves(cpu_engine::Isa isa, const FormatSpec& format, DType dtype,
                                       const std::vector<double>& row) {
  std::vector<double> moves(row.size());
  if (!fixes_rows(isa, format, dtype)) return moves;
  const std::size_t group =
      cpu_engine::fixed_product(isa, {.format = resolved(format)}, dtype).group;
  for (std::size_t begin = 0; begin < row.size(); begin += group) {
    const std::size_t end = std::min(row.size(), begin + group);
    double largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(row[i]));
    const int e = largest == 0 ? -111 : std::max(std::ilogb(largest), -111);
    const int less = format.format == Format::dense3 ? 1 : 0;  // bits
    const double exact = std::ldexp(1, e - (dtype == DType::bf16 ? 7 : 4) + less);
    for (std::size_t i = begin; i < end; ++i) {
      const double size = std::fabs(row[i]);
      if (size < exact) moves[i] = std::min(size, std::ldexp(1, e - 15 + less));
    }
  }
  return moves;
}

}  // namespace shunt::test
