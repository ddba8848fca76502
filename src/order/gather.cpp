// gather(): checks of everything it is given, then the engine.
#include <limits>

#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/runtime.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

Support legal(const GatherSpec& spec) {
  if (spec.slots < 1 || spec.slots > 128) {
    return refuse("slots is {}: must be 1 to 128", spec.slots);
  }
  return {};
}

}  // namespace

Support supports(const GatherSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("gather", device);
}

std::string to_json(const GatherSpec& spec) {
  return nlohmann::ordered_json{{"slots", spec.slots}, {"scale_by_weight", spec.scale_by_weight}}
      .dump();
}

GatherSpec gather_spec_from_json(const std::string& json) {
  const nlohmann::json parsed = parse_json("GatherSpec", json);
  SpecReader reader("GatherSpec", parsed);
  GatherSpec spec;
  reader.require("slots");
  reader.read("slots", spec.slots, 1, 128);
  reader.read("scale_by_weight", spec.scale_by_weight);
  reader.finish();
  return spec;
}

void gather(const Context& context, const GatherSpec& spec, const GatherInputs& in, Tensor rows) {
  const Device device = context.device();
  if (const Support support = legal(spec); !support) {
    fail(Status::invalid_argument, "gather: {}", support.reason);
  }
  require(supports(spec, device), "gather");
  check_tensor("gather: hidden", in.hidden,
               {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true}, device);
  const std::int64_t tokens = in.hidden.shape[0];
  const std::int64_t width = in.hidden.shape[1];
  const std::int64_t pairs = checked_product("gather: pairs", tokens, spec.slots);
  check_tensor("gather: permutation", in.permutation,
               {.dtypes = {i32}, .shape = {pairs}, .dense = true}, device);
  check_tensor("gather: rows (count)", in.rows, {.dtypes = {i32}, .shape = {1}}, device);
  check_tensor("gather: rows (output)", rows,
               {.dtypes = float_dtypes, .shape = {pairs, width}, .rows_dense = true}, device);
  if (check_given("gather: weights", in.weights, spec.scale_by_weight,
                  "GatherSpec.scale_by_weight")) {
    check_tensor("gather: weights", in.weights, {.dtypes = {f32}, .shape = {pairs}, .dense = true},
                 device);
  }
  if (pairs > 1 && rows.strides[0] < width) {
    fail(Status::invalid_argument,
         "gather: rows (output) has a row stride of {}: must be {} or more", rows.strides[0],
         width);
  }
  if (pairs > std::numeric_limits<std::int32_t>::max()) {
    fail(Status::invalid_argument, "gather: hidden is {}: more than {} pairs", in.hidden.describe(),
         std::numeric_limits<std::int32_t>::max());
  }
  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) return gather_cuda(context, spec, in, rows);
  }
  const std::int32_t count = *in.rows.as<std::int32_t>();
  if (count < 0 || count > pairs) {
    fail(Status::invalid_argument, "gather: rows (count) is {}: must be 0 to {}", count, pairs);
  }
  const std::int32_t* permutation = in.permutation.as<std::int32_t>();
  for (std::int32_t r = 0; r < count; ++r) {
    if (permutation[r] < 0 || permutation[r] >= pairs) {
      fail(Status::invalid_argument, "gather: permutation[{}] is {}: must be 0 to {}", r,
           permutation[r], pairs - 1);
    }
  }
  gather_cpu(context, spec, in, rows, count);
}

}  // namespace shunt
