// shunt bench: a stage or the whole layer over a grid of token counts.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench.hpp"
#include "bench/shapes/models.hpp"
#include "bench_options.hpp"
#include "cost.hpp"
#include "options.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

struct Stage {
  const char* name;
  void (*run)(const BenchPlan&, const Context&, Emit&);
};
constexpr Stage stages[] = {
    {"route", bench_route},
    {"gate", bench_gate},
    {"order", bench_order},
    {"shuffle", bench_shuffle},
    {"gather", bench_gather},
    {"gemm", bench_gemm},
    {"indexed", bench_indexed},
    {"activate", bench_activate},
    {"combine", bench_combine},
    {"layer", bench_layer},
    {"combine_shuffling", bench_combine_shuffling},
    {"split_shuffling", bench_split_shuffling},
    {"scatter_add", bench_scatter_add},
    {"chain", bench_chain},
    {"pack", bench_pack},
};
constexpr const char* gpu_stages[] = {
    "route",   "gate",     "order",   "shuffle",           "gather",          "gemm",
    "indexed", "activate", "combine", "combine_shuffling", "split_shuffling", "scatter_add",
    "chain",   "layer"};

// `wrapped`: in lines of a help text.
std::string stage_names(bool wrapped = false) {
  constexpr std::size_t widest = 60;
  std::string names, line;
  for (const auto& stage : stages) {
    line += std::string(stage.name) + " ";
    if (!wrapped || line.size() < widest) continue;
    names += line + "\n";
    line.clear();
  }
  return names + line + "all";
}

// A rule in a few words; `inspect` has room for all of them.
std::string short_rule(const RouteSpec& spec) {
  static constexpr const char* scores[] = {"logits", "softmax", "sigmoid", "sqrt-softplus",
                                           "sparsemixer"};
  std::string rule = scores[static_cast<int>(spec.score)];
  if (spec.score_stage == ScoreStage::after_top_k) rule += " of the top";
  if (spec.logit_scale != 1) rule += fmt::format(" of {} l", spec.logit_scale);
  if (spec.soft_cap > 0) rule += fmt::format(", cap {}", spec.soft_cap);
  if (spec.selection_bias) rule += " + bias";
  if (spec.router_bias) rule += ", router bias";
  if (spec.groups.count > 1) {
    rule += fmt::format(", {}/{} groups", spec.groups.keep, spec.groups.count);
  }
  if (spec.renormalize) rule += ", sum 1";
  if (spec.scale != 1) rule += fmt::format(", x{}", spec.scale);
  if (spec.weight_on_input) rule += ", on input";
  return rule;
}

int list_models(const JsonOption& json) {
  if (json.wanted) {
    Json list = Json::array();
    for (const auto& model : bench::models()) {
      list.push_back({{"name", model.name},
                      {"title", model.title},
                      {"moe_layers", model.moe_layers},
                      {"spec", Json::parse(to_json(model.spec))}});
    }
    emit_json(json, list);
    if (json.to_stdout()) return exit_done;
  }
  Table table("<>>>>>>><", 1);
  table.heading({"model", "H", "I", "E", "k", "shared", "layers", "bf16", "rule"});
  for (const auto& model : bench::models()) {
    const auto& spec = model.spec;
    table.row({{model.name, Style::bold},
               std::to_string(spec.hidden),
               std::to_string(spec.experts.intermediate),
               std::to_string(spec.route.experts),
               std::to_string(spec.route.top_k),
               spec.shared.intermediate > 0 ? std::to_string(spec.shared.intermediate) : "-",
               std::to_string(model.moe_layers),
               size(spec.experts.experts * expert_bytes(spec, bf16) + shared_bytes(spec, bf16)),
               short_rule(spec.route)});
  }
  fmt::print("{}{}", table.str(),
             paint(Style::dim,
                   "H hidden, I intermediate, E experts, k chosen; bf16: weights of one layer; "
                   "sum 1: renormalised\n"));
  return exit_done;
}

// Columns are fixed, so that rows can be printed as they come.
void print_heading(const BenchPlan& plan, const Context& context, double busy) {
  fmt::print("{}  {}\n", paint(Style::bold, plan.title),
             to_string(plan.dtype) +
                 (plan.format == FormatSpec{} ? "" : ", experts " + to_string(plan.format)));
  fmt::print("{}", wrap(plan.whole ? describe(plan.spec) : describe(plan.spec.route), 2));
  fmt::print("{}",
             wrap(fmt::format("{}, {} thread{}, {}; {} routing, weights rotate past {}", cpu_name(),
                              context.threads(), context.threads() == 1 ? "" : "s", isa_name(),
                              to_string(plan.spread), size(static_cast<double>(plan.rotate_bytes))),
                  2));
  if (busy > 0.1) {
    fmt::print("  {}\n",
               paint(Style::warn,
                     fmt::format("not idle: {} of this machine is busy already", percent(busy))));
  }
  print_columns();
}

// What `--device cuda` can do: the stages, or the grid's rows of them.
int run_gpu(const BenchOptions& options) {
  GpuBench wanted{.title = "the grid of the stages", .dependent_launch = options.dependent_launch};
  const auto takes = [&](const std::string& stage) {
    return options.stage == stage || options.stage == "all";
  };
  if (options.grid) {
    for (const auto* grid : {&bench::routing_grid(), &bench::gemm_grid()}) {
      for (const auto& shape : *grid) {
        if (takes(shape.stage)) wanted.shapes.push_back(shape);
      }
    }
  } else {
    const BenchPlan plan = make_plan(options);
    wanted.title = plan.title;
    wanted.spread = plan.spread;
    for (const char* stage : gpu_stages) {
      if (!takes(stage)) continue;
      for (auto& shape : stage_shapes(plan, stage)) wanted.shapes.push_back(shape);
    }
  }
  for (auto& shape : wanted.shapes) {
    if (shape.stage == "activate") shape.rows = options.rows;
    if (shape.stage == "indexed") shape.format = format_of(options);
    if (shape.stage != "gemm" && shape.stage != "layer") continue;
    shape.format = format_of(options);
    shape.shared_format = shared_format_of(options);
    shape.rows = options.rows;
    shape.fast_accumulation = options.fast_accumulation;
    shape.walk = options.walk;
    shape.from = options.from;
    shape.valid = options.valid;
    if (shape.valid > shape.tokens) {
      throw Error(
          Status::invalid_argument,
          fmt::format("--valid {}: must be at most the {} of --tokens", shape.valid, shape.tokens));
    }
  }
  if (wanted.shapes.empty()) {
    throw Error(Status::unsupported,
                fmt::format("bench: --grid has no rows of {}: without it a model's shape is timed",
                            options.stage));
  }
  wanted.skip_unsupported = options.stage == "all";
  if (!options.rotate.empty()) {
    wanted.rotate_bytes = parse_bytes("--rotate-bytes", options.rotate);
  }
  if (options.seconds) wanted.seconds = *options.seconds;
  return bench_gpu(wanted, options.json);
}

bool is_stage(const std::string& text) {
  return text == "all" || std::any_of(std::begin(stages), std::end(stages),
                                      [&](const Stage& stage) { return text == stage.name; });
}

int run_bench(BenchOptions options) {
  if (options.stage.empty()) options.stage = options.json.taken(is_stage);
  if (options.stage.empty()) options.stage = "layer";
  // A known shape comes before a folder of its name.
  std::error_code none;
  const bool folder = bench::find_model(options.model) == nullptr &&
                      std::filesystem::is_directory(options.model, none);
  check_apart("--json", options.json.file, folder ? options.model : "", {});
  if (options.list_models) return list_models(options.json);
  refuse_ineffective(options);
  if (options.device.device == "cuda") return run_gpu(options);
  const BenchPlan plan = make_plan(options);
  const Engine engine(options.device);
  const Context& context = engine.context();
  if (!options.json.file.empty()) check_writable(options.json.file);
  const bool people = !options.json.to_stdout();

  double busy = 0;
  LoadWatch watch;
  std::vector<Row> rows;
  std::vector<double> reads;
  std::vector<double> peaks;
  const char* peak = "";
  Emit emit;
  emit.start = [&] {
    if (options.wait > 0) busy = wait_until_idle(options.wait);
    watch = LoadWatch();
    if (people) print_heading(plan, context, busy);
  };
  emit.row = [&](const Row& row, const Ceilings& ceilings) {
    rows.push_back(row);
    reads.push_back(ceilings.read);
    peaks.push_back(ceilings.flops);
    peak = ceilings.peak;
    if (people) print_row(row);
  };
  for (const auto& stage : stages) {
    if (options.stage == stage.name || options.stage == "all") stage.run(plan, context, emit);
  }

  const auto middle = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
  };
  const Ceilings ceilings{middle(reads), middle(peaks)};
  if (people) {
    fmt::print(
        "{}",
        paint(Style::dim,
              wrap(fmt::format("ceilings, measured around every case: reads {}, {} {}. "
                               "share: median of floor / time.",
                               rate(ceilings.read, "B/s"), peak, rate(ceilings.flops, "FLOP/s")),
                   0)));
    fmt::print("{}", paint(Style::warn, watch.note()));
  }
  if (options.json.wanted) {
    Json machine = machine_json(context);
    machine["busy_before"] = busy;
    machine["used_by_others"] = watch.others();
    Json json = report_json(machine, ceilings_json(ceilings, plan.dtype), rows);
    json["model"] = plan.title;
    json["dtype"] = to_string(plan.dtype);
    json["format"] = to_string(plan.format);
    json["routing"] = to_string(plan.spread);
    json["rotate_bytes"] = plan.rotate_bytes;
    json["spec"] = Json::parse(to_json(plan.spec));
    emit_json(options.json, json);
  }
  return exit_done;
}

}  // namespace

void print_columns() {
  fmt::print(
      "\n{}\n",
      paint(Style::dim, fmt::format("{:<38} {:>8} {:>8} {:>8} {:>8} {:>10} {:>8} {:>6}", "case",
                                    "time", "min", "max", "bytes", "ops", "floor", "share")));
}

void print_row(const Row& row) {
  const Style style = row.share >= 0.8 ? Style::good : Style::plain;
  // "1.21 GFLOP" -> "1.21 G": the heading says what they are.
  std::string ops = row.flops > 0 ? operations(row.flops) : "-";
  if (const auto unit = ops.find("FLOP"); unit != std::string::npos) ops.resize(unit);
  const std::string op = row.op == "indexed_gemm" ? "indexed" : row.op;
  const std::string name = op == "grouped_gemm" ? row.label : fmt::format("{} {}", op, row.label);
  fmt::print("{:<38} {:>8} {:>8} {:>8} {:>8} {:>10} {:>8} {}\n", name, duration(row.us),
             duration(row.us_min), duration(row.us_max), size(row.bytes), ops,
             duration(row.floor_us), paint(style, fmt::format("{:>6}", percent(row.share))));
  std::fflush(stdout);
}

std::vector<bench::StageShape> stage_shapes(const BenchPlan& plan, const std::string& stage) {
  std::vector<bench::StageShape> shapes;
  const bool exchanged =
      stage == "combine_shuffling" || stage == "split_shuffling" || stage == "scatter_add";
  const bool rows = stage == "gather" || stage == "combine" || exchanged;
  int ranks = exchanged ? 8 : 0;
  while (ranks > 1 && plan.spec.route.experts % ranks != 0) ranks /= 2;
  for (const auto tokens : plan.tokens) {
    if (stage == "layer" || stage == "activate") {
      shapes.push_back({.stage = stage,
                        .route = plan.spec.route,
                        .tokens = tokens,
                        .hidden = plan.spec.hidden,
                        .dtype = plan.dtype,
                        .layer = std::make_shared<const LayerSpec>(plan.spec)});
      continue;
    }
    if (stage == "gemm" || stage == "indexed") {
      const ExpertSpec& e = plan.spec.experts;
      RouteSpec route = plan.spec.route;
      route.experts -= plan.spec.zero_experts;
      const std::int64_t gate_up = e.intermediate * (e.activation.gated ? 2 : 1);
      shapes.push_back({.stage = stage,
                        .route = route,
                        .tokens = tokens,
                        .hidden = e.hidden,
                        .dtype = plan.dtype,
                        .columns = gate_up});
      shapes.push_back({.stage = stage,
                        .route = route,
                        .tokens = tokens,
                        .hidden = e.intermediate,
                        .dtype = plan.dtype,
                        .columns = e.hidden,
                        .row_a_pair = true});
      continue;
    }
    shapes.push_back({stage, plan.spec.route, tokens,
                      rows ? plan.spec.experts.hidden : plan.spec.hidden, plan.dtype,
                      stage == "order" ? plan.tile : 0, ranks});
  }
  return shapes;
}

void run_case(const BenchPlan& plan, const Context& context, Emit& emit, const Case& work) {
  if (!emit.started) emit.start();
  emit.started = true;
  Ceilings ceilings;
  const Row row = measure(context, work, plan.seconds, ceilings);
  emit.row(row, ceilings);
}

std::int64_t copies_to_rotate(const BenchPlan& plan, double bytes, std::int64_t most,
                              double besides) {
  const double copies =
      std::ceil((static_cast<double>(plan.rotate_bytes) - besides) / std::max(bytes, 1.0));
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(copies, 1e9)), 1, most);
}

void require_memory(const BenchPlan& plan, double bytes) {
  const auto available = static_cast<double>(memory_available());
  if (available <= 0 || bytes < 0.8 * available) return;
  throw Error(Status::out_of_memory,
              fmt::format("{} in {} needs {}, and {} of memory are available; fewer --experts or "
                          "--tokens, a lower --rotate-bytes or a shorter --dtype need less",
                          plan.title, to_string(plan.dtype), size(bytes), size(available)));
}

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "one stage or the whole layer over numbers of tokens");
  command->add_option("stage", options->stage, stage_names(true))
      ->option_text(" ")
      ->check(CLI::Validator(
          [](std::string& text) -> std::string {
            return is_stage(text) ? std::string()
                                  : fmt::format("'{}' is no stage; {}", text, stage_names());
          },
          ""));
  command
      ->add_option("--model", options->model,
                   "a known shape, or a checkpoint's folder (default: qwen3-30b-a3b)")
      ->option_text("NAME|DIR");
  command->add_flag("--list-models", options->list_models, "the known shapes");
  command->add_option("--experts", options->experts, "routed experts")
      ->option_text("E")
      ->check(whole_number(1, 4096));
  command->add_option("--top-k", options->top_k, "experts a token")
      ->option_text("K")
      ->check(whole_number(1, 64));
  command->add_option("--hidden", options->hidden, "hidden size")
      ->option_text("H")
      ->check(whole_number(1, 1 << 20));
  command->add_option("--intermediate", options->intermediate, "intermediate size of an expert")
      ->option_text("I")
      ->check(whole_number(1, 1 << 20));
  command
      ->add_option("--shared", options->shared,
                   "layer: intermediate size of the shared expert, 0: none")
      ->option_text("I")
      ->check(whole_number(0, 1 << 20));
  command->add_option("--tokens", options->tokens, "numbers of tokens (default: 1,16,256)")
      ->option_text("LIST");
  add_dtype_option(
      *command, [options](DType dtype) { options->dtype = dtype; },
      "of weights and rows (default: bf16)");
  command
      ->add_option("--format", options->format,
                   "gemm, indexed, layer, pack: of the experts, nvfp4, int4:64, ..")
      ->option_text("NAME");
  command
      ->add_option("--shared-format", options->shared_format,
                   "layer: of the shared expert (default: that of --format)")
      ->option_text("NAME");
  add_rows_option(*command, options->rows,
                  "activate, gemm, layer on a GPU: what rows are rounded to");
  command
      ->add_option("--routing", options->routing,
                   "uniform, skewed, zipf or one-hot (default: uniform)")
      ->option_text("KIND")
      ->check(CLI::Validator(
          [](std::string& text) -> std::string {
            try {
              spread_from_string(text);
            } catch (const Error& error) {
              return error.what();
            }
            return {};
          },
          ""));
  command
      ->add_option("--rotate-bytes", options->rotate,
                   "bytes read before any is read again (1G, or 8 x L3; GPU 2 x L2)")
      ->option_text("SIZE");
  command
      ->add_option("--rule", options->rule,
                   "softmax, top-softmax, biased-sigmoid, sigmoid-on-input or none")
      ->option_text("NAME")
      ->check(CLI::Validator(
          [](std::string& text) -> std::string {
            for (const char* rule :
                 {"softmax", "top-softmax", "biased-sigmoid", "sigmoid-on-input", "none"}) {
              if (text == rule) return {};
            }
            return fmt::format(
                "'{}' is not softmax, top-softmax, biased-sigmoid, sigmoid-on-input or none", text);
          },
          ""));
  command->add_option("--groups", options->groups, "groups of experts, and how many are kept")
      ->option_text("COUNT,KEEP");
  command
      ->add_option_function<std::string>(
          "--walk",
          [options](const std::string& text) {
            options->walk = text == "masked"  ? bench::Walk::masked
                            : text == "dense" ? bench::Walk::dense
                                              : bench::Walk::offsets;
          },
          "gemm on a GPU: how rows of groups lie (default: offsets)")
      ->option_text("offsets|masked|dense")
      ->check(CLI::IsMember({"offsets", "masked", "dense"}));
  command
      ->add_option_function<std::string>(
          "--from",
          [options](const std::string& text) {
            options->from = text == "logits" ? bench::RoutingFrom::logits
                            : text == "ids"  ? bench::RoutingFrom::ids
                                             : bench::RoutingFrom::hidden;
          },
          "layer on a GPU: where its routing begins (default: hidden)")
      ->option_text("hidden|logits|ids")
      ->check(CLI::IsMember({"hidden", "logits", "ids"}));
  command
      ->add_option("--valid", options->valid,
                   "layer on a GPU: valid tokens, others are padding (default: all)")
      ->option_text("N")
      ->check(whole_number(1, 1 << 20));
  command
      ->add_option("--tile", options->tile, "order on a GPU: rows of a padded tile (default: none)")
      ->option_text("N")
      ->check(whole_number(0, 1024));
  command->add_flag("--grid", options->grid,
                    "on a GPU: the shapes of docs/performance.md, of one stage or all");
  command->add_flag("--dependent-launch", options->dependent_launch,
                    "on a GPU: a kernel may start before its predecessor has ended");
  command->add_flag("--batch-invariant", options->batch_invariant,
                    "route and layer: a token's bits do not depend on the others");
  command->add_flag("--fast-accumulation", options->fast_accumulation,
                    "gemm and layer, --rows fp8_token: sums stay in the tensor cores");
  command
      ->add_option("--seconds", options->seconds, "about this long a case (default: 1, GPU 0.06)")
      ->option_text("S")
      ->check(finite_number(0.01, 600));
  command->add_option("--wait", options->wait, "at most this long for an idle machine (default: 3)")
      ->option_text("S")
      ->check(finite_number(0, 600));
  add_device_options(*command, options->device);
  add_json_option(*command, options->json);
  command->footer(
      "--experts, --top-k, --hidden, --intermediate and --shared override a model's numbers.\n"
      "Examples:\n"
      "  shunt bench layer --model qwen3-30b-a3b --tokens 1,2048 --dtype bf16\n"
      "  shunt bench gate --device cuda --experts 256 --top-k 8 --rule biased-sigmoid --groups "
      "8,4\n"
      "  shunt bench gemm --experts 16 --top-k 2 --hidden 1024 --intermediate 2048 --routing zipf\n"
      "  shunt bench indexed --model qwen3-30b-a3b --tokens 1,8 --format sparse_nvfp4");
  command->callback([options, &action] { action = [options] { return run_bench(*options); }; });
}

}  // namespace shunt::tool
