// shunt eval: bits per byte of a small language model, its experts in one format after another.
#include "eval.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/mapped_file.hpp"
#include "convert/recorded_inputs.hpp"
#include "core/convert.hpp"
#include "eval_speed.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::tool {

namespace {

struct EvalOptions {
  std::string model, text, calibrate, record;
  std::vector<std::string> formats;
  bool all_formats = false;
  bool speed = false;
  bool markdown = false;
  std::optional<std::int64_t> tokens;
  std::int64_t skip = 0;
  std::optional<std::int64_t> context, stride;
  DeviceOptions device;
  DType dtype = DType::f32;
  JsonOption json;
};

constexpr std::size_t most_text = 1u << 30;
constexpr std::string_view in_pairs = ":pairs";

// "nvfp4", or "nvfp4/obs": pruned to 2:4 by that method before; "nvfp4/obs:pairs" in pairs.
ConversionSpec parse_format(const std::string& text) {
  const std::size_t slash = text.find('/');
  ConversionSpec spec = parse_option("--format", conversion_from_string, text.substr(0, slash));
  if (slash != std::string::npos) {
    spec.prune = true;
    std::string method = text.substr(slash + 1);
    if (method.ends_with(in_pairs)) {
      method.resize(method.size() - in_pairs.size());
      spec.pruning.pattern = PrunePattern::pairs;
    }
    try {
      spec.pruning.method = prune_method_from_string(method);
    } catch (const Error& error) {
      throw UsageError(
          fmt::format("--format {}: {}, with or without {}", text, error.what(), in_pairs));
    }
  }
  return spec;
}

// Whether a word of the command line is meant as a format: paths have slashes too.
bool names_format(const std::string& text) {
  try {
    parse_format(text);
  } catch (const UsageError&) {
    return false;
  }
  return true;
}

bool needs_inputs(const ConversionSpec& spec) {
  return spec.prune && spec.pruning.method != PruneMethod::magnitude;
}

// What a table of everything shows. Methods that need inputs only where there are some.
std::vector<ConversionSpec> all_conversions(bool calibrated) {
  std::vector<ConversionSpec> specs = {{.dtype = DType::bf16}};
  for (const FormatSpec& format : known_formats()) {
    if (format.format == Format::int4) {
      for (const int group : {32, 128}) specs.push_back({.format = {Format::int4, group}});
    } else if (format.format != Format::sparse_nvfp4) {
      specs.push_back({.format = format});
    }
  }
  for (const FormatSpec& format : {FormatSpec{}, FormatSpec{Format::sparse_nvfp4}}) {
    for (const PruneMethod method :
         {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
      const ConversionSpec spec{.format = format, .prune = true, .pruning = {.method = method}};
      if (calibrated || !needs_inputs(spec)) specs.push_back(spec);
    }
  }
  return specs;
}

class Evaluation {
 public:
  explicit Evaluation(const EvalOptions& options)
      : options_(options),
        engine_(options.device),
        host_(cpu({.threads = options.device.threads})),
        checkpoint_(Checkpoint::open(options.model)) {}
  int run();

 private:
  std::string command() const;
  std::string read();
  EvalRow evaluate(const std::optional<ConversionSpec>& spec, std::span<const std::uint8_t> text);
  Layer make_layer(int index, const std::optional<ConversionSpec>& spec, EvalRow& row,
                   WeightError& error);
  void convert(int index, const ConversionSpec& spec, ConvertedLayer& layer);
  void record(int layer, const Tensor& hidden);
  void write_recordings() const;
  double expert_weights_per_token() const;
  Support computes(const FormatSpec& format) const;
  LayerOptions layer_options(const FormatSpec& format) const;
  bool on_gpu() const { return context().device().type == DeviceType::cuda; }
  const Context& context() const { return engine_.context(); }

  const EvalOptions& options_;
  Engine engine_;
  Context host_;
  Checkpoint checkpoint_;
  Windows windows_;
  std::unique_ptr<const RecordedInputs> inputs_;        // to calibrate by
  std::map<int, std::vector<std::uint16_t>> recorded_;  // bf16
  EvalSpeed speed_;                                     // for --speed
  Progress progress_;
};

std::string Evaluation::read() {
  std::string path = options_.text;
  if (path.empty()) {
    path = options_.model + "/heldout.txt";
    if (!file_exists(path)) {
      throw UsageError(
          fmt::format("--text FILE is needed: '{}' has no heldout.txt", options_.model));
    }
  }
  std::string text = read_text(path, most_text);
  const auto size = static_cast<std::int64_t>(text.size());
  if (size == 0) {
    throw Error(Status::invalid_argument, fmt::format("--text: '{}' is empty", path));
  }
  if (options_.skip >= size) {
    throw Error(Status::invalid_argument,
                fmt::format("--skip {}: '{}' has {} bytes", options_.skip, path, size));
  }
  text.erase(0, static_cast<std::size_t>(options_.skip));
  if (options_.tokens && *options_.tokens < static_cast<std::int64_t>(text.size())) {
    text.resize(static_cast<std::size_t>(*options_.tokens));
  }
  return text;
}

double Evaluation::expert_weights_per_token() const {
  double weights = 0;
  for (const CheckpointLayer& layer : checkpoint_.layers()) {
    if (!layer.moe) continue;
    const LayerSpec spec = checkpoint_.spec(layer.index);
    weights += static_cast<double>(spec.route.top_k) * (spec.experts.activation.gated ? 3 : 2) *
               static_cast<double>(spec.experts.hidden * spec.experts.intermediate);
  }
  return weights;
}

// A text scores the same however it is cut into batches.
LayerOptions Evaluation::layer_options(const FormatSpec& format) const {
  return {.dtype = options_.dtype, .format = format, .batch_invariant = true};
}

// Whether the engine multiplies the experts of every layer from this packed form.
Support Evaluation::computes(const FormatSpec& format) const {
  for (const CheckpointLayer& layer : checkpoint_.layers()) {
    if (!layer.moe) continue;
    const Support support =
        supports(checkpoint_.spec(layer.index), layer_options(format), context().device());
    if (!support) return support;
  }
  return {};
}

void Evaluation::convert(int index, const ConversionSpec& spec, ConvertedLayer& layer) {
  const LayerSpec layer_spec = checkpoint_.spec(index);
  layer.weights = checkpoint_.weights(index);
  std::unique_ptr<LayerCalibration> calibration;
  if (needs_inputs(spec)) {
    const RecordedLayer& inputs = inputs_->of(index);
    calibration = std::make_unique<LayerCalibration>(host_, layer_spec, layer.weights,
                                                     inputs.hidden, inputs.token_ids);
  }
  ExpertWeights experts;
  experts.gate_bias = layer.weights.experts.gate_bias;
  experts.up_bias = layer.weights.experts.up_bias;
  experts.down_bias = layer.weights.experts.down_bias;
  for (int e = 0; e < layer_spec.experts.experts; ++e) {
    layer.experts.push_back(
        convert_expert(host_, spec, layer_spec, layer.weights, e, calibration.get()));
    bool by_magnitude = false;
    for (const ConvertedMatrix& matrix : layer.experts.back().matrices) {
      layer.error.add(matrix.error);
      by_magnitude = by_magnitude || fell_back(spec, matrix);
    }
    layer.fell_back += by_magnitude ? 1 : 0;
    progress_.show(
        to_string(spec), index * layer_spec.experts.experts + e + 1,
        static_cast<std::int64_t>(checkpoint_.layers().size()) * layer_spec.experts.experts);
  }
  layer.weights.experts = experts;
}

// A layer as the checkpoint has it, or converted; from the packed form where the engine computes
// it.
Layer Evaluation::make_layer(int index, const std::optional<ConversionSpec>& spec, EvalRow& row,
                             WeightError& error) {
  const LayerSpec layer_spec = checkpoint_.spec(index);
  ConvertedLayer layer;
  FormatSpec format;
  if (spec) {
    convert(index, *spec, layer);
    error.add(layer.error);
    row.experts += std::ssize(layer.experts);
    row.fell_back += layer.fell_back;
    format = resolved(spec->format);
  } else {
    layer.weights = checkpoint_.weights(index);
    const std::vector<PackedMatrix>& packed = layer.weights.experts.packed_up;
    if (!packed.empty()) {
      format = packed[0].format;
      row.name = to_string(format);
      row.bits_per_weight = bits_per_weight(format);
    } else {
      row.name = to_string(layer.weights.experts.up[0].dtype);
      row.bits_per_weight = bits(layer.weights.experts.up[0].dtype);
    }
  }
  const bool plain = format.format == Format::plain;
  LayerOptions options = layer_options(format);
  if (!plain && !supports(layer_spec, options, context().device())) options.format = {};
  row.packed = plain || options.format.format != Format::plain;
  ExpertWeights& experts = layer.weights.experts;
  if (spec) {
    for (const ConvertedExpert& expert : layer.experts) {
      const auto& [gate, up, down] = expert.matrices;
      if (options.format.format != Format::plain) {
        if (gate.packed) experts.packed_gate.push_back(gate.packed);
        experts.packed_up.push_back(up.packed);
        experts.packed_down.push_back(down.packed);
      } else {
        if (!gate.values.empty()) experts.gate.push_back(gate.view());
        experts.up.push_back(up.view());
        experts.down.push_back(down.view());
      }
    }
  } else if (!plain && options.format.format == Format::plain) {
    // Decoded, exactly.
    convert(index, {.dtype = DType::f32}, layer);
    for (const ConvertedExpert& expert : layer.experts) {
      const auto& [gate, up, down] = expert.matrices;
      if (!gate.values.empty()) experts.gate.push_back(gate.view());
      experts.up.push_back(up.view());
      experts.down.push_back(down.view());
    }
  }
  Layer result(layer_spec, layer.weights, context(), options);
  if (options_.speed) {
    options.dtype = DType::bf16;
    speed_.add({index, layer_spec, options, std::move(layer)});
  }
  return result;
}

EvalRow Evaluation::evaluate(const std::optional<ConversionSpec>& spec,
                             std::span<const std::uint8_t> text) {
  EvalRow row;
  WeightError error;
  speed_.clear();
  if (spec) {
    row.name = to_string(*spec);
    row.bits_per_weight = bits_per_weight(*spec);
  }
  LanguageModel model(checkpoint_, host_, context(), {.dtype = options_.dtype},
                      [&](int index) { return make_layer(index, spec, row, error); });
  if (spec) row.error = error.relative();
  row.bytes_per_token = expert_weights_per_token() * row.bits_per_weight / 8;
  HiddenHook hook;
  if (!spec && (options_.speed || !options_.record.empty())) {
    hook = [&](int layer, const Tensor& hidden) {
      if (options_.speed) speed_.sample(layer, hidden);
      if (!options_.record.empty()) record(layer, hidden);
    };
  }
  const auto size = static_cast<std::int64_t>(text.size());
  std::int64_t windows = 1;
  while (windows_.context + (windows - 1) * windows_.stride < size) ++windows;
  row.score = bits_per_byte(
      model, text, windows_, [&](std::int64_t scored) { progress_.show(row.name, scored, size); },
      hook);
  if (!std::isfinite(row.score.bits)) {
    throw Error(Status::bad_file, fmt::format("{}: {} has {} bits: weights are not finite",
                                              options_.model, row.name, row.score.bits));
  }
  const std::int64_t computed =
      std::min(size, windows_.context) + std::max<std::int64_t>(0, windows - 1) * windows_.context;
  row.moe_us_per_token = model.moe_seconds() * 1e6 / static_cast<double>(computed);
  if (options_.speed) {
    progress_.show(row.name + ", speed", size, size);
    speed_.time(context(), row);
  }
  progress_.clear();
  return row;
}

void Evaluation::record(int layer, const Tensor& hidden) {
  std::vector<std::uint16_t>& rows = recorded_[layer];
  for (std::int64_t i = 0; i < hidden.elements(); ++i) {
    rows.push_back(f32_to_bf16(hidden.as<const float>()[i]));
  }
}

void Evaluation::write_recordings() const {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [layer, rows] : recorded_) {
    const std::int64_t hidden = checkpoint_.spec(layer).hidden;
    tensors.emplace_back(
        checkpoint_.layers()[static_cast<std::size_t>(layer)].module + ".input",
        view(rows.data(), bf16, {static_cast<std::int64_t>(rows.size()) / hidden, hidden}));
  }
  write_safetensors(options_.record, tensors, {{"made_by", "shunt eval --record"}});
}

// What makes the same table.
std::string Evaluation::command() const {
  const EvalOptions& o = options_;
  std::string text = "shunt eval " + o.model;
  if (!o.text.empty()) text += " --text " + o.text;
  if (o.skip > 0) text += fmt::format(" --skip {}", o.skip);
  if (o.tokens) text += fmt::format(" --tokens {}", *o.tokens);
  if (o.context) text += fmt::format(" --context {}", *o.context);
  if (o.stride) text += fmt::format(" --stride {}", *o.stride);
  for (const std::string& format : o.formats) text += " --format " + format;
  if (o.all_formats) text += " --all-formats";
  if (on_gpu()) text += " --device cuda";
  if (on_gpu() || o.dtype != DType::f32) text += fmt::format(" --dtype {}", to_string(o.dtype));
  if (o.speed) text += " --speed";
  if (!o.calibrate.empty()) text += " --calibrate " + o.calibrate;
  return text + " --markdown";
}

int Evaluation::run() {
  const DecoderSpec decoder = decoder_spec(checkpoint_);
  windows_.context = options_.context.value_or(std::min<std::int64_t>(512, decoder.max_positions));
  windows_.stride = options_.stride.value_or(std::max<std::int64_t>(1, windows_.context / 2));
  // What a GPU does not compute is not computed elsewhere: asked for by name it is refused, and in
  // the table of everything it is left out.
  std::vector<std::pair<std::string, std::string>> left_out;
  const auto refused = [&](const ConversionSpec& spec) -> std::string {
    const FormatSpec format = resolved(spec.format);
    return !on_gpu() || format.format == Format::plain ? "" : computes(format).reason;
  };
  std::vector<ConversionSpec> specs;
  for (const std::string& format : options_.formats) {
    specs.push_back(parse_format(format));
    parse_option(
        "--format", [&](const std::string&) { check_prunable(specs.back()); }, format);
    const std::string why = refused(specs.back());
    if (!why.empty()) {
      throw Error(Status::unsupported, fmt::format("--format {}: {}", format, why));
    }
  }
  if (!options_.calibrate.empty()) {
    inputs_ = std::make_unique<const RecordedInputs>(options_.calibrate, checkpoint_);
  }
  if (options_.all_formats) {
    for (const ConversionSpec& spec : all_conversions(inputs_ != nullptr)) {
      const std::string why = refused(spec);
      if (why.empty()) {
        specs.push_back(spec);
      } else {
        left_out.emplace_back(to_string(spec), why);
      }
    }
  }
  if (inputs_ && std::none_of(specs.begin(), specs.end(), needs_inputs)) {
    throw UsageError("--calibrate: no --format of wanda or obs looks at it");
  }
  for (const ConversionSpec& spec : specs) {
    if (needs_inputs(spec) && !inputs_) {
      throw UsageError(fmt::format("--calibrate FILE is needed for {}: --record makes one",
                                   to_string(spec.pruning.method)));
    }
  }
  if (options_.markdown && options_.json.to_stdout()) {
    throw UsageError("--markdown and --json both print: --json FILE writes beside it");
  }
  if (options_.speed && on_gpu()) {
    throw UsageError("--speed: times layers on the CPU only; shunt bench layer does on a GPU");
  }
  check_apart("--record", options_.record, options_.model,
              {{"--calibrate", options_.calibrate},
               {"--text", options_.text},
               {"--json", options_.json.file}});
  check_apart("--json", options_.json.file, options_.model,
              {{"--calibrate", options_.calibrate}, {"--text", options_.text}});
  if (!options_.json.file.empty()) check_writable(options_.json.file);
  if (!options_.record.empty()) check_writable(options_.record);
  const std::string bytes = read();
  const std::span<const std::uint8_t> text(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                                           bytes.size());
  EvalReport report{.model = options_.model,
                    .text = options_.text.empty() ? "heldout.txt" : options_.text,
                    .arithmetic = to_string(options_.dtype),
                    .skipped = options_.skip,
                    .windows = windows_,
                    .left_out = left_out};
  report.rows.push_back(evaluate(std::nullopt, text));
  for (const ConversionSpec& spec : specs) {
    // The model as it is needs no second row.
    if (spec == ConversionSpec{.dtype = DType::bf16} && report.rows[0].name == "bf16") continue;
    report.rows.push_back(evaluate(spec, text));
  }
  if (!options_.record.empty()) write_recordings();

  if (options_.json.wanted) emit_json(options_.json, eval_json(report, context()));
  if (options_.json.to_stdout()) return exit_done;
  if (options_.markdown) {
    fmt::print("{}", eval_markdown(report, context(), command()));
  } else {
    print_eval(report, context());
    if (!options_.record.empty()) {
      fmt::print("wrote {}: hidden states of {} MoE layers\n", options_.record, recorded_.size());
    }
  }
  return exit_done;
}

// The list of --format takes whatever stands behind it: MODEL too, which is what of it is no
// format.
void take_model(EvalOptions& options) {
  if (!options.model.empty()) return;
  std::vector<std::string>& formats = options.formats;
  if (formats.size() > 1 && !names_format(formats.back())) {
    options.model = formats.back();
    formats.pop_back();
    return;
  }
  options.model = options.json.taken(is_folder);
  if (options.model.empty()) throw CLI::RequiredError("--model");
}

}  // namespace

void add_eval(CLI::App& app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command =
      app.add_subcommand("eval", "bits per byte of a small language model, in any weight format");
  command->add_option("model,--model", options->model, "folder of a checkpoint")
      ->option_text("MODEL");
  command->add_option("--text", options->text, "text to predict (default: MODEL/heldout.txt)")
      ->option_text("FILE");
  command
      ->add_option("--format", options->formats,
                   "experts in this too: NAME or NAME/METHOD, pruned before")
      ->option_text("NAME ..");
  command->add_flag("--all-formats", options->all_formats, "every format there is");
  command
      ->add_option("--calibrate", options->calibrate,
                   "hidden states for the methods wanda and obs (--record)")
      ->option_text("FILE");
  command->add_option("--record", options->record, "writes the hidden states that MoE layers saw")
      ->option_text("FILE");
  command->add_option("--tokens", options->tokens, "at most so many bytes of the text")
      ->option_text("N")
      ->check(whole_number(2, std::int64_t{1} << 40));
  command->add_option("--skip", options->skip, "leaves out the first N bytes of the text")
      ->option_text("N")
      ->check(whole_number(0, std::int64_t{1} << 40));
  command->add_option("--context", options->context, "bytes of a window (default: 512)")
      ->option_text("N")
      ->check(whole_number(2, 1 << 24));
  command
      ->add_option("--stride", options->stride, "from one window to the next (default: half of it)")
      ->option_text("N")
      ->check(whole_number(1, 1 << 24));
  add_device_options(*command, options->device);
  add_dtype_option(*command, options->dtype,
                   "arithmetic of the MoE layers (default: f32, on a GPU bf16)");
  command->add_flag("--speed", options->speed,
                    "also times the MoE layers in bf16: a token alone, and 512 at once");
  command->add_flag("--markdown", options->markdown, "the table as docs/quality.md has it");
  add_json_option(*command, options->json);
  command->footer(
      "Each byte but the first is scored once, by a window that has at least context - stride\n"
      "bytes before it. What is around the MoE layers is computed in f32, on the CPU.\n"
      "On a GPU (--device cuda) only formats that it multiplies as they are packed, in 16 bits.\n"
      "Formats: f32, bf16, f16, fp8_tensor, fp8_channel, fp8_block, mxfp8, nvfp4, mxfp4, int8,\n"
      "int4[:GROUP], dense3, sparse_nvfp4. METHOD (not of dense3): magnitude, wanda, obs;\n"
      "with :pairs behind it one aligned pair of every two stays, and NVFP4 has one scale for 32.\n"
      "Examples:\n"
      "  shunt eval models/tiny-moe\n"
      "  shunt eval models/tiny-moe --format nvfp4 int4:64 sparse_nvfp4/magnitude\n"
      "  shunt eval models/tiny-moe --device cuda --all-formats");
  command->callback([options, command, &action] {
    if (options->device.device == "cuda" && command->count("--dtype") == 0) options->dtype = bf16;
    take_model(*options);
    action = [options] { return Evaluation(*options).run(); };
  });
}

}  // namespace shunt::tool
