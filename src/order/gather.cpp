// gather(): checks of everything it is given, then the engine.
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/json.hpp"
#include "core/quantise.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

std::vector<std::string_view> quantise_names() { return {"none", "row", "block_128"}; }

Support legal(const GatherSpec& spec) {
  if (spec.slots < 1 || spec.slots > 128) {
    return refuse("slots is {}: must be 1 to 128", spec.slots);
  }
  return shunt::legal(spec.rounding());
}

}  // namespace

Support supports(const GatherSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("gather", device);
}

std::string to_json(const GatherSpec& spec) {
  return SpecWriter()
      .add("slots", spec.slots)
      .add("scale_by_weight", spec.scale_by_weight)
      .add("quantise", quantise_names().at(static_cast<std::size_t>(spec.quantise)))
      .add("scale_upper_bound", shortest(spec.scale_upper_bound))
      .add("power_of_two_scales", spec.power_of_two_scales)
      .text();
}

GatherSpec gather_spec_from_json(const std::string& json) {
  SpecReader reader("GatherSpec", json);
  GatherSpec spec;
  reader.require("slots");
  reader.read("slots", spec.slots, 1, 128);
  reader.read("scale_by_weight", spec.scale_by_weight);
  reader.read("quantise", spec.quantise, quantise_names());
  reader.read("scale_upper_bound", spec.scale_upper_bound);
  reader.read("power_of_two_scales", spec.power_of_two_scales);
  reader.finish();
  require_legal(legal(spec), "GatherSpec");
  return spec;
}

void gather(const Context& context, const GatherSpec& spec, const GatherInputs& in, Tensor rows,
            Tensor scales) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require_legal(legal(spec), "gather");
  require(supports(spec, device), "gather");
  check_tensor("gather: hidden", in.hidden,
               {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true}, device);
  const std::int64_t tokens = in.hidden.shape[0];
  const std::int64_t width = in.hidden.shape[1];
  const std::int64_t pairs = checked_product("gather: pairs", tokens, spec.slots);
  check_tensor("gather: permutation", in.permutation,
               {.dtypes = {i32}, .shape = {pairs}, .dense = true}, device);
  check_tensor("gather: rows (count)", in.rows, {.dtypes = {i32}, .shape = {1}}, device);
  const bool quantises = spec.quantise != Quantise::none;
  static constexpr std::initializer_list<DType> quantised_dtypes = {DType::f8_e4m3};
  check_tensor("gather: rows (output)", rows,
               {.dtypes = quantises ? quantised_dtypes : float_dtypes,
                .shape = {pairs, width},
                .rows_dense = true,
                .written = true},
               device);
  if (check_given("gather: scales", scales, quantises, "GatherSpec.quantise")) {
    check_scales("gather: scales", scales, spec.quantise, pairs, width, device);
  }
  if (check_given("gather: weights", in.weights, spec.scale_by_weight,
                  "GatherSpec.scale_by_weight")) {
    check_tensor("gather: weights", in.weights, {.dtypes = {f32}, .shape = {pairs}, .dense = true},
                 device);
  }
  if (in.inverse) {
    check_tensor("gather: inverse", in.inverse,
                 {.dtypes = {i32}, .shape = {tokens, spec.slots}, .dense = true}, device);
  }
  check_all_apart("gather", {{"rows (output)", rows}, {"scales", scales}},
                  {{"hidden", in.hidden},
                   {"permutation", in.permutation},
                   {"rows (count)", in.rows},
                   {"weights", in.weights},
                   {"inverse", in.inverse}});
  if (pairs > std::numeric_limits<std::int32_t>::max()) {
    fail(Status::invalid_argument, "gather: hidden is {}: more than {} pairs", in.hidden.describe(),
         std::numeric_limits<std::int32_t>::max());
  }
  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) return gather_cuda(context, spec, in, rows, scales);
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
  gather_cpu(context, spec, in, rows, scales, count);
}

}  // namespace shunt
