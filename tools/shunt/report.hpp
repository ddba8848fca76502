// Results for machines: the one JSON form of `run --json` and `bench --json`.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"
#include "options.hpp"

namespace shunt::tool {

struct Row {
  std::string op;
  std::string label;  // "case" in the file
  DType dtype = DType::f32;
  std::string device = "cpu";
  double us = 0, us_min = 0, us_max = 0;  // median, fastest, slowest
  double bytes = 0, flops = 0;            // that the case needs, counted
  double floor_us = 0;
  double share = 0;  // floor / time
};
Json to_json(const Row& row);

// {"machine", "ceilings", "rows"}; a subcommand may add keys of its own.
Json report_json(const Json& machine, const Json& ceilings, const std::vector<Row>& rows);

// Text into a file that is replaced when whole. Throws Error{io}.
void write_file(const std::string& path, const std::string& text);
// Throws Error{io} when a file cannot be made there, before hours of work for it.
void check_writable(const std::string& path);
// Throws UsageError where what `option` writes is a file that is read, or written by another one:
// those in `model` (or none), and `others`, by option.
void check_apart(const std::string& option, const std::string& path, const std::string& model,
                 const std::vector<std::pair<std::string, std::string>>& others);
// Throws UsageError where `path`, if any, is `folder`, which is yet to be made, or lies in it.
void check_outside(const std::string& option, const std::string& path, const std::string& folder);
// How many experts were pruned by magnitude instead: what convert and eval say of it.
std::string fell_back_text(std::int64_t fell_back, std::int64_t experts);
// To where the option says.
void emit_json(const JsonOption& option, const Json& json);

}  // namespace shunt::tool
