// shunt bench layer: whole layers with random weights that rotate through memory.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>

#include "bench.hpp"
#include "bench_packed.hpp"
#include "cost.hpp"
#include "layer_check.hpp"
#include "terminal.hpp"

namespace shunt::tool {

namespace {

// Everything that the weights of one layer point to. Each prepared layer is a copy of its own, so
// all of them can be made from one pool that is hardly larger than a matrix.
struct Source {
  Source(const BenchPlan& plan, const Context& on)
      : context(on),
        formats{plan.format, plan.shared_format},
        matrices(on, bf16, largest(plan.spec) + (std::int64_t{1} << 20)),
        unit(unit_rows(plan.spec.route.columns(), plan.spec.hidden, 7)),
        biases(static_cast<std::size_t>(plan.spec.route.columns())),
        router_memory(on.allocate(unit.size() * 2)),
        router(view(router_memory.data(), bf16, {plan.spec.route.columns(), plan.spec.hidden})) {
    for (std::size_t i = 0; i < unit.size(); ++i) {
      const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, unit[i]);
      static_cast<std::uint16_t*>(router_memory.data())[i] =
          static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    }
    // So small that routing is what the hidden states say.
    std::mt19937_64 random(8);
    std::normal_distribution<float> normal(0, 1e-4F);
    for (float& bias : biases) bias = normal(random);
  }

  static std::int64_t largest(const LayerSpec& spec) {
    return std::max({spec.experts.intermediate * spec.experts.hidden,
                     spec.shared.intermediate * spec.hidden, spec.latent * spec.hidden,
                     spec.hidden});
  }

  // Packed once for each size: packing takes longer than measuring.
  const PackedMatrix& packed(const FormatSpec& format, std::int64_t n, std::int64_t k) {
    const std::tuple key(to_string(format), n, k);
    const auto found = packed_sizes.find(key);
    if (found != packed_sizes.end()) return found->second.matrix();
    const Tensor matrix = matrices.take(n, k);
    return packed_sizes.emplace(key, BenchMatrix(context, format, matrix)).first->second.matrix();
  }

  ExpertWeights experts(const FormatSpec& format, int count, std::int64_t hidden,
                        std::int64_t inner, const ActivationSpec& activation, bool gate_up_bias,
                        bool down_bias) {
    ExpertWeights weights;
    for (int e = 0; e < count; ++e) {
      if (format != FormatSpec{}) {
        if (activation.gated) weights.packed_gate.push_back(packed(format, inner, hidden));
        weights.packed_up.push_back(packed(format, inner, hidden));
        weights.packed_down.push_back(packed(format, hidden, inner));
      } else {
        if (activation.gated) weights.gate.push_back(matrices.take(inner, hidden));
        weights.up.push_back(matrices.take(inner, hidden));
        weights.down.push_back(matrices.take(hidden, inner));
      }
      if (gate_up_bias && activation.gated) weights.gate_bias.push_back(matrices.take(inner));
      if (gate_up_bias) weights.up_bias.push_back(matrices.take(inner));
      if (down_bias) weights.down_bias.push_back(matrices.take(hidden));
    }
    return weights;
  }

  LayerWeights layer(const LayerSpec& spec) {
    LayerWeights weights;
    const auto vector = [&](bool wanted, std::int64_t n) {
      return wanted ? matrices.take(n) : Tensor{};
    };
    weights.router = router;
    if (spec.route.router_bias) {
      weights.router_bias = view(biases.data(), {spec.route.columns()});
    }
    if (spec.route.selection_bias) {
      weights.selection_bias = view(biases.data(), {spec.route.experts});
    }
    weights.per_expert_scale = vector(spec.route.per_expert_scale, spec.route.columns());
    const auto& e = spec.experts;
    weights.experts = experts(formats.experts, e.experts, e.hidden, e.intermediate, e.activation,
                              e.gate_up_bias, e.down_bias);
    const auto& s = spec.shared;
    if (s.intermediate > 0) {
      weights.shared = experts(formats.shared, 1, spec.hidden, s.intermediate, s.activation,
                               s.gate_up_bias, s.down_bias);
      weights.shared_gate = vector(s.sigmoid_gate, spec.hidden);
    }
    if (spec.latent > 0) {
      weights.latent_down = matrices.take(spec.latent, spec.hidden);
      weights.latent_up = matrices.take(spec.hidden, spec.latent);
    }
    weights.output_bias = vector(spec.output_bias, spec.hidden);
    weights.router_norm = vector(spec.router_norm.weight, spec.hidden);
    weights.input_norm = vector(spec.input_norm.weight, spec.hidden);
    weights.output_norm = vector(spec.output_norm.weight, spec.hidden);
    weights.latent_norm = vector(spec.latent_norm.weight, spec.latent);
    weights.latent_input_norm = vector(spec.latent_input_norm.weight, spec.latent);
    weights.expert_norm = vector(spec.expert_norm.weight, spec.experts.hidden);
    return weights;
  }

  Context context;
  struct Formats {
    FormatSpec experts, shared;
  } formats;
  std::map<std::tuple<std::string, std::int64_t, std::int64_t>, BenchMatrix> packed_sizes;
  RandomPool matrices;
  std::vector<float> unit;  // the router's rows, as hidden states are made from them
  std::vector<float> biases;
  Buffer router_memory;
  Tensor router;
};

// How a number of tokens is spread over variants and copies of the layer, so that what a run reads
// was last read at least rotate_bytes ago.
struct Rotation {
  std::int64_t layers = 1;   // copies of the layer
  std::int64_t batches = 1;  // inputs for each copy
};
Rotation rotation_for(const BenchPlan& plan, std::int64_t tokens) {
  RoutingSource source(plan.spec.route, plan.spread, 1);
  const std::int64_t experts = plan.spec.route.experts;
  const std::int64_t hit =
      std::max<std::int64_t>(1, distinct_experts(source.next(tokens), experts));
  Rotation rotation;
  // While runs hit at most half of the experts, RoutingSource takes the others next.
  rotation.batches = hit * 2 <= experts ? experts / hit : 1;
  const double once = static_cast<double>(hit * rotation.batches) *
                          expert_bytes(plan.spec, plan.dtype, plan.format) +
                      shared_bytes(plan.spec, plan.dtype, plan.shared_format) +
                      static_cast<double>(rotation.batches) *
                          static_cast<double>(bytes(plan.dtype, tokens * plan.spec.hidden));
  rotation.layers = copies_to_rotate(plan, once, 4096);
  return rotation;
}

struct Batch {
  Buffer memory;
  Tensor hidden;
  std::int64_t hit = 0;    // distinct computed experts
  std::int64_t pairs = 0;  // (token, slot) pairs that are computed
};

}  // namespace

void bench_layer(const BenchPlan& plan, const Context& context, Emit& emit) {
  // What prepared weights are besides, the packed matrices say.
  const LayerOptions options{.dtype = plan.dtype, .format = plan.format.of_matrix()};
  const Support support = supports(plan.spec, options, context.device());
  if (!support) throw Error(Status::unsupported, "layer: " + support.reason);
  if (plan.spec.route.hashed) {
    throw Error(Status::unsupported, "layer: routing by token ids is not benchmarked");
  }

  std::int64_t copies = 1;
  for (const auto tokens : plan.tokens)
    copies = std::max(copies, rotation_for(plan, tokens).layers);
  const double one = plan.spec.experts.experts * expert_bytes(plan.spec, plan.dtype, plan.format) +
                     shared_bytes(plan.spec, plan.dtype, plan.shared_format);
  require_memory(plan, one * static_cast<double>(copies));

  Source source(plan, context);
  const LayerWeights first = source.layer(plan.spec);
  std::vector<Layer> layers;
  layers.reserve(static_cast<std::size_t>(copies));
  layers.emplace_back(plan.spec, first, context, options);
  for (std::int64_t i = 1; i < copies; ++i) {
    layers.emplace_back(plan.spec, source.layer(plan.spec), context, options);
  }

  const int k = plan.spec.route.top_k;
  const std::int64_t width = plan.spec.hidden;
  for (const auto tokens : plan.tokens) {
    const Rotation rotation = rotation_for(plan, tokens);
    require_memory(plan, static_cast<double>(layers[0].workspace_bytes(tokens)) +
                             static_cast<double>(1 + rotation.layers * rotation.batches) *
                                 static_cast<double>(bytes(plan.dtype, tokens * width)));
    const Buffer workspace = context.allocate(layers[0].workspace_bytes(tokens));
    const Buffer out_memory =
        context.allocate(static_cast<std::size_t>(bytes(plan.dtype, tokens * width)));
    const Tensor out = view(out_memory.data(), plan.dtype, {tokens, width});
    std::vector<std::int32_t> chosen(static_cast<std::size_t>(tokens * k));
    const Tensor ids = view(chosen.data(), DType::i32, {tokens, k});
    std::vector<float> slots(chosen.size());
    const Tensor weights = view(slots.data(), {tokens, k});

    std::vector<RoutingSource> sources;
    sources.reserve(static_cast<std::size_t>(rotation.layers));
    for (std::int64_t l = 0; l < rotation.layers; ++l) {
      sources.emplace_back(plan.spec.route, plan.spread, 1 + static_cast<std::uint64_t>(l));
    }
    std::vector<Batch> batches;
    for (std::int64_t v = 0; v < rotation.layers * rotation.batches; ++v) {
      const auto at = static_cast<std::size_t>(v % rotation.layers);
      Batch batch;
      batch.memory = context.allocate(static_cast<std::size_t>(bytes(plan.dtype, tokens * width)));
      batch.hidden = view(batch.memory.data(), plan.dtype, {tokens, width});
      states_for(context, source.unit, sources[at].next(tokens), k, batch.hidden);
      // What is counted is what the layer chose, not what was planned.
      layers[at].forward({.hidden = batch.hidden}, {.output = out, .ids = ids, .weights = weights},
                         workspace);
      if (v == 0) {
        check_layer(token_label(plan, tokens), plan.spec, first, context,
                    {.hidden = batch.hidden,
                     .ids = ids,
                     .weights = weights,
                     .output = out,
                     .valid = tokens},
                    rounded_to_16_bits);
      }
      const int computed = plan.spec.route.experts - plan.spec.zero_experts;
      batch.hit = distinct_experts(chosen, computed);
      batch.pairs = std::count_if(chosen.begin(), chosen.end(),
                                  [&](std::int32_t id) { return id >= 0 && id < computed; });
      batch.hit += plan.spec.route.shared.count;
      batch.pairs += plan.spec.route.shared.count * tokens;
      batches.push_back(std::move(batch));
    }

    Case work{.op = "layer",
              .label = token_label(plan, tokens),
              .dtype = plan.dtype,
              .variants = static_cast<std::int64_t>(batches.size())};
    work.call = [&](std::int64_t i) {
      layers[static_cast<std::size_t>(i % rotation.layers)].forward(
          batches[static_cast<std::size_t>(i)].hidden, out, workspace);
    };
    work.cost = [&](std::int64_t i) {
      const Batch& batch = batches[static_cast<std::size_t>(i)];
      return layer_cost(plan.spec, plan.dtype, plan.dtype, tokens, batch.hit, batch.pairs,
                        plan.format, plan.shared_format);
    };
    run_case(plan, context, emit, work);
  }
}

}  // namespace shunt::tool
