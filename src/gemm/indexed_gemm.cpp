// The indexed product: pairs are put in the order of their matrices, multiplied there, and brought
// back.
#include "shunt/indexed_gemm.hpp"

#include <algorithm>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/workspace.hpp"
#include "cuda/current.hpp"
#include "gemm/check_prepared.hpp"
#include "gemm/fused.hpp"
#include "shunt/combine.hpp"
#include "shunt/order.hpp"

namespace shunt {
namespace {

OrderSpec order_of(const GroupedGemmSpec& spec, int slots) {
  return {.experts = spec.groups, .slots = slots};
}

PreparedWeights shape_of(const GroupedGemmSpec& spec, Device device) {
  return {.dtype = spec.dtype,
          .groups = spec.groups,
          .n = spec.n,
          .k = spec.k,
          .device = device,
          .format = resolved(spec.format)};
}

struct Scratch {
  std::int32_t *offsets, *permutation, *inverse;
  void* gathered;  // rows, where they are brought together before: on a GPU
  void* products;  // [N, n]
  Workspace stage;
  std::size_t bytes = 0;

  Scratch(const Context& context, const GroupedGemmSpec& spec, std::int64_t tokens, int slots,
          Workspace workspace) {
    Carver carver = workspace.data == nullptr ? Carver() : Carver(workspace);
    const std::int64_t pairs = checked_product("indexed_gemm: pairs", tokens, slots);
    offsets = carver.take<std::int32_t>(std::int64_t{spec.groups} + 1);
    permutation = carver.take<std::int32_t>(pairs);
    inverse = carver.take<std::int32_t>(pairs);
    const bool gpu = context.device().type == DeviceType::cuda;
    gathered = carver.take<float>(
        gpu ? checked_product("indexed_gemm: pairs x k", pairs, std::max<std::int64_t>(spec.k, 1))
            : 0);
    products = carver.take<float>(
        checked_product("indexed_gemm: pairs x n", pairs, std::max<std::int64_t>(spec.n, 1)));
    stage.bytes =
        std::max(order_workspace_bytes(context, order_of(spec, slots), tokens),
                 mlp_workspace_bytes(context, shape_of(spec, context.device()), pairs, tokens));
    stage.data = carver.take_bytes(stage.bytes);
    bytes = carver.used();
  }
};

void check_slots(std::int64_t slots) {
  if (slots < 1 || slots > 128) {
    fail(Status::invalid_argument, "indexed_gemm: slots is {}: must be 1 to 128", slots);
  }
}

}  // namespace

Support supports_indexed(const GroupedGemmSpec& spec, Device device) {
  if (!spec.prepared) return refuse("prepared is false: must be true");
  if (spec.rows != RowFormat::as_dtype) {
    return refuse("rows is {}: must be as_dtype", to_string(spec.rows));
  }
  if (Support support = supports(spec, device); !support) return support;
  return supports(order_of(spec, 1), device);
}

std::size_t indexed_gemm_workspace_bytes(const Context& context, const GroupedGemmSpec& spec,
                                         std::int64_t tokens, int slots) {
  require_legal(supports_indexed(spec, Device{}), "indexed_gemm");
  require(supports_indexed(spec, context.device()), "indexed_gemm");
  if (tokens < 0)
    fail(Status::invalid_argument, "indexed_gemm: tokens is {}: must be >= 0", tokens);
  check_slots(slots);
  return Scratch(context, spec, tokens, slots, {}).bytes;
}

void indexed_gemm(const Context& context, const GroupedGemmSpec& spec, const IndexedGemmInputs& in,
                  Tensor out, Workspace workspace) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require_legal(supports_indexed(spec, Device{}), "indexed_gemm");
  require(supports_indexed(spec, device), "indexed_gemm");
  check_tensor("indexed_gemm: rows", in.rows,
               {.dtypes = float_dtypes, .shape = {any_size, spec.k}, .rows_dense = true}, device);
  const std::int64_t tokens = in.rows.shape[0];
  check_tensor("indexed_gemm: ids", in.ids,
               {.dtypes = {DType::i32}, .shape = {tokens, any_size}, .dense = true}, device);
  check_slots(in.ids.shape[1]);
  const int slots = static_cast<int>(in.ids.shape[1]);
  const std::int64_t pairs = tokens * slots;
  check_tensor(
      "indexed_gemm: out", out,
      {.dtypes = float_dtypes, .shape = {pairs, spec.n}, .rows_dense = true, .written = true},
      device);
  check_prepared("indexed_gemm", spec, in.prepared, context);
  if (check_given("indexed_gemm: bias", in.bias, spec.bias, "the spec's bias")) {
    check_tensor("indexed_gemm: bias", in.bias,
                 {.dtypes = {DType::f32}, .shape = {spec.groups, spec.n}, .dense = true}, device);
  }
  const Tensor weights = bytes_at(in.prepared.data, in.prepared.bytes, device);
  check_all_apart("indexed_gemm", {{"out", out}},
                  {{"rows", in.rows}, {"ids", in.ids}, {"bias", in.bias}, {"weights", weights}});
  const Scratch s(context, spec, tokens, slots, workspace);
  check_workspace("indexed_gemm", workspace, s.bytes);
  check_all_apart(
      "indexed_gemm", {{"workspace", bytes_at(workspace.data, s.bytes, device)}},
      {{"out", out}, {"rows", in.rows}, {"ids", in.ids}, {"bias", in.bias}, {"weights", weights}});
  if (pairs == 0 || spec.n == 0) return;

  const auto at = [&](const void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return view(data, dtype, shape, device);
  };
  const Tensor offsets = at(s.offsets, DType::i32, {spec.groups + 1});
  const Tensor permutation = at(s.permutation, DType::i32, {pairs});
  order(context, order_of(spec, slots), {.ids = in.ids},
        {.offsets = offsets,
         .permutation = permutation,
         .inverse = at(s.inverse, DType::i32, {tokens, slots})},
        s.stage);
  MlpInput product{.rows = in.rows,
                   .offsets = s.offsets,
                   .whole_k = spec.batch_invariant,
                   .permutation = s.permutation,
                   .slots = slots,
                   .bias = in.bias.as<const float>()};
  if (mlp_wants_gathered(context, in.prepared, pairs, {.dtype = in.rows.dtype})) {
    product.rows = at(s.gathered, spec.dtype, {pairs, spec.k});
    gather(context, {.slots = slots},
           {.hidden = in.rows,
            .permutation = permutation,
            .rows = offsets.rows(spec.groups, spec.groups + 1)},
           product.rows);
    product.permutation = nullptr;
    product.slots = 1;
  }
  // Rounded here, and not again where they are brought back.
  const Tensor products = at(s.products, out.dtype, {pairs, spec.n});
  // Weights without elements may be absent.
  mlp_gemm(context, in.prepared ? in.prepared : shape_of(spec, device), product, products, s.stage);
  combine(context, {.slots = 1, .weighted = false},
          {.rows = products, .inverse = at(s.inverse, DType::i32, {pairs, 1})}, out);
}

}  // namespace shunt
