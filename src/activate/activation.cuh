// The nonlinearities in device code: for activate's own kernel and for the GEMM's epilogue.
#pragma once

#include <cstdint>

#include "activate/kernels.hpp"

namespace shunt::cuda_engine {

namespace thread {

using cpu_engine::ActivationRule;

#include "cuda/simd_thread.cuh"
// The functions of one number.
#include "cpu/simd_math.hpp"
// The nonlinearities.
#include "activate/formulas.inl"

struct One {
  const ActivationRule& rule;
  float gate, up;
  float& out;
  template <ActivationRule::Kind kind, bool gated>
  __device__ __forceinline__ void go() const {
    out = activated<kind, gated>(Constants(rule), F32{gate}, F32{up}).v;
  }
};

#undef SHUNT_INLINE

}  // namespace thread

// h of one gate and up; `gate` is not looked at unless the rule is gated. All threads of a warp
// take the same branches: the rule is the kernel's.
__device__ __forceinline__ float activated(const cpu_engine::ActivationRule& rule, float gate,
                                           float up) {
  float out;
  const thread::One one{rule, gate, up, out};
  rule.gated ? thread::with_kind<true>(rule, one) : thread::with_kind<false>(rule, one);
  return out;
}

// x sigmoid(z).
__device__ __forceinline__ float times_sigmoid(float x, float z) {
  return thread::mul_sigmoid(thread::F32{x}, thread::F32{z}).v;
}

}  // namespace shunt::cuda_engine
