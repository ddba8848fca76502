// shunt run: the MoE layers of a checkpoint over recorded or given hidden states.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>

#include "checkpoint/access.hpp"
#include "core/convert.hpp"
#include "options.hpp"
#include "run.hpp"
#include "run_layer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::tool {

namespace {

struct RunOptions {
  std::string model;
  std::optional<int> layer;
  DeviceOptions device;
  std::optional<DType> given_dtype;
  DType dtype = DType::f32;  // that, or what run() takes without it
  std::string format = "plain";
  RowFormat rows = RowFormat::as_dtype;
  std::string input, input_name, token_ids_name, output;
  std::optional<double> tolerance;
  bool allow_nonfinite = false;
  bool no_timing = false;
  bool explain = false;
  JsonOption json;
};

// The first element that is no number, in words; empty when all are.
std::string first_nonfinite(const Tensor& matrix) {
  const std::int64_t width = matrix.shape[1];
  for (std::int64_t i = 0; i < matrix.elements(); ++i) {
    const float value = load_f32(matrix.data, matrix.dtype, i);
    if (!std::isfinite(value)) return fmt::format("{} at [{}, {}]", value, i / width, i % width);
  }
  return {};
}

std::string list(const std::vector<std::string>& names, std::size_t most = 8) {
  std::string out;
  for (std::size_t i = 0; i < names.size() && i < most; ++i) out += (i ? ", " : "") + names[i];
  if (names.size() > most) out += fmt::format(", .. ({} in all)", names.size());
  return names.empty() ? "nothing" : out;
}

[[noreturn]] void bad_input(const std::string& message) {
  throw Error(Status::invalid_argument, message);
}

std::int64_t last_of(const Tensor& tensor) {
  return tensor.shape[static_cast<std::size_t>(tensor.rank) - 1];
}

// The hidden states that were asked for, as f32 | bf16 | f16; what is rounded lies in `memory`.
Tensor read_hidden(const SafetensorsFile& file, const RunOptions& options, std::int64_t width,
                   Rounded& memory) {
  std::string name = options.input_name;
  if (name.empty()) {
    std::vector<std::string> matrices;
    for (const auto& candidate : file.names()) {
      const Tensor tensor = file.get(candidate);
      const bool fits = tensor.rank == 2 || (tensor.rank > 2 && last_of(tensor) == width);
      if (fits && is_float(tensor.dtype)) matrices.push_back(candidate);
    }
    if (matrices.size() != 1) {
      throw UsageError(
          fmt::format("--input-name is needed: '{}' holds {} tensors of floats that may be it: {}",
                      options.input, matrices.size(), list(matrices)));
    }
    name = matrices[0];
  }
  if (!file.contains(name)) {
    bad_input(fmt::format("'{}' has no tensor '{}'; it holds {}", options.input, name,
                          list(file.names())));
  }
  Tensor hidden = file.get(name);
  if (hidden.rank < 2 || last_of(hidden) != width) {
    bad_input(fmt::format(
        "input '{}' is {}: must be [T, {}] or [.., T, {}], tokens by the model's hidden size", name,
        hidden.describe(), width, width));
  }
  if (!is_float(hidden.dtype) || bits(hidden.dtype) < 16) {
    bad_input(
        fmt::format("input '{}' is {}: must be f32, bf16, f16 or f64", name, hidden.describe()));
  }
  // Sequences one after the other: a token's experts depend on no other token.
  const std::int64_t tokens = hidden.elements() / width;
  hidden.rank = 2;
  hidden.shape = {tokens, width};
  hidden.strides = {width, 1};
  hidden = without_f64(hidden, memory);
  if (!options.allow_nonfinite) {
    const std::string found = first_nonfinite(hidden);
    if (!found.empty()) {
      bad_input(
          fmt::format("input '{}' has {}: hidden states must be finite "
                      "(--allow-nonfinite computes them all the same)",
                      name, found));
    }
  }
  return hidden;
}

Tensor read_token_ids(const SafetensorsFile& file, const RunOptions& options, const LayerSpec& spec,
                      int layer, std::int64_t tokens) {
  if (!spec.route.hashed) {
    if (options.token_ids_name.empty()) return {};
    throw UsageError(fmt::format("--token-ids-name: layer {} is not routed by token ids", layer));
  }
  if (options.token_ids_name.empty()) {
    bad_input(fmt::format(
        "layer {} is routed by token ids: --token-ids-name must name them in '{}', which holds {}",
        layer, options.input, list(file.names())));
  }
  if (!file.contains(options.token_ids_name)) {
    bad_input(fmt::format("'{}' has no tensor '{}'; it holds {}", options.input,
                          options.token_ids_name, list(file.names())));
  }
  const Tensor ids = file.get(options.token_ids_name);
  if (ids.rank != 1 || ids.shape[0] != tokens ||
      (ids.dtype != DType::i32 && ids.dtype != DType::i64)) {
    bad_input(fmt::format("token ids '{}' are {}: must be i32 or i64 [{}]", options.token_ids_name,
                          ids.describe(), tokens));
  }
  return ids;
}

LayerOptions layer_options(const RunOptions& options) {
  return {.dtype = options.dtype,
          .format = parse_option("--format", format_from_string, options.format),
          .rows = options.rows};
}

// About twice what rounding costs any recorded model; docs/formats.md has the means. Pruned to 2:4
// by magnitude random experts are off by up to 0.9: a tolerance of 1 finds gross faults alone.
double default_tolerance(const LayerOptions& options) {
  switch (options.format.format) {
    case Format::plain:
      return options.dtype == DType::f32 ? 1e-5 : 1e-2;
    case Format::int8:
      return 0.05;
    case Format::fp8_tensor:
    case Format::fp8_channel:
    case Format::fp8_block:
    case Format::mxfp8:
      return 0.15;
    case Format::nvfp4:
    case Format::mxfp4:
    case Format::int4:
      return 0.5;
    case Format::dense3:
      return 0.7;
    default:
      return 1;
  }
}

void finish(const RunOptions& options, const LoadWatch& watch, RunReport& report,
            const Context& context) {
  if (report.timed && !report.gpu) report.note = watch.note();
  // The best that was seen between all calls: on a machine that others use too, a single look at a
  // ceiling may find it low.
  for (const auto& layer : report.layers) {
    report.ceilings = better(report.ceilings, layer.ceilings);
  }
  const auto set_floor = [&](StageResult& stage) {
    stage.floor_us = report.gpu ? report.gpu->ceilings.floor_us(
                                      stage.bytes, stage.on_tensor_cores ? stage.flops : 0.0)
                                : report.ceilings.floor_us(stage.bytes, stage.flops);
    stage.share = stage.us > 0 ? stage.floor_us / stage.us : 0;
  };
  for (auto& layer : report.layers) {
    for (auto& stage : layer.stages) set_floor(stage);
    set_floor(layer.whole);
  }
  if (options.json.wanted) emit_json(options.json, run_json(report, context));
  if (!options.json.to_stdout()) print_report(report, context);
}

RunReport begin(const RunOptions& options, const Checkpoint& checkpoint, const Context& context) {
  RunReport report;
  report.model = options.model;
  report.summary = checkpoint.summary();
  report.dtype = options.dtype;
  report.output = options.output;
  report.format = resolved(layer_options(options).format);
  report.tolerance = options.tolerance.value_or(default_tolerance(layer_options(options)));
  report.timed = !options.no_timing;
  if (context.device().type == DeviceType::cuda) {
    report.gpu = gpu_side(context);
    if (report.timed) report.gpu->ceilings = cuda_engine::measure_ceilings(context);
  }
  return report;
}

void explain(const RunOptions& options, const Layer& layer, int index, std::int64_t tokens) {
  if (options.explain) {
    fmt::print(options.json.to_stdout() ? stderr : stdout, "plan of layer {}:\n{}\n", index,
               layer.explain(tokens));
  }
}

// Hidden states from a file through one layer, into a file.
int run_given(const RunOptions& options, const Checkpoint& checkpoint, const Context& context) {
  const int index = options.layer.value_or(checkpoint.first_moe_layer());
  const LayerSpec spec = checkpoint.spec(index);
  const SafetensorsFile file = SafetensorsFile::open(options.input);
  Rounded rounded;
  const Tensor hidden = read_hidden(file, options, spec.hidden, rounded);
  const Tensor ids = read_token_ids(file, options, spec, index, hidden.shape[0]);
  if (!options.output.empty()) check_writable(options.output);

  const LoadWatch watch;
  RunReport report = begin(options, checkpoint, context);
  const Layer layer(checkpoint, index, context, layer_options(options));
  Pass pass(context, spec, hidden, ids);
  report.layers.push_back(run_layer(layer, context, pass, index, report.timed));
  explain(options, layer, index, hidden.shape[0]);
  if (!options.allow_nonfinite) {
    const std::string found = first_nonfinite(pass.output());
    if (!found.empty()) {
      throw Error(
          Status::bad_file,
          fmt::format("layer {}: output has {}: weights are not finite, or numbers too large "
                      "(--allow-nonfinite computes them all the same)",
                      index, found));
    }
  }
  if (!options.output.empty()) {
    write_safetensors(
        options.output,
        {{"output", pass.output()}, {"topk_ids", pass.ids()}, {"topk_weights", pass.weights()}});
  }
  finish(options, watch, report, context);
  if (!options.output.empty() && !options.json.to_stdout()) {
    fmt::print("wrote {}: output {}, topk_ids {}, topk_weights {}\n", options.output,
               pass.output().describe(), pass.ids().describe(), pass.weights().describe());
  }
  return exit_done;
}

// Every recorded layer, compared with its recording.
int run_recorded(const RunOptions& options, const Checkpoint& checkpoint, const Context& context) {
  const std::string path = recording_file(options.model);
  if (path.empty()) {
    throw Error(Status::io,
                fmt::format("'{}' holds no activations.safetensors or golden.safetensors to check "
                            "against; --input FILE gives hidden states",
                            options.model));
  }
  if (options.layer) checkpoint.spec(*options.layer);  // out of range, dense: said by name
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto recordings = find_recordings(file, checkpoint, options.layer);
  if (recordings.empty()) {
    throw Error(Status::bad_file,
                fmt::format("'{}' records no input and output of {}", path,
                            options.layer ? fmt::format("layer {}", *options.layer)
                                          : std::string("any MoE layer")));
  }

  const LoadWatch watch;
  RunReport report = begin(options, checkpoint, context);
  report.against = std::filesystem::path(path).filename().string();
  bool pass_all = true;
  for (const auto& recording : recordings) {
    const LayerSpec spec = checkpoint.spec(recording.layer);
    if (spec.route.hashed && !recording.token_ids) {
      throw Error(Status::bad_file, fmt::format("'{}' records no token ids, by which layer {} "
                                                "is routed",
                                                path, recording.layer));
    }
    const Layer layer(checkpoint, recording.layer, context, layer_options(options));
    Pass pass(context, spec, recording.input, spec.route.hashed ? recording.token_ids : Tensor{});
    LayerResult result = run_layer(layer, context, pass, recording.layer, report.timed);
    result.comparison = compare(recording, spec, pass.output(), pass.ids());
    pass_all = pass_all && result.comparison->pass(report.tolerance);
    explain(options, layer, recording.layer, result.tokens);
    report.layers.push_back(std::move(result));
  }
  for (const auto& entry : checkpoint.layers()) {
    const bool asked = !options.layer || *options.layer == entry.index;
    const bool there =
        std::any_of(recordings.begin(), recordings.end(),
                    [&](const Recording& recording) { return recording.layer == entry.index; });
    if (entry.moe && asked && !there) report.not_recorded.push_back(entry.index);
  }
  finish(options, watch, report, context);
  return pass_all ? exit_done : exit_failed;
}

// f32, as recordings are; bf16 where that is what has packed experts: a GPU.
DType dtype_without(const RunOptions& options, const Checkpoint& checkpoint,
                    const Context& context) {
  if (context.device().type != DeviceType::cuda) return DType::f32;
  if (layer_options(options).format.format != Format::plain) return DType::bf16;
  const int layer = options.layer.value_or(checkpoint.first_moe_layer());
  const auto& layers = checkpoint.layers();
  const bool packed = std::any_of(layers.begin(), layers.end(), [&](const CheckpointLayer& entry) {
    return entry.index == layer && entry.moe &&
           !CheckpointAccess::unfilled_weights(checkpoint, layer).experts.packed_up.empty();
  });
  return packed ? DType::bf16 : DType::f32;
}

int run(RunOptions options) {
  if (options.tolerance && !options.input.empty()) {
    throw UsageError("--tolerance: with --input there is nothing to compare with");
  }
  if (options.input.empty()) {
    for (const auto& [name, value] :
         {std::pair<const char*, const std::string&>{"--output", options.output},
          {"--input-name", options.input_name},
          {"--token-ids-name", options.token_ids_name}}) {
      if (!value.empty()) throw UsageError(fmt::format("{} needs --input FILE", name));
    }
  }
  try {
    (void)layer_options(options);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--format: {}", error.what()));
  }
  const Engine engine(options.device);
  const Context& context = engine.context();
  const Checkpoint checkpoint = Checkpoint::open(options.model);
  if (checkpoint.first_moe_layer() < 0) {
    throw Error(Status::bad_file,
                fmt::format("'{}' has no MoE layer: {}", options.model, checkpoint.summary()));
  }
  options.dtype =
      options.given_dtype ? *options.given_dtype : dtype_without(options, checkpoint, context);
  check_apart("--output", options.output, options.model,
              {{"--input", options.input}, {"--json", options.json.file}});
  check_apart("--json", options.json.file, options.model, {{"--input", options.input}});
  if (!options.json.file.empty()) check_writable(options.json.file);
  return options.input.empty() ? run_recorded(options, checkpoint, context)
                               : run_given(options, checkpoint, context);
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "MoE layers over recorded or given hidden states");
  CLI::Option* model =
      command->add_option("model,--model", options->model, "folder of a checkpoint")
          ->option_text("DIR")
          ->required();
  command->add_option("--layer", options->layer, "this layer (default: every MoE layer recorded,")
      ->description("this layer; default: every recorded one, or the first with --input")
      ->option_text("N")
      ->check(whole_number(0, 1000000));
  add_device_options(*command, options->device);
  add_dtype_option(
      *command, [given = options.get()](DType dtype) { given->given_dtype = dtype; },
      "of weights and rows (default: f32; a GPU's packed experts: bf16)");
  command
      ->add_option("--format", options->format,
                   "packs the experts first: nvfp4, int4:64, .. (default: as they are)")
      ->option_text("NAME");
  add_rows_option(*command, options->rows, "on a GPU: what rows are rounded to");
  command->add_option("--input", options->input, "hidden states (.safetensors)")
      ->option_text("FILE");
  command
      ->add_option("--input-name", options->input_name, "its tensor [T, hidden] or [B, T, hidden]")
      ->option_text("NAME");
  command
      ->add_option("--token-ids-name", options->token_ids_name,
                   "its tensor [T] of token ids, for layers routed by them")
      ->option_text("NAME");
  command
      ->add_option("--output", options->output,
                   "writes output, topk_ids, topk_weights (.safetensors)")
      ->option_text("FILE");
  command
      ->add_option("--tolerance", options->tolerance,
                   "largest error / output (default: 1e-5 f32, 1e-2; --format more)")
      ->option_text("X")
      ->check(finite_number(0, 1e6));
  command->add_flag("--allow-nonfinite", options->allow_nonfinite,
                    "computes NaN and infinite hidden states too");
  command->add_flag("--no-timing", options->no_timing, "computes once and measures nothing");
  command->add_flag("--explain", options->explain, "prints what the plan chose, and why");
  add_json_option(*command, options->json, {{model, is_folder}});
  command->footer(
      "Without --input it takes DIR/activations.safetensors or DIR/golden.safetensors, and\n"
      "compares with what is recorded there.\n"
      "Examples:\n"
      "  shunt run --model models/tiny-moe\n"
      "  shunt run --model models/tiny-moe --format nvfp4\n"
      "  shunt run --model models/tiny-moe --layer 2 --dtype bf16 --input x.safetensors \\\n"
      "      --input-name hidden --output y.safetensors");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace shunt::tool
