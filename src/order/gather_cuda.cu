// gather on a GPU: rows of hidden states in the order of experts, converted on the way. How rows
// move is in cuda/move_rows.cuh; here is the map, one item a row: its token and its weight.
//
// Bytes: a token's row once from memory and, for each of its other experts, from the L2, as strips
// of columns are worked off one after another; every row written once. Predicted: 90 % of a copy of
// as many bytes.
#include "cuda/move_rows.cuh"
#include "order/engine.hpp"

namespace shunt {

namespace {

using namespace cuda_engine;

// n / slots for 0 <= n < 2^31 by a multiplication.
struct Divisor {
  std::uint32_t factor = 0;
  int shift = 0;

  explicit Divisor(std::uint32_t d) {
    while ((1u << shift) < d) ++shift;
    shift += 31;
    factor = static_cast<std::uint32_t>((std::uint64_t{1} << shift) / d + 1);
  }
  __device__ std::int32_t operator()(std::int32_t n) const {
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(n) * factor) >> shift);
  }
};

struct GatherMap {
  const std::int32_t* permutation;
  const std::int32_t* count;
  const float* weights;  // null: 1
  std::int32_t pairs;
  Divisor slots;

  __device__ std::int64_t items() const { return min(max(*count, 0), pairs); }
  __device__ MoveItem item(std::int64_t row) const {
    const std::int32_t pair = permutation[row];
    if (pair < 0 || pair >= pairs) return {};
    return {slots(pair), row, weights != nullptr ? weights[row] : 1.0f};
  }
};

struct Gather {
  const Gpu& gpu;
  GatherMap map;
  RowsView from, to;
  std::int64_t tokens, width;

  template <Form from_form, Form to_form, int n>
  bool convert() const {
    using Vector = ConvertVector<from_form, to_form, n>;
    if (width % n != 0 || !from.aligned(Vector::from_bytes) || !to.aligned(Vector::to_bytes)) {
      return false;
    }
    move_rows<Vector>("gather", gpu, move_shape(gpu, width / n, Vector::from_bytes, tokens),
                      map.pairs, map, from, to);
    return true;
  }
  template <Form from_form, Form to_form>
  void run() const {
    if (from_form == to_form && map.weights == nullptr) {
      return copy_rows("gather", gpu, width * form_bytes(to_form), tokens, map.pairs, map, from,
                       to);
    }
    constexpr int most = from_form == Form::f32 && to_form == Form::f32 ? 4 : 8;
    convert<from_form, to_form, most>() || convert<from_form, to_form, 2>() ||
        convert<from_form, to_form, 1>();
  }
  template <Form from_form>
  void run() const {
    switch (to.form) {
      case Form::f32:
        return run<from_form, Form::f32>();
      case Form::f16:
        return run<from_form, Form::f16>();
      default:
        return run<from_form, Form::bf16>();
    }
  }
};

}  // namespace

void gather_cuda(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                 const Tensor& rows) {
  const std::int64_t tokens = in.hidden.shape[0];
  const Gather gather{.gpu = gpu(context),
                      .map = {.permutation = in.permutation.as<std::int32_t>(),
                              .count = in.rows.as<std::int32_t>(),
                              .weights = spec.scale_by_weight ? in.weights.as<float>() : nullptr,
                              .pairs = static_cast<std::int32_t>(tokens * spec.slots),
                              .slots = Divisor(static_cast<std::uint32_t>(spec.slots))},
                      .from = RowsView(in.hidden),
                      .to = RowsView(rows),
                      .tokens = tokens,
                      .width = in.hidden.shape[1]};
  switch (gather.from.form) {
    case Form::f32:
      return gather.run<Form::f32>();
    case Form::f16:
      return gather.run<Form::f16>();
    default:
      return gather.run<Form::bf16>();
  }
}

}  // namespace shunt
