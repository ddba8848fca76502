// The small passes around a layer's experts: RMSNorm, dot products, bias.
#pragma once

#include "shunt/layer.hpp"

namespace shunt {

// out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight * multiplier, for x [T, W] f32 | bf16 |
// f16 with strided rows, out f32 [T, W] dense (may be x). Sums are f32 in 16 strided lanes, so that
// bits do not depend on the number of threads. Zhang and Sennrich, arXiv:1910.07467.
void rms_norm(const Context& context, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              float* out);

// logits[t] = x[t] . gate, f32.
void gate_logits(const Context& context, const Tensor& x, const Tensor& gate, float* logits);

// Rows [0, rows) of a dense f32 array [rows, width]: row * scale + bias (bias may be absent).
void scale_and_bias(const Context& context, float* data, std::int64_t rows, std::int64_t width,
                    float scale, const Tensor& bias);

// A dense f32 array [T, W] into any float dtype, rows strided; plus `residual` where given.
void store_rows(const Context& context, const float* from, const Tensor& residual,
                const Tensor& to);

// Rows [begin, end) of `to` become 0.
void zero_rows(const Tensor& to, std::int64_t begin, std::int64_t end);

}  // namespace shunt
