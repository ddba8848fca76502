#include "bench_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "bench/shapes/models.hpp"
#include "machine.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt::tool {

namespace {

// --rule and --groups, over what the shape says.
void apply_rule(const BenchOptions& options, RouteSpec& route) {
  if (options.rule == "softmax") {
    route.score = Score::softmax;
    route.renormalize = true;
  } else if (options.rule == "top-softmax") {
    route = bench::softmax_of_top(route.experts, route.top_k);
  } else if (options.rule == "biased-sigmoid") {
    route = bench::biased_groups(route.experts, route.top_k, route.groups);
  } else if (options.rule == "sigmoid-on-input") {
    route.score = Score::sigmoid;
    route.score_stage = ScoreStage::after_top_k;
    route.renormalize = false;
    route.weight_on_input = true;
  } else if (options.rule == "none") {
    route.score = Score::none;
    route.renormalize = false;
  }
  if (options.groups.empty()) return;
  const auto numbers = parse_list("--groups", options.groups, 1, 4096);
  if (numbers.size() != 2) {
    throw UsageError(
        fmt::format("--groups: '{}' is not COUNT,KEEP; 8,4 for DeepSeek-V3's", options.groups));
  }
  route.groups = {.count = static_cast<int>(numbers[0]),
                  .keep = static_cast<int>(numbers[1]),
                  .rank_by = route.selection_bias ? GroupRank::sum_of_top_2 : GroupRank::max};
}

}  // namespace

FormatSpec format_of(const BenchOptions& options) {
  return options.format.empty() ? FormatSpec{}
                                : parse_option("--format", format_from_string, options.format);
}
FormatSpec shared_format_of(const BenchOptions& options) {
  return options.shared_format.empty()
             ? format_of(options)
             : parse_option("--shared-format", format_from_string, options.shared_format);
}

void refuse_ineffective(const BenchOptions& options) {
  const std::string& stage = options.stage;
  const bool gpu = options.device.device == "cuda", layer = stage == "layer",
             gemm = stage == "gemm";
  const bool all = stage == "all", packs = layer || gemm || (all && options.grid);
  const auto refuse_where = [](bool ineffective, const char* what) {
    if (ineffective) throw UsageError(what);
  };
  const bool pack = stage == "pack";
  refuse_where(format_of(options) != FormatSpec{} && !packs && !pack && stage != "indexed",
               "--format: only gemm, indexed, layer and pack take packed weights");
  refuse_where(pack && format_of(options) == FormatSpec{},
               "pack: --format must be a packed one, nvfp4, dense3, ..");
  refuse_where(pack && gpu, "pack runs on the CPU: without --device cuda");
  refuse_where(
      pack && (options.tokens || options.experts || options.top_k || !options.rule.empty() ||
               !options.groups.empty() || options.routing != "uniform"),
      "pack is of one expert's matrices: --tokens, --experts, --top-k, --rule, --groups and "
      "--routing are not looked at");
  refuse_where(options.rows != RowFormat::as_dtype && (!gpu || !(packs || stage == "activate")),
               "--rows is about activate, gemm and layer of a GPU: --device cuda");
  refuse_where(options.fast_accumulation && (options.rows != RowFormat::fp8_token || !packs),
               "--fast-accumulation is about gemm and layer with --rows fp8_token");
  refuse_where(options.valid > 0 && (!gpu || !layer),
               "--valid is about the layer of a GPU: shunt bench layer --device cuda");
  refuse_where(options.walk != bench::Walk::offsets && (!gpu || !(gemm || all)),
               "--walk is about the gemm of a GPU: --device cuda");
  refuse_where(options.from != bench::RoutingFrom::hidden && (!gpu || !(layer || all)),
               "--from is about the layer of a GPU: --device cuda");
  refuse_where(options.tile > 0 && (!gpu || !(stage == "order" || all)),
               "--tile is about order of a GPU: --device cuda");
  refuse_where(stage == "activate" && (!options.rule.empty() || !options.groups.empty()),
               "--rule and --groups are about routing: not about activate");
  refuse_where(options.shared && !(layer || all), "--shared is about layer");
  refuse_where(!options.shared_format.empty() && !layer, "--shared-format is about layer");
  refuse_where(options.batch_invariant && !(layer || stage == "route" || all),
               "--batch-invariant is about route and layer");
  refuse_where((options.grid || options.dependent_launch) && !gpu,
               "--grid and --dependent-launch are about a GPU: --device cuda");
  refuse_where(options.grid && (!options.model.empty() || options.tokens || options.experts ||
                                options.top_k || options.hidden || options.intermediate ||
                                options.shared || !options.rule.empty() ||
                                !options.groups.empty() || options.routing != "uniform" ||
                                options.batch_invariant || options.tile > 0 || options.dtype),
               "--grid has shapes of its own: --model, --tokens, --dtype, --rule, --groups, "
               "--routing, --tile, --batch-invariant and the numbers of a shape are not looked at");
}

BenchPlan make_plan(const BenchOptions& options) {
  BenchPlan plan;
  const std::string& stage = options.stage;
  const bool inner = stage == "gemm" || stage == "indexed" || stage == "activate" ||
                     stage == "layer" || stage == "pack" || stage == "all";
  const bool width = stage != "gate" && stage != "order" && stage != "shuffle";
  const bool no_routing = stage == "pack";
  const bool given = ((options.experts && options.top_k) || no_routing) &&
                     (options.hidden || !width) && (options.intermediate || !inner);
  if (!options.model.empty()) {
    if (const bench::Model* model = bench::find_model(options.model)) {
      plan.title = model->title;
      plan.spec = model->spec;
    } else if (std::filesystem::is_directory(options.model)) {
      const Checkpoint checkpoint = Checkpoint::open(options.model);
      if (checkpoint.first_moe_layer() < 0) {
        throw Error(Status::bad_file, fmt::format("'{}' has no MoE layer", options.model));
      }
      plan.title = options.model;
      plan.spec = checkpoint.spec(checkpoint.first_moe_layer());
    } else {
      throw Error(Status::invalid_argument,
                  fmt::format("--model '{}' is neither a folder nor a known shape; "
                              "shunt bench --list-models names those",
                              options.model));
    }
  } else if (given) {
    plan.title = "given shape";
    plan.whole = options.hidden && options.intermediate;
    plan.spec = bench::plain_layer(options.hidden.value_or(1), options.intermediate.value_or(1),
                                   options.experts.value_or(1), options.top_k.value_or(1));
  } else if (options.experts || options.top_k || options.hidden || options.intermediate) {
    throw UsageError(
        "without --model a shape is all of --experts, --top-k, --hidden and --intermediate; gate, "
        "order and shuffle need only the first two, pack the last two, gemm, indexed, activate and "
        "layer all of them, others no --intermediate");
  } else {
    const bench::Model* model = bench::find_model("qwen3-30b-a3b");
    plan.title = model->title;
    plan.spec = model->spec;
  }
  if (!options.model.empty()) {
    LayerSpec& spec = plan.spec;
    const auto override_with = [&](auto& field, const auto& value, const char* name) {
      if (!value || field == *value) return;
      field = *value;
      plan.title += fmt::format(", {} {}", name, *value);
    };
    // Those with weights; zero-compute experts stay what they are.
    int computed = spec.route.experts - spec.zero_experts;
    override_with(computed, options.experts, "experts");
    spec.route.experts = computed + spec.zero_experts;
    spec.experts.experts = computed + spec.route.shared.count;
    override_with(spec.route.top_k, options.top_k, "top");
    override_with(spec.hidden, options.hidden, "hidden");
    if (spec.latent == 0) spec.experts.hidden = spec.hidden;
    override_with(spec.experts.intermediate, options.intermediate, "intermediate");
  }
  if (options.shared && plan.spec.shared.intermediate != *options.shared) {
    plan.spec.shared.intermediate = *options.shared;
    if (*options.shared == 0) plan.spec.shared = {};
    plan.title += fmt::format(", shared {}", *options.shared);
  }
  apply_rule(options, plan.spec.route);
  if (options.batch_invariant) {
    plan.spec.route.batch_invariant = true;
    plan.title += ", batch-invariant";
  }
  const Support routed = supports(plan.spec.route, Device{});
  if (!routed) throw Error(Status::invalid_argument, routed.reason);
  plan.dtype = options.dtype.value_or(DType::bf16);
  plan.format = format_of(options);
  plan.shared_format = shared_format_of(options);
  if (!options.shared_format.empty()) {
    if (plan.spec.shared.intermediate == 0) {
      throw UsageError("--shared-format: the layer has no shared expert");
    }
    plan.title += ", shared in " + to_string(plan.shared_format);
  }
  plan.spread = spread_from_string(options.routing);
  plan.tokens = parse_list("--tokens", options.tokens.value_or("1,16,256"), 1, 1 << 20);
  plan.rotate_bytes = options.rotate.empty()
                          ? std::max<std::int64_t>(1'000'000'000, 8 * last_cache_bytes())
                          : parse_bytes("--rotate-bytes", options.rotate);
  plan.seconds = options.seconds.value_or(1);
  plan.tile = options.tile;
  return plan;
}

}  // namespace shunt::tool
