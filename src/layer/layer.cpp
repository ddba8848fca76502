#include "shunt/layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/check.hpp"
#include "core/convert.hpp"
#include "gemm/fused.hpp"
#include "layer/norm.hpp"
#include "layer/plan.hpp"
#include "layer/weights.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/combine.hpp"
#include "shunt/gemm.hpp"
#include "shunt/order.hpp"

namespace shunt {

namespace {

// The matrices of a gated or plain MLP, prepared, with their biases in f32.
struct PreparedExperts {
  PreparedWeights gate_up;
  PreparedWeights down;
  Tensor gate_up_bias;  // [E, 2I] as gate_up_activate wants it
  Tensor down_bias;     // [E, H] f32
  std::vector<Buffer> memory;

  PreparedExperts() = default;
  PreparedExperts(const Context& context, DType dtype, const ActivationSpec& activation,
                  const ExpertWeights& weights) {
    const int groups = static_cast<int>(weights.up.size());
    const std::int64_t intermediate = weights.up[0].shape[0];
    const std::int64_t hidden = weights.up[0].shape[1];
    const std::int64_t columns = activation.gated ? 2 * intermediate : intermediate;
    memory.push_back(context.allocate(
        shunt::prepared_bytes(context, dtype, groups, columns, hidden, activation.gated)));
    gate_up = activation.gated
                  ? prepare_paired(context, dtype, weights.gate, weights.up, memory.back())
                  : prepare(context, dtype, weights.up, memory.back());
    memory.push_back(
        context.allocate(shunt::prepared_bytes(context, dtype, groups, hidden, intermediate)));
    down = prepare(context, dtype, weights.down, memory.back());
    if (!weights.up_bias.empty()) {
      gate_up_bias = hold_bias(context, activation.gated ? &weights.gate_bias : nullptr,
                               weights.up_bias, intermediate);
    }
    if (!weights.down_bias.empty()) {
      down_bias = hold_bias(context, nullptr, weights.down_bias, hidden);
    }
  }

  std::size_t bytes() const {
    std::size_t total = 0;
    for (const Buffer& buffer : memory) total += buffer.bytes();
    return total;
  }

 private:
  // One f32 row an expert: first's, then second's values.
  Tensor hold_bias(const Context& context, const std::vector<Tensor>* first,
                   const std::vector<Tensor>& second, std::int64_t width) {
    const std::int64_t columns = first != nullptr ? 2 * width : width;
    const auto groups = static_cast<std::int64_t>(second.size());
    memory.push_back(context.allocate(static_cast<std::size_t>(groups * columns) * sizeof(float)));
    auto* to = static_cast<float*>(memory.back().data());
    const Tensor bias = view(to, {groups, columns});
    for (std::size_t e = 0; e < second.size(); ++e) {
      for (const auto* list : {first, &second}) {
        if (list == nullptr) continue;
        const Tensor& source = (*list)[e];
        for (std::int64_t i = 0; i < width; ++i) {
          *to++ = load_f32(source.data, source.dtype, i * source.strides[0]);
        }
      }
    }
    return bias;
  }
};

Tensor i32_view(const std::int32_t* data, std::initializer_list<std::int64_t> shape) {
  return view(data, DType::i32, shape);
}

void copy_columns(const void* from, std::int64_t columns, const Tensor& to) {
  for (std::int64_t t = 0; t < to.shape[0]; ++t) {
    std::memcpy(to.as<char>() + t * to.shape[1] * 4,
                static_cast<const char*>(from) + t * columns * 4,
                static_cast<std::size_t>(to.shape[1]) * 4);
  }
}

}  // namespace

struct Layer::Impl {
  LayerSpec spec;
  LayerOptions options;
  Context context;
  HeldWeights held;
  PreparedExperts experts;
  PreparedExperts shared;
  std::vector<Buffer> latent_memory;
  PreparedWeights latent_down, latent_up;

  std::size_t stage_bytes(std::int64_t tokens) const;
  void check_call(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const;
  void run(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
           std::vector<StageTime>* times) const;
};

namespace {

// Runs stages one after the other, timing each when asked.
class StageClock {
 public:
  explicit StageClock(std::vector<StageTime>* times) : times_(times) {}
  template <class Run, class Cost>
  void operator()(const char* stage, Run&& run, Cost&& cost) {
    if (times_ == nullptr) {
      run();
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    const StageCost least = cost();
    times_->push_back({stage, took.count(), least.bytes, least.flops});
  }

 private:
  std::vector<StageTime>* times_;
};

}  // namespace

Layer::Layer(const LayerSpec& spec, const LayerWeights& weights, const Context& context,
             const LayerOptions& options)
    : impl_(std::make_unique<Impl>()) {
  require(supports(spec, options, context.device()), "layer");
  check_weights(spec, weights);
  impl_->spec = spec;
  impl_->options = options;
  impl_->context = context;
  impl_->held = HeldWeights(context, weights);
  impl_->experts =
      PreparedExperts(context, options.dtype, spec.experts.activation, weights.experts);
  if (spec.shared.intermediate > 0) {
    impl_->shared = PreparedExperts(context, options.dtype, spec.shared.activation, weights.shared);
  }
  if (spec.latent > 0) {
    const auto prepare_one = [&](const Tensor& matrix) {
      impl_->latent_memory.push_back(context.allocate(
          shunt::prepared_bytes(context, options.dtype, 1, matrix.shape[0], matrix.shape[1])));
      return prepare(context, options.dtype, {matrix}, impl_->latent_memory.back());
    };
    impl_->latent_down = prepare_one(weights.latent_down);
    impl_->latent_up = prepare_one(weights.latent_up);
  }
}

Layer::Layer(const Checkpoint& checkpoint, int layer, const Context& context,
             const LayerOptions& options)
    : Layer(checkpoint.spec(layer), checkpoint.weights(layer), context, options) {}

Layer::~Layer() = default;
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;

const LayerSpec& Layer::spec() const { return impl_->spec; }
const LayerOptions& Layer::options() const { return impl_->options; }

std::size_t Layer::prepared_bytes() const {
  std::size_t total = impl_->held.bytes() + impl_->experts.bytes() + impl_->shared.bytes();
  for (const Buffer& buffer : impl_->latent_memory) total += buffer.bytes();
  return total;
}

std::size_t Layer::Impl::stage_bytes(std::int64_t tokens) const {
  const std::int64_t pairs = tokens * spec.route.slots();
  std::size_t most = route_workspace_bytes(context, spec.route, tokens, spec.hidden);
  most = std::max(most, order_workspace_bytes(context, order_spec(spec), tokens));
  // Scaled rows are converted one a pair, others one a token.
  most = std::max(most, mlp_workspace_bytes(context, experts.gate_up, pairs,
                                            spec.route.weight_on_input ? -1 : tokens));
  most = std::max(most, mlp_workspace_bytes(context, experts.down, pairs));
  if (spec.shared.intermediate > 0) {
    most = std::max(most, mlp_workspace_bytes(context, shared.gate_up, tokens));
    most = std::max(most, mlp_workspace_bytes(context, shared.down, tokens));
  }
  if (spec.latent > 0) {
    most = std::max(most, mlp_workspace_bytes(context, latent_down, tokens));
    most = std::max(most, mlp_workspace_bytes(context, latent_up, tokens));
  }
  return most;
}

std::size_t Layer::workspace_bytes(std::int64_t max_tokens) const {
  if (max_tokens < 0 || max_tokens > (std::int64_t{1} << 31) / impl_->spec.route.slots() - 1) {
    fail(Status::invalid_argument, "workspace_bytes: max_tokens is {}: must be 0 to {}", max_tokens,
         (std::int64_t{1} << 31) / impl_->spec.route.slots() - 1);
  }
  return carve(impl_->spec, impl_->options, max_tokens, impl_->stage_bytes(max_tokens), {})
      .total_bytes;
}

void Layer::forward(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const {
  impl_->run(in, out, workspace, nullptr);
}

void Layer::forward_timed(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
                          std::vector<StageTime>& times) const {
  times.clear();
  impl_->run(in, out, workspace, &times);
}

void Layer::Impl::check_call(const LayerInputs& in, const LayerOutputs& out,
                             Workspace workspace) const {
  const Device device = context.device();
  check_tensor("forward: hidden", in.hidden,
               {.dtypes = float_dtypes, .shape = {any_size, spec.hidden}, .rows_dense = true},
               device);
  const std::int64_t tokens = in.hidden.shape[0];
  check_tensor("forward: output", out.output,
               {.dtypes = float_dtypes, .shape = {tokens, spec.hidden}, .rows_dense = true},
               device);
  if (in.residual) {
    check_tensor("forward: residual", in.residual,
                 {.dtypes = float_dtypes, .shape = {tokens, spec.hidden}, .rows_dense = true},
                 device);
  }
  if (check_given("forward: token_ids", in.token_ids, spec.route.hashed, "the layer's routing")) {
    check_tensor("forward: token_ids", in.token_ids,
                 {.dtypes = {DType::i32, DType::i64}, .shape = {tokens}, .dense = true}, device);
  }
  if (in.valid_tokens) {
    check_tensor("forward: valid_tokens", in.valid_tokens, {.dtypes = {DType::i32}, .shape = {1}},
                 device);
  }
  if (out.ids) {
    check_tensor("forward: ids", out.ids,
                 {.dtypes = {DType::i32}, .shape = {tokens, spec.route.top_k}, .dense = true},
                 device);
  }
  if (out.weights) {
    check_tensor("forward: weights", out.weights,
                 {.dtypes = {DType::f32}, .shape = {tokens, spec.route.top_k}, .dense = true},
                 device);
  }
  check_workspace("forward", workspace,
                  carve(spec, options, tokens, stage_bytes(tokens), {}).total_bytes);
}

void Layer::Impl::run(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
                      std::vector<StageTime>* times) const {
  check_call(in, out, workspace);
  const std::int64_t given = in.hidden.shape[0];
  std::int64_t tokens = given;
  if (in.valid_tokens) {
    tokens = std::clamp<std::int64_t>(*in.valid_tokens.as<std::int32_t>(), 0, given);
  }
  const Tensor x = in.hidden.rows(0, tokens);
  const Tensor y = out.output.rows(0, tokens);
  const Tensor residual = in.residual ? in.residual.rows(0, tokens) : Tensor{};
  const int slots = spec.route.slots();
  const std::int64_t pairs = tokens * slots;
  const std::int64_t inner = spec.experts.hidden;
  const LayerScratch s = carve(spec, options, tokens, stage_bytes(given), workspace);
  const Workspace stage{s.stage, s.stage_bytes};
  StageClock clock(times);

  const auto finish_ids = [&] {
    // Rows past the valid ones: id -1, weight 0, output 0.
    if (out.ids) {
      copy_columns(s.ids, slots, out.ids.rows(0, tokens));
      std::fill_n(out.ids.as<std::int32_t>() + tokens * spec.route.top_k,
                  (given - tokens) * spec.route.top_k, -1);
    }
    if (out.weights) {
      copy_columns(s.weights, slots, out.weights.rows(0, tokens));
      std::fill_n(out.weights.as<float>() + tokens * spec.route.top_k,
                  (given - tokens) * spec.route.top_k, 0.0f);
    }
    zero_rows(out.output, tokens, given);
  };
  if (tokens == 0) {
    finish_ids();
    return;
  }

  const LayerWeights& w = held.views;
  clock(
      "route",
      [&] {
        Tensor router_input = x;
        if (spec.router_norm.enabled) {
          rms_norm(context, spec.router_norm, x, w.router_norm, s.router_input);
          router_input = view(s.router_input, {tokens, spec.hidden});
        }
        route(
            context, spec.route,
            {.hidden = router_input,
             .router_weight = w.router,
             .router_bias = w.router_bias,
             .selection_bias = w.selection_bias,
             .per_expert_scale = w.per_expert_scale,
             .token_ids = in.token_ids ? in.token_ids.rows(0, tokens) : Tensor{},
             .hash_table = w.hash_table},
            {.ids = i32_view(s.ids, {tokens, slots}), .weights = view(s.weights, {tokens, slots})},
            stage);
      },
      [&] { return route_cost(spec, w, tokens, x.dtype); });

  const Tensor ids = i32_view(s.ids, {tokens, slots});
  const Tensor weights = view(s.weights, {tokens, slots});
  const Tensor inverse = i32_view(s.inverse, {tokens, slots});
  clock(
      "order",
      [&] {
        OrderOutputs ordered{.offsets = i32_view(s.offsets, {spec.experts.experts + 1}),
                             .permutation = i32_view(s.permutation, {pairs}),
                             .inverse = inverse};
        if (s.row_weights != nullptr) ordered.weights = view(s.row_weights, {pairs});
        order(context, order_spec(spec),
              {.ids = ids, .weights = s.row_weights ? weights : Tensor{}}, ordered, stage);
      },
      [&] { return order_cost(spec, tokens); });
  const std::int64_t rows = s.offsets[spec.experts.experts];
  int hit = 0;
  for (int e = 0; e < spec.experts.experts; ++e) hit += s.offsets[e + 1] > s.offsets[e];

  s.one_group[0] = 0;
  s.one_group[1] = static_cast<std::int32_t>(tokens);
  Tensor u = x;
  if (spec.input_norm.enabled) {
    clock(
        "norm", [&] { rms_norm(context, spec.input_norm, x, w.input_norm, s.normed); },
        [&] {
          return StageCost{tokens * spec.hidden * 8, 0};
        });
    u = view(s.normed, {tokens, spec.hidden});
  }
  if (spec.latent > 0) {
    clock(
        "latent_down",
        [&] {
          mlp_gemm(context, latent_down, {.rows = u, .offsets = s.one_group},
                   view(s.latent, {tokens, inner}), stage);
        },
        [&] { return latent_cost(spec, options.dtype, tokens); });
    u = view(s.latent, {tokens, inner});
  }

  const Tensor h = view(s.h, options.dtype, {pairs, spec.experts.intermediate});
  const Tensor expert_rows = view(s.rows, {pairs, inner});
  clock(
      "gate_up",
      [&] {
        mlp_gate_up(context, experts.gate_up, spec.experts.activation,
                    {.rows = u,
                     .offsets = s.offsets,
                     .permutation = s.permutation,
                     .slots = slots,
                     .row_scale = s.row_weights,
                     .bias = experts.gate_up_bias.as<float>()},
                    h, stage);
      },
      [&] { return gate_up_cost(spec, options.dtype, tokens, rows, hit, u.dtype); });
  clock(
      "down",
      [&] {
        mlp_gemm(context, experts.down,
                 {.rows = h, .offsets = s.offsets, .bias = experts.down_bias.as<float>()},
                 expert_rows, stage);
      },
      [&] { return down_cost(spec, options.dtype, rows, hit); });

  Tensor shared_rows;
  if (spec.shared.intermediate > 0) {
    shared_rows = view(s.shared, {tokens, spec.hidden});
    clock(
        "shared",
        [&] {
          const Tensor shared_h =
              view(s.shared_h, options.dtype, {tokens, spec.shared.intermediate});
          mlp_gate_up(context, shared.gate_up, spec.shared.activation,
                      {.rows = x, .offsets = s.one_group, .bias = shared.gate_up_bias.as<float>()},
                      shared_h, stage);
          mlp_gemm(context, shared.down,
                   {.rows = shared_h, .offsets = s.one_group, .bias = shared.down_bias.as<float>()},
                   shared_rows, stage);
          if (spec.shared.sigmoid_gate) gate_logits(context, x, w.shared_gate, s.shared_logits);
        },
        [&] { return shared_cost(spec, options.dtype, tokens, x.dtype); });
  }

  // Where the sum goes on (latent projection, bias, norm) it stays in f32 until then.
  const bool more = s.wide != nullptr;
  const Tensor wide = more ? view(s.wide, {tokens, spec.hidden}) : Tensor{};
  CombineSpec combine_spec{
      .slots = slots,
      .weighted = !spec.route.weight_on_input,
      .identity_from = spec.zero_experts > 0 ? spec.route.experts - spec.zero_experts : -1,
      .shared_gate = spec.shared.sigmoid_gate && spec.latent == 0,
      .shared_scale = spec.shared.scale};
  CombineInputs parts{.rows = expert_rows, .inverse = inverse};
  if (combine_spec.weighted || spec.zero_experts > 0) parts.weights = weights;
  if (spec.zero_experts > 0) {
    parts.ids = ids;
    parts.hidden = x;
  }
  const auto add_shared = [&](CombineSpec& to_spec, CombineInputs& to) {
    to.shared = shared_rows;
    to_spec.shared_gate = spec.shared.intermediate > 0 && spec.shared.sigmoid_gate;
    if (to_spec.shared_gate) to.shared_gate = view(s.shared_logits, {tokens});
  };
  if (spec.latent == 0) add_shared(combine_spec, parts);
  if (!more) parts.residual = residual;
  clock(
      "combine",
      [&] {
        combine(context, combine_spec, parts,
                spec.latent > 0 ? view(s.inner, {tokens, inner}) : (more ? wide : y));
      },
      [&] { return combine_cost(spec, tokens, rows, y.dtype); });
  if (spec.latent > 0) {
    clock(
        "latent_up",
        [&] {
          mlp_gemm(context, latent_up,
                   {.rows = view(s.inner, {tokens, inner}), .offsets = s.one_group}, wide, stage);
          if (shared_rows) {
            // One slot a token, its own row: the shared expert joins as in any combine. The
            // permutation is spent and holds the identity.
            for (std::int64_t t = 0; t < tokens; ++t) {
              s.permutation[t] = static_cast<std::int32_t>(t);
            }
            CombineSpec join{.slots = 1, .weighted = false, .shared_scale = spec.shared.scale};
            CombineInputs both{.rows = wide, .inverse = i32_view(s.permutation, {tokens, 1})};
            add_shared(join, both);
            combine(context, join, both, shared_rows);
            std::memcpy(s.wide, s.shared,
                        static_cast<std::size_t>(tokens * spec.hidden) * sizeof(float));
          }
        },
        [&] { return latent_cost(spec, options.dtype, tokens); });
  }
  if (more) {
    clock(
        "finish",
        [&] {
          if (spec.output_bias) {
            scale_and_bias(context, s.wide, tokens, spec.hidden, 1.0f, w.output_bias);
          }
          if (spec.output_norm.enabled) {
            rms_norm(context, spec.output_norm, wide, w.output_norm, s.wide);
          }
          store_rows(context, s.wide, residual, y);
        },
        [&] {
          return StageCost{tokens * spec.hidden * (4 + bits(y.dtype) / 8), 0};
        });
  }
  finish_ids();
}

std::string Layer::explain(std::int64_t tokens) const {
  const LayerSpec& spec = impl_->spec;
  const double hit = expected_hit(spec, tokens);
  const std::int64_t pairs = tokens * spec.route.slots();
  const StageCost gate_up =
      gate_up_cost(spec, impl_->options.dtype, tokens, pairs, static_cast<int>(hit), DType::f32);
  std::string text = fmt::format(
      "{} tokens on {} threads, experts in {}, sums in f32\n"
      "  about {:.0f} of {} experts hit under uniform routing, {:.1f} rows each\n",
      tokens, impl_->context.threads(), to_string(impl_->options.dtype), hit, spec.experts.experts,
      hit > 0 ? static_cast<double>(pairs) / hit : 0.0);
  text += fmt::format("  route    router GEMM in f32, then selection; {}\n", describe(spec.route));
  text += "  order    stable counting sort, compact: no padding rows\n";
  text += fmt::format(
      "  gate_up  gather while packing rows{}, {} in the epilogue; {}\n",
      spec.route.weight_on_input ? ", times the weight" : "", describe(spec.experts.activation),
      mlp_explain(impl_->context, impl_->experts.gate_up, pairs, static_cast<int>(hit)));
  text += fmt::format("  down     f32 rows; {}\n", mlp_explain(impl_->context, impl_->experts.down,
                                                               pairs, static_cast<int>(hit)));
  if (spec.shared.intermediate > 0) {
    text += fmt::format("  shared   {}\n",
                        mlp_explain(impl_->context, impl_->shared.gate_up, tokens, 1));
  }
  text += "  combine  per token, slots in order of selection, then the shared expert\n";
  text += fmt::format(
      "  gate_up reads {:.1f} MB of weights for {:.2f} GFLOP; workspace {:.1f} MB\n",
      static_cast<double>(gate_up.bytes) / 1e6, static_cast<double>(gate_up.flops) / 1e9,
      static_cast<double>(workspace_bytes(tokens)) / 1e6);
  return text;
}

}  // namespace shunt
