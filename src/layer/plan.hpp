// What a layer call needs and does: arrays in the workspace, and the cost of each stage. Pure
// functions of the spec and sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/workspace.hpp"
#include "shunt/combine.hpp"
#include "shunt/gemm.hpp"
#include "shunt/layer.hpp"
#include "shunt/order.hpp"

namespace shunt {

// Arrays of one call of T tokens, N = T * S pairs, in the workspace; absent ones are null.
struct LayerScratch {
  std::int32_t* ids = nullptr;          // [T, S]
  float* weights = nullptr;             // [T, S]
  std::int32_t* offsets = nullptr;      // [E + 1]
  std::int32_t* permutation = nullptr;  // [N]
  std::int32_t* inverse = nullptr;      // [T, S]
  float* row_weights = nullptr;         // [N], weight on the input only
  float* router_input = nullptr;        // [T, H], router norm only
  float* normed = nullptr;              // [T, H], input norm only
  void* latent = nullptr;               // [T, L] of rows_dtype(), latent only
  void* h = nullptr;                    // [N, I] of the layer's dtype
  void* rows = nullptr;                 // [N, experts.hidden] of Layer::Impl::rows_dtype()
  float* wide_latents = nullptr;        // [T, L], what a norm of latents reads
  void* shared_h = nullptr;             // [T, shared I] of the layer's dtype
  void* shared = nullptr;               // [T, H] of rows_dtype(), shared expert only
  float* shared_logits = nullptr;       // [T], sigmoid gate only
  void* wide = nullptr;                 // [T, H] of wide_dtype(): output bias, norm or latent only
  void* stage = nullptr;                // what a stage asks for, one after the other
  std::size_t stage_bytes = 0;
  std::size_t total_bytes = 0;
};

constexpr bool in_fp8(RowFormat rows) {
  return rows == RowFormat::fp8_token || rows == RowFormat::fp8_block;
}

// Whether weights of that format are multiplied by rows that are rounded so, on some GPU.
bool takes_rows(Format format, RowFormat rows);

constexpr Quantise quantise_of(RowFormat rows) {
  return rows == RowFormat::fp8_token   ? Quantise::row
         : rows == RowFormat::fp8_block ? Quantise::block_128
                                        : Quantise::none;
}

// Rows of e4m3 in one piece of memory: the rows, 16 bytes aligned, then the scales f32, [rows,
// blocks] of one for 128 columns, or [rows] of fp8_token.
struct Fp8Rows {
  Tensor values, scales;
  static std::int64_t pitch(std::int64_t columns) { return (columns + 15) / 16 * 16; }
  static std::int64_t scales_of(RowFormat kind, std::int64_t columns) {
    return kind == RowFormat::fp8_token ? 1 : (columns + 127) / 128;
  }
  static std::int64_t bytes(RowFormat kind, std::int64_t rows, std::int64_t columns) {
    return rows * (pitch(columns) + 4 * scales_of(kind, columns));
  }
  Fp8Rows(RowFormat kind, void* memory, std::int64_t rows, std::int64_t columns, Device device)
      : values(view(memory, DType::f8_e4m3, {rows, columns}, device)),
        scales(view(static_cast<char*>(memory) + rows * pitch(columns), DType::f32,
                    {rows, scales_of(kind, columns)}, device)) {
    values.strides[0] = pitch(columns);
    if (kind == RowFormat::fp8_token) scales.rank = 1;
  }
  // Where rows of 16 bits lay: of each, its values and then its scales.
  static Fp8Rows in_place(RowFormat kind, void* memory, std::int64_t rows, std::int64_t columns,
                          Device device) {
    Fp8Rows result(kind, memory, rows, columns, device);
    result.values.strides[0] = 2 * columns;
    result.scales.data = static_cast<char*>(memory) + pitch(columns);
    result.scales.strides[0] = columns / 2;
    return result;
  }
  static bool fits_in_place(RowFormat kind, std::int64_t columns) {
    return columns % 2 == 0 && pitch(columns) + 4 * scales_of(kind, columns) <= 2 * columns;
  }
};

// Of what follows a layer's weighted sum, in front of the shared expert, the bias and the norm:
// f32, but as latent projections write it where no norm reads it.
DType wide_dtype(const LayerSpec& spec, DType rows);

// `rows`: of the experts' rows between their second GEMM and the combine. With a null workspace:
// measures. What a call of fewer tokens takes is never more.
LayerScratch carve(const LayerSpec& spec, const LayerOptions& options, DType rows,
                   std::int64_t tokens, std::size_t stage_bytes, Workspace workspace);

// The order stage of a layer: computed experts only, zero-compute ids fall out of range.
OrderSpec order_spec(const LayerSpec& spec);

// Whether routing and ordering are one operation, and so one launch where the batch is small: on a
// GPU up to some pairs. More are ordered as soon by a launch of their own, and so are few where
// launches are dependent: an order that starts while the router ends is 1 to 6 us sooner.
inline constexpr std::int64_t most_pairs_at_once = 1024;
bool routes_and_orders_at_once(const LayerSpec& spec, Device device, std::int64_t tokens,
                               bool dependent_launch);

// Whether, as far as the spec goes, there is no order: on a GPU each block of the experts' products
// orders so few pairs by itself. Of ids that may repeat, a caller's or a hash table's, for a token
// or two: then the time that they take to look at is less than an order's launch (measured:
// docs/notes/cuda-layer.md).
enum class IdsFrom { router, elsewhere };
bool orders_in_products(const LayerSpec& spec, Device device, std::int64_t tokens, IdsFrom from,
                        RowFormat rows);

// Whether, as far as the spec goes, the experts' second product may add up the rows of so few
// tokens where it orders them: one token's, which nothing else joins, or whose sum is latents.
bool adds_up(const LayerSpec& spec, std::int64_t tokens);

// Whether, as far as the spec goes, an expert's row is its token's output, times a weight: on a GPU
// the experts' second product may then write it there, and nothing is left to combine.
bool one_row_a_token(const LayerSpec& spec);

// Where the shared expert runs on a GPU. On a stream of its own beside routing and ordering, which
// leave most of the GPU idle; or after the experts. Where one token's is one more of the experts:
// folded.hpp.
struct SharedPlan {
  bool beside = false;
  double us = 0;      // that its products take by themselves
  double hidden = 0;  // of them while routing runs
};
// `us`: of the shared expert's products. Routing and ordering take about 5 us and 1 us more for 400
// tokens, a fork and a join 3 us.
SharedPlan plan_shared(Device device, std::int64_t tokens, double us);

// The combine stage: with the shared expert, unless a latent projection comes in between.
CombineSpec combine_spec(const LayerSpec& spec);

// Bytes that must cross memory and operations, a stage at a time. `hit`: experts with a token.
struct StageCost {
  std::int64_t bytes = 0;
  std::int64_t flops = 0;
  StageCost operator+(const StageCost& other) const {
    return {bytes + other.bytes, flops + other.flops};
  }
};
StageCost route_cost(const LayerSpec& spec, const LayerWeights& held, std::int64_t tokens,
                     DType hidden);
StageCost order_cost(const LayerSpec& spec, std::int64_t tokens);
StageCost gate_up_cost(const LayerSpec& spec, DType dtype, std::int64_t tokens, std::int64_t rows,
                       int hit, DType hidden);
StageCost down_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t rows,
                    int hit);
StageCost shared_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t tokens,
                      DType hidden);
// Of one of the two projections; hidden: the type of the side that is H wide.
StageCost latent_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t tokens,
                      DType hidden);
// By how many bytes `hit` groups of packed weights cost less than plain ones: a negative number.
StageCost packed_cost(const PreparedWeights& weights, int hit);
StageCost combine_cost(const LayerSpec& spec, DType rows_dtype, std::int64_t tokens,
                       std::int64_t rows, DType output);

// Experts that `tokens` tokens hit on average under uniform routing: E (1 - (1 - k/E)^T).
double expected_hit(const LayerSpec& spec, std::int64_t tokens);

}  // namespace shunt
