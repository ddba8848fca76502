// shunt convert: a checkpoint with its experts in another format.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "convert/conversion.hpp"
#include "cpu/features.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

struct ConvertOptions {
  std::string in, out, to, prune, method, calibrate;
  std::optional<double> damping;
  int threads = 0;
  bool experts = false;
  JsonOption json;
};

ConversionOptions parse(const ConvertOptions& options) {
  ConversionOptions result;
  result.spec = parse_option("--to", conversion_from_string, options.to);
  // The best that there are numbers for.
  result.spec.pruning.method =
      !options.method.empty() ? parse_option("--method", prune_method_from_string, options.method)
      : options.calibrate.empty() ? PruneMethod::magnitude
                                  : PruneMethod::obs;
  if (!options.prune.empty()) {
    result.spec.pruning.pattern = parse_option("--prune", prune_pattern_from_string, options.prune);
  }
  result.spec.prune = !options.prune.empty();
  parse_option(
      "--to", [&](const std::string&) { check_prunable(result.spec); }, options.to);
  result.calibrate = options.calibrate;
  const bool measured = result.spec.pruning.method != PruneMethod::magnitude;
  if (options.damping) {
    if (!result.spec.prune || result.spec.pruning.method != PruneMethod::obs) {
      throw UsageError("--damping is about --prune 2:4 --method obs");
    }
    result.spec.pruning.damping = *options.damping;
  }
  if (options.out.empty()) throw UsageError("OUT: must be the name of a folder");
  if (!result.spec.prune && (!options.method.empty() || !options.calibrate.empty())) {
    throw UsageError(fmt::format("{} needs --prune 2:4",
                                 options.calibrate.empty() ? "--method" : "--calibrate"));
  }
  if (measured && options.calibrate.empty()) {
    throw UsageError(
        fmt::format("--method {} needs --calibrate FILE; 'shunt eval --record FILE' makes one",
                    options.method));
  }
  if (result.spec.prune && !measured && !options.calibrate.empty()) {
    throw UsageError("--calibrate: --method magnitude does not look at it");
  }
  return result;
}

WeightError all_of(const ConvertedExpertReport& expert) {
  WeightError sum;
  for (const WeightError& error : expert.errors) sum.add(error);
  return sum;
}

std::string percent_of(const WeightError& error) {
  return fmt::format("{:.2f} %", 100 * error.relative());
}

void print_experts(const std::vector<ConvertedExpertReport>& experts) {
  Table table(">>>>>><");
  table.heading({"layer", "expert", "gate", "up", "down", "tokens", ""});
  for (const ConvertedExpertReport& expert : experts) {
    std::vector<Cell> row = {std::to_string(expert.layer), std::to_string(expert.expert)};
    for (const WeightError& error : expert.errors) row.emplace_back(percent_of(error));
    row.emplace_back(expert.tokens < 0 ? "-" : std::to_string(expert.tokens));
    row.emplace_back(expert.fell_back ? "no inputs: by magnitude" : "");
    table.row(std::move(row));
  }
  fmt::print("{}", table.str());
}

void print_layers(const std::vector<ConvertedExpertReport>& experts) {
  std::map<int, std::vector<const ConvertedExpertReport*>> layers;
  for (const ConvertedExpertReport& expert : experts) layers[expert.layer].push_back(&expert);
  Table table(">>>>>>>>");
  table.heading({"layer", "experts", "gate", "up", "down", "all", "worst", "expert"});
  for (const auto& [layer, list] : layers) {
    std::array<WeightError, expert_matrices> sums{};
    WeightError all;
    const ConvertedExpertReport* worst = list.front();
    for (const ConvertedExpertReport* expert : list) {
      for (std::size_t m = 0; m < sums.size(); ++m) sums[m].add(expert->errors[m]);
      all.add(all_of(*expert));
      if (all_of(*expert).relative() > all_of(*worst).relative()) worst = expert;
    }
    std::vector<Cell> row = {std::to_string(layer), std::to_string(list.size())};
    for (const WeightError& sum : sums) row.emplace_back(percent_of(sum));
    row.emplace_back(percent_of(all));
    row.emplace_back(percent_of(all_of(*worst)));
    row.emplace_back(std::to_string(worst->expert));
    table.row(std::move(row));
  }
  fmt::print("{}", table.str());
}

Json json_of(const ConvertOptions& options, const ConversionOptions& parsed,
             const ConversionReport& report) {
  Json rows = Json::array();
  for (const ConvertedExpertReport& expert : report.experts) {
    Json row = {{"layer", expert.layer}, {"expert", expert.expert}};
    for (int m = 0; m < expert_matrices; ++m) {
      row[std::string(to_string(static_cast<ExpertMatrix>(m))) + "_error"] =
          expert.errors[static_cast<std::size_t>(m)].relative();
    }
    if (expert.tokens >= 0) row["tokens"] = expert.tokens;
    if (expert.fell_back) row["fell_back"] = true;
    rows.push_back(row);
  }
  return {{"in", options.in},
          {"out", options.out},
          {"to", to_string(parsed.spec)},
          {"bits_per_weight", bits_per_weight(parsed.spec)},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after},
          {"expert_bytes_before", report.experts_before},
          {"expert_bytes_after", report.experts_after},
          {"shards", report.shards},
          {"shards_resumed", report.shards_resumed},
          {"left_out", report.left_out},
          {"unpacked_modules", report.unpacked_modules},
          {"experts", rows}};
}

// There is no such folder yet: what tells it from the FILE of --json is that it is not named so.
bool may_be_out(const std::string& word) { return !word.ends_with(".json"); }

int convert(const ConvertOptions& options) {
  const ConversionOptions parsed = parse(options);
  check_apart("--json", options.json.file, options.in, {{"--calibrate", options.calibrate}});
  std::string out = options.out;
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  for (const char* end : {"", ".partial"}) check_outside("--json", options.json.file, out + end);
  if (!options.json.file.empty()) check_writable(options.json.file);
  const cpu_engine::CoreLimit limit(options.threads);
  const Context context = cpu({.threads = options.threads});
  Progress progress;
  const ConversionReport report =
      convert_checkpoint(context, options.in, options.out, parsed,
                         [&](const std::string& file, std::int64_t done, std::int64_t total) {
                           progress.show(file, done, total);
                         });
  progress.clear();
  if (options.json.wanted) emit_json(options.json, json_of(options, parsed, report));
  if (options.json.to_stdout()) return exit_done;

  fmt::print("{} -> {}: experts in {}\n", paint(Style::bold, options.in), options.out,
             to_string(parsed.spec));
  if (options.experts) {
    print_experts(report.experts);
  } else {
    print_layers(report.experts);
  }
  WeightError all;
  std::int64_t fell_back = 0;
  for (const ConvertedExpertReport& expert : report.experts) {
    all.add(all_of(expert));
    fell_back += expert.fell_back ? 1 : 0;
  }
  if (fell_back > 0) {
    fmt::print("{}", wrap(fell_back_text(fell_back, std::ssize(report.experts)) +
                              " (--experts says to which)",
                          0));
  }
  fmt::print(
      "{}",
      wrap(fmt::format(
               "errors are |w - w'| / |w|, {} over all; experts {} -> {}, all "
               "{} file{} {} -> {}{}",
               percent_of(all), size(static_cast<double>(report.experts_before)),
               size(static_cast<double>(report.experts_after)), report.shards,
               report.shards == 1 ? "" : "s", size(static_cast<double>(report.bytes_before)),
               size(static_cast<double>(report.bytes_after)),
               report.shards_resumed > 0 ? fmt::format("; {} found finished", report.shards_resumed)
                                         : ""),
           0));
  if (report.unpacked_modules > 0) {
    fmt::print("{}", wrap(fmt::format("{} packed matrices beside the experts became {}",
                                      report.unpacked_modules, to_string(report.unpacked_dtype)),
                          0));
  }
  if (!report.left_out.empty()) {
    fmt::print("{}", wrap(fmt::format("left out: {}", fmt::join(report.left_out, "; ")), 0));
  }
  return exit_done;
}

}  // namespace

void add_convert(CLI::App& app, Action& action) {
  auto options = std::make_shared<ConvertOptions>();
  CLI::App* command =
      app.add_subcommand("convert", "a checkpoint with its experts in another format, or pruned");
  CLI::Option* in = command->add_option("in", options->in, "folder of a checkpoint")
                        ->option_text("IN")
                        ->required();
  CLI::Option* out =
      command->add_option("out", options->out, "folder that it makes; must not exist")
          ->option_text("OUT")
          ->required();
  command->add_option("--to", options->to, "format of the experts (required)")
      ->option_text("FORMAT")
      ->required();
  command
      ->add_option("--prune", options->prune,
                   "to two of every four weights before rounding, or 2:4-pairs")
      ->option_text("2:4");
  command
      ->add_option("--method", options->method,
                   "magnitude, wanda or obs (default: magnitude; with --calibrate obs)")
      ->option_text("NAME");
  command
      ->add_option("--calibrate", options->calibrate,
                   "hidden states that MoE layers saw, for wanda and obs")
      ->option_text("FILE");
  command->add_option("--damping", options->damping, "of obs (default: 0.01)")
      ->option_text("X")
      ->check(finite_number(0, 1));
  command->add_option("--threads", options->threads, "CPU threads (default 0: every core)")
      ->option_text("N")
      ->check(whole_number(0, 1024, " (0: every core)"));
  command->add_flag("--experts", options->experts, "prints a line an expert, not a layer");
  add_json_option(*command, options->json, {{in, is_folder}, {out, may_be_out}});
  command->footer(
      "Formats: f32, bf16, f16, fp8_tensor, fp8_channel, fp8_block, mxfp8, nvfp4, mxfp4, int8,\n"
      "int4[:GROUP], dense3, sparse_nvfp4. Experts that have it already stay bit for bit. An\n"
      "interrupted call, repeated, goes on with the first file that is not finished, unless the\n"
      "source has been written since.\n"
      "2:4-pairs keeps weights 0 and 1 or 2 and 3, as Blackwell multiplies sparse NVFP4; nvfp4\n"
      "and sparse_nvfp4 then have one scale for 32. dense3 does not hold every 0 and is not "
      "pruned.\n"
      "Examples:\n"
      "  shunt convert models/tiny-moe tiny-nvfp4 --to nvfp4\n"
      "  shunt convert models/tiny-moe tiny-sparse --to sparse_nvfp4 --prune 2:4 --method obs \\\n"
      "      --calibrate hidden.safetensors");
  command->callback([options, &action] { action = [options] { return convert(*options); }; });
}

}  // namespace shunt::tool
