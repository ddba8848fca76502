// The table that each instruction set fills with its kernel of combine. Included by files that are
// compiled for one set: plain types only.
#pragma once

#include <cstddef>

#include "cpu/form.hpp"

namespace shunt::cpu_engine {

// weight * row, one summand of a token.
struct Term {
  const void* row;
  Form form;  // f32, bf16 or f16
  float weight;
};

struct CombineKernels {
  // out[h] = sum over terms, first to last, of weight * row[h] for h in [begin, end); f32 sums. out
  // may be one of the rows.
  void (*columns)(const Term* terms, std::size_t count, void* out, Form out_form, std::size_t begin,
                  std::size_t end);
};

namespace scalar {
extern const CombineKernels combine_kernels;
}
namespace avx2 {
extern const CombineKernels combine_kernels;
}
namespace avx512 {
extern const CombineKernels combine_kernels;
}

}  // namespace shunt::cpu_engine
