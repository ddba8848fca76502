// The weights of a layer: checked against its spec, and the small ones copied.
#pragma once

#include <vector>

#include "shunt/gemm.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Whether any of the matrices is packed.
bool is_packed(const ExpertWeights& weights);

// Throws Error{invalid_argument} naming the first weight that is missing, superfluous, of the
// wrong dtype or shape, or neither on the host nor on `device`.
void check_weights(const LayerSpec& spec, const LayerWeights& weights, Device device);
// The same for what HeldWeights holds.
void check_held(const LayerSpec& spec, const LayerWeights& weights, Device device);

// What a shared expert's rows are rounded to: as the routed experts', where its format takes them.
RowFormat shared_rows(const LayerSpec& spec, const ExpertWeights& shared,
                      const LayerOptions& options);

// Copies of everything but the experts, dense, on the context's device, in memory of this object.
// Move only.
class HeldWeights {
 public:
  HeldWeights() = default;
  HeldWeights(const Context& context, const LayerWeights& weights);
  LayerWeights views;  // without experts, shared and the latent projections
  std::size_t bytes() const;

 private:
  std::vector<Buffer> buffers_;
};

// The matrices of a gated or plain MLP, prepared, with their biases in f32. Move only.
class PreparedExperts {
 public:
  PreparedExperts() = default;
  PreparedExperts(const Context& context, DType dtype, const ActivationSpec& activation,
                  const ExpertWeights& weights, bool in_place = false,
                  const FormatSpec& format = {}, RowFormat rows = RowFormat::as_dtype);
  PreparedWeights gate_up;
  PreparedWeights down;
  Tensor gate_up_bias;  // [E, 2I] as mlp_gate_up wants it
  Tensor down_bias;     // [E, H]
  std::size_t bytes() const;
  // Plain matrices of some groups, without biases, in this object's memory.
  PreparedExperts part(int first, int groups) const;
  // Takes memory that one of these lies in, and says where it is.
  void* keep(Buffer memory);

 private:
  void prepare_packed_ones(const Context& context, DType dtype, bool gated,
                           const ExpertWeights& weights, const FormatSpec& wanted, bool in_place,
                           RowFormat rows);
  void hold_biases(const Context& context, bool gated, const ExpertWeights& weights);
  std::vector<Buffer> buffers_;
};

}  // namespace shunt
