// shunt bench --device cuda.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

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
  const double counted = !work.on_tensor_cores ? 0 : work.fp8_rows ? 0.5 : 1;
  row.floor_us = ceilings.floor_us(work.cost.bytes, counted * work.cost.flops, work.cost.written);
  row.share = row.floor_us / row.us;
  return row;
}

}  // namespace

int bench_gpu(const GpuBench& wanted, const JsonOption& json) {
  if (!json.file.empty()) check_writable(json.file);
  const Engine engine({.device = "cuda"}, wanted.dependent_launch);
  const Context& context = engine.context();
  const GpuSide gpu = gpu_side(context);
  const std::int64_t rotate_bytes =
      wanted.rotate_bytes > 0
          ? wanted.rotate_bytes
          : std::max(least_rotate_bytes, 2 * gpu.machine["l2_bytes"].get<std::int64_t>());
  const cuda_engine::Ceilings ceilings = cuda_engine::measure_ceilings(context);

  const bool people = !json.to_stdout();
  if (people) {
    fmt::print("{}\n", paint(Style::bold, wanted.title));
    fmt::print("{}",
               wrap(fmt::format("{}, driver for CUDA {}; {} routing, tensors rotate past {}{}",
                                gpu.name, gpu.driver, to_string(wanted.spread),
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
      tell(fmt::format("{} at {} tokens: left out: {}\n", shape.stage, shape.tokens, error.what()));
    }
  }
  if (json.wanted) {
    Json report = report_json(gpu.machine, gpu_ceilings_json(ceilings), rows);
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
