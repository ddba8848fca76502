#include <cstddef>
#include <cstdint>
#include <cstring>

#include "activate/kernels.hpp"

namespace shunt::cpu_engine::scalar {
namespace {

#include "cpu/simd_scalar.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The functions of one vector.
#include "cpu/simd_math.hpp"
// The nonlinearities.
#include "activate/formulas.inl"
// The kernels.
#include "activate/kernels.inl"

}  // namespace

const ActivateKernels activate_kernels{activate_row, activate_tile};

}  // namespace shunt::cpu_engine::scalar
