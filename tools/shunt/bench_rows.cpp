// Cases of gather and combine: rows into the experts' order, and back into tokens.
#include <fmt/core.h>

#include <cmath>
#include <memory>

#include "bench_cases.hpp"
#include "bench_tensors.hpp"
#include "shunt/combine.hpp"
#include "shunt/order.hpp"

namespace shunt::tool {

namespace {

// The tensors of one call. `tokens` [T, H] and `rows` [T * S, H]: one is read, the other written.
struct RowsCall {
  Tensor tokens, rows, permutation, count, inverse;
  Tensor weights;  // [T, S]; of gather [T * S]
};

struct Rows {
  Context context;
  bool gathers = true;
  GatherSpec gathering;
  CombineSpec combining;
  Variants tokens, rows, permutation, count, inverse, weights;

  RowsCall tensors(std::int64_t i) const {
    return {tokens[i], rows[i], permutation[i], count[i], inverse[i], weights[i]};
  }
  void run(const Context& where, const RowsCall& t) const {
    if (gathers) {
      gather(where, gathering,
             {.hidden = t.tokens,
              .permutation = t.permutation,
              .rows = t.count,
              .weights = t.weights,
              .inverse = t.inverse},
             t.rows);
    } else {
      combine(where, combining, {.rows = t.rows, .inverse = t.inverse, .weights = t.weights},
              t.tokens);
    }
  }
};

// gather moves values and is exact where it does not scale; combine's sums may be contracted.
void check_rows(const Rows& made, const std::string& label) {
  const RowsCall there = made.tensors(0);
  const Tensor& out = made.gathers ? there.rows : there.tokens;
  const OnHost got(made.context, out);
  const OnHost tokens(made.context, there.tokens), rows(made.context, there.rows),
      permutation(made.context, there.permutation), count(made.context, there.count),
      inverse(made.context, there.inverse), weights(made.context, there.weights);
  made.run(host(), {tokens.tensor, rows.tensor, permutation.tensor, count.tensor, inverse.tensor,
                    weights.tensor});
  const OnHost& want = made.gathers ? rows : tokens;
  check_close(label, got, want, made.gathers && !made.gathering.scale_by_weight ? 0 : 0.01f);
}

}  // namespace

StageCase rows_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes) {
  const std::int64_t tokens = shape.tokens, hidden = shape.hidden;
  const Batches batches(shape.route, spread, tokens);
  const int slots = batches.spec.slots;
  const std::int64_t pairs = tokens * slots;
  auto made = std::make_shared<Rows>(Rows{.context = context});
  made->gathers = shape.stage == "gather";
  made->gathering = {.slots = slots,
                     .scale_by_weight = made->gathers && shape.route.weight_on_input};
  made->combining = {.slots = slots, .weighted = !shape.route.weight_on_input};
  require(made->gathers ? supports(made->gathering, context.device())
                        : supports(made->combining, context.device()));
  const bool weighted = made->gathers ? made->gathering.scale_by_weight : made->combining.weighted;

  const auto n = static_cast<double>(pairs);
  const double moved = element_bytes(shape.dtype) * static_cast<double>((tokens + pairs) * hidden) +
                       4 * n + (weighted ? 4 * n : 0);
  const double written =
      element_bytes(shape.dtype) * static_cast<double>((made->gathers ? pairs : tokens) * hidden);
  const std::int64_t copies = variants_for(moved, rotate_bytes);
  made->tokens = Variants(context, shape.dtype, {tokens, hidden}, copies);
  made->rows = Variants(context, shape.dtype, {pairs, hidden}, copies);
  fill(context, made->gathers ? made->tokens : made->rows, 1, 1);
  if (made->gathers) {
    made->permutation = Variants(context, DType::i32, {pairs}, copies);
    made->count = Variants(context, DType::i32, {1}, copies);
    upload(context, made->permutation, batches.permutation);
    std::vector<std::vector<std::int32_t>> counts;
    for (const auto& offsets : batches.offsets) counts.push_back({offsets.back()});
    upload(context, made->count, counts);
  }
  made->inverse = Variants(context, DType::i32, {tokens, slots}, copies);
  upload(context, made->inverse, batches.inverse);
  if (weighted) {
    made->weights = made->gathers ? Variants(context, DType::f32, {pairs}, copies)
                                  : Variants(context, DType::f32, {tokens, slots}, copies);
    fill(context, made->weights, 1 / static_cast<float>(slots), 2);
  }
  const std::string label = fmt::format("T{} R{} H{}", tokens, pairs, hidden);
  return {.op = shape.stage,
          .label = label,
          .dtype = shape.dtype,
          .variants = copies,
          .cost = {moved, made->gathers ? 0 : 2 * n * static_cast<double>(hidden), written},
          .on_tensor_cores = false,
          .call = [made](std::int64_t i) { made->run(made->context, made->tensors(i)); },
          .check = [made, label] { check_rows(*made, label); }};
}

}  // namespace shunt::tool
