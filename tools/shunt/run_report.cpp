// How `shunt run` shows what it found.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "run.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

// Layers beside each other in the table of stages: as many as a page is wide.
constexpr std::size_t layers_across = 4;
constexpr int bar_width = 24;

std::string load_range(const std::vector<std::int64_t>& load) {
  const auto [low, high] = std::minmax_element(load.begin(), load.end());
  return fmt::format("{}..{}", *low, *high);
}

std::string weights_words(const RunReport& report) {
  const std::string dtype = fmt::format("{} weights", to_string(report.dtype));
  return report.format == FormatSpec{}
             ? dtype
             : fmt::format("{}, experts in {}", dtype, to_string(report.format));
}

void print_head(const RunReport& report, const Context& context) {
  fmt::print("{}\n{}", paint(Style::bold, report.model), wrap(report.summary, 2));
  if (report.gpu) {
    std::string gpu = fmt::format("{}, driver for CUDA {}, {}", report.gpu->name,
                                  report.gpu->driver, weights_words(report));
    if (report.timed) gpu += "; measured now: " + describe(report.gpu->ceilings);
    fmt::print("{}\n", wrap(gpu, 2));
    return;
  }
  std::string machine =
      fmt::format("{}, {} thread{}, {}, {}", cpu_name(), context.threads(),
                  context.threads() == 1 ? "" : "s", isa_name(), weights_words(report));
  if (report.ceilings.read > 0) {
    machine += fmt::format("; measured now: reads {}, {} {}", rate(report.ceilings.read, "B/s"),
                           report.ceilings.peak, rate(report.ceilings.flops, "FLOP/s"));
  }
  fmt::print("{}\n", wrap(machine, 2));
}

void print_checks(const RunReport& report) {
  const bool compared = !report.against.empty();
  if (compared) fmt::print("checked against {}\n", report.against);
  Table table(compared ? ">>>>>>>><" : ">>>><");
  std::vector<std::string> heading = {"layer", "tokens"};
  if (compared) {
    heading.insert(heading.end(), {"error", "limit", "ids differ", ""});
  }
  heading.insert(heading.end(), {"load", "max/mean", "tokens of each expert"});
  table.heading(heading);
  for (const auto& layer : report.layers) {
    std::vector<Cell> row = {std::to_string(layer.layer), std::to_string(layer.tokens)};
    if (layer.comparison) {
      const Comparison& found = *layer.comparison;
      const bool pass = found.pass(report.tolerance);
      row.push_back(fmt::format("{:.1e}", found.error));
      row.push_back(fmt::format("{:.0e}", report.tolerance));
      row.push_back(found.ids_known ? fmt::format("{} of {}", found.ids_differ, found.ids)
                                    : std::string("-"));
      row.emplace_back(pass ? "ok" : "FAIL", pass ? Style::good : Style::bad);
    }
    row.emplace_back(load_range(layer.load));
    row.emplace_back(layer.tokens > 0 ? fmt::format("{:.2f}", imbalance(layer.load)) : "-");
    row.emplace_back(bars(layer.load, bar_width));
    table.row(std::move(row));
  }
  fmt::print("{}", table.str());
}

// Share of the floor; above 1 nothing crossed memory.
Cell share_cell(const StageResult& stage) {
  const double share = stage.share;
  return {percent(share), share >= 0.7 ? Style::good : share >= 0.3 ? Style::plain : Style::dim};
}

// Stages down, layers [first, last) across; in the order of their first appearance, since layers of
// a model may differ.
std::string stage_table(const RunReport& report, std::size_t first, std::size_t last) {
  std::vector<std::string> names;
  for (std::size_t i = first; i < last; ++i) {
    for (const auto& stage : report.layers[i].stages) {
      if (std::find(names.begin(), names.end(), stage.stage) == names.end()) {
        names.push_back(stage.stage);
      }
    }
  }
  if (names.empty()) return {};
  Table table("<" + std::string(3 * (last - first), '>'));
  std::vector<std::string> top = {""};
  std::vector<std::string> heading = {"us"};
  for (std::size_t i = first; i < last; ++i) {
    top.insert(top.end(), {"", "", fmt::format("layer {}", report.layers[i].layer)});
    heading.insert(heading.end(), {"time", "floor", "share"});
  }
  table.heading(top);
  table.heading(heading);
  const auto add = [&](std::vector<Cell>& row, const StageResult* stage) {
    if (stage == nullptr) {
      row.insert(row.end(), {"", "", ""});
      return;
    }
    row.emplace_back(three_digits(stage->us));
    row.emplace_back(three_digits(stage->floor_us), Style::dim);
    row.push_back(share_cell(*stage));
  };
  for (const auto& name : names) {
    std::vector<Cell> row = {name};
    for (std::size_t i = first; i < last; ++i) {
      const auto& stages = report.layers[i].stages;
      const auto found = std::find_if(stages.begin(), stages.end(),
                                      [&](const StageResult& s) { return s.stage == name; });
      add(row, found == stages.end() ? nullptr : &*found);
    }
    table.row(std::move(row));
  }
  std::vector<Cell> whole = {{"layer", Style::bold}};
  for (std::size_t i = first; i < last; ++i) add(whole, &report.layers[i].whole);
  table.row(std::move(whole));
  // Fewer layers where long times would leave the page.
  return last - first > 1 && table.width() > page_width ? std::string() : table.str();
}

void print_stages(const RunReport& report) {
  bool above = false;
  bool timed = false;
  for (std::size_t first = 0; first < report.layers.size();) {
    std::size_t last = std::min(first + layers_across, report.layers.size());
    std::string table = stage_table(report, first, last);
    while (table.empty() && last > first + 1) table = stage_table(report, first, --last);
    if (!table.empty()) fmt::print("\n{}", table);
    timed = timed || !table.empty();
    first = last;
  }
  for (const auto& layer : report.layers) {
    for (const auto& stage : layer.stages) above = above || stage.share > 1;
  }
  if (!timed) return;
  std::string note =
      report.gpu
          ? "floor: the longest of a launch, bytes / read bandwidth and operations on tensor cores "
            "/ their peak, counted and measured here; stages one by one between events, the layer "
            "in a CUDA graph, where its rows between stages need not cross memory."
          : "floor: the longer of bytes / read bandwidth and operations / peak, counted and "
            "measured here; layer: the whole in one call, whose rows between stages need not "
            "cross memory.";
  if (above) note += " A share above 100 %: the bytes were in a cache.";
  fmt::print("{}", paint(Style::dim, wrap(note, 0)));
}

void print_verdict(const RunReport& report) {
  if (report.against.empty()) return;
  const auto failed =
      std::count_if(report.layers.begin(), report.layers.end(), [&](const LayerResult& layer) {
        return !layer.comparison || !layer.comparison->pass(report.tolerance);
      });
  if (!report.not_recorded.empty()) {
    fmt::print("{} MoE layer{} without a recording: {}\n", report.not_recorded.size(),
               report.not_recorded.size() == 1 ? "" : "s", fmt::join(report.not_recorded, ", "));
  }
  const auto count = report.layers.size();
  const std::string layers = fmt::format("{} MoE layer{}", count, count == 1 ? "" : "s");
  if (failed == 0) {
    fmt::print("\n{}\n", paint(Style::good, fmt::format("ok: {} as recorded", layers)));
  } else {
    fmt::print("\n{}\n",
               paint(Style::bad, fmt::format("FAIL: {} of {} not as recorded", failed, layers)));
  }
}

}  // namespace

double imbalance(const std::vector<std::int64_t>& load) {
  const auto sum = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  if (sum == 0) return 0;
  return static_cast<double>(*std::max_element(load.begin(), load.end())) *
         static_cast<double>(load.size()) / static_cast<double>(sum);
}

void print_report(const RunReport& report, const Context& context) {
  print_head(report, context);
  print_checks(report);
  print_stages(report);
  fmt::print("{}", paint(Style::warn, report.note));
  print_verdict(report);
}

Json run_json(const RunReport& report, const Context& context) {
  std::vector<Row> rows;
  Json layers = Json::array();
  for (const auto& layer : report.layers) {
    const std::string label = fmt::format("layer {} T{}", layer.layer, layer.tokens);
    const auto add = [&](const StageResult& stage) {
      rows.push_back({.op = stage.stage,
                      .label = label,
                      .dtype = report.dtype,
                      .device = report.gpu ? "cuda" : "cpu",
                      .us = stage.us,
                      .us_min = stage.us_min,
                      .us_max = stage.us_max,
                      .bytes = stage.bytes,
                      .flops = stage.flops,
                      .floor_us = stage.floor_us,
                      .share = stage.share});
    };
    for (const auto& stage : layer.stages) add(stage);
    if (!layer.stages.empty()) add(layer.whole);
    Json entry = {{"layer", layer.layer},
                  {"tokens", layer.tokens},
                  {"load", layer.load},
                  {"imbalance", imbalance(layer.load)}};
    if (layer.comparison) {
      const double error = layer.comparison->error;
      entry["error"] = std::isfinite(error) ? Json(error) : Json(nullptr);
      entry["tolerance"] = report.tolerance;
      entry["ids"] = layer.comparison->ids;
      entry["ids_differ"] =
          layer.comparison->ids_known ? Json(layer.comparison->ids_differ) : Json(nullptr);
      entry["pass"] = layer.comparison->pass(report.tolerance);
    }
    layers.push_back(entry);
  }
  const bool timed = report.timed;
  Json ceilings = Json::object();
  if (timed) {
    ceilings = report.gpu ? gpu_ceilings_json(report.gpu->ceilings)
                          : ceilings_json(report.ceilings, report.dtype);
  }
  Json json = report_json(report.gpu ? report.gpu->machine : machine_json(context), ceilings, rows);
  json["model"] = report.model;
  json["dtype"] = to_string(report.dtype);
  json["format"] = to_string(report.format);
  json["device"] = report.gpu ? "cuda" : "cpu";
  if (!report.output.empty()) json["output"] = report.output;
  json["summary"] = report.summary;
  if (!report.against.empty()) json["against"] = report.against;
  json["layers"] = layers;
  return json;
}

}  // namespace shunt::tool
