// What a computation needs at least: bytes that must cross memory, operations that must be done.
#pragma once

#include <cstdint>

#include "shunt/layer.hpp"

namespace shunt::tool {

struct Cost {
  double bytes = 0;
  double flops = 0;
  double written = 0;  // of the bytes, where reads and writes are to be told apart
};

double element_bytes(DType dtype);
// Weights of one routed expert, and of the shared expert, biases included; matrices in `format`.
double expert_bytes(const LayerSpec& spec, DType dtype, const FormatSpec& format = {});
double shared_bytes(const LayerSpec& spec, DType dtype, const FormatSpec& format = {});
double latent_bytes(const LayerSpec& spec, DType dtype);  // its two projections
double router_bytes(const LayerSpec& spec, DType dtype);

// The whole layer over `tokens` tokens that hit `experts_hit` experts with `pairs` pairs: those
// weights once, hidden states in and out; rows between the stages need not cross memory.
Cost layer_cost(const LayerSpec& spec, DType weights, DType rows, std::int64_t tokens,
                std::int64_t experts_hit, std::int64_t pairs, const FormatSpec& format = {},
                const FormatSpec& shared_format = {});

}  // namespace shunt::tool
