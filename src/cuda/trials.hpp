// Kernels that are written and not proven on a GPU yet: taken only where the environment variable
// SHUNT_CUDA_TRY names them, so that they can be. docs/notes says of each what has been seen.
#pragma once

#include <string_view>

namespace shunt::cuda_engine {

//   combine_slots    tokens' rows without a barrier (combine/combine_cuda.cu)
//   one_launch       both products of few rows (gemm/fused_few.cuh)
// Throws Error{invalid_argument} where the variable has any other name.
bool tried(std::string_view name);
// Whether `list`, of names with commas in between, has `name`. Throws likewise.
bool tried(std::string_view list, std::string_view name);

}  // namespace shunt::cuda_engine
