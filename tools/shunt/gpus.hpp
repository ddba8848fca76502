// The GPUs that this process sees.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shunt::tool {

struct Gpu {
  std::string name;
  std::string compute;  // "9.0"
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
};
struct Gpus {
  std::vector<Gpu> list;
  std::string reason;  // why the list is empty
};
Gpus list_gpus();

}  // namespace shunt::tool
