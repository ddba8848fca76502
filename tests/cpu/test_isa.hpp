// Every instruction set of this machine, for tests that run over all of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/features.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

inline std::vector<cpu_engine::Isa> all_isas() {
  std::vector<cpu_engine::Isa> isas;
  for (int i = 0; i < cpu_engine::isa_count; ++i) {
    if (cpu_engine::supported(static_cast<cpu_engine::Isa>(i))) {
      isas.push_back(static_cast<cpu_engine::Isa>(i));
    }
  }
  return isas;
}

inline Context context_of(cpu_engine::Isa isa, int threads) {
  const char* before = std::getenv("SHUNT_ISA");
  const std::string kept = before == nullptr ? "" : before;
  setenv("SHUNT_ISA", cpu_engine::to_string(isa), 1);
  Context context = cpu({.threads = threads});
  kept.empty() ? unsetenv("SHUNT_ISA") : setenv("SHUNT_ISA", kept.c_str(), 1);
  return context;
}

// For gtest's parameter names.
inline std::string isa_name(const cpu_engine::Isa& isa) { return cpu_engine::to_string(isa); }
inline std::string isa_and_format_name(
    const testing::TestParamInfo<std::tuple<cpu_engine::Isa, FormatSpec>>& info) {
  std::string name = isa_name(std::get<0>(info.param)) + "_" + to_string(std::get<1>(info.param));
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

}  // namespace shunt::test
