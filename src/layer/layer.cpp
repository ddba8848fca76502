#include "shunt/layer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "cpu/float_mode.hpp"
#include "cuda/runtime.hpp"
#include "gemm/few_chain.hpp"
#include "gemm/fused.hpp"
#include "layer/impl.hpp"
#include "layer/plan.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/gemm.hpp"
#include "shunt/order.hpp"
#include "shunt/route_and_order.hpp"

namespace shunt {

namespace {
// A GPU's products are of one format, which the options say: plain is that of packed weights.
LayerOptions with_format(LayerOptions options, const ExpertWeights& experts, Device device) {
  if (device.type == DeviceType::cuda && options.format == FormatSpec{} &&
      !experts.packed_up.empty()) {
    options.format = experts.packed_up[0].format.of_matrix();
  }
  return options;
}
}  // namespace

Layer::Layer(const LayerSpec& spec, const LayerWeights& weights, const Context& context,
             const LayerOptions& given)
    : impl_(std::make_unique<Impl>()) {
  const cpu_engine::FloatMode mode;  // a subnormal f16 becomes an f32 by a product
  const LayerOptions options = with_format(given, weights.experts, context.device());
  require_legal(supports(spec, {}, Device{}), "layer");
  require_legal(legal(options), "layer");
  require_legal(supports(spec, {.dtype = options.dtype}, Device{}), "layer");
  require(supports(spec, options, context.device()), "layer");
  check_weights(spec, weights, context.device());
  impl_->spec = spec;
  impl_->options = options;
  impl_->context = context;
  impl_->held = HeldWeights(context, weights);
  const bool folds = shunt::folds(spec, options, context) && may_fold(weights);
  if (spec.shared.intermediate > 0 && !folds) {
    impl_->shared = PreparedExperts(context, options.dtype, spec.shared.activation, weights.shared,
                                    false, {}, shared_rows(spec, weights.shared, options));
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
  impl_->set_up();
  if (folds) {
    impl_->fold(PreparedExperts(context, options.dtype, spec.experts.activation, joined(weights)));
    return;
  }
  // Last: in place, after which nothing may fail that would leave the caller without his weights.
  impl_->experts = PreparedExperts(context, options.dtype, spec.experts.activation, weights.experts,
                                   options.in_place, options.format, options.rows);
}

namespace {
// A checkpoint's tensors are files, mapped to be read.
LayerOptions of_a_file(const LayerOptions& options) {
  if (!options.in_place) return options;
  fail(
      Status::unsupported,
      "layer: LayerOptions.in_place: must be false for a checkpoint, whose tensors are mapped read "
      "only");
}

// What is wrong with its weights is said with the folder and the layer.
Layer of_checkpoint(const Checkpoint& checkpoint, int layer, const Context& context,
                    const LayerOptions& given) {
  const LayerSpec spec = checkpoint.spec(layer);
  const LayerWeights weights = checkpoint.weights(layer);
  const LayerOptions options = of_a_file(given);
  try {
    return Layer(spec, weights, context, options);
  } catch (const Error& error) {
    fail(error.status(), "{}, layer {}: {}", checkpoint.folder(), layer, error.what());
  }
}
}  // namespace

Layer::Layer(const Checkpoint& checkpoint, int layer, const Context& context,
             const LayerOptions& options)
    : Layer(of_checkpoint(checkpoint, layer, context, options)) {}

Layer::Layer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Layer::~Layer() = default;
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;

const LayerSpec& Layer::spec() const { return impl_of(impl_).spec; }
const LayerOptions& Layer::options() const { return impl_of(impl_).options; }

std::size_t Layer::prepared_bytes() const {
  std::size_t total = impl_of(impl_).held.bytes() + impl_->experts.bytes() + impl_->shared.bytes();
  if (impl_->with_shared) total += impl_->with_shared->experts.bytes();
  for (const Buffer& buffer : impl_->latent_memory) total += buffer.bytes();
  return total;
}

void Layer::Impl::check_prepared(const char* what) const {
  if (experts.down.data != nullptr) return;
  fail(Status::invalid_argument, "{}: the layer's matrices were given back by unprepare()", what);
}

void Layer::Impl::set_up() {
  if constexpr (cuda_engine::built) {
    if (!on_gpu()) return;
    if (spec.shared.intermediate > 0) side = std::make_shared<SideStream>(context);
    if (spec.shared.intermediate > 0 || spec.latent > 0) {
      constexpr std::array<std::int32_t, cuda_engine::most_chained_tokens> zeros{};
      group_0 = context.allocate(sizeof(zeros));
      context.copy(group_0.data(), zeros.data(), sizeof(zeros));
    }
  }
}

bool Layer::Impl::routes_and_orders_at_once(std::int64_t tokens) const {
  if (fills_shared) return false;
  bool dependent = false;
  if constexpr (cuda_engine::built) {
    if (on_gpu()) dependent = context.gpu().dependent_launch;
  }
  return shunt::routes_and_orders_at_once(spec, context.device(), tokens, dependent);
}

SharedPlan Layer::Impl::shared_plan(std::int64_t tokens, bool whole_k) const {
  if (spec.shared.intermediate == 0 || !on_gpu()) return {};
  return plan_shared(context.device(), tokens,
                     mlp_us(context, shared.gate_up, tokens, whole_k) +
                         mlp_us(context, shared.down, tokens, whole_k));
}

// Kernels for few rows take a multiprocessor each for all that is theirs: there before routing has
// ended, they would have the shared expert wait. And where rows are rounded on the way the order's
// launch is no loss from two tokens on (measured: docs/notes/cuda-layer.md, "Few tokens and a
// shared expert").
bool Layer::Impl::orders_beside(std::int64_t tokens, bool whole_k) const {
  return !whole_k && (tokens == 1 || !in_fp8(options.rows)) &&
         mlp_one_pass_us(context, experts.gate_up, tokens * spec.route.slots(), tokens).has_value();
}

// Its warps take all of the GPU. An order's launch and what waits for it are slowed down by that,
// unless they are soon gone.
bool Layer::Impl::streams_shared(std::int64_t tokens, bool in_products, bool whole_k) const {
  constexpr std::size_t soon_gone = std::size_t{8} << 20;
  return shared_rounding(tokens) == Rounding::on_the_way &&
         (in_products || shared.gate_up.bytes + shared.down.bytes <= soon_gone) &&
         streams(shared.gate_up, tokens, whole_k) && streams(shared.down, tokens, whole_k);
}

bool Layer::Impl::streams(const PreparedWeights& matrix, std::int64_t tokens, bool whole_k) const {
  return tokens <= cuda_engine::most_chained_tokens && !whole_k &&
         mlp_one_pass_us(context, matrix, tokens, tokens).has_value();
}

std::size_t Layer::Impl::side_bytes(std::int64_t tokens) const {
  if (side == nullptr) return 0;
  const std::size_t most = std::max(mlp_workspace_bytes(context, shared.gate_up, tokens),
                                    mlp_workspace_bytes(context, shared.down, tokens));
  return (most + 255) / 256 * 256;
}

Rounding Layer::Impl::rounding(std::int64_t tokens) const {
  return rounding_of(experts, spec.experts.intermediate, tokens * spec.route.slots());
}

Rounding Layer::Impl::shared_rounding(std::int64_t tokens) const {
  return rounding_of(shared, spec.shared.intermediate, tokens);
}

Rounding Layer::Impl::rounding_of(const PreparedExperts& of, std::int64_t intermediate,
                                  std::int64_t rows) const {
  const RowFormat kind = of.gate_up.rows;
  if (!in_fp8(kind)) return Rounding::on_the_way;
  // A scale of a whole row is not known before its end.
  if (kind == RowFormat::fp8_token) return Rounding::between;
  const Rounding best = mlp_rounding(context, of.gate_up, of.down, rows);
  const bool fits = options.dtype != DType::f32 && Fp8Rows::fits_in_place(kind, intermediate);
  return best == Rounding::between && !fits ? Rounding::on_the_way : best;
}

bool Layer::Impl::gathers_first(std::int64_t tokens, DType hidden, bool pieces) const {
  if (rounding(tokens) != Rounding::on_the_way) return true;
  const DType source = spec.latent > 0           ? rows_dtype()
                       : spec.input_norm.enabled ? DType::f32
                                                 : hidden;
  const bool own = spec.latent > 0 || spec.input_norm.enabled;  // in the workspace
  return mlp_wants_gathered(context, experts.gate_up, tokens * spec.route.slots(),
                            {.dtype = source,
                             .pieces = own || pieces,
                             .scaled = spec.route.weight_on_input,
                             .whole_k = options.batch_invariant});
}

MlpWay Layer::Impl::down_way(std::int64_t tokens, bool gathered) const {
  MlpWay way{.whole_k = options.batch_invariant,
             .rounded = rounding(tokens) != Rounding::on_the_way};
  way.placed = one_row_a_token(spec) && experts.down.format == FormatSpec{};
  if (!way.placed) {
    way.tile_before = mlp_tile(context, experts.gate_up, tokens * spec.route.slots(),
                               {.whole_k = options.batch_invariant, .gathers = !gathered});
  }
  return way;
}

std::size_t Layer::Impl::stage_bytes(std::int64_t tokens) const {
  const std::int64_t pairs = tokens * spec.route.slots();
  std::size_t most = order_workspace_bytes(context, order_spec(spec), tokens);
  if (!spec.routed_outside) {
    most = std::max(most, route_workspace_bytes(context, routing(), tokens, spec.hidden));
  }
  if (on_gpu() && !spec.routed_outside && !fills_shared) {
    // Of the most tokens that may be routed and ordered at once: never less for more tokens.
    const std::int64_t few = std::min(tokens, most_pairs_at_once / spec.route.slots());
    most = std::max(most, route_and_order_workspace_bytes(context, routing(), order_spec(spec), few,
                                                          spec.hidden));
  }
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
  return (most + 255) / 256 * 256 + side_bytes(tokens);
}

namespace {
void check_tokens(const char* what, const LayerSpec& spec, std::int64_t tokens) {
  const std::int64_t most = (std::int64_t{1} << 31) / spec.route.slots() - 1;
  if (tokens >= 0 && tokens <= most) return;
  fail(Status::invalid_argument, "{} is {}: must be 0 to {}", what, tokens, most);
}
}  // namespace

std::size_t Layer::workspace_bytes(std::int64_t max_tokens) const {
  check_tokens("workspace_bytes: max_tokens", impl_of(impl_).spec, max_tokens);
  const auto bytes = [](const Impl& layer, std::int64_t tokens) {
    return carve(layer.spec, layer.options, layer.rows_dtype(), tokens, layer.stage_bytes(tokens),
                 {})
        .total_bytes;
  };
  const std::size_t apart = bytes(*impl_, max_tokens);
  if (!impl_->with_shared) return apart;
  return std::max(apart, bytes(*impl_->with_shared, std::min<std::int64_t>(max_tokens, 1)));
}

void Layer::forward(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const {
  impl_of(impl_).run(in, out, workspace, nullptr);
}

void Layer::forward_timed(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
                          std::vector<StageTime>& times) const {
  times.clear();
  impl_of(impl_).run(in, out, workspace, &times);
}

std::string Layer::explain(std::int64_t tokens) const {
  check_tokens("explain: tokens", impl_of(impl_).spec, tokens);
  const bool folds = impl_->folds(tokens);
  const Impl& layer = folds ? *impl_->with_shared : *impl_;
  const LayerSpec& spec = layer.spec;
  const double hit = expected_hit(spec, tokens);
  const std::int64_t pairs = tokens * spec.route.slots();
  const bool whole_k = layer.options.batch_invariant;
  const StageCost gate_up =
      gate_up_cost(spec, layer.options.dtype, tokens, pairs, static_cast<int>(hit), DType::f32);
  const std::string where = layer.on_gpu() ? fmt::format("GPU {}", layer.context.device().index)
                                           : fmt::format("{} threads", layer.context.threads());
  std::string text = fmt::format(
      "{} tokens on {}, experts in {}, sums in f32\n"
      "  about {:.0f} of {} experts hit under uniform routing, {:.1f} rows each\n",
      tokens, where, to_string(layer.options.dtype), hit, spec.experts.experts,
      hit > 0 ? static_cast<double>(pairs) / hit : 0.0);
  if (spec.routed_outside) {
    text += fmt::format("  route    no router: {} ids a token\n", spec.route.top_k);
  } else {
    text += fmt::format("  route    {}; {}\n",
                        layer.held.views.router ? "router GEMM in f32, then selection"
                                                : "no router: ids, or logits and selection",
                        describe(impl_->spec.route));  // a folded one has a slot more
  }
  const bool rounded = layer.rounding(tokens) != Rounding::on_the_way;
  const SharedPlan shared_plan = layer.shared_plan(tokens, whole_k);
  const auto few_of = [&](IdsFrom from, bool invariant) {
    return !rounded &&
           (!layer.shared_plan(tokens, invariant).beside ||
            layer.orders_beside(tokens, invariant)) &&
           orders_in_products(spec, layer.context.device(), tokens, from, layer.options.rows);
  };
  const auto few_pairs_of = [&](bool invariant) {
    return few_of(IdsFrom::elsewhere, invariant) ||
           (!spec.route.hashed && few_of(IdsFrom::router, invariant));
  };
  const bool few_given = few_of(IdsFrom::elsewhere, whole_k), few_pairs = few_pairs_of(whole_k);
  if (few_pairs) {
    text += fmt::format(
        "  order    by each block of the products that follow, where they are for few rows{}{}\n",
        few_given ? "" : " and the call gives no ids",
        whole_k ? "" : "; these read weights in one pass where all of their warps fit on the GPU");
  } else if (!spec.routed_outside && layer.routes_and_orders_at_once(tokens)) {
    text +=
        "  order    in the router's launch where it is one for few tokens, else in one that starts "
        "while it ends; compact: no padding rows\n";
  } else {
    text += "  order    stable counting sort, compact: no padding rows\n";
  }
  if (spec.latent > 0) {
    const auto projection = [&](const char* way, const PreparedWeights& matrix, bool normed) {
      return fmt::format("  latent   {} {}, {}{}; {}{}\n", way, spec.latent,
                         to_string(layer.rows_dtype()), normed ? " after a norm" : "",
                         layer.streams(matrix, tokens, whole_k) ? "its weights in one pass; " : "",
                         mlp_explain(layer.context, matrix, tokens, 1, {.whole_k = whole_k}));
    };
    text += projection("to", layer.latent_down, spec.latent_input_norm.enabled);
    text += projection("from", layer.latent_up, spec.latent_norm.enabled);
  }
  const bool gathered = layer.gathers_first(tokens, layer.options.dtype);
  text += fmt::format(
      "  gate_up  {}{}, {} in the epilogue; {}\n",
      !layer.on_gpu() ? "gather while packing rows"
      : gathered      ? "rows gathered first"
                      : "rows gathered on the way",
      spec.route.weight_on_input ? ", times the weight" : "", describe(spec.experts.activation),
      mlp_explain(layer.context, layer.experts.gate_up, pairs, static_cast<int>(hit),
                  {.whole_k = whole_k, .rounded = rounded, .gathers = !gathered}));
  text += fmt::format("  down     {}{} rows; {}\n",
                      layer.rounding(tokens) == Rounding::between ? "its rows to fp8 first; " : "",
                      to_string(layer.rows_dtype()),
                      mlp_explain(layer.context, layer.experts.down, pairs, static_cast<int>(hit),
                                  layer.down_way(tokens, gathered)));
  if (spec.shared.intermediate > 0) {
    text += fmt::format(
        "  shared   {}{}\n",
        !layer.on_gpu()       ? ""
        : !shared_plan.beside ? "after the experts: a fork would cost more than it hides; "
        : layer.streams_shared(tokens, few_pairs, whole_k)
            ? "on a stream of its own beside routing, its weights in one pass; "
            : fmt::format("on a stream of its own beside routing, which hides about {:.0f} of its "
                          "{:.0f} us; ",
                          shared_plan.hidden, shared_plan.us),
        mlp_explain(
            layer.context, layer.shared.gate_up, tokens, 1,
            {.whole_k = whole_k,
             .rounded = layer.shared_rounding(tokens) != Rounding::on_the_way,
             .beside = shared_plan.beside && !layer.streams_shared(tokens, few_pairs, whole_k)}));
  }
  if (folds) text += "  shared   one more of the experts: all weights in one pass a product\n";
  const bool added_up = few_pairs && !whole_k && adds_up(spec, tokens);
  const bool placed = layer.on_gpu() && one_row_a_token(spec) && !added_up;
  text +=
      fmt::format("  combine  per token, slots in order of selection{}{}\n",
                  spec.shared.intermediate > 0 ? ", then the shared expert" : "",
                  added_up ? "; by down's own blocks where these are small"
                  : placed ? "; down writes a token's only row where its kernel and the output's "
                             "dtype allow"
                           : "");
  text += fmt::format(
      "  gate_up moves {:.3g} MB, weights and rows, for {:.3g} GFLOP; workspace {:.3g} MB\n",
      static_cast<double>(gate_up.bytes) / 1e6, static_cast<double>(gate_up.flops) / 1e9,
      static_cast<double>(workspace_bytes(tokens)) / 1e6);
  if (whole_k) {
    // The same layer's products without it, some of which read weights in one pass; that one
    // token's shared expert may be one more of the experts is left out.
    const bool in_products = few_pairs_of(false);
    const bool streams_shared =
        layer.shared_plan(tokens, false).beside && layer.streams_shared(tokens, in_products, false);
    double more = 0;
    bool streams = false;
    const auto count = [&](const PreparedWeights& weights, std::int64_t rows, bool one_pass) {
      if (!weights) return;
      double otherwise = mlp_us(layer.context, weights, rows, false);
      const auto streamed =
          one_pass ? mlp_one_pass_us(layer.context, weights, rows, tokens) : std::nullopt;
      otherwise = std::min(otherwise, streamed.value_or(otherwise));
      streams = streams || streamed.has_value();
      more += mlp_us(layer.context, weights, rows, true) - otherwise;
    };
    for (const PreparedWeights* weights : {&layer.experts.gate_up, &layer.experts.down}) {
      count(*weights, pairs, in_products);
    }
    for (const PreparedWeights* weights : {&layer.shared.gate_up, &layer.shared.down}) {
      count(*weights, tokens, streams_shared);
    }
    for (const PreparedWeights* weights : {&layer.latent_down, &layer.latent_up}) {
      count(*weights, tokens, *weights && layer.streams(*weights, tokens, false));
    }
    text += layer.on_gpu() ? fmt::format(
                                 "  batch-invariant: one router for any number of tokens; products "
                                 "about {:.1f} us longer than with k shared out{}\n",
                                 more, streams ? " or weights read in one pass" : "")
                           : std::string("  batch-invariant, as ever on the CPU\n");
  }
  return text;
}

}  // namespace shunt
