// How a row of numbers stands in memory. Included by files that are compiled for one instruction
// set: nothing of the standard library but plain types.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shunt::cpu_engine {

enum class Form : std::int32_t {
  f32 = 0,
  f16 = 1,  // the first three are numbered as DType is
  bf16 = 2,
  // f32 in memory, values rounded to the shorter type: operands of an f32 FMA that must mean the
  // same as those of a bf16 dot product.
  f32_of_bf16 = 3,
  f32_of_f16 = 4,
};

constexpr std::size_t form_bytes(Form form) {
  return form == Form::bf16 || form == Form::f16 ? 2 : 4;
}

}  // namespace shunt::cpu_engine
