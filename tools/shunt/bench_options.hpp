// What a command line asks of `shunt bench`: options, their contradictions, and the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bench.hpp"
#include "bench/shapes/grid.hpp"
#include "options.hpp"
#include "shunt/format.hpp"
#include "shunt/tensor.hpp"

namespace shunt::tool {

struct BenchOptions {
  std::string stage;  // empty: layer
  std::string model;
  std::optional<int> experts, top_k;
  std::optional<std::int64_t> hidden, intermediate, shared;
  std::optional<std::string> tokens;
  std::optional<DType> dtype;  // none: bf16
  std::string format, shared_format;
  RowFormat rows = RowFormat::as_dtype;
  std::string routing = "uniform";
  std::string rotate;
  std::optional<double> seconds;
  std::string rule, groups;
  bench::Walk walk = bench::Walk::offsets;
  bench::RoutingFrom from = bench::RoutingFrom::hidden;
  std::int64_t valid = 0;
  int tile = 0;
  bool grid = false;
  bool dependent_launch = false;
  bool batch_invariant = false, fast_accumulation = false;
  double wait = 3;
  DeviceOptions device;
  JsonOption json;
  bool list_models = false;
};

// Throws UsageError for what is asked of a stage or an engine that does not have it.
void refuse_ineffective(const BenchOptions& options);
FormatSpec format_of(const BenchOptions& options);
FormatSpec shared_format_of(const BenchOptions& options);  // that of --format, unless said
// The shape that was asked for: a known model, a checkpoint, or given numbers; numbers override.
// Throws UsageError, or Error for what no plan can be made of.
BenchPlan make_plan(const BenchOptions& options);

}  // namespace shunt::tool
