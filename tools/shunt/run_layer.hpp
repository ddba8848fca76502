// One layer over hidden states: what it computes, and how long its stages take.
#pragma once

#include <vector>

#include "run.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

// The tensors of one call where the engine works, and its results on the host; on the CPU they are
// the same.
class Pass {
 public:
  // `token_ids` may be absent. Both lie dense on the host; on the CPU they must outlive the pass.
  Pass(const Context& context, const LayerSpec& spec, const Tensor& hidden,
       const Tensor& token_ids);
  const LayerInputs& in() const { return in_; }
  const LayerOutputs& out() const { return out_; }  // all three
  // Brings the results to the host; waits for them.
  void fetch();
  const Tensor& output() const { return output_; }    // [T, H] f32
  const Tensor& ids() const { return ids_; }          // [T, k] i32
  const Tensor& weights() const { return weights_; }  // [T, k] f32

 private:
  Tensor placed(const Tensor& host);
  Tensor room(DType dtype, std::int64_t rows, std::int64_t columns, Tensor& host);

  Context context_;
  LayerInputs in_;
  LayerOutputs out_;
  Tensor output_, ids_, weights_;
  std::vector<Buffer> memory_;
};

// Computes, and when `timed` and there are tokens, measures. Stages and the whole are still without
// their floors, which wait for the end of the run.
LayerResult run_layer(const Layer& layer, const Context& context, Pass& pass, int index,
                      bool timed);

}  // namespace shunt::tool
