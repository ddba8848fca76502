// shunt bench --device cuda.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "bench.hpp"
#include "bench_cases.hpp"
#include "cuda/ceilings.hpp"
#include "cuda/timing.hpp"
#include "gpus.hpp"
#include "options.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

constexpr std::int64_t least_rotate_bytes = 120'000'000;

Json gpu_machine_json(const Context& context, const Gpus& gpus) {
  Json machine = machine_json(context);
  const Gpu& gpu = gpus.list.at(static_cast<std::size_t>(context.device().index));
  machine["gpu"] = gpu.name;
  machine["compute_capability"] = gpu.compute;
  machine["multiprocessors"] = gpu.multiprocessors;
  machine["gpu_memory_bytes"] = gpu.memory_bytes;
  machine["l2_bytes"] = gpu.l2_bytes;
  machine["cuda_driver"] = gpus.driver;
  machine["cuda_runtime"] = gpus.runtime;
  machine["date"] = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)));
  return machine;
}

Row time_case(const Context& context, const StageCase& work, double seconds,
              const cuda_engine::Ceilings& ceilings) {
  work.call(0);
  context.synchronize();
  work.check();
  const cuda_engine::GraphTimes times = cuda_engine::time_in_graph(
      context, work.call, {.rotations = work.variants, .calls = 64, .seconds = seconds});
  Row row{.op = work.op, .label = work.label, .dtype = work.dtype, .device = "cuda"};
  row.us = times.us;
  row.us_min = times.us_min;
  row.us_max = times.us_max;
  row.bytes = work.cost.bytes;
  row.flops = work.cost.flops;
  row.floor_us = ceilings.floor_us(work.cost.bytes, work.on_tensor_cores ? work.cost.flops : 0.0);
  row.share = row.floor_us / row.us;
  return row;
}

}  // namespace

int bench_gpu(const GpuBench& wanted, const JsonOption& json) {
  if (!json.file.empty()) check_writable(json.file);
  const Context probe = cuda();  // says why where there is no GPU
  const cuda_engine::Stream stream;
  const Context context =
      cuda({.stream = stream.get(), .dependent_launch = wanted.dependent_launch});
  const Gpus gpus = list_gpus();
  const Gpu& gpu = gpus.list.at(0);
  const std::int64_t rotate_bytes =
      wanted.rotate_bytes > 0
          ? wanted.rotate_bytes
          : std::max(least_rotate_bytes, 2 * static_cast<std::int64_t>(gpu.l2_bytes));
  const cuda_engine::Ceilings ceilings = cuda_engine::measure_ceilings(context);

  const bool people = !json.to_stdout();
  if (people) {
    fmt::print("{}\n", paint(Style::bold, wanted.title));
    fmt::print("{}",
               wrap(fmt::format("{}, driver for CUDA {}; {} routing, tensors rotate past {}{}",
                                gpu.name, gpus.driver, to_string(wanted.spread),
                                size(static_cast<double>(rotate_bytes)),
                                wanted.dependent_launch ? ", dependent launches" : ""),
                    2));
    fmt::print("{}", wrap("measured: " + describe(ceilings), 2));
    print_columns();
  }
  std::vector<Row> rows;
  Json skipped = Json::array();
  for (const auto& shape : wanted.shapes) {
    try {
      const StageCase work = make_case(context, shape, wanted.spread, rotate_bytes);
      rows.push_back(time_case(context, work, wanted.seconds, ceilings));
      if (people) print_row(rows.back());
    } catch (const Error& error) {
      if (!wanted.skip_unsupported || error.status() != Status::unsupported) throw;
      const Json note = {{"op", shape.stage}, {"tokens", shape.tokens}, {"reason", error.what()}};
      skipped.push_back(note);
      fmt::print(stderr, "{} at {} tokens: left out: {}\n", shape.stage, shape.tokens,
                 error.what());
    }
  }
  if (json.wanted) {
    Json report = report_json(gpu_machine_json(context, gpus), gpu_ceilings_json(ceilings), rows);
    report["model"] = wanted.title;
    report["routing"] = to_string(wanted.spread);
    report["rotate_bytes"] = rotate_bytes;
    report["dependent_launch"] = wanted.dependent_launch;
    report["left_out"] = skipped;
    emit_json(json, report);
  }
  return rows.empty() ? exit_failed : exit_done;
}

}  // namespace shunt::tool
