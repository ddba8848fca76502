// LayerSpec: what is legal, its JSON, and its words.
#include <fmt/core.h>

#include <cmath>
#include <string>
#include <tuple>

#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/runtime.hpp"
#include "format/rules.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/packed_product.hpp"
#include "layer/impl.hpp"
#include "layer/plan.hpp"
#include "shunt/layer.hpp"

namespace shunt {

namespace {

constexpr std::int64_t max_width = std::int64_t{1} << 24;

SpecWriter expert_json(const ExpertSpec& spec) {
  return SpecWriter()
      .add("experts", spec.experts)
      .add("hidden", spec.hidden)
      .add("intermediate", spec.intermediate)
      .add_json("activation", to_json(spec.activation))
      .add("gate_up_bias", spec.gate_up_bias)
      .add("down_bias", spec.down_bias);
}

SpecWriter shared_json(const SharedExpertSpec& spec) {
  return SpecWriter()
      .add("intermediate", spec.intermediate)
      .add_json("activation", to_json(spec.activation))
      .add("gate_up_bias", spec.gate_up_bias)
      .add("down_bias", spec.down_bias)
      .add("sigmoid_gate", spec.sigmoid_gate)
      .add("scale", spec.scale);
}

SpecWriter norm_json(const NormSpec& spec) {
  return SpecWriter()
      .add("enabled", spec.enabled)
      .add("epsilon", spec.epsilon)
      .add("weight", spec.weight)
      .add("multiplier", spec.multiplier)
      .add("weight_first", spec.weight_first);
}

// Where the caller routes, more ids a token than experts are legal, and nothing is said of a rule.
constexpr int max_outside_experts = 4096, max_outside_top_k = 64;

std::string route_json(const LayerSpec& spec) {
  if (!spec.routed_outside) return to_json(spec.route);
  return SpecWriter()
      .add("experts", spec.route.experts)
      .add("top_k", spec.route.top_k)
      .add("weight_on_input", spec.route.weight_on_input)
      .text();
}

RouteSpec read_outside(SpecReader reader) {
  RouteSpec spec;
  reader.require("experts");
  reader.require("top_k");
  reader.read("experts", spec.experts, 1, max_outside_experts);
  reader.read("top_k", spec.top_k, 1, max_outside_top_k);
  reader.read("weight_on_input", spec.weight_on_input);
  reader.finish();
  return spec;
}

ExpertSpec read_experts(SpecReader reader) {
  ExpertSpec spec;
  reader.read("experts", spec.experts, 1, 65536);
  reader.read("hidden", spec.hidden, 1, max_width);
  reader.read("intermediate", spec.intermediate, 1, max_width);
  if (const auto activation = reader.json("activation")) {
    spec.activation = activation_spec_from_json(*activation);
  }
  reader.read("gate_up_bias", spec.gate_up_bias);
  reader.read("down_bias", spec.down_bias);
  reader.finish();
  return spec;
}

SharedExpertSpec read_shared(SpecReader reader) {
  SharedExpertSpec spec;
  reader.read("intermediate", spec.intermediate, 0, max_width);
  if (const auto activation = reader.json("activation")) {
    spec.activation = activation_spec_from_json(*activation);
  }
  reader.read("gate_up_bias", spec.gate_up_bias);
  reader.read("down_bias", spec.down_bias);
  reader.read("sigmoid_gate", spec.sigmoid_gate);
  reader.read("scale", spec.scale);
  reader.finish();
  return spec;
}

NormSpec read_norm(SpecReader reader) {
  NormSpec spec;
  reader.read("enabled", spec.enabled);
  reader.read("epsilon", spec.epsilon);
  reader.read("weight", spec.weight);
  reader.read("multiplier", spec.multiplier);
  reader.read("weight_first", spec.weight_first);
  reader.finish();
  return spec;
}

Support check_outside(const LayerSpec& spec) {
  const RouteSpec& route = spec.route;
  for (const auto& [name, value, most] : {std::tuple("experts", route.experts, max_outside_experts),
                                          std::tuple("top_k", route.top_k, max_outside_top_k)}) {
    if (value >= 1 && value <= most) continue;
    return refuse("LayerSpec.route.{} is {}: must be 1 to {} where routed_outside", name, value,
                  most);
  }
  if (route != RouteSpec{.experts = route.experts,
                         .top_k = route.top_k,
                         .weight_on_input = route.weight_on_input}) {
    return refuse(
        "LayerSpec.route has a rule: must have experts, top_k and weight_on_input alone where "
        "routed_outside");
  }
  if (spec.router_norm.enabled) {
    return refuse(
        "LayerSpec.router_norm.enabled is true: must be false where routed_outside, without a "
        "router");
  }
  return {};
}

Support check_norm(const char* name, const NormSpec& norm) {
  if (!norm.enabled) {
    if (norm == NormSpec{.epsilon = norm.epsilon}) return {};
    return refuse("LayerSpec.{}.enabled is false: must be true with a {}", name,
                  norm.weight || norm.weight_first ? "weight" : "multiplier");
  }
  if (!(norm.epsilon >= 0) || !std::isfinite(norm.epsilon)) {
    return refuse("LayerSpec.{}.epsilon is {}: must be finite, 0 or above", name, norm.epsilon);
  }
  if (!std::isfinite(norm.multiplier)) {
    return refuse("LayerSpec.{}.multiplier is {}: must be finite", name, norm.multiplier);
  }
  if (norm.weight_first && !norm.weight) {
    return refuse("LayerSpec.{}.weight_first is true: must be false without a weight", name);
  }
  return {};
}

std::string describe_routing(const LayerSpec& spec) {
  if (!spec.routed_outside) return describe(spec.route);
  return fmt::format("{} ids a token from outside{}", spec.route.top_k,
                     spec.route.weight_on_input ? ", weights on the input" : "");
}

}  // namespace

std::string to_json(const LayerSpec& spec) {
  return SpecWriter()
      .add("hidden", spec.hidden)
      .add_json("route", route_json(spec))
      .add("experts", expert_json(spec.experts))
      .add("shared", shared_json(spec.shared))
      .add("routed_outside", spec.routed_outside)
      .add("zero_experts", spec.zero_experts)
      .add("latent", spec.latent)
      .add("output_bias", spec.output_bias)
      .add("router_norm", norm_json(spec.router_norm))
      .add("input_norm", norm_json(spec.input_norm))
      .add("output_norm", norm_json(spec.output_norm))
      .add("latent_norm", norm_json(spec.latent_norm))
      .add("latent_input_norm", norm_json(spec.latent_input_norm))
      .add("expert_norm", norm_json(spec.expert_norm))
      .text();
}

LayerSpec layer_spec_from_json(const std::string& text) {
  SpecReader reader("LayerSpec", text);
  LayerSpec spec;
  for (const char* key : {"hidden", "route", "experts"}) reader.require(key);
  reader.read("hidden", spec.hidden, 1, max_width);
  reader.read("routed_outside", spec.routed_outside);
  if (spec.routed_outside) {
    if (const auto route = reader.object("route")) spec.route = read_outside(*route);
  } else if (const auto route = reader.json("route")) {
    spec.route = route_spec_from_json(*route);
  }
  if (const auto experts = reader.object("experts")) spec.experts = read_experts(*experts);
  if (const auto shared = reader.object("shared")) spec.shared = read_shared(*shared);
  reader.read("zero_experts", spec.zero_experts, 0, 4096);
  reader.read("latent", spec.latent, 0, max_width);
  reader.read("output_bias", spec.output_bias);
  if (const auto norm = reader.object("router_norm")) spec.router_norm = read_norm(*norm);
  if (const auto norm = reader.object("input_norm")) spec.input_norm = read_norm(*norm);
  if (const auto norm = reader.object("output_norm")) spec.output_norm = read_norm(*norm);
  if (const auto norm = reader.object("latent_norm")) spec.latent_norm = read_norm(*norm);
  if (const auto norm = reader.object("latent_input_norm")) {
    spec.latent_input_norm = read_norm(*norm);
  }
  if (const auto norm = reader.object("expert_norm")) spec.expert_norm = read_norm(*norm);
  reader.finish();
  return spec;
}

std::string describe(const LayerSpec& spec) {
  std::string text = describe_routing(spec);
  text += fmt::format("; experts {} x ({} -> {} -> {}), {}", spec.experts.experts,
                      spec.experts.hidden, spec.experts.intermediate, spec.experts.hidden,
                      describe(spec.experts.activation));
  if (spec.experts.gate_up_bias || spec.experts.down_bias) text += ", with biases";
  if (spec.shared.intermediate > 0) {
    text += fmt::format("; shared expert {}", spec.shared.intermediate);
    if (spec.shared.activation != spec.experts.activation) {
      text += fmt::format(", {}", describe(spec.shared.activation));
    }
    if (spec.shared.sigmoid_gate) text += ", sigmoid-gated";
    if (spec.shared.scale != 1) text += fmt::format(", times {:g}", spec.shared.scale);
  }
  if (spec.zero_experts > 0) text += fmt::format("; {} zero-compute experts", spec.zero_experts);
  const auto norm = [&](const NormSpec& of, const char* comma, const char* where) {
    if (!of.enabled) return;
    text +=
        fmt::format("{}RMSNorm {}{}", comma, where, of.weight_first ? ", its weight first" : "");
  };
  if (spec.latent > 0) text += fmt::format("; latent width {}", spec.latent);
  norm(spec.latent_input_norm, ", ", "of the input");
  norm(spec.latent_norm, ", ", "of the sum");
  norm(spec.expert_norm, "; ", "of every expert's output");
  if (spec.output_bias) text += "; output bias";
  norm(spec.router_norm, "; ", "before the router");
  norm(spec.input_norm, "; ", "before the experts");
  norm(spec.output_norm, "; ", "of the output");
  return text;
}

Support legal(const LayerOptions& options) {
  if (options.dtype != DType::f32 && options.dtype != DType::bf16 && options.dtype != DType::f16) {
    return refuse("LayerOptions.dtype is {}: must be f32, bf16 or f16", to_string(options.dtype));
  }
  if (!is_known(options.format.format)) {
    return refuse("LayerOptions.format is {}: must be one of shunt::Format",
                  to_string(options.format));
  }
  if (options.format != options.format.of_matrix()) {
    return refuse("LayerOptions.format is {}: order and zeros are the packed weights' own",
                  to_string(options.format));
  }
  const int group = resolved(options.format).group;
  const bool grouped = options.format.format == Format::int4;
  if (grouped ? group < 16 || group % 16 != 0 : group != 0) {
    return refuse("LayerOptions.format has the group {}: must be {}", group,
                  grouped ? "a multiple of 16" : "0, only int4 has one");
  }
  if (options.rows < RowFormat::as_dtype || options.rows > RowFormat::nvfp4) {
    return refuse("LayerOptions.rows is {}: must be 0 (as_dtype) to 3 (nvfp4)",
                  to_string(options.rows));
  }
  return {};
}

bool takes_rows(Format format, RowFormat rows) {
  switch (rows) {
    case RowFormat::as_dtype:
      return true;
    case RowFormat::fp8_block:
      return format == Format::fp8_block;
    case RowFormat::fp8_token:
      return format == Format::fp8_channel || format == Format::fp8_tensor;
    case RowFormat::nvfp4:
      return format == Format::nvfp4 || format == Format::sparse_nvfp4;
  }
  return false;
}

Support supports(const LayerSpec& spec, const LayerOptions& options, Device device) {
  if (const Support here = cuda_engine::supported_device("layer", device); !here) return here;
  if (Support each = legal(options); !each) return each;
  const bool packed = options.format != FormatSpec{};
  if (packed && options.in_place) {
    return refuse("LayerOptions.in_place: must be false with format {}", to_string(options.format));
  }
  if (packed && options.rows == RowFormat::as_dtype) {
    if (device.type == DeviceType::cuda) {
      if (options.dtype == DType::f32) {
        return refuse("LayerOptions.dtype is f32 and format {}: must be bf16 or f16 on a GPU",
                      to_string(options.format));
      }
      if (spec.experts.experts > 1024) {
        return refuse("LayerSpec.experts.experts is {}: must be 1 to 1024 in {}",
                      spec.experts.experts, to_string(options.format));
      }
    }
  } else if (packed || options.rows != RowFormat::as_dtype) {
    const Format format = options.format.format;
    if (!takes_rows(format, options.rows) || device.type != DeviceType::cuda) {
      return refuse(
          "LayerOptions.rows is {} with format {}: must be as_dtype, or on a GPU fp8_block with "
          "fp8_block, fp8_token with fp8_channel or fp8_tensor, nvfp4 with nvfp4 or sparse_nvfp4",
          to_string(options.rows), to_string(options.format));
    }
    if (options.dtype == DType::f32) {
      return refuse("LayerOptions.dtype is f32, with rows {} of format {}: must be bf16 or f16",
                    to_string(options.rows), to_string(options.format));
    }
    if (options.rows == RowFormat::fp8_token &&
        !Fp8Rows::fits_in_place(options.rows, spec.experts.intermediate)) {
      return refuse(
          "LayerSpec.experts.intermediate is {}: must be even and at least 10 with "
          "rows fp8_token",
          spec.experts.intermediate);
    }
    if (spec.experts.experts > 1024) {
      return refuse("LayerSpec.experts.experts is {}: must be 1 to 1024 with rows in fp8 or nvfp4",
                    spec.experts.experts);
    }
  }
  if (options.fast_accumulation) {
    const Support fast =
        cuda_engine::fast_accumulation_fits("LayerOptions.", options.rows, options.batch_invariant);
    if (!fast) return fast;
  }
  if constexpr (cuda_engine::built) {
    if (packed && device.type == DeviceType::cuda) {
      Support kernels = cuda_engine::packed_support(device, options.format, options.rows);
      if (!kernels) return kernels;
    }
  }
  Support route = spec.routed_outside ? check_outside(spec) : supports(spec.route, device);
  if (!route) return route;
  const auto width = [](const char* name, std::int64_t value, std::int64_t low) -> Support {
    if (value >= low && value <= max_width) return {};
    return refuse("LayerSpec.{} is {}: must be {} to {}", name, value, low, max_width);
  };
  const ExpertSpec& experts = spec.experts;
  for (const Support& support :
       {width("hidden", spec.hidden, 1), width("latent", spec.latent, 0),
        width("experts.hidden", experts.hidden, 1),
        width("experts.intermediate", experts.intermediate, 1),
        width("shared.intermediate", spec.shared.intermediate, 0),
        supports(experts.activation, device), supports(spec.shared.activation, device),
        check_norm("router_norm", spec.router_norm), check_norm("input_norm", spec.input_norm),
        check_norm("output_norm", spec.output_norm), check_norm("latent_norm", spec.latent_norm),
        check_norm("latent_input_norm", spec.latent_input_norm),
        check_norm("expert_norm", spec.expert_norm)}) {
    if (!support) return support;
  }
  const std::int64_t inner = spec.latent > 0 ? spec.latent : spec.hidden;
  if (experts.hidden != inner) {
    return refuse("LayerSpec.experts.hidden is {}: must be {}, the {} width", experts.hidden, inner,
                  spec.latent > 0 ? "latent" : "hidden");
  }
  for (const auto& [name, norm] : {std::pair("latent_norm", spec.latent_norm),
                                   std::pair("latent_input_norm", spec.latent_input_norm)}) {
    if (norm.enabled && spec.latent == 0) {
      return refuse("LayerSpec.{}.enabled is true: must be false without a latent width", name);
    }
  }
  if (spec.zero_experts < 0 || spec.zero_experts >= spec.route.experts) {
    return refuse("LayerSpec.zero_experts is {}: must be 0 to {}, below route.experts",
                  spec.zero_experts, spec.route.experts - 1);
  }
  if (spec.zero_experts > 0 &&
      (spec.latent > 0 || spec.route.shared.count > 0 || spec.input_norm.enabled ||
       spec.expert_norm.enabled || spec.route.weight_on_input)) {
    return refuse(
        "LayerSpec.zero_experts is {}: must be 0 with a latent width, shared slots, an input norm, "
        "a norm of the experts' outputs or the weight on the input",
        spec.zero_experts);
  }
  const int computed = spec.route.experts - spec.zero_experts + spec.route.shared.count;
  if (experts.experts != computed) {
    return refuse(
        "LayerSpec.experts.experts is {}: must be {} = route.experts - zero_experts + "
        "route.shared.count",
        experts.experts, computed);
  }
  if (spec.route.shared.weight == SharedWeight::sigmoid_gate && spec.route.shared.count > 0) {
    return refuse(
        "LayerSpec.route.shared.weight is sigmoid_gate: in a layer that is "
        "LayerSpec.shared.sigmoid_gate");
  }
  if (!spec.route.scale_in_weights) {
    return refuse("LayerSpec.route.scale_in_weights is false: a layer applies the scale itself");
  }
  const SharedExpertSpec& shared = spec.shared;
  if (shared.intermediate == 0 &&
      (shared.sigmoid_gate || shared.gate_up_bias || shared.down_bias || shared.scale != 1)) {
    return refuse("LayerSpec.shared.{}: must be {} where intermediate is 0, no shared expert",
                  shared.sigmoid_gate   ? "sigmoid_gate is true"
                  : shared.gate_up_bias ? "gate_up_bias is true"
                  : shared.down_bias    ? "down_bias is true"
                                        : fmt::format("scale is {}", shared.scale),
                  shared.sigmoid_gate || shared.gate_up_bias || shared.down_bias ? "false" : "1");
  }
  if (!std::isfinite(spec.shared.scale)) {
    return refuse("LayerSpec.shared.scale is {}: must be finite", spec.shared.scale);
  }
  if (const Support order = supports(order_spec(spec), device); !order) return order;
  return supports(combine_spec(spec), device);
}

}  // namespace shunt
