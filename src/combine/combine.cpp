// combine(): its spec, checks of everything it is given, then the engine.
#include "shunt/combine.hpp"

#include <cmath>
#include <limits>
#include <string>

#include "combine/engine.hpp"
#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"

namespace shunt {

namespace {

constexpr int max_slots = 128;
constexpr std::int64_t max_id = std::numeric_limits<std::int32_t>::max();

Support legal(const CombineSpec& spec) {
  if (spec.slots < 1 || spec.slots > max_slots) {
    return refuse("slots is {}: must be 1 to {}", spec.slots, max_slots);
  }
  if (spec.identity_from < -1) {
    return refuse("identity_from is {}: must be an expert id, or -1 for none", spec.identity_from);
  }
  if (spec.identity_until != 0 &&
      (spec.identity_from < 0 || spec.identity_until <= spec.identity_from)) {
    return refuse("identity_until is {}: must be 0, or above an identity_from, here {}",
                  spec.identity_until, spec.identity_from);
  }
  if (!std::isfinite(spec.shared_scale)) {
    return refuse("shared_scale is {}: must be finite", spec.shared_scale);
  }
  return {};
}

}  // namespace

Support supports(const CombineSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("combine", device);
}

std::string to_json(const CombineSpec& spec) {
  return SpecWriter()
      .add("slots", spec.slots)
      .add("weighted", spec.weighted)
      .add("identity_from", spec.identity_from)
      .add("identity_until", spec.identity_until)
      .add("shared_gate", spec.shared_gate)
      .add("shared_scale", shortest(spec.shared_scale))
      .text();
}

CombineSpec combine_spec_from_json(const std::string& json) {
  SpecReader reader("CombineSpec", json);
  CombineSpec spec;
  reader.require("slots");
  reader.read("slots", spec.slots, 1, max_slots);
  reader.read("weighted", spec.weighted);
  reader.read("identity_from", spec.identity_from, -1, max_id);
  reader.read("identity_until", spec.identity_until, 0, max_id);
  reader.read("shared_gate", spec.shared_gate);
  reader.read("shared_scale", spec.shared_scale);
  reader.finish();
  require_legal(legal(spec), "CombineSpec");
  return spec;
}

void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out) {
  combine(context, spec, in, out, false);
}

void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out,
             bool early) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require_legal(legal(spec), "combine");
  require(supports(spec, device), "combine");
  check_tensor(
      "combine: out", out,
      {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true, .written = true},
      device);
  const std::int64_t tokens = out.shape[0];
  const std::int64_t width = out.shape[1];
  const auto per_token = [&](const char* name, const Tensor& tensor) {
    check_tensor(name, tensor,
                 {.dtypes = float_dtypes, .shape = {tokens, width}, .rows_dense = true}, device);
  };
  const auto per_pair = [&](const char* name, const Tensor& tensor, DType dtype) {
    check_tensor(name, tensor, {.dtypes = {dtype}, .shape = {tokens, spec.slots}, .dense = true},
                 device);
  };

  check_tensor("combine: rows", in.rows,
               {.dtypes = float_dtypes, .shape = {any_size, width}, .rows_dense = true}, device);
  per_pair("combine: inverse", in.inverse, i32);
  const bool identity = spec.identity_from >= 0;
  if (check_given("combine: weights", in.weights, spec.weighted || identity,
                  "CombineSpec.weighted (or identity_from)")) {
    per_pair("combine: weights", in.weights, f32);
  }
  if (check_given("combine: ids", in.ids, identity, "CombineSpec.identity_from")) {
    per_pair("combine: ids", in.ids, i32);
  }
  if (check_given("combine: hidden", in.hidden, identity, "CombineSpec.identity_from")) {
    per_token("combine: hidden", in.hidden);
  }
  if (check_given("combine: shared_gate", in.shared_gate, spec.shared_gate,
                  "CombineSpec.shared_gate")) {
    check_tensor("combine: shared_gate", in.shared_gate,
                 {.dtypes = {f32}, .shape = {tokens}, .dense = true}, device);
  }
  if (in.shared) {
    per_token("combine: shared", in.shared);
  } else if (spec.shared_gate || spec.shared_scale != 1) {
    fail(Status::invalid_argument, "combine: shared is missing: CombineSpec.{} asks for it",
         spec.shared_gate ? "shared_gate" : "shared_scale");
  }
  if (in.residual) per_token("combine: residual", in.residual);
  if (in.valid_tokens) {
    check_tensor("combine: valid_tokens", in.valid_tokens, {.dtypes = {i32}, .shape = {1}}, device);
  }
  check_all_apart("combine", {{"out", out}},
                  {{"rows", in.rows},
                   {"inverse", in.inverse},
                   {"weights", in.weights},
                   {"ids", in.ids},
                   {"shared_gate", in.shared_gate},
                   {"valid_tokens", in.valid_tokens}});
  check_same_or_apart("combine: out", out, "hidden", in.hidden);
  check_same_or_apart("combine: out", out, "shared", in.shared);
  check_same_or_apart("combine: out", out, "residual", in.residual);

  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) return combine_cuda(context, spec, in, out, early);
  }
  // Nothing is read through an index that was not checked.
  const std::int32_t* inverse = in.inverse.as<std::int32_t>();
  const std::int64_t rows = in.rows.shape[0];
  for (std::int64_t pair = 0; pair < tokens * spec.slots; ++pair) {
    if (inverse[pair] >= rows || inverse[pair] < -1) {
      fail(Status::invalid_argument, "combine: inverse[{}, {}] is {}: must be -1 to {}",
           pair / spec.slots, pair % spec.slots, inverse[pair], rows - 1);
    }
  }
  combine_cpu(context, spec, in, out);
}

}  // namespace shunt
