// Conversion of rows between f32, bf16 and f16.
#pragma once

#include <cstddef>

#include "cpu/convert_kernels.hpp"
#include "cpu/features.hpp"
#include "cpu/form.hpp"

namespace shunt::cpu_engine {

const ConvertKernels& convert_kernels(Isa isa);

}  // namespace shunt::cpu_engine
