// The case `layer` on a GPU: hidden states to output, routing and all, with random weights.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "bench_cases.hpp"
#include "bench_packed.hpp"
#include "bench_tensors.hpp"
#include "core/convert.hpp"
#include "layer/plan.hpp"
#include "layer_check.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

namespace {

// Random weights on the GPU; a layer prepares a copy of its own.
class Weights {
 public:
  Weights(const Context& context, const LayerSpec& spec, std::uint64_t seed)
      : context_(context), seed_(seed) {
    const RouteSpec& route = spec.route;
    weights.router = vector(true, route.columns(), spec.hidden, spec.hidden);
    // So small that routing is what the logits say.
    weights.router_bias = vector(route.router_bias, route.columns(), little);
    weights.selection_bias = vector(route.selection_bias, route.experts, little);
    weights.per_expert_scale = vector(route.per_expert_scale, route.columns());
    const ExpertSpec& e = spec.experts;
    experts(weights.experts, e.experts, e.hidden, e.intermediate, e.activation.gated,
            e.gate_up_bias, e.down_bias);
    const SharedExpertSpec& s = spec.shared;
    if (s.intermediate > 0) {
      experts(weights.shared, 1, spec.hidden, s.intermediate, s.activation.gated, s.gate_up_bias,
              s.down_bias);
      weights.shared_gate = vector(s.sigmoid_gate, spec.hidden);
    }
    if (spec.latent > 0) {
      weights.latent_down = vector(true, spec.latent, spec.hidden, spec.hidden);
      weights.latent_up = vector(true, spec.hidden, spec.latent, spec.latent);
    }
    weights.output_bias = vector(spec.output_bias, spec.hidden);
    weights.router_norm = ones(spec.router_norm.weight, spec.hidden);
    weights.input_norm = ones(spec.input_norm.weight, spec.hidden);
    weights.output_norm = ones(spec.output_norm.weight, spec.hidden);
    weights.latent_norm = ones(spec.latent_norm.weight, spec.latent);
    weights.latent_input_norm = ones(spec.latent_input_norm.weight, spec.latent);
    weights.expert_norm = ones(spec.expert_norm.weight, spec.experts.hidden);
  }
  void pack(const FormatSpec& experts, const FormatSpec& shared) {
    if (experts != FormatSpec{}) pack(experts, weights.experts);
    if (shared != FormatSpec{}) pack(shared, weights.shared);
  }
  LayerWeights weights;

 private:
  // The first expert's matrices, packed, for all of them: packing is the host's, and slow.
  void pack(const FormatSpec& format, ExpertWeights& e) {
    const auto pack_list = [&](std::vector<Tensor>& plain, std::vector<PackedMatrix>& to) {
      if (plain.empty()) return;
      const OnHost first(context_, plain[0]);
      packed_.emplace_back(host(), format, first.tensor);
      to.assign(plain.size(), packed_.back().matrix());
      plain.clear();
    };
    pack_list(e.gate, e.packed_gate);
    pack_list(e.up, e.packed_up);
    pack_list(e.down, e.packed_down);
  }
  Tensor matrix(std::int64_t rows, std::int64_t columns, std::int64_t fan_in) {
    memory_.emplace_back(context_, bf16, std::vector<std::int64_t>{rows, columns}, 1);
    fill(context_, memory_.back(), 1 / std::sqrt(static_cast<float>(fan_in)), ++seed_);
    return memory_.back()[0];
  }
  Tensor vector(bool wanted, std::int64_t rows, std::int64_t columns, std::int64_t fan_in) {
    return wanted ? matrix(rows, columns, fan_in) : Tensor{};
  }
  static constexpr std::int64_t little = 100'000'000;
  Tensor vector(bool wanted, std::int64_t size, std::int64_t fan_in = 100) {
    return wanted ? matrix(1, size, fan_in)[0] : Tensor{};
  }
  Tensor ones(bool wanted, std::int64_t size) {
    if (!wanted) return {};
    const Tensor there = vector(true, size);
    const OnHost copy(context_, there);
    for (std::int64_t i = 0; i < size; ++i) put_element(copy.tensor, i, 1);
    context_.copy(there.data, copy.tensor.data, at(there.bytes()));
    return there;
  }
  void experts(ExpertWeights& to, int count, std::int64_t hidden, std::int64_t inner, bool gated,
               bool gate_up_bias, bool down_bias) {
    const auto cut = [&](std::vector<Tensor>& list, bool wanted, std::int64_t rows,
                         std::int64_t columns, bool vectors) {
      if (!wanted) return;
      const Tensor all = matrix(count * rows, columns, columns);
      for (int e = 0; e < count; ++e) {
        list.push_back(vectors ? all[e] : all.rows(e * rows, (e + 1) * rows));
      }
    };
    cut(to.gate, gated, inner, hidden, false);
    cut(to.up, true, inner, hidden, false);
    cut(to.down, true, hidden, inner, false);
    cut(to.gate_bias, gated && gate_up_bias, 1, inner, true);
    cut(to.up_bias, gate_up_bias, 1, inner, true);
    cut(to.down_bias, down_bias, 1, hidden, true);
  }

  Context context_;
  std::uint64_t seed_;
  std::vector<Variants> memory_;
  std::vector<BenchMatrix> packed_;
};

struct Layers {
  Context context;
  std::vector<Layer> layers;       // in turn
  std::unique_ptr<Weights> first;  // the first one's, as they were
  Variants hidden, out, ids, weights, logits;
  Variants valid;  // where not all tokens are: how many
  Buffer workspace;
  bench::RoutingFrom from = bench::RoutingFrom::hidden;
  // That puts out the ids that it chose, or is given them.
  void run(std::int64_t i) const { run(i, from); }
  void run(std::int64_t i, bench::RoutingFrom begin) const {
    LayerInputs in{.hidden = hidden[i]};
    if (valid.count() > 0) in.valid_tokens = valid[0];
    LayerOutputs to{.output = out[i]};
    if (begin == bench::RoutingFrom::ids) {
      in.ids = ids[i], in.weights = weights[i];
    } else {
      if (begin == bench::RoutingFrom::logits) in.logits = logits[i];
      to.ids = ids[i], to.weights = weights[i];
    }
    layers[at(i) % layers.size()].forward(in, to, workspace);
  }
};

// Copies of the layer, each called in its turn: so many that `rotate_bytes` are read before an
// expert is met again, as far as 16 GB go. A call that hits few experts leaves them in the L2,
// where the next ones would find some.
std::int64_t copies_of(const LayerSpec& spec, const bench::StageShape& shape,
                       std::int64_t rotate_bytes) {
  constexpr double most_bytes = 16e9;
  const std::int64_t tokens = shape.valid > 0 ? shape.valid : shape.tokens;
  const double expert = expert_bytes(spec, shape.dtype, shape.format);
  const double shared = shared_bytes(spec, shape.dtype, shape.shared_format);
  const double once = expected_hit(spec, tokens) * expert + shared;
  const double whole = spec.experts.experts * expert + shared;
  const auto wanted = static_cast<double>(rotate_bytes);
  const double copies = once >= wanted ? 1 : 1 + std::ceil(wanted / once);
  return static_cast<std::int64_t>(std::clamp(std::min(copies, most_bytes / whole), 1.0, 64.0));
}

// A layer that begins with logits reads these and no router; one that is given ids, ids and
// weights.
void leave_out_router(const LayerSpec& spec, const bench::StageShape& shape, std::int64_t tokens,
                      Cost& cost) {
  const auto t = static_cast<double>(tokens);
  cost.bytes -= router_bytes(spec, shape.dtype);
  cost.bytes += t * (shape.from == bench::RoutingFrom::ids
                         ? 8.0 * spec.route.top_k
                         : spec.route.columns() * element_bytes(shape.dtype));
  cost.flops -= 2 * t * spec.route.experts * static_cast<double>(spec.hidden);
}

}  // namespace

StageCase layer_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes) {
  const LayerSpec& spec = *shape.layer;
  LayerOptions options{.dtype = shape.dtype, .batch_invariant = spec.route.batch_invariant};
  options.format = shape.format.of_matrix();  // what is besides, the packed matrices say
  options.rows = shape.rows;
  options.fast_accumulation = shape.fast_accumulation;
  require(supports(spec, options, context.device()));
  auto made = std::make_shared<Layers>(Layers{.context = context});
  const std::int64_t tokens = shape.tokens;
  const std::int64_t copies = copies_of(spec, shape, rotate_bytes);
  std::vector<std::vector<float>> routers;
  for (std::int64_t i = 0; i < copies; ++i) {
    auto random = std::make_unique<Weights>(context, spec, 1 + 100 * static_cast<std::uint64_t>(i));
    random->pack(shape.format, shape.shared_format);
    if (spread != Spread::uniform) routers.push_back(floats_of(context, random->weights.router));
    made->layers.emplace_back(spec, random->weights, context, options);
    context.synchronize();
    if (i == 0) made->first = std::move(random);
  }
  // Every variant has tokens, and so experts, of its own.
  const std::int64_t least = std::max<std::int64_t>(copies, tokens <= 64 ? 32 : 4);
  const std::int64_t n = (least + copies - 1) / copies * copies;  // round after round of copies
  made->hidden = Variants(context, shape.dtype, {tokens, spec.hidden}, n);
  made->out = Variants(context, shape.dtype, {tokens, spec.hidden}, n);
  made->ids = Variants(context, DType::i32, {tokens, spec.route.top_k}, n);
  made->weights = Variants(context, DType::f32, {tokens, spec.route.top_k}, n);
  made->logits = Variants(context, shape.dtype, {tokens, spec.route.columns()}, n);
  made->from = shape.from;
  if (shape.from == bench::RoutingFrom::ids && spec.route.shared.count > 0) {
    throw Error(Status::unsupported, "layer --from ids: the model's ids have shared slots");
  }
  fill(context, made->hidden, 1, 7);
  fill(context, made->logits, 1, 8);
  steer_states(context, spec.route, spread, routers, made->hidden);
  steer_logits(context, spec.route, spread, made->logits);
  made->workspace = context.allocate(made->layers[0].workspace_bytes(tokens));
  const std::int64_t valid = shape.valid > 0 ? shape.valid : tokens;
  if (shape.valid > 0) {
    const auto count = static_cast<std::int32_t>(valid);
    made->valid = Variants(context, DType::i32, {1}, 1);
    context.copy(made->valid[0].data, &count, sizeof(count));
  }

  // What is counted is what the layer chooses.
  Cost cost;
  const int computed = spec.route.experts - spec.zero_experts;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool given = shape.from == bench::RoutingFrom::ids;
    made->run(i, given ? bench::RoutingFrom::logits : shape.from);
    context.synchronize();
    const OnHost ids(context, made->ids[i]);
    std::vector<std::int32_t> chosen(ids.ints(), ids.ints() + valid * spec.route.top_k);
    const std::int64_t hit = distinct_experts(chosen, computed) + spec.route.shared.count;
    const std::int64_t pairs = std::count_if(chosen.begin(), chosen.end(),
                                             [&](auto id) { return id >= 0 && id < computed; }) +
                               spec.route.shared.count * valid;
    Cost one = layer_cost(spec, shape.dtype, shape.dtype, valid, hit, pairs, shape.format,
                          shape.shared_format);
    if (shape.from != bench::RoutingFrom::hidden) leave_out_router(spec, shape, valid, one);
    cost.bytes += one.bytes / static_cast<double>(n);
    cost.flops += one.flops / static_cast<double>(n);
  }
  std::string label = fmt::format("T{} H{} I{} E{} k{}", tokens, spec.hidden,
                                  spec.experts.intermediate, computed, spec.route.top_k);
  if (spec.shared.intermediate > 0) label += fmt::format(" shared {}", spec.shared.intermediate);
  if (shape.valid > 0) label += fmt::format(" {} valid", valid);
  if (shape.format != FormatSpec{}) label += " " + to_string(shape.format);
  if (spec.shared.intermediate > 0 && shape.shared_format != shape.format) {
    label += " shared in " + to_string(shape.shared_format);
  }
  if (shape.fast_accumulation) label += " fast";
  if (shape.from == bench::RoutingFrom::logits) label += " from logits";
  if (shape.from == bench::RoutingFrom::ids) label += " from ids";
  const float tolerance = shape.rows == RowFormat::as_dtype ? rounded_to_16_bits : rounded_to_fp8;
  return {.op = "layer",
          .label = label,
          .dtype = shape.dtype,
          .variants = n,
          .cost = cost,
          .on_tensor_cores = shape.dtype != DType::f32,
          .fp8_rows = shape.rows != RowFormat::as_dtype,
          .call = [made](std::int64_t i) { made->run(i); },
          // Two tokens beside the CPU engine, and all of them the same again.
          .check =
              [made, label, tokens, valid, tolerance] {
                check_layer(label, made->layers[0].spec(), made->first->weights, made->context,
                            {.hidden = made->hidden[0],
                             .ids = made->ids[0],
                             .weights = made->weights[0],
                             .output = made->out[0],
                             .valid = valid},
                            tolerance);
                const OnHost first(made->context, made->out[0]);
                made->run(0);
                made->context.synchronize();
                const OnHost again(made->context, made->out[0]);
                for (std::int64_t i = 0; i < first.tensor.elements(); ++i) {
                  const float x = load_f32(first.tensor.data, first.tensor.dtype, i);
                  const float y = load_f32(again.tensor.data, again.tensor.dtype, i);
                  if (!std::isfinite(x) || x != y) {
                    differs(label, fmt::format("token {}: {}, then {}",
                                               i * tokens / first.tensor.elements(), x, y));
                  }
                }
              }};
}

}  // namespace shunt::tool
