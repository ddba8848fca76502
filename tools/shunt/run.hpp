// What `shunt run` found out about one layer, and how it is shown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpus.hpp"
#include "machine.hpp"
#include "recordings.hpp"
#include "report.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt::tool {

struct StageResult {
  std::string stage;
  double us = 0, us_min = 0, us_max = 0;
  double bytes = 0, flops = 0;
  double floor_us = 0;
  double share = 0;              // floor / time
  bool on_tensor_cores = false;  // its operations; elsewhere a GPU's floor does not count them
};

struct LayerResult {
  int layer = 0;
  std::int64_t tokens = 0;
  std::optional<Comparison> comparison;  // with what was recorded, if anything was
  std::vector<std::int64_t> load;        // tokens of each expert
  std::vector<StageResult> stages;       // timed one by one
  StageResult whole;                     // one call
  Ceilings ceilings;                     // the best between the calls
};

// Tokens of the busiest expert over the mean; 0 without tokens.
double imbalance(const std::vector<std::int64_t>& load);

struct RunReport {
  std::string model, summary, against;
  DType dtype = DType::f32;
  FormatSpec format{};   // that experts were packed to; plain: as they were
  std::string output{};  // the file that --output named
  double tolerance = 0;
  bool timed = false;
  Ceilings ceilings;  // the best seen, of the CPU engine
  std::optional<GpuSide> gpu;
  std::string note;  // about the machine, a line or nothing
  std::vector<LayerResult> layers;
  std::vector<int> not_recorded;  // MoE layers without a recording
};

void print_report(const RunReport& report, const Context& context);
Json run_json(const RunReport& report, const Context& context);

}  // namespace shunt::tool
