#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "route/policy.hpp"
#include "route/rule.hpp"

namespace shunt::routing::avx512 {
namespace {

#include "cpu/simd_avx512.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernels.
#include "route/dots.inl"
#include "route/select.inl"

}  // namespace

const Kernels kernels{widen, dots, select};

}  // namespace shunt::routing::avx512
