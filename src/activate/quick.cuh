// SwiGLU in fewer instructions than formulas.inl has, and with the same bits: for kernels that do
// nothing else. About 40 a number, one of them MUFU; by way of conversions it is four, at a quarter
// of the rate.
#pragma once

#include "activate/activation.cuh"

namespace shunt::cuda_engine {

// e^x of simd_math.hpp for what is no NaN: whole numbers are rounded to and read off by adding
// 1.5 * 2^23.
__device__ __forceinline__ float quick_exp(float x) {
  constexpr float magic = 12582912.0f;
  x = fmaxf(-120.0f, fminf(120.0f, x));
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), magic);
  const float n = __fadd_rn(shifted, -magic);
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fmaf_rn(__fmul_rn(p, r), r, __fadd_rn(r, 1.0f));
  const std::int32_t whole = __float_as_int(shifted) - __float_as_int(magic), half = whole >> 1;
  return __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)),
                   __int_as_float((whole - half + 127) << 23));
}

// Rows to fp8 are faster by the second, others slower (docs/notes/cuda-move.md, "Activate").
enum class Division { compilers, own };

// x / d, to nearest even, for d of 1 and more: the compiler's own steps for numbers that cannot
// leave the range. It asks of each whether it can, and has a call for those that do.
__device__ __forceinline__ float quick_divide(float x, float d) {
  if (!(fabsf(x) > 0x1p-60f && fabsf(x) < 0x1p60f && d < 0x1p60f)) return __fdiv_rn(x, d);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
  float q = __fmul_rn(x, r);
  q = __fmaf_rn(__fmaf_rn(-d, q, x), r, q);
  return __fmaf_rn(__fmaf_rn(-d, q, x), r, q);
}

template <Division division>
__device__ __forceinline__ float divided(float x, float d) {
  return division == Division::own ? quick_divide(x, d) : __fdiv_rn(x, d);
}

// activated() of a gated silu. `limited`: the rule has limits, an alpha or an offset. A NaN comes
// through: x / (1 + e) is one where x is.
template <bool limited, Division division>
__device__ __forceinline__ float quick_swiglu(const cpu_engine::ActivationRule& rule, float gate,
                                              float up) {
  if constexpr (!limited) {
    const float a = divided<division>(gate, __fadd_rn(1.0f, quick_exp(__fadd_rn(0.0f, -gate))));
    return __fmul_rn(a, __fadd_rn(up, 0.0f));
  }
  const float most_in = rule.limit_output ? __int_as_float(0x7f800000) : rule.limit;
  const float most_out = rule.limit_output ? rule.limit : __int_as_float(0x7f800000);
  const float x = most_in < gate ? most_in : gate;
  const float z = __fmul_rn(rule.alpha, x);
  float a = divided<division>(x, __fadd_rn(1.0f, quick_exp(__fadd_rn(0.0f, -z))));
  a = most_out < a ? most_out : a;
  float u = rule.limit < up ? rule.limit : up;
  u = -rule.limit > u ? -rule.limit : u;
  return __fmul_rn(a, __fadd_rn(u, rule.up_offset));
}

// Which of these a rule is, or neither.
enum class Quick { no, swiglu, limited_swiglu };
inline Quick quick_form(const cpu_engine::ActivationRule& rule) {
  if (rule.kind != cpu_engine::ActivationRule::silu || !rule.gated) return Quick::no;
  const bool plain = rule.limit == __builtin_inff() && rule.alpha == 1 && rule.up_offset == 0;
  return plain ? Quick::swiglu : Quick::limited_swiglu;
}

// Calls f<quick_form(rule)>().
template <class F>
void with_quick(const cpu_engine::ActivationRule& rule, const F& f) {
  switch (quick_form(rule)) {
    case Quick::swiglu:
      return f.template operator()<Quick::swiglu>();
    case Quick::limited_swiglu:
      return f.template operator()<Quick::limited_swiglu>();
    case Quick::no:
      return f.template operator()<Quick::no>();
  }
}

// h of `count` of gate's and up's numbers, into up.
template <Quick quick, int count, Division division>
struct Activate {
  const cpu_engine::ActivationRule& rule;
  float (&gate)[count], (&up)[count];

  template <cpu_engine::ActivationRule::Kind kind, bool gated>
  __device__ __forceinline__ void go() const {
    const thread::Constants constants(rule);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      up[i] = thread::activated<kind, gated>(constants, thread::F32{gate[i]}, thread::F32{up[i]}).v;
    }
  }
  __device__ __forceinline__ void operator()() const {
    if constexpr (quick == Quick::no) {
      rule.gated ? thread::with_kind<true>(rule, *this) : thread::with_kind<false>(rule, *this);
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        up[i] = quick_swiglu<quick == Quick::limited_swiglu, division>(rule, gate[i], up[i]);
      }
    }
  }
};

}  // namespace shunt::cuda_engine
