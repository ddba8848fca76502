// What `shunt eval` found out about one form of a model's experts, and how it is shown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convert/expert.hpp"
#include "eval/bits_per_byte.hpp"
#include "report.hpp"

namespace shunt::tool {

struct EvalRow {
  std::string name;             // "nvfp4", "sparse_nvfp4, 2:4 by obs"
  double bits_per_weight = 0;   // of experts, scales included
  double bytes_per_token = 0;   // of the experts that a token is routed to, all layers
  std::optional<double> error;  // ||w - w'|| / ||w|| over all experts; none: as they are
  std::int64_t experts = 0;     // converted
  std::int64_t fell_back = 0;   // of them, pruned by magnitude for want of inputs
  BitsPerByte score{};
  double moe_us_per_token = 0;  // in batches, all layers
  bool packed = false;          // computed from the packed form; else decoded beforehand
  // With --speed: of all MoE layers in bf16, a token alone and in a batch.
  std::optional<double> alone_us, batch_us;
};

struct EvalReport {
  std::string model, text;
  std::string arithmetic;  // of the MoE layers: "f32"
  std::int64_t skipped = 0;
  Windows windows{};
  std::vector<EvalRow> rows;
  // Formats of --all-formats that the engine does not compute, and why.
  std::vector<std::pair<std::string, std::string>> left_out;
};

void print_eval(const EvalReport& report, const Context& context);
// The table of docs/quality.md. Without --speed nothing in it depends on the machine.
std::string eval_markdown(const EvalReport& report, const Context& context,
                          const std::string& command);
Json eval_json(const EvalReport& report, const Context& context);

}  // namespace shunt::tool
