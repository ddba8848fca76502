// A layer and a call of it, every property drawn at random: any mixture that spec, options and
// inputs can say, of sizes that take little time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "drawn.hpp"
#include "route/drawn_rule.hpp"
#include "shunt/layer.hpp"

namespace shunt::testing {

enum class Routed { by_the_layer, from_logits, by_the_caller };

class DrawnLayer {
 public:
  LayerSpec spec;
  LayerOptions options;
  bool stored_packed = false;           // the weights are packed ones, as a checkpoint's are
  std::int64_t tokens = 0, valid = -1;  // -1: all, and no count is given
  DType hidden_dtype = DType::f32, output_dtype = DType::f32, logits_dtype = DType::f32;
  bool residual = false;
  std::int64_t gap = 0;  // numbers between rows of hidden states and outputs
  Routed routed = Routed::by_the_layer;
  int mapped = 0;  // ids of the expert map, 0: none
  int threads = 1;
  bool dependent_launch = false;

  // The same seed gives the same one.
  explicit DrawnLayer(unsigned seed) : draw_(seed) {
    draw_route();
    draw_experts();
    draw_options();
    draw_call();
  }

  std::string text() const {
    return to_json(spec) + ", " + to_string(options.dtype) + ", " + to_string(options.format) +
           (stored_packed ? " stored" : "") + ", rows " + to_string(options.rows) +
           (options.batch_invariant ? ", batch-invariant" : "") + ", " + std::to_string(tokens) +
           " tokens of " + to_string(hidden_dtype) + ", valid " + std::to_string(valid) +
           ", routed " + std::to_string(static_cast<int>(routed)) + ", map of " +
           std::to_string(mapped) + ", output " + to_string(output_dtype) +
           (residual ? ", residual" : "") + ", gap " + std::to_string(gap) + ", threads " +
           std::to_string(threads) + (dependent_launch ? ", dependent launches" : "");
  }

 private:
  void draw_route() {
    spec.route = test::drawn_rule(
        draw_, static_cast<int>(draw_.any<std::int64_t>(
                   {draw_.between(1, 8), draw_.between(2, 40), draw_.between(9, 160)})));
    // f16 would saturate behind large ones.
    RouteSpec& r = spec.route;
    if (r.weight_on_input && r.score == Score::none) r.score = Score::softmax;
    r.batch_invariant = false;  // the options'
  }

  ActivationSpec activation() {
    ActivationSpec a;
    a.kind = draw_.any({Activation::silu, Activation::silu, Activation::silu, Activation::gelu,
                        Activation::gelu_tanh, Activation::relu2, Activation::relu,
                        Activation::identity, Activation::situ});
    a.gated = !draw_.one_in(4);
    if (a.kind == Activation::silu && draw_.one_in(4)) a.alpha = 1.702f;
    if (draw_.one_in(4)) {
      a.limit = draw_.any({0.5f, 1.0f, 7.0f});
      a.limit_on = draw_.any({LimitOn::input, LimitOn::output});
    }
    if (a.gated && draw_.one_in(5)) a.up_offset = 1;
    if (a.kind == Activation::situ) {
      a.beta = draw_.any({0.5f, 1.0f, 4.0f});
      if (a.gated) a.linear_beta = draw_.any({0.0f, 1.5f, 25.0f});
    }
    return a;
  }
  NormSpec norm(bool enabled) {
    if (!enabled) return {};
    NormSpec n = {
        .enabled = true, .weight = draw_.one_in(2), .multiplier = draw_.one_in(2) ? 1.0f : 0.25f};
    n.weight_first = n.weight && draw_.one_in(3);
    return n;
  }

  void draw_experts() {
    const bool plain = draw_.one_in(2);  // but for experts, as most models are
    if (!plain && !spec.route.weight_on_input && spec.route.shared.count == 0 && draw_.one_in(4)) {
      spec.zero_experts = static_cast<int>(draw_.between(0, spec.route.experts - 1));
    }
    ExpertSpec& e = spec.experts;
    e.experts = spec.route.experts - spec.zero_experts + spec.route.shared.count;
    // Weights of all experts.
    const double all = 3e6;
    const std::int64_t most =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(all / 3 / e.experts / 64), 16, 700);
    spec.hidden = draw_.width(most);
    e.intermediate = draw_.width(std::clamp<std::int64_t>(
        static_cast<std::int64_t>(all / 3 / static_cast<double>(e.experts) /
                                  static_cast<double>(spec.hidden)),
        8, 700));
    e.hidden = spec.hidden;
    e.activation = activation();
    e.gate_up_bias = draw_.one_in(4);
    e.down_bias = draw_.one_in(4);
    if (!plain && draw_.one_in(2)) {
      spec.shared = {.intermediate = draw_.width(300),
                     .activation = draw_.one_in(2) ? e.activation : activation(),
                     .gate_up_bias = draw_.one_in(4),
                     .down_bias = draw_.one_in(4),
                     .sigmoid_gate = draw_.one_in(2),
                     .scale = draw_.any({1.0f, 0.5f})};
    }
    if (!plain && spec.zero_experts == 0 && draw_.one_in(4)) {
      spec.latent = e.hidden = draw_.width(std::min<std::int64_t>(most, 200));
    }
    spec.output_bias = !plain && draw_.one_in(4);
    spec.router_norm = norm(!plain && draw_.one_in(4));
    spec.input_norm = norm(!plain && spec.zero_experts == 0 && draw_.one_in(4));
    spec.output_norm = norm(!plain && draw_.one_in(4));
    spec.latent_norm = norm(spec.latent > 0 && draw_.one_in(2));
    spec.latent_input_norm = norm(spec.latent > 0 && draw_.one_in(3));
    spec.expert_norm = norm(!plain && spec.zero_experts == 0 && draw_.one_in(5));
  }

  void draw_options() {
    options.dtype = draw_.any({DType::f32, DType::bf16, DType::bf16, DType::f16});
    options.batch_invariant = draw_.one_in(5);
    if (!draw_.one_in(2)) return;
    options.format =
        draw_.format(3 * spec.experts.experts * spec.experts.hidden * spec.experts.intermediate);
    if (options.dtype == DType::f32 && !draw_.one_in(4)) options.dtype = DType::bf16;
    if (draw_.one_in(4)) {  // a GPU's
      options.rows = draw_.any({RowFormat::fp8_block, RowFormat::fp8_token});
      options.format = options.rows == RowFormat::fp8_block
                           ? FormatSpec{Format::fp8_block}
                           : FormatSpec{draw_.any({Format::fp8_channel, Format::fp8_tensor})};
    }
    stored_packed = options.format != FormatSpec{} && draw_.one_in(2);
  }

  void draw_call() {
    tokens =
        draw_.any<std::int64_t>({1, draw_.between(1, 8), draw_.between(1, 20), draw_.between(9, 70),
                                 draw_.between(60, 300), draw_.between(200, 900)});
    // What a call multiplies, routing too.
    const auto budget = [&](std::int64_t each, double most) {
      tokens = std::clamp<std::int64_t>(static_cast<std::int64_t>(most / static_cast<double>(each)),
                                        1, tokens);
    };
    budget(spec.route.slots() * 3 * spec.experts.hidden * spec.experts.intermediate, 3e8);
    budget(spec.route.columns() * spec.hidden, 1e7);
    if (draw_.one_in(5)) valid = draw_.between(0, tokens);
    hidden_dtype = draw_.one_in(2) ? DType::bf16 : draw_.dtype();
    output_dtype = draw_.one_in(2) ? DType::bf16 : draw_.dtype();
    logits_dtype = draw_.dtype();
    residual = draw_.one_in(5);
    if (draw_.one_in(4)) gap = draw_.any<std::int64_t>({1, 3, 8, 16});
    routed = draw_.any(
        {Routed::by_the_layer, Routed::by_the_layer, Routed::from_logits, Routed::by_the_caller});
    if (routed == Routed::by_the_caller && spec.zero_experts == 0 && draw_.one_in(3)) {
      const int elsewhere = static_cast<int>(draw_.between(0, 9));
      const bool whole = spec.latent_norm.enabled || spec.output_norm.enabled;
      mapped = spec.experts.experts + (whole ? 0 : elsewhere);
    }
    threads = static_cast<int>(draw_.between(1, 3));
    dependent_launch = draw_.one_in(2);
  }

  test::Draw draw_;
};

}  // namespace shunt::testing
