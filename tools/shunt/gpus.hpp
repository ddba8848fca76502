// The GPUs that this process sees.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cuda/ceilings.hpp"
#include "shunt/context.hpp"

namespace shunt::tool {

struct Gpu {
  std::string name;
  std::string compute;  // "9.0"
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
};
struct Gpus {
  std::vector<Gpu> list;
  std::string reason;           // why the list is empty
  std::string driver, runtime;  // CUDA versions
};
Gpus list_gpus();

// The GPU of a CUDA context, for reports.
struct GpuSide {
  std::string name, driver;
  nlohmann::ordered_json machine;  // machine_json's, with the GPU's entries
  cuda_engine::Ceilings ceilings;  // once measured
};
GpuSide gpu_side(const Context& context);

// What launches, memory and tensor cores of a GPU can do at best: for people, and for machines.
nlohmann::ordered_json gpu_ceilings_json(const cuda_engine::Ceilings& ceilings);
std::string describe(const cuda_engine::Ceilings& ceilings);

}  // namespace shunt::tool
