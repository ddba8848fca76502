// One call of a layer: the plan over the stages, the same for every engine. What differs: the CPU
// reads valid_tokens and cuts the rows; a GPU, whose host reads nothing, hands the count to every
// stage.
#include <algorithm>

#include "combine/engine.hpp"
#include "core/check.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "gemm/fused.hpp"
#include "layer/impl.hpp"
#include "layer/passes.hpp"
#include "layer/plan.hpp"
#include "layer/stage_clock.hpp"
#include "shunt/combine.hpp"
#include "shunt/order.hpp"
#include "shunt/route_and_order.hpp"

namespace shunt {

namespace {

// What routing came to, for the costs of timed stages.
struct Load {
  std::int64_t rows = 0;
  int hit = 0;  // experts with a row
  Load(const Context& context, const std::int32_t* offsets, int experts) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(experts) + 1);
    context.copy(values.data(), offsets, values.size() * sizeof(std::int32_t));
    rows = values.back();
    for (std::size_t e = 0; e + 1 < values.size(); ++e) hit += values[e + 1] > values[e];
  }
};

// Rows past the valid ones: id -1, weight 0, output 0.
void clear_rest(const LayerOutputs& out, std::int64_t tokens, std::int64_t given) {
  const auto rest = [&](const Tensor& of) { return of.rows(tokens, given); };
  if (out.ids) std::fill_n(rest(out.ids).as<std::int32_t>(), rest(out.ids).elements(), -1);
  if (out.weights) std::fill_n(rest(out.weights).as<float>(), rest(out.weights).elements(), 0.0f);
  const std::int64_t width = bits(out.output.dtype) / 8;
  for (std::int64_t t = tokens; t < given; ++t) {
    std::fill_n(out.output[t].as<char>(), out.output.shape[1] * width, char{0});
  }
}

}  // namespace

void Layer::Impl::run(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
                      std::vector<StageTime>* times) const {
  // Stage by stage, the shared expert has its turn as well; ids that are given have no slot for it.
  if (times == nullptr && !in.ids && in.hidden.rank == 2 && folds(in.hidden.shape[0])) {
    return with_shared->run(in, out, workspace, nullptr);
  }
  const cuda_engine::Current current(context);
  check_call(in, out, workspace);
  const std::int64_t given = in.hidden.shape[0];
  std::int64_t tokens = given;
  Tensor valid;
  if (in.valid_tokens && on_gpu()) {
    valid = in.valid_tokens;
  } else if (in.valid_tokens) {
    tokens = std::clamp<std::int64_t>(*in.valid_tokens.as<std::int32_t>(), 0, given);
  }
  if (tokens == 0) return clear_rest(out, tokens, given);

  const auto cut = [&](const Tensor& of) { return of ? of.rows(0, tokens) : Tensor{}; };
  const auto at = [&](const void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return view(data, dtype, shape, context.device());
  };
  const Tensor x = cut(in.hidden), y = cut(out.output), residual = cut(in.residual);
  const int slots = spec.route.slots();
  const std::int64_t pairs = tokens * slots;
  const std::int64_t inner = spec.experts.hidden;
  const LayerScratch s = carve(spec, options, rows_dtype(), tokens, stage_bytes(given), workspace);
  const bool beside = cuda_engine::built && side != nullptr && times == nullptr &&
                      shared_plan(tokens, options.batch_invariant).beside;
  const std::size_t side_size = side_bytes(given);
  const Workspace stage{s.stage, s.stage_bytes - side_size};
  const Workspace side_stage{static_cast<char*>(s.stage) + stage.bytes, side_size};
  const bool whole_k = options.batch_invariant;
  const LayerWeights& w = held.views;
  StageClock clock(context, times);
  const auto load = [&] { return Load(context, s.offsets, spec.experts.experts); };

  // Without shared slots the caller's ids and weights are all there is.
  const bool own_routing = spec.route.shared.count > 0;
  const bool routed_before = static_cast<bool>(in.ids);
  const Tensor ids = routed_before             ? cut(in.ids)
                     : !own_routing && out.ids ? cut(out.ids)
                                               : at(s.ids, i32, {tokens, slots});
  const Tensor weights = routed_before                 ? cut(in.weights)
                         : !own_routing && out.weights ? cut(out.weights)
                                                       : at(s.weights, f32, {tokens, slots});
  const Tensor inverse = at(s.inverse, i32, {tokens, slots});
  OrderOutputs ordered{.offsets = at(s.offsets, i32, {spec.experts.experts + 1}),
                       .permutation = at(s.permutation, i32, {pairs}),
                       .inverse = inverse};
  if (s.row_weights != nullptr) ordered.weights = at(s.row_weights, f32, {pairs});
  const std::int64_t columns = spec.experts.intermediate;
  const Rounding way = rounding(tokens);
  const bool rounded = way != Rounding::on_the_way;
  const Fp8Rows fp8_u(options.rows, s.rows, pairs, inner, context.device());
  const Fp8Rows fp8_h = way == Rounding::between
                            ? Fp8Rows::in_place(options.rows, s.h, pairs, columns, context.device())
                            : Fp8Rows(options.rows, s.h, pairs, columns, context.device());
  const Tensor h_16 = at(s.h, options.dtype, {pairs, columns});
  const Tensor count = at(s.offsets + spec.experts.experts, i32, {1});
  const Tensor expert_rows = at(s.rows, rows_dtype(), {pairs, inner});
  const bool scaled = s.row_weights != nullptr, latent = spec.latent > 0;
  const bool pieces = reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 &&
                      x.strides[0] * bits(x.dtype) / 8 % 16 == 0;
  const bool gathered = gathers_first(tokens, x.dtype, pieces);
  // The experts' rows, and later their sums, as the products read them.
  const Tensor latents = latent ? at(s.latent, rows_dtype(), {tokens, inner}) : Tensor{};
  MlpInput to_gate_up{.rows = latent ? latents : x,
                      .offsets = s.offsets,
                      .whole_k = whole_k,
                      .fast_accumulation = options.fast_accumulation,
                      .permutation = s.permutation,
                      .slots = slots,
                      .row_scale = s.row_weights,
                      .bias = experts.gate_up_bias.as<float>()};
  MlpInput to_down{.rows = rounded ? fp8_h.values : h_16,
                   .offsets = s.offsets,
                   .whole_k = whole_k,
                   .fast_accumulation = options.fast_accumulation,
                   .early = true,  // gate_up lies in between
                   .tile_before = down_way(tokens, gathered).tile_before,
                   .bias = experts.down_bias.as<float>(),
                   .row_scales = rounded ? fp8_h.scales : Tensor{}};
  const bool may_repeat = routed_before || spec.route.hashed;
  const bool may_order =
      orders_in_products(spec, context.device(), tokens,
                         may_repeat ? IdsFrom::elsewhere : IdsFrom::router, options.rows) &&
      times == nullptr && !gathered &&
      mlp_takes_pairs(context, experts.gate_up, &spec.experts.activation, to_gate_up, h_16) &&
      mlp_takes_pairs(context, experts.down, nullptr, to_down, expert_rows);
  const bool in_products = may_order && (!beside || orders_beside(tokens, whole_k));
  if (in_products) {
    cuda_engine::FewChain chain{.ids = ids.as<std::int32_t>(),
                                .given = {.distinct = !may_repeat},
                                .pairs = static_cast<int>(pairs),
                                .tokens = static_cast<int>(tokens),
                                .beside = beside,
                                .from_logits = static_cast<bool>(in.logits)};
    if (routed_before) {
      if (in.expert_map) {
        chain.given.map = in.expert_map.as<std::int32_t>();
        chain.given.mapped = static_cast<int>(in.expert_map.shape[0]);
      }
      chain.given.valid = valid.as<std::int32_t>();
      chain.given.slots = slots;
    }
    to_gate_up.chain = to_down.chain = chain;
    to_gate_up.chain.rows_older = !routed_before && !latent;  // routing lies in between
    to_gate_up.early = latent;  // the ids, which the projection's launch has waited for
    to_gate_up.chain.inverse = s.inverse;
    if (scaled) to_gate_up.chain.weights = weights.as<float>();  // instead of row_scale
  }
  to_gate_up.chain.next = mlp_next(context, experts.down);
  bool added_up = false;  // by the experts' second product
  // Rows that are outputs go there at once. Where a token may have none, a pass clears its own.
  const cuda_engine::RowPlaces places{
      .rows = s.permutation, .weights = spec.route.weight_on_input ? nullptr : weights.as<float>()};
  MlpInput placed_down = to_down;
  placed_down.places = places;
  const bool placed = one_row_a_token(spec) && on_gpu() && !residual && y.dtype == rows_dtype() &&
                      mlp_takes_places(context, experts.down, placed_down, y);
  const bool all_routed = !routed_before && !valid && !spec.route.hashed;
  const bool at_once = !routed_before && !in_products && routes_and_orders_at_once(tokens);
  const auto* const valid_count = valid.as<const std::int32_t>();
  // All tokens as pairs of one group: rows behind the valid ones as well, which nobody reads.
  const auto as_pairs = [&](MlpInput& product) {
    product.chain.ids = static_cast<const std::int32_t*>(group_0.data());
    product.chain.pairs = product.chain.tokens = static_cast<int>(tokens);
    product.chain.beside = beside;
    product.valid = nullptr;
  };
  Tensor shared_rows, shared_logits;
  const auto shared_expert = [&](const Context& on, Workspace memory) {
    const std::int64_t intermediate = spec.shared.intermediate;
    const RowFormat kind = shared.gate_up.rows;
    const Rounding rounds = shared_rounding(tokens);
    const Tensor shared_h = at(s.shared_h, options.dtype, {tokens, intermediate});
    const Fp8Rows h =
        rounds == Rounding::between
            ? Fp8Rows::in_place(kind, s.shared_h, tokens, intermediate, context.device())
            : Fp8Rows(kind, s.shared_h, tokens, intermediate, context.device());
    MlpInput up{.rows = x,
                .valid = valid_count,
                .whole_k = whole_k,
                .fast_accumulation = options.fast_accumulation,
                .beside = beside,
                .bias = shared.gate_up_bias.as<float>()};
    const bool in_one_pass = beside && streams_shared(tokens, in_products, whole_k);
    if (in_one_pass) as_pairs(up);
    MlpInput down = up;
    down.rows = shared_h;
    down.bias = shared.down_bias.as<float>();
    if (beside) {
      down.tile_before =
          mlp_tile(context, shared.gate_up, tokens, {.whole_k = whole_k, .beside = true});
    }
    // All but the rows is older than the launch before.
    up.early = in_one_pass && shared_logits, down.early = in_one_pass;
    if (shared_logits) gate_logits(on, x, w.shared_gate, s.shared_logits, valid);
    if (rounds != Rounding::on_the_way) {
      const Fp8Rows u(kind, s.shared, tokens, spec.hidden, context.device());
      round_rows(on, kind, x, valid, u.values, u.scales);
      up.rows = u.values, up.row_scales = u.scales;
      down.rows = h.values, down.row_scales = h.scales;
    }
    if (rounds == Rounding::by_product) {
      mlp_gate_up(on, shared.gate_up, spec.shared.activation, up, h.values, memory, h.scales);
    } else {
      mlp_gate_up(on, shared.gate_up, spec.shared.activation, up, shared_h, memory);
    }
    if (rounds == Rounding::between) round_in_place(on, kind, shared_h, valid);
    mlp_gemm(on, shared.down, down, shared_rows, memory);
  };
  if (spec.shared.intermediate > 0) {
    shared_rows = at(s.shared, rows_dtype(), {tokens, spec.hidden});
    if (spec.shared.sigmoid_gate) shared_logits = at(s.shared_logits, f32, {tokens});
  }
  // Whatever is thrown between the two, a capture is not left with a fork in it.
  struct Fork {
    const SideStream* side = nullptr;
    ~Fork() {
      if constexpr (cuda_engine::built) {
        if (side != nullptr) side->abandon();
      }
    }
  } fork;
  if constexpr (cuda_engine::built) {
    if (beside) {
      side->fork();
      fork.side = &*side;
    }
  }
  if (!routed_before) {
    clock(
        at_once ? "route+order" : "route",
        [&] {
          RouteInputs routed{.hidden = x,
                             .router_weight = w.router,
                             .router_bias = w.router_bias,
                             .selection_bias = w.selection_bias,
                             .per_expert_scale = w.per_expert_scale,
                             .token_ids = cut(in.token_ids),
                             .hash_table = w.hash_table,
                             .valid_tokens = valid};
          if (in.logits) {
            routed.hidden = routed.router_weight = {};
            routed.logits = cut(in.logits);
          } else if (spec.router_norm.enabled) {
            routed.hidden = at(s.router_input, f32, {tokens, spec.hidden});
            rms_norm(context, spec.router_norm, x, w.router_norm, routed.hidden, valid);
          }
          const auto selected = [&](Tensor of) {
            of.shape[1] = spec.route.slots() - (fills_shared ? 1 : 0);
            return of;
          };
          const RouteOutputs chosen{.ids = selected(ids), .weights = selected(weights)};
          const RouteSpec rule = routing();
          if (at_once) {
            route_and_order(context, rule, routed, chosen, order_spec(spec), ordered, stage);
          } else {
            route(context, rule, routed, chosen, stage);
          }
          if (own_routing && (out.ids || out.weights)) {
            copy_columns(context, s.ids, s.weights, slots, cut(out.ids), cut(out.weights));
          }
        },
        [&] {
          const StageCost routing = route_cost(spec, w, tokens, x.dtype);
          return at_once ? routing + order_cost(spec, tokens) : routing;
        });
  }
  if (fills_shared) {  // behind routing, which waits for x
    fill_slot(context, {.slot = slots - 1,
                        .id = spec.route.experts,
                        .scale = shared_scale,
                        .ids = ids,
                        .weights = weights,
                        .x = x,
                        .gate = w.shared_gate,
                        .valid = valid});
  }
  if (!at_once && !in_products) {
    clock(
        "order",
        [&] {
          OrderSpec by_expert = order_spec(spec);
          if (in.expert_map) {
            by_expert.experts = static_cast<int>(in.expert_map.shape[0]);
            by_expert.expert_map = true;
          }
          order(context, by_expert,
                {.ids = ids,
                 .weights = s.row_weights != nullptr ? weights : Tensor{},
                 .expert_map = in.expert_map,
                 .valid_tokens = valid},
                ordered, stage);
        },
        [&] { return order_cost(spec, tokens); });
  }
  // Not before routing and order have read what the caller may have got wrong.
  clear_rest(out, tokens, given);

  Tensor u = x;
  if (spec.input_norm.enabled) {
    u = at(s.normed, f32, {tokens, spec.hidden});
    clock(
        "norm", [&] { rms_norm(context, spec.input_norm, x, w.input_norm, u, valid); },
        [&] {
          return StageCost{tokens * spec.hidden * 8, 0};
        });
  }
  // Enqueued behind routing, so that routing's few blocks are there first.
  if (beside) shared_expert(side->side(), side_stage);
  // What a norm reads is in f32.
  const Tensor wide_latents =
      s.wide_latents != nullptr ? at(s.wide_latents, f32, {tokens, inner}) : Tensor{};
  const auto norm_latents = [&](const char* name, const NormSpec& norm, const Tensor& weight) {
    clock(
        name, [&] { rms_norm(context, norm, wide_latents, weight, latents, valid); },
        [&] {
          return StageCost{tokens * inner * (4 + bits(rows_dtype()) / 8), 0};
        });
  };
  const auto project = [&](const PreparedWeights& by, const Tensor& rows, const Tensor& to) {
    MlpInput projected{.rows = rows, .valid = valid_count, .whole_k = whole_k};
    if (streams(by, tokens, whole_k)) {
      as_pairs(projected);
      projected.early = true;  // all but the rows is older than the launch before
    }
    mlp_gemm(context, by, projected, to, stage);
  };
  if (latent) {
    const bool normed = spec.latent_input_norm.enabled;
    clock(
        "latent_down", [&] { project(latent_down, u, normed ? wide_latents : latents); },
        [&] { return latent_cost(spec, options.dtype, rows_dtype(), tokens, u.dtype); });
    if (normed) norm_latents("latent_input_norm", spec.latent_input_norm, w.latent_input_norm);
    u = latents;
  }
  to_gate_up.rows = u;
  // Where the sum goes on (latent projection, bias, norm) it is wide until then.
  const bool more = s.wide != nullptr;
  const Tensor wide =
      more ? at(s.wide, wide_dtype(spec, rows_dtype()), {tokens, spec.hidden}) : Tensor{};
  // What the experts' rows become.
  const Tensor& summed = !latent                    ? (more ? wide : y)
                         : spec.latent_norm.enabled ? wide_latents
                                                    : latents;

  const auto gate_up_takes = [&] {
    const Load now = load();
    return gate_up_cost(spec, options.dtype, tokens, now.rows, now.hit, u.dtype) +
           packed_cost(experts.gate_up, now.hit);
  };
  const auto down_takes = [&] {
    const Load now = load();
    return down_cost(spec, options.dtype, rows_dtype(), now.rows, now.hit) +
           packed_cost(experts.down, now.hit);
  };
  clock(
      "gate_up",
      [&] {
        MlpInput rows = to_gate_up;
        if (gathered) {
          // Where the experts' rows will be written later.
          rows.rows = rounded ? fp8_u.values : at(s.rows, options.dtype, {pairs, inner});
          GatherInputs from{.hidden = u,
                            .permutation = at(s.permutation, i32, {pairs}),
                            .rows = count,
                            .inverse = inverse};
          if (scaled) from.weights = at(s.row_weights, f32, {pairs});
          if (rounded) rows.row_scales = fp8_u.scales;
          gather(context,
                 {.slots = slots,
                  .scale_by_weight = scaled,
                  .quantise = rounded ? quantise_of(options.rows) : Quantise::none},
                 from, rows.rows, rows.row_scales);
          rows.permutation = nullptr;
          rows.slots = 1;
          rows.row_scale = nullptr;
        }
        if (way == Rounding::by_product) {
          mlp_gate_up(context, experts.gate_up, spec.experts.activation, rows, fp8_h.values, stage,
                      fp8_h.scales);
        } else {
          mlp_gate_up(context, experts.gate_up, spec.experts.activation, rows, h_16, stage);
        }
      },
      gate_up_takes);
  clock(
      "down",
      [&] {
        if (way == Rounding::between) round_in_place(context, options.rows, h_16, count);
        if (placed) return mlp_gemm(context, experts.down, placed_down, y, stage);
        MlpInput rows = to_down;
        if (in_products && adds_up(spec, tokens) && expert_rows.dtype != f32) {
          const Tensor joins = more ? Tensor{} : residual;
          rows.chain.sum = {.out = summed.data,
                            .out_dtype = summed.dtype,
                            .residual = joins.data,
                            .residual_dtype = joins.dtype,
                            .weights = combine_spec(spec).weighted ? weights.as<float>() : nullptr,
                            .valid = valid.as<std::int32_t>(),
                            .heard = &added_up};
        }
        mlp_gemm(context, experts.down, rows, expert_rows, stage);
      },
      down_takes);
  if (spec.expert_norm.enabled) {
    clock(
        "expert_norm",
        [&] {
          const Tensor rows =
              on_gpu() ? expert_rows : expert_rows.rows(0, *count.as<std::int32_t>());
          rms_norm(context, spec.expert_norm, rows, w.expert_norm, rows,
                   on_gpu() ? count : Tensor{});
        },
        [&] {
          return StageCost{load().rows * inner * (bits(rows_dtype()) / 4), 0};
        });
  }

  if (spec.shared.intermediate > 0 && !beside) {
    clock(
        "shared", [&] { shared_expert(context, stage); },
        [&] {
          return shared_cost(spec, options.dtype, rows_dtype(), tokens, x.dtype) +
                 packed_cost(shared.gate_up, 1) + packed_cost(shared.down, 1);
        });
  }
  // The shared expert joins at the combine; where down has added up, at what it is added by.
  const auto join_shared_expert = [&]() -> const Context& {
    if constexpr (cuda_engine::built) {
      if (fork.side != nullptr) {
        side->join();
        fork.side = nullptr;
        return side->joined();
      }
    }
    return context;
  };
  clock(
      "combine",
      [&] {
        if (placed && !all_routed) clear_unrouted(context, inverse, valid, y);
        if (added_up || placed) return;
        const CombineSpec with = combine_spec(spec);
        CombineInputs parts{.rows = expert_rows, .inverse = inverse, .valid_tokens = valid};
        if (with.weighted || with.identity_from >= 0) parts.weights = weights;
        if (with.identity_from >= 0) {
          parts.ids = ids;
          parts.hidden = x;
        }
        if (!latent) parts.shared = shared_rows;
        if (with.shared_gate) parts.shared_gate = shared_logits;
        if (!more) parts.residual = residual;
        // The experts' products lie in between.
        combine(join_shared_expert(), with, parts, summed, true);
      },
      [&] { return combine_cost(spec, rows_dtype(), tokens, load().rows, y.dtype); });
  if (spec.latent_norm.enabled) norm_latents("latent_norm", spec.latent_norm, w.latent_norm);
  if (latent) {
    clock(
        "latent_up", [&] { project(latent_up, latents, wide); },
        [&] { return latent_cost(spec, options.dtype, rows_dtype(), tokens, wide.dtype); });
  }
  if (more) {
    clock(
        "finish",
        [&] {
          finish_rows(join_shared_expert(), {.wide = wide,
                                             .shared = latent ? shared_rows : Tensor{},
                                             .shared_logits = latent ? s.shared_logits : nullptr,
                                             .shared_scale = spec.shared.scale,
                                             .bias = w.output_bias,
                                             .norm = spec.output_norm,
                                             .norm_weight = w.output_norm,
                                             .residual = residual,
                                             .out = y,
                                             .valid = valid});
        },
        [&] {
          return StageCost{tokens * spec.hidden * (bits(wide.dtype) + bits(y.dtype)) / 8, 0};
        });
  }
  clock.finish();
}

}  // namespace shunt
