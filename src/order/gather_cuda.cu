// gather on a GPU: rows of hidden states in the order of experts, converted on the way. How rows
// move is in cuda/move_rows.cuh; here are the maps. With the order's inverse every token is read
// once and written to its rows; else every row reads its token, most often from the L2.
//
// Bytes: tokens once (with a permutation alone: once and what the L2 does not hold), rows once.
// Reached: 91 to 98 % of a kernel that reads and writes as many bytes with the inverse, 80 to 94 %
// with the permutation alone.
#include "cuda/move_rows.cuh"
#include "order/engine.hpp"
#include "order/gather_cuda.hpp"

namespace shunt {

namespace {

using namespace cuda_engine;

struct Gather {
  const Gpu& gpu;
  PermutationMap by_row;
  InverseMap by_token;  // inverse is null: not given
  RowsView from, to;
  std::int64_t width;

  template <class Vector>
  void run(std::int64_t vectors) const {
    if (by_token.inverse != nullptr) {
      launch_spread<Vector>("gather", gpu, vectors, by_token, from, to);
    } else {
      const std::int64_t again = by_row.slots.divisor > 1 ? by_token.tokens : 0;
      launch_rows("gather", gpu, move_rows_kernel<Vector, PermutationMap>,
                  move_shape(gpu, vectors, Vector::from_bytes, by_row.pairs, again), by_row.pairs,
                  by_row, from, to);
    }
  }
  template <Form from_form, Form to_form, int n>
  bool convert() const {
    using Vector = ConvertVector<from_form, to_form, n>;
    if (width % n != 0 || !from.aligned(Vector::from_bytes) || !to.aligned(Vector::to_bytes)) {
      return false;
    }
    run<Vector>(width / n);
    return true;
  }
  template <Form from_form, Form to_form>
  void convert() const {
    constexpr int most = from_form == Form::f32 && to_form == Form::f32 ? 4 : 8;
    convert<from_form, to_form, most>() || convert<from_form, to_form, 2>() ||
        convert<from_form, to_form, 1>();
  }
  template <Form from_form>
  void convert() const {
    switch (to.form) {
      case Form::f32:
        return convert<from_form, Form::f32>();
      case Form::f16:
        return convert<from_form, Form::f16>();
      default:
        return convert<from_form, Form::bf16>();
    }
  }
  void run() const {
    if (from.form == to.form && by_row.weights == nullptr) {
      const std::int64_t bytes = width * form_bytes(to.form);
      return with_widest_copy(bytes, from, to, [&]<int n>() { run<CopyVector<n>>(bytes / n); });
    }
    switch (from.form) {
      case Form::f32:
        return convert<Form::f32>();
      case Form::f16:
        return convert<Form::f16>();
      default:
        return convert<Form::bf16>();
    }
  }
};

}  // namespace

void gather_cuda(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                 const Tensor& rows, const Tensor& scales) {
  const std::int64_t tokens = in.hidden.shape[0];
  const auto pairs = static_cast<std::int32_t>(tokens * spec.slots);
  const PermutationMap by_row{.permutation = in.permutation.as<std::int32_t>(),
                              .count = in.rows.as<std::int32_t>(),
                              .weights = spec.scale_by_weight ? in.weights.as<float>() : nullptr,
                              .pairs = pairs,
                              .slots = Divisor(static_cast<std::uint32_t>(spec.slots))};
  const InverseMap by_token{.inverse = in.inverse.as<std::int32_t>(),
                            .count = by_row.count,
                            .weights = by_row.weights,
                            .pairs = pairs,
                            .targets = spec.slots,
                            .tokens = tokens};
  if (spec.quantise != Quantise::none) {
    return gather_quantised_cuda(context, spec, in, rows, scales, by_row, by_token);
  }
  const Gather gather{.gpu = gpu(context),
                      .by_row = by_row,
                      .by_token = by_token,
                      .from = RowsView(in.hidden),
                      .to = RowsView(rows),
                      .width = in.hidden.shape[1]};
  gather.run();
}

}  // namespace shunt
