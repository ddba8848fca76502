// The table that each instruction set fills with its kernels of conversion.
#pragma once

#include "cpu/form.hpp"

namespace shunt::cpu_engine {

struct ConvertKernels {
  // to[i] = scale * from[i] for i < n, computed in f32, rounded to nearest even, f16 saturating.
  // `from` is f32, bf16 or f16.
  void (*row)(const void* from, Form from_form, float scale, void* to, Form to_form, std::size_t n);
};

namespace scalar {
extern const ConvertKernels convert_kernels;
}
namespace avx2 {
extern const ConvertKernels convert_kernels;
}
namespace avx512 {
extern const ConvertKernels convert_kernels;
}

}  // namespace shunt::cpu_engine
