#include "gpus.hpp"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <ctime>

#include "cuda/devices.hpp"
#include "machine.hpp"
#include "terminal.hpp"

namespace shunt::tool {

Gpus list_gpus() {
  const cuda_engine::DeviceList found = cuda_engine::list_devices();
  Gpus gpus;
  gpus.reason = found.reason;
  gpus.driver = found.driver;
  gpus.runtime = found.runtime;
  for (const auto& device : found.devices) {
    gpus.list.push_back(
        {device.name,
         std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor),
         device.multiprocessors, device.memory_bytes, device.l2_bytes});
  }
  return gpus;
}

GpuSide gpu_side(const Context& context) {
  const Gpus gpus = list_gpus();
  const Gpu& gpu = gpus.list.at(static_cast<std::size_t>(context.device().index));
  Json machine = machine_json(context);
  machine["gpu"] = gpu.name;
  machine["compute_capability"] = gpu.compute;
  machine["multiprocessors"] = gpu.multiprocessors;
  machine["gpu_memory_bytes"] = gpu.memory_bytes;
  machine["l2_bytes"] = gpu.l2_bytes;
  machine["cuda_driver"] = gpus.driver;
  machine["cuda_runtime"] = gpus.runtime;
  machine["date"] = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)));
  return {.name = gpu.name, .driver = gpus.driver, .machine = machine, .ceilings = {}};
}

nlohmann::ordered_json gpu_ceilings_json(const cuda_engine::Ceilings& ceilings) {
  nlohmann::ordered_json json = {{"read_GBps", ceilings.read / 1e9},
                                 {"copy_GBps", ceilings.mixes[1].rate() / 1e9},
                                 {"write_GBps", ceilings.mixes[3].rate() / 1e9},
                                 {"launch_us", ceilings.launch_us},
                                 {"read_start_us", ceilings.read_start_us}};
  nlohmann::ordered_json mixes = nlohmann::ordered_json::array();
  for (const auto& mix : ceilings.mixes) {
    nlohmann::ordered_json times;
    for (int i = 0; i < cuda_engine::Ceilings::mix_sizes; ++i) {
      times.push_back({cuda_engine::Ceilings::mix_bytes[i], mix.us[i]});
    }
    mixes.push_back({{"written", mix.written}, {"GBps", mix.rate() / 1e9}, {"bytes_us", times}});
  }
  json["mixes"] = mixes;
  if (ceilings.bf16_flops > 0) json["bf16_TFLOPs"] = ceilings.bf16_flops / 1e12;
  return json;
}

std::string describe(const cuda_engine::Ceilings& ceilings) {
  std::string text = fmt::format(
      "a launch {}, one that only reads {} + bytes / {}; of both ways, 8 to 1 {}, "
      "1 to 1 {}, 1 to 8 {}; writes {}",
      duration(ceilings.launch_us), duration(ceilings.read_start_us), rate(ceilings.read, "B/s"),
      rate(ceilings.mixes[0].rate(), "B/s"), rate(ceilings.mixes[1].rate(), "B/s"),
      rate(ceilings.mixes[2].rate(), "B/s"), rate(ceilings.mixes[3].rate(), "B/s"));
  if (ceilings.bf16_flops > 0)
    text += fmt::format(", bf16 {}", rate(ceilings.bf16_flops, "FLOP/s"));
  return text;
}

}  // namespace shunt::tool
