#include "cuda/trials.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "core/check.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr std::array<std::string_view, 2> trials = {"combine_slots", "one_launch"};

}  // namespace

bool tried(std::string_view list, std::string_view name) {
  bool found = false;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    const std::string_view one = list.substr(0, end);
    list.remove_prefix(std::min(end + 1, list.size()));
    if (std::find(trials.begin(), trials.end(), one) == trials.end()) {
      fail(Status::invalid_argument,
           "SHUNT_CUDA_TRY names '{}': must be some of {}, with commas in between", one,
           fmt::join(trials, ", "));
    }
    found = found || one == name;
  }
  return found;
}

bool tried(std::string_view name) {
  static const std::string list = [] {
    const char* const text = std::getenv("SHUNT_CUDA_TRY");
    return std::string(text == nullptr ? "" : text);
  }();
  return tried(list, name);
}

}  // namespace shunt::cuda_engine
