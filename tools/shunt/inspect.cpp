// shunt inspect: what a checkpoint holds.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <map>
#include <memory>
#include <vector>

#include "checkpoint/access.hpp"
#include "cost.hpp"
#include "gpus.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "report.hpp"
#include "shunt/checkpoint.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

struct InspectOptions {
  std::string model;
  DeviceOptions device;
  JsonOption json;
};

// What one MoE layer weighs in its file.
struct LayerBytes {
  std::string format = "f32";  // of the experts' matrices: a dtype, or a FormatSpec
  double expert = 0;           // one routed expert
  double routed = 0;           // all of them
  double shared = 0;           // the shared expert
  double router = 0;           // and its biases
  double per_token = 0;        // what one token needs
};

double total(const std::vector<Tensor>& tensors) {
  double sum = 0;
  for (const auto& tensor : tensors) sum += static_cast<double>(tensor.bytes());
  return sum;
}
double total(const ExpertWeights& experts) {
  double sum = 0;
  for (const auto* list : {&experts.gate, &experts.up, &experts.down, &experts.gate_bias,
                           &experts.up_bias, &experts.down_bias}) {
    sum += total(*list);
  }
  for (const auto* list : {&experts.packed_gate, &experts.packed_up, &experts.packed_down}) {
    for (const PackedMatrix& matrix : *list) sum += static_cast<double>(matrix.bytes());
  }
  return sum;
}

LayerBytes weigh(const Checkpoint& checkpoint, int layer, const LayerSpec& spec) {
  const LayerWeights weights = CheckpointAccess::unfilled_weights(checkpoint, layer);
  LayerBytes bytes;
  if (!weights.experts.down.empty()) bytes.format = to_string(weights.experts.down[0].dtype);
  if (!weights.experts.packed_up.empty()) {
    bytes.format = to_string(weights.experts.packed_up[0].format);
  }
  bytes.routed = total(weights.experts);
  bytes.expert = bytes.routed / std::max(1, spec.experts.experts);
  bytes.shared = total(weights.shared) + total({weights.shared_gate});
  bytes.router =
      total({weights.router, weights.router_bias, weights.selection_bias, weights.per_expert_scale,
             weights.latent_down, weights.latent_up, weights.output_bias, weights.router_norm,
             weights.input_norm, weights.output_norm, weights.latent_norm,
             weights.latent_input_norm, weights.expert_norm});
  // Zero-compute experts share the slots: on average they spare their part of the bytes.
  const double computed =
      static_cast<double>(spec.experts.experts - spec.route.shared.count) / spec.route.experts;
  bytes.per_token = bytes.expert * (spec.route.top_k * computed + spec.route.shared.count) +
                    bytes.shared + bytes.router;
  return bytes;
}

// "0-3, 5, 7-9"
std::string ranges(const std::vector<int>& numbers) {
  std::string out;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!out.empty()) out += ", ";
    out += i == j ? std::to_string(numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[j]);
    i = j + 1;
  }
  return out;
}

// Layers of one spec, shown once.
struct Kind {
  LayerSpec spec;
  LayerBytes bytes;
  std::vector<int> layers;
};

int inspect(const InspectOptions& options) {
  check_apart("--json", options.json.file, options.model, {});
  if (!options.json.file.empty()) check_writable(options.json.file);
  const Engine engine(options.device);
  const Context& context = engine.context();
  const Checkpoint checkpoint = Checkpoint::open(options.model);
  std::vector<Kind> kinds;
  std::map<std::string, std::vector<int>> others;  // by note
  Json layers = Json::array();
  double experts = 0;
  double per_token = 0;
  for (const auto& entry : checkpoint.layers()) {
    Json json = {{"index", entry.index}, {"moe", entry.moe}};
    if (!entry.moe) {
      others[entry.note.empty() ? "dense" : entry.note].push_back(entry.index);
      json["note"] = entry.note;
      layers.push_back(json);
      continue;
    }
    const LayerSpec spec = checkpoint.spec(entry.index);
    const LayerBytes bytes = weigh(checkpoint, entry.index, spec);
    experts += bytes.routed + bytes.shared;
    per_token += bytes.per_token;
    json["module"] = entry.module;
    json["dtype"] = bytes.format;
    json["expert_bytes"] = bytes.expert;
    json["routed_bytes"] = bytes.routed;
    json["shared_bytes"] = bytes.shared;
    json["bytes_per_token"] = bytes.per_token;
    json["spec"] = Json::parse(to_json(spec));
    layers.push_back(json);
    bool known = false;
    for (auto& kind : kinds) {
      if (!known && kind.spec == spec && kind.bytes.format == bytes.format) {
        kind.layers.push_back(entry.index);
        known = true;
      }
    }
    if (!known) kinds.push_back({spec, bytes, {entry.index}});
  }
  const bool gpu = context.device().type == DeviceType::cuda;
  const double read = gpu ? cuda_engine::measure_ceilings(context).read : measure_read(context);

  if (options.json.wanted) {
    emit_json(options.json, {{"machine", gpu ? gpu_side(context).machine : machine_json(context)},
                             {"ceilings", {{"read_GBps", read / 1e9}}},
                             {"folder", checkpoint.folder()},
                             {"family", checkpoint.family()},
                             {"model", checkpoint.model_name()},
                             {"summary", checkpoint.summary()},
                             {"expert_bytes", experts},
                             {"bytes_per_token", per_token},
                             {"floor_us_per_token", per_token / read * 1e6},
                             {"layers", layers}});
    if (options.json.to_stdout()) return exit_done;
  }

  fmt::print("{}\n{}\n", paint(Style::bold, options.model), wrap(checkpoint.summary(), 2));
  Table facts("<<");
  facts.row({"family", fmt::format("{} ({})", checkpoint.family(), checkpoint.model_name())});
  for (const auto& [note, indices] : others) {
    facts.row({(indices.size() == 1 ? "layer " : "layers ") + ranges(indices), note});
  }
  fmt::print("{}", facts.str());
  for (const auto& kind : kinds) {
    const auto& e = kind.spec.experts;
    Table table("<<");
    table.row(
        {"shape", fmt::format("hidden {}, intermediate {}, {} experts, top {}{}", kind.spec.hidden,
                              e.intermediate, kind.spec.route.experts, kind.spec.route.top_k,
                              kind.spec.shared.intermediate > 0
                                  ? fmt::format(", shared expert {}", kind.spec.shared.intermediate)
                                  : std::string())});
    table.fact("rule", describe(kind.spec.route), page_width - 12);
    table.row({"experts", fmt::format("{}, {}", describe(e.activation), kind.bytes.format)});
    const LayerBytes& bytes = kind.bytes;
    table.row({"bytes", fmt::format("{} an expert, {} routed, {}{} router", size(bytes.expert),
                                    size(bytes.routed),
                                    bytes.shared > 0 ? size(bytes.shared) + " shared, " : "",
                                    size(bytes.router))});
    table.row({"a token", fmt::format("reads {}: at least {}", size(bytes.per_token),
                                      duration(bytes.per_token / read * 1e6))});
    fmt::print("\n{} {}\n{}", kind.layers.size() == 1 ? "MoE layer" : "MoE layers",
               ranges(kind.layers), table.str(2));
  }
  const std::string whole = fmt::format(
      "all MoE layers: {} of experts, of which a token reads {}; at least {} at the {} that this "
      "{}",
      size(experts), size(per_token), duration(per_token / read * 1e6), rate(read, "B/s"),
      gpu ? std::string("GPU reads now")
          : fmt::format("machine reads now with {} thread{}", context.threads(),
                        context.threads() == 1 ? "" : "s"));
  fmt::print("\n{}", wrap(whole, 0));
  return exit_done;
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command =
      app.add_subcommand("inspect", "what a checkpoint holds: family, rules, shapes, bytes");
  CLI::Option* model =
      command->add_option("model,--model", options->model, "folder of a checkpoint")
          ->option_text("DIR")
          ->required();
  add_device_options(*command, options->device);
  add_json_option(*command, options->json, {{model, is_folder}});
  command->footer("Example:\n  shunt inspect models/tiny-moe");
  command->callback([options, &action] { action = [options] { return inspect(*options); }; });
}

}  // namespace shunt::tool
