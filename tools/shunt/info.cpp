// shunt info: this machine and this build.
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <CLI/Version.hpp>

#include <memory>
#include <optional>

#include "cpu/features.hpp"
#include "cuda/timing.hpp"
#include "gpus.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "report.hpp"
#include "shunt/error.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

struct InfoOptions {
  DeviceOptions device;
  JsonOption json;
};

std::string library_versions() {
  return fmt::format("fmt {}.{}.{}, CLI11 {}, nlohmann-json {}.{}.{}", FMT_VERSION / 10000,
                     FMT_VERSION / 100 % 100, FMT_VERSION % 100, CLI11_VERSION,
                     NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                     NLOHMANN_JSON_VERSION_PATCH);
}

// Of each GPU that the engine runs on; a reason where it does not.
struct GpuLimits {
  std::optional<cuda_engine::Ceilings> ceilings;
  std::string reason;
};
GpuLimits measure_gpu(int index) {
  try {
    const cuda_engine::Stream stream(index);
    return {cuda_engine::measure_ceilings(cuda(stream.get(), index)), {}};
  } catch (const shunt::Error& error) {
    return {{}, error.what()};
  }
}

int info(const InfoOptions& options) {
  if (options.device.device == "cuda") cuda();  // says why where there is no GPU
  const Context context = cpu({.threads = options.device.threads});
  const Context one = cpu({.threads = 1});
  const Gpus gpus = list_gpus();
  const Json machine = machine_json(context);

  Json ceilings = Json::object();
  const double read_one = measure_read(one);
  const double read_all = measure_read(context);
  ceilings["read_GBps"] = read_all / 1e9;
  ceilings["read_GBps_1_thread"] = read_one / 1e9;
  const std::vector<Peak> peaks = measure_peaks(context);
  for (const auto& peak : peaks) ceilings[peak.key] = peak.per_second / 1e9;

  Json devices = Json::array();
  std::vector<GpuLimits> limits;
  for (const auto& gpu : gpus.list) {
    limits.push_back(measure_gpu(static_cast<int>(limits.size())));
    const GpuLimits& limit = limits.back();
    devices.push_back(
        {{"name", gpu.name},
         {"compute_capability", gpu.compute},
         {"multiprocessors", gpu.multiprocessors},
         {"memory_bytes", gpu.memory_bytes},
         {"l2_bytes", gpu.l2_bytes},
         {"ceilings", limit.ceilings ? gpu_ceilings_json(*limit.ceilings) : Json(limit.reason)}});
  }
  if (options.json.wanted) {
    emit_json(options.json, {{"machine", machine},
                             {"ceilings", ceilings},
                             {"rows", Json::array()},
                             {"cpu_flags", cpu_engine::features().flags()},
                             {"gpus", devices},
                             {"gpu_note", gpus.reason},
                             {"cuda_driver", gpus.driver},
                             {"cuda_runtime", gpus.runtime},
                             {"libraries", library_versions()}});
    if (options.json.to_stdout()) return exit_done;
  }

  const auto& features = cpu_engine::features();
  const auto best = cpu_engine::best_isa();
  const auto used = cpu_engine::selected_isa();
  Table table("<<");
  table.row({"shunt", fmt::format("{}, built with {}", SHUNT_VERSION,
                                  machine["compiler"].get<std::string>())});
  table.row({"CPU", fmt::format("{}, {} family {} model {}", features.brand, features.vendor,
                                features.family, features.model)});
  table.row({"cores", fmt::format("{} usable, {} threads", cpu_engine::available_cores(),
                                  context.threads())});
  table.row({"instructions", fmt::format("{} used{}, tuning {}", to_string(used),
                                         best == used ? std::string()
                                                      : fmt::format(" (SHUNT_ISA; this CPU has {})",
                                                                    to_string(best)),
                                         to_string(features.tuning))});
  table.fact("flags", fmt::format("{}", fmt::join(features.flags(), " ")), page_width - 14);
  table.row({"memory", fmt::format("{}, {} available", size(static_cast<double>(memory_total())),
                                   size(static_cast<double>(memory_available())))});
  table.row({"reads", fmt::format("{} with 1 thread, {} with {}", rate(read_one, "B/s"),
                                  rate(read_all, "B/s"), context.threads())});
  for (const auto& peak : peaks) {
    table.row({peak.name, rate(peak.per_second, peak.floating ? "FLOP/s" : "op/s")});
  }
  if (gpus.list.empty()) table.row({"GPU", gpus.reason});
  for (std::size_t i = 0; i < gpus.list.size(); ++i) {
    const Gpu& gpu = gpus.list[i];
    table.row(
        {"GPU", fmt::format("{}, compute {}, {} multiprocessors, {}, L2 {}", gpu.name, gpu.compute,
                            gpu.multiprocessors, size(static_cast<double>(gpu.memory_bytes)),
                            size(static_cast<double>(gpu.l2_bytes)))});
    const GpuLimits& limit = limits[i];
    table.fact("", limit.ceilings ? describe(*limit.ceilings) : limit.reason, page_width - 14);
  }
  if (!gpus.list.empty()) {
    table.row({"CUDA", fmt::format("driver {}, run-time {}", gpus.driver, gpus.runtime)});
  }
  table.row({"libraries", library_versions()});
  fmt::print("{}", table.str());
  return exit_done;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "this machine: instruction set, bandwidth, peaks, GPUs");
  add_device_options(*command, options->device);
  add_json_option(*command, options->json);
  command->footer("Example:\n  shunt info");
  command->callback([options, &action] { action = [options] { return info(*options); }; });
}

}  // namespace shunt::tool
