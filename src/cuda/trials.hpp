// Kernels that are written and not proven on a GPU yet: taken only where the environment variable
// SHUNT_CUDA_TRY names them, so that they can be. docs/notes says of each what has been seen.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/check.hpp"

namespace shunt::cuda_engine {

//   one_launch       both products of few rows (gemm/fused_few.cuh)
//   fp8_shared_rows  many rows in fp8, blocks that share rows (gemm/fp8_shared_rows.cu)
inline constexpr std::array<std::string_view, 2> trials = {"one_launch", "fp8_shared_rows"};

// Whether `list`, of names with commas in between, has `name`. Throws Error{invalid_argument} for
// any other name in it.
inline bool tried(std::string_view list, std::string_view name) {
  bool found = false;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    const std::string_view one = list.substr(0, end);
    list.remove_prefix(std::min(end + 1, list.size()));
    if (std::find(trials.begin(), trials.end(), one) == trials.end()) {
      fail(Status::invalid_argument,
           "SHUNT_CUDA_TRY names '{}': must be one_launch, fp8_shared_rows, or both with a comma",
           one);
    }
    found = found || one == name;
  }
  return found;
}
inline bool tried(std::string_view name) {
  static const std::string list = [] {
    const char* const text = std::getenv("SHUNT_CUDA_TRY");
    return std::string(text == nullptr ? "" : text);
  }();
  return tried(list, name);
}

}  // namespace shunt::cuda_engine
