#include <cstddef>
#include <cstdint>
#include <cstring>

#include "route/policy.hpp"
#include "route/rule.hpp"

namespace shunt::routing::scalar {
namespace {

#include "cpu/simd_scalar.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernels.
#include "route/dots.inl"
#include "route/select.inl"

}  // namespace

const Kernels kernels{widen, dots, select};

}  // namespace shunt::routing::scalar
