// The engines that a suite's cases are repeated on: every instruction set of this machine, or with
// SHUNT_TEST_DEVICE=cuda the GPU.
#pragma once

#include <string>
#include <vector>

#include "cpu/test_isa.hpp"
#include "engine.hpp"

namespace shunt::test {

struct Engine {
  cpu_engine::Isa isa{};
  bool gpu = false;
};

inline std::vector<Engine> all_engines() {
  if (on_gpu()) return {{.gpu = true}};
  std::vector<Engine> engines;
  for (const cpu_engine::Isa isa : all_isas()) engines.push_back({.isa = isa});
  return engines;
}

// `threads` is the CPU engine's.
inline Context context_of(const Engine& engine, int threads) {
  return engine.gpu ? cuda() : context_of(engine.isa, threads);
}

// For gtest's parameter names.
inline std::string engine_name(const Engine& engine) {
  return engine.gpu ? "cuda" : isa_name(engine.isa);
}

}  // namespace shunt::test
