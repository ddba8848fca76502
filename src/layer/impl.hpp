// What a Layer holds.
#pragma once

#include <memory>
#include <vector>

#include "core/check.hpp"
#include "gemm/fused.hpp"
#include "layer/folded.hpp"
#include "layer/plan.hpp"
#include "layer/side_stream.hpp"
#include "layer/weights.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Whether each option has a value that it may have on some engine; all together may still not fit.
Support legal(const LayerOptions& options);

struct Layer::Impl {
  LayerSpec spec;
  LayerOptions options;
  Context context;
  HeldWeights held;
  PreparedExperts experts;
  PreparedExperts shared;
  std::vector<Buffer> latent_memory;
  PreparedWeights latent_down, latent_up;
  std::shared_ptr<SideStream> side;  // on a GPU, of a layer with a shared expert
  Buffer group_0;  // likewise, or of one with latents: groups of rows of one matrix, 0 each
  // The same layer with the shared expert as one more group (folded.hpp), where it may be; it has
  // the matrices then.
  std::unique_ptr<Impl> with_shared;
  bool fills_shared = false;  // of such a one: routing knows nothing of the shared slot
  float shared_scale = 1;     // likewise: of that slot's weight

  // Of the spec and options that were given: the side stream and group_0.
  void set_up();
  // Takes the experts' and the shared expert's matrices in one, and makes with_shared.
  void fold(PreparedExperts joint);
  // Whether a call of so many tokens that routes by itself is with_shared's.
  bool folds(std::int64_t tokens) const { return with_shared != nullptr && tokens == 1; }

  bool on_gpu() const { return context.device().type == DeviceType::cuda; }
  bool routes_and_orders_at_once(std::int64_t tokens) const;
  // Of the experts' rows between their second GEMM and the combine: f32, but on a GPU, where they
  // cross memory twice, the layer's dtype.
  DType rows_dtype() const { return on_gpu() ? options.dtype : DType::f32; }
  // Where the rows of fp8 products are rounded.
  Rounding rounding(std::int64_t tokens) const;
  Rounding shared_rounding(std::int64_t tokens) const;
  Rounding rounding_of(const PreparedExperts& of, std::int64_t intermediate,
                       std::int64_t rows) const;
  // Whether the experts' first product finds its rows gathered, of hidden states of that dtype that
  // lie in whole pieces of 16 bytes or not.
  bool gathers_first(std::int64_t tokens, DType hidden, bool pieces = true) const;
  // The way of the second product, after a first one that finds its rows gathered or not: it takes
  // the first one's tiles where that is faster, but not where rows may be written to their places,
  // which kernels for few rows do not.
  MlpWay down_way(std::int64_t tokens, bool gathered) const;
  RouteSpec routing() const {
    RouteSpec route = spec.route;
    route.batch_invariant = route.batch_invariant || options.batch_invariant;
    if (fills_shared) route.shared = {};
    return route;
  }
  // `whole_k`: as batch-invariant layers do.
  SharedPlan shared_plan(std::int64_t tokens, bool whole_k) const;
  // With the shared expert beside routing: whether the routed experts' products may order few pairs
  // by themselves; and whether its own products read their weights in one pass.
  bool orders_beside(std::int64_t tokens, bool whole_k) const;
  bool streams_shared(std::int64_t tokens, bool in_products, bool whole_k) const;
  // Whether a product of all tokens by one matrix, the shared expert's or a projection to or from
  // the latents, reads its weights in one pass.
  bool streams(const PreparedWeights& matrix, std::int64_t tokens, bool whole_k) const;
  std::size_t stage_bytes(std::int64_t tokens) const;
  // Of that, what a shared expert beside the others has to itself, behind the rest.
  std::size_t side_bytes(std::int64_t tokens) const;
  // Throws once the matrices have been given back.
  void check_prepared(const char* what) const;
  void check_call(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const;
  void run(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
           std::vector<StageTime>* times) const;
};

// A layer's, unless that has been moved from.
template <class Pointer>
auto& impl_of(const Pointer& impl) {
  return held(impl, "layer", "its constructor or load_prepared()");
}

}  // namespace shunt
