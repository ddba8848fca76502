// The two GEMMs of an expert as the layer calls them: gather and scale on the way in, activation on
// the way out. Arguments are checked by the layer; pointers are of the context's device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "gemm/few_chain.hpp"
#include "gemm/row_places.hpp"
#include "shunt/activate.hpp"
#include "shunt/gemm.hpp"

namespace shunt {

struct MlpInput {
  Tensor rows{};                          // [T, K] f32 | bf16 | f16, rows may be strided
  const std::int32_t* offsets = nullptr;  // [groups + 1]; null: one group of all rows
  // With null offsets: rows at or past *valid are left alone; may be null.
  const std::int32_t* valid = nullptr;
  // On a GPU: k is not shared out, so that a row's bits do not depend on how many there are.
  bool whole_k = false;
  bool fast_accumulation = false;  // as GroupedGemmSpec's, of rows in fp8
  // On a GPU, of one group: others wait for multiprocessors meanwhile (beside_plan.hpp).
  bool beside = false;
  // Offsets, valid and bias were there before the launch that precedes this one on the GPU.
  bool early = false;
  int tile_before = 0;  // mlp_tile() of the product before; 0: there is none
  // Row r reads rows[permutation[r] / slots]; null: rows[r].
  const std::int32_t* permutation = nullptr;
  int slots = 1;
  // Row r times row_scale[r], in f32 before rounding, or on a GPU its sums, unless weights are
  // packed; may be null.
  const float* row_scale = nullptr;
  const float* bias = nullptr;  // [groups, n] f32, gate's columns before up's; may be null
  // Of rows that are f8_e4m3: f32 [T, ceil(K / 128)], any strides.
  Tensor row_scales{};
  // On a GPU: what kernels for few rows are told beside that.
  cuda_engine::FewChain chain{};
  // On a GPU, where mlp_takes_places(), of mlp_gemm().
  cuda_engine::RowPlaces places{};
};

// out [R, I] of the weights' dtype: act(gate x, up x) (weights paired), or act(up x). With
// out_scales [R, ceil(I / 128)] f32, out is f8_e4m3: that, rounded once more; in must be fp8 then,
// and lie in place.
void mlp_gate_up(const Context& context, const PreparedWeights& weights,
                 const ActivationSpec& activation, const MlpInput& in, Tensor out,
                 Workspace workspace, Tensor out_scales = {});
// out [R, n], f32 | bf16 | f16.
void mlp_gemm(const Context& context, const PreparedWeights& weights, const MlpInput& in,
              Tensor out, Workspace workspace);
// On a GPU: whether the product may be given its pairs by ids (FewChain). Of mlp_gate_up() with an
// activation, else of mlp_gemm().
bool mlp_takes_pairs(const Context& context, const PreparedWeights& weights,
                     const ActivationSpec* activation, const MlpInput& in, const Tensor& out);
// On a GPU: the predicted time of a product of so many pairs of so many tokens that likely reads
// its weights in one pass (pair_stream.hpp), where it is given them by ids. Of others none.
std::optional<double> mlp_one_pass_us(const Context& context, const PreparedWeights& weights,
                                      std::int64_t pairs, std::int64_t tokens);
// On a GPU: whether mlp_gemm() puts rows into the places of `in`.
bool mlp_takes_places(const Context& context, const PreparedWeights& weights, const MlpInput& in,
                      const Tensor& out);
// Weights as those that a product reads next.
cuda_engine::NextWeights mlp_next(const Context& context, const PreparedWeights& weights);
// Rows that a permutation picks.
struct MlpSource {
  DType dtype = DType::f32;
  bool pieces = true;  // lie in whole pieces of 16 bytes
  bool scaled = false, whole_k = false;
};
// Whether mlp_gate_up() over such rows would be faster with the rows gathered beforehand, the
// weights' dtype, scaled where they are: on a GPU, whose kernels for many rows read them where they
// lie and as they are. Of rows that are scaled sums may be, unless `whole_k`: then a row is rounded
// in one way, however many there are, and multiplied by one kind of instructions.
bool mlp_wants_gathered(const Context& context, const PreparedWeights& weights, std::int64_t rows,
                        const MlpSource& source);
// Where rows of weights that are multiplied in fp8 are rounded, whichever is predicted to be the
// fastest for both products of an expert.
enum class Rounding {
  on_the_way,  // by each product's kernel
  between,     // beforehand; the first product's results by a pass after it
  by_product,  // beforehand; the first product's results by its kernel
};
Rounding mlp_rounding(const Context& context, const PreparedWeights& gate_up,
                      const PreparedWeights& down, std::int64_t rows);
// Enough for either with up to `rows` rows. `source_rows`: how many rows MlpInput.rows has when
// they are read through a permutation and not scaled, if known: they need less.
std::size_t mlp_workspace_bytes(const Context& context, const PreparedWeights& weights,
                                std::int64_t rows, std::int64_t source_rows = -1);
// The kernel and blocking chosen for `rows` rows over `hit` groups, in a few words.
struct MlpWay {
  bool whole_k = false;
  bool rounded = false;  // rows of fp8 products are fp8 already
  bool gathers = false;  // on a GPU: the product reads rows as a permutation picks them
  int tile_before = 0;   // as MlpInput's
  bool placed = false;   // ProductSizes::placed
  bool beside = false;   // as MlpInput's
};
std::string mlp_explain(const Context& context, const PreparedWeights& weights, std::int64_t rows,
                        int hit, const MlpWay& way = {});
// On a GPU: the rows of the tiles of the product, where one after it could take the same kernel
// with the same tiles, and does well to. Else 0.
int mlp_tile(const Context& context, const PreparedWeights& weights, std::int64_t rows,
             const MlpWay& way = {});
// On a GPU: the predicted time of the product. On the CPU 0.
double mlp_us(const Context& context, const PreparedWeights& weights, std::int64_t rows,
              bool whole_k);

}  // namespace shunt
