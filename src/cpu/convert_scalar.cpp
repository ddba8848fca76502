#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/convert_kernels.hpp"

namespace shunt::cpu_engine::scalar {
namespace {

#include "cpu/simd_scalar.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernels.
#include "cpu/convert.inl"

}  // namespace

const ConvertKernels convert_kernels{convert_row};

}  // namespace shunt::cpu_engine::scalar
