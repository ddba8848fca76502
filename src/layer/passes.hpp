// The small passes around a layer's experts, on either engine: RMSNorm, dot products, bias. Both
// engines add in one order. Arguments are checked by the layer.
//
// `valid` ([1] i32, absent on the CPU, where the layer has cut the rows already): rows at or past
// it need not be computed.
#pragma once

#include "shunt/layer.hpp"

namespace shunt {

// out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight * multiplier, with weight_first x[t] *
// weight in place of x[t] and no weight behind; for x and out [T, W] f32 | bf16 | f16 with strided
// rows (the CPU: out f32); out may be x. Sums are f32 in 16 strided lanes, so that bits do not
// depend on the number of threads. Zhang and Sennrich, arXiv:1910.07467.
void rms_norm(const Context& context, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              const Tensor& out, const Tensor& valid);

// logits[t] = x[t] . gate, f32, summed likewise.
void gate_logits(const Context& context, const Tensor& x, const Tensor& gate, float* logits,
                 const Tensor& valid);

// What follows the weighted sum of a layer that has more than it:
//   y = norm(wide + g * shared + bias) + residual,  g = shared_scale * sigmoid(shared_logits)
// Any part may be absent.
struct Finish {
  Tensor wide{};    // [T, W] dense, f32; on a GPU without a norm bf16 or f16 too;
                    // overwritten
  Tensor shared{};  // [T, W] dense, f32; on a GPU bf16 or f16 too
  const float* shared_logits = nullptr;  // [T]; null: g = shared_scale
  float shared_scale = 1;
  Tensor bias{};  // [W]
  NormSpec norm{};
  Tensor norm_weight{};  // [W]
  Tensor residual{};     // [T, W], rows may be strided
  Tensor out{};          // [T, W], rows may be strided; rows at or past `valid` become 0
  Tensor valid{};
};
void finish_rows(const Context& context, const Finish& finish);

// The rows of x [T, W] f32 | bf16 | f16 as fp8 of that kind with their scales, as gather() rounds
// them. On a GPU.
void round_rows(const Context& context, RowFormat kind, const Tensor& x, const Tensor& valid,
                const Tensor& rows, const Tensor& scales);

// Rows [R, W] bf16 or f16, dense, become fp8 with scales of that kind, as gather() rounds them,
// where they lie: Fp8Rows::in_place(). `count` [1] i32: how many; absent: all. On a GPU.
void round_in_place(const Context& context, RowFormat kind, const Tensor& rows,
                    const Tensor& count);

// 16-bit rows t of out [T, W] become 0 where no expert's row was written to them: `inverse` [T] i32
// (one slot a token) is -1, or t is not below `valid`. On a GPU.
void clear_unrouted(const Context& context, const Tensor& inverse, const Tensor& valid,
                    const Tensor& out);

// The first columns of ids and weights [T, from_columns] into those of the outputs given [T, k].
void copy_columns(const Context& context, const std::int32_t* ids, const float* weights,
                  std::int64_t from_columns, const Tensor& to_ids, const Tensor& to_weights);

// A shared expert's slot of every token's ids and weights [T, S], dense: `id`, weighed
// scale * sigmoid(gate . x), or scale. Rows at or past `valid` get -1 and 0. On a GPU; x and valid
// were there before the launch that precedes this one, which may still run.
struct SharedSlot {
  int slot = 0;
  std::int32_t id = 0;
  float scale = 1;
  Tensor ids{}, weights{};
  Tensor x{};     // [T, H], with a gate
  Tensor gate{};  // [H], or absent
  Tensor valid{};
};
void fill_slot(const Context& context, const SharedSlot& slot);

namespace cuda_engine {
struct Gpu;
void rms_norm(const Gpu& gpu, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              const Tensor& out, const Tensor& valid);
void gate_logits(const Gpu& gpu, const Tensor& x, const Tensor& gate, float* logits,
                 const Tensor& valid);
void finish_rows(const Gpu& gpu, const shunt::Finish& finish);
void round_in_place(const Gpu& gpu, RowFormat kind, const Tensor& rows, const Tensor& count);
void clear_unrouted(const Gpu& gpu, const Tensor& inverse, const Tensor& valid, const Tensor& out);
void copy_columns(const Gpu& gpu, const std::int32_t* ids, const float* weights,
                  std::int64_t from_columns, const Tensor& to_ids, const Tensor& to_weights);
void fill_slot(const Gpu& gpu, const SharedSlot& slot);
}  // namespace cuda_engine

}  // namespace shunt
