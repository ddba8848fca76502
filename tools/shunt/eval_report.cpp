// How `shunt eval` shows what it found.
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "eval.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

std::string error_text(const EvalRow& row) {
  return row.error ? fmt::format("{:.2f} %", 100 * *row.error) : "-";
}

// Over the first row, which is the model as it is.
std::string loss_text(const EvalReport& report, const EvalRow& row) {
  const double base = report.rows.front().score.per_byte();
  return &row == &report.rows.front()
             ? std::string("-")
             : fmt::format("{:+.2f} %", 100 * (row.score.per_byte() / base - 1));
}

std::string time_text(const EvalRow& row) {
  return row.packed ? three_digits(row.moe_us_per_token) : "-";
}

bool has_speed(const EvalReport& report) { return report.rows.front().alone_us.has_value(); }

// "12.3 (1.9x)": how many times as fast as the first row.
std::string speed_text(const std::optional<double>& base, const std::optional<double>& us) {
  if (!us || !base) return "-";
  return fmt::format("{} ({:.1f}x)", three_digits(*us), *base / *us);
}

std::string engine_words(const Context& context) {
  return context.device().type == DeviceType::cuda
             ? std::string("on a GPU")
             : fmt::format("{}, {} thread{}, {}", cpu_name(), context.threads(),
                           context.threads() == 1 ? "" : "s", isa_name());
}

std::string text_words(const EvalReport& report) {
  return fmt::format("{}: {} bytes scored{}, in windows of {} every {}", report.text,
                     report.rows.front().score.bytes,
                     report.skipped > 0 ? fmt::format(", after the first {}", report.skipped) : "",
                     report.windows.context, report.windows.stride);
}

// Which experts are pruned in another way than asked for is not passed over in silence.
std::string fell_back_notes(const EvalReport& report) {
  std::string notes;
  for (const EvalRow& row : report.rows) {
    if (row.fell_back == 0) continue;
    notes += fmt::format("; {}: {}", row.name, fell_back_text(row.fell_back, row.experts));
  }
  return notes;
}

}  // namespace

void print_eval(const EvalReport& report, const Context& context) {
  fmt::print("{}\n{}", paint(Style::bold, report.model), wrap(text_words(report), 2));
  fmt::print(
      "{}\n",
      wrap(fmt::format("MoE layers in {}; {}", report.arithmetic, engine_words(context)), 2));
  const bool speed = has_speed(report);
  Table table(speed ? "<>>>>>>>" : "<>>>>>>");
  std::vector<std::string> heading = {"experts",      "bits a weight", "bytes a token",
                                      "weight error", "bits per byte", "loss"};
  if (speed) {
    heading.insert(heading.end(), {"us, alone", "us, of 512"});
  } else {
    heading.emplace_back("us a token");
  }
  table.heading(heading);
  bool decoded = false;
  for (const EvalRow& row : report.rows) {
    decoded = decoded || !row.packed;
    std::vector<Cell> cells = {
        row.name,        fmt::format("{:.4g}", row.bits_per_weight),  size(row.bytes_per_token),
        error_text(row), fmt::format("{:.4f}", row.score.per_byte()), loss_text(report, row)};
    if (speed) {
      cells.emplace_back(speed_text(report.rows.front().alone_us, row.alone_us));
      cells.emplace_back(speed_text(report.rows.front().batch_us, row.batch_us));
    } else {
      cells.emplace_back(time_text(row));
    }
    table.row(cells);
  }
  fmt::print("{}", table.str());
  std::string note =
      "bytes a token: of its experts in all layers; weight error: |w - w'| / |w|; us a token: MoE "
      "layers, in batches";
  if (speed) {
    note =
        "bytes a token: of its experts in all layers; weight error: |w - w'| / |w|; us: of a token "
        "in all MoE layers in bf16, alone with its experts in memory, and in a batch";
  }
  if (decoded) note += "; -: decoded beforehand and computed as plain weights";
  note += fell_back_notes(report);
  if (!report.left_out.empty()) {
    note += "; not computed on a GPU:";
    for (const auto& [name, why] : report.left_out) note += ' ' + name;
  }
  fmt::print("{}", wrap(note, 0));
}

std::string eval_markdown(const EvalReport& report, const Context& context,
                          const std::string& command) {
  const bool speed = has_speed(report);
  std::string text =
      "| experts | bits a weight | bytes a token | weight error | bits per byte | loss |";
  if (speed) text += " us a token, alone | us a token, of 512 |";
  text += "\n|---|--:|--:|--:|--:|--:|";
  text += speed ? "--:|--:|\n" : "\n";
  for (const EvalRow& row : report.rows) {
    text += fmt::format("| {} | {:.4g} | {} | {} | {:.4f} | {} |", row.name, row.bits_per_weight,
                        size(row.bytes_per_token), error_text(row), row.score.per_byte(),
                        loss_text(report, row));
    if (speed) {
      text += fmt::format(" {} | {} |", speed_text(report.rows.front().alone_us, row.alone_us),
                          speed_text(report.rows.front().batch_us, row.batch_us));
    }
    text += '\n';
  }
  text += fmt::format("\n{}; MoE layers in {}{}.", text_words(report), report.arithmetic,
                      fell_back_notes(report));
  if (speed) text += fmt::format(" Times: {}; MoE layers in bf16.", engine_words(context));
  text += fmt::format(" Made by\n\n    {}\n", command);
  return text;
}

Json eval_json(const EvalReport& report, const Context& context) {
  Json rows = Json::array();
  for (const EvalRow& row : report.rows) {
    rows.push_back({{"experts", row.name},
                    {"bits_per_weight", row.bits_per_weight},
                    {"bytes_per_token", row.bytes_per_token},
                    {"weight_error", row.error ? Json(*row.error) : Json(nullptr)},
                    {"fell_back", row.fell_back},
                    {"bits_per_byte", row.score.per_byte()},
                    {"bytes_scored", row.score.bytes},
                    {"moe_us_per_token", row.moe_us_per_token},
                    {"alone_us", row.alone_us ? Json(*row.alone_us) : Json(nullptr)},
                    {"batch_us", row.batch_us ? Json(*row.batch_us) : Json(nullptr)},
                    {"computed", row.packed ? "packed" : "decoded"}});
  }
  Json left_out = Json::array();
  for (const auto& [name, why] : report.left_out) {
    left_out.push_back({{"experts", name}, {"why", why}});
  }
  return {{"machine", machine_json(context)},
          {"model", report.model},
          {"text", report.text},
          {"skipped", report.skipped},
          {"context", report.windows.context},
          {"stride", report.windows.stride},
          {"dtype", report.arithmetic},
          {"rows", rows},
          {"left_out", left_out}};
}

}  // namespace shunt::tool
