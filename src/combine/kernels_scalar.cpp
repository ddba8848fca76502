#include <cstddef>
#include <cstdint>
#include <cstring>

#include "combine/kernels.hpp"

namespace shunt::cpu_engine::scalar {
namespace {

#include "cpu/simd_scalar.hpp"
// In this order.
#include "cpu/simd_rows.hpp"
// The kernel.
#include "combine/kernels.inl"

}  // namespace

const CombineKernels combine_kernels{combine_columns};

}  // namespace shunt::cpu_engine::scalar
