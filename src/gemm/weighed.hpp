// What a plan was weighed against, in words.
#pragma once

#include <fmt/core.h>

#include <string>

namespace shunt::cuda_engine {

// "; weighed, us by rows of a tile: 8 31.2, 16 31.9, 8 with k / 2 24.0, .."; nothing where there
// was no choice. Plans of two kernels with as many rows stand in the order of the candidates.
template <class Plans>
std::string weighed(const Plans& plans) {
  if (plans.size() < 2) return {};
  std::string words;
  for (const auto& plan : plans) {
    words += fmt::format("{}{}{} {:.1f}", words.empty() ? "" : ", ", plan.tile_tokens,
                         plan.split > 1 ? fmt::format(" with k / {}", plan.split) : "", plan.us);
  }
  return "; weighed, us by rows of a tile: " + words;
}

}  // namespace shunt::cuda_engine
