// What a benchmark's layer puts out, beside what its experts give in f32.
#pragma once

#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

// Of one call, on the device of its context.
struct LayerCall {
  Tensor hidden;           // [T, H]
  Tensor ids;              // [T, k] i32, as the layer or the caller chose
  Tensor weights;          // [T, k] f32
  Tensor output;           // [T, H]
  std::int64_t valid = 0;  // tokens that count
};

// How far an output may be from the expected row, in units of its largest magnitude. For gross
// errors, before a time is taken: what a format may move is bounded by the tests.
inline constexpr float rounded_to_16_bits = 0.03F, rounded_to_fp8 = 0.15F;

// Computes the first and the last valid token again, by a layer on the CPU that has the experts
// they went to alone, from `weights` (of the call's layer, before they were prepared; packed ones
// unpacked), in f32. Throws what differs() throws for an output further away than `tolerance`.
// Routing is taken as it is; of layers with shared slots, whose weights no call puts out, nothing
// is checked.
void check_layer(const std::string& label, const LayerSpec& spec, const LayerWeights& weights,
                 const Context& context, const LayerCall& call, float tolerance);

}  // namespace shunt::tool
