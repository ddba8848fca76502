// Rows of f32 | bf16 | f16 read and written in vectors of 2 to 32 bytes a lane, for kernels that
// are bound by memory. A vector's bytes stay raw until they are computed with, so that many loads
// are in flight. Conversions are those of core/convert.hpp: to nearest even, f16 saturating,
// infinities and NaN kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// The type of a row's elements; the first three are numbered as DType is. `any`: known at run time.
enum class Form : std::int32_t { f32 = 0, f16 = 1, bf16 = 2, any = 3 };
static_assert(static_cast<int>(DType::f16) == 1 && static_cast<int>(DType::bf16) == 2);
__host__ __device__ constexpr int form_bytes(Form form) { return form == Form::f32 ? 4 : 2; }

// The rows of a [., H] tensor as a kernel takes them.
struct RowsView {
  char* data = nullptr;  // null: not given
  std::int64_t row_bytes = 0;
  Form form = Form::f32;

  RowsView() = default;
  explicit RowsView(const Tensor& tensor)
      : data(tensor.as<char>()),
        row_bytes(tensor ? tensor.strides[0] * bits(tensor.dtype) / 8 : 0),
        form(static_cast<Form>(tensor.dtype)) {}
  // Whether vectors of `bytes` lie aligned (those of 32 are read as two of 16).
  bool aligned(int bytes) const {
    const auto unit = static_cast<std::uint64_t>(std::min(bytes, 16));
    return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(row_bytes)) %
               unit ==
           0;
  }
};

template <int bytes>
struct Raw {
  std::uint32_t word[(bytes + 3) / 4];
};

// Not kept in L1: no row is read twice by one multiprocessor soon.
template <int bytes>
__device__ __forceinline__ Raw<bytes> load_raw(const char* from) {
  Raw<bytes> raw;
  if constexpr (bytes == 32) {
    const Raw<16> low = load_raw<16>(from), high = load_raw<16>(from + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.word[i] = low.word[i], raw.word[4 + i] = high.word[i];
  } else if constexpr (bytes == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.word[0]), "=r"(raw.word[1]), "=r"(raw.word[2]), "=r"(raw.word[3])
                 : "l"(from));
  } else if constexpr (bytes == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(raw.word[0]), "=r"(raw.word[1])
                 : "l"(from));
  } else if constexpr (bytes == 4) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(raw.word[0]) : "l"(from));
  } else if constexpr (bytes == 2) {
    std::uint16_t half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from));
    raw.word[0] = half;
  } else {
    static_assert(bytes == 1);
    std::uint16_t byte;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(byte) : "l"(from));
    raw.word[0] = byte;
  }
  return raw;
}

// A vector of a row that nobody reads again: first out of the L2 when room is needed.
template <int bytes>
__device__ __forceinline__ Raw<bytes> load_last(const char* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (bytes == 16) {
    Raw<bytes> raw;
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(raw.word[0]), "=r"(raw.word[1]), "=r"(raw.word[2]), "=r"(raw.word[3])
                 : "l"(from), "l"(policy));
    return raw;
  }
#endif
  return load_raw<bytes>(from);
}

// First out of the L2 when room is needed: rows written must not drive out rows to be read again.
template <int bytes>
__device__ __forceinline__ void store_raw(char* to, const Raw<bytes>& raw) {
  if constexpr (bytes == 32) {
    store_raw<16>(to, {raw.word[0], raw.word[1], raw.word[2], raw.word[3]});
    store_raw<16>(to + 16, {raw.word[4], raw.word[5], raw.word[6], raw.word[7]});
  } else if constexpr (bytes == 16) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.word[0]),
                 "r"(raw.word[1]), "r"(raw.word[2]), "r"(raw.word[3])
                 : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(raw.word[0]), "r"(raw.word[1])
                 : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(raw.word[0]) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to),
                 "h"(static_cast<std::uint16_t>(raw.word[0]))
                 : "memory");
  } else {
    static_assert(bytes == 1);
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(to), "h"(static_cast<std::uint16_t>(raw.word[0]))
                 : "memory");
  }
}

template <int n, Form form>
__device__ __forceinline__ void widen(const Raw<n * form_bytes(form)>& raw, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (form == Form::f32) {
      x[i] = __uint_as_float(raw.word[i]);
    } else if constexpr (form == Form::bf16) {
      x[i] = __uint_as_float(i % 2 == 0 ? raw.word[i / 2] << 16 : raw.word[i / 2] & 0xffff0000u);
    } else {
      const auto half =
          static_cast<std::uint16_t>(i % 2 == 0 ? raw.word[i / 2] : raw.word[i / 2] >> 16);
      asm("cvt.f32.f16 %0, %1;" : "=f"(x[i]) : "h"(half));
    }
  }
}

// Finite values beyond f16's range become the largest. A comparison with NaN is false.
__device__ __forceinline__ float saturate_f16(float x) {
  return fabsf(x) < __int_as_float(0x7f800000) ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x;
}

template <int n, Form form>
__device__ __forceinline__ Raw<n * form_bytes(form)> narrow(const float (&x)[n]) {
  Raw<n * form_bytes(form)> raw;
  if constexpr (form == Form::f32) {
#pragma unroll
    for (int i = 0; i < n; ++i) raw.word[i] = __float_as_uint(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const float low = x[i], high = i + 1 < n ? x[i + 1] : 0;
      if constexpr (form == Form::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw.word[i / 2]) : "f"(high), "f"(low));
      } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;"
            : "=r"(raw.word[i / 2])
            : "f"(saturate_f16(high)), "f"(saturate_f16(low)));
      }
    }
  }
  return raw;
}

// The same with the form known at run time: n elements at column h of a row, in the low words of a
// vector that would hold f32.
template <int n>
__device__ __forceinline__ Raw<4 * n> load_raw(const char* row, Form form, std::int64_t h) {
  Raw<4 * n> raw;
  if (form == Form::f32) {
    raw = load_raw<4 * n>(row + 4 * h);
  } else {
    const Raw<2 * n> halves = load_raw<2 * n>(row + 2 * h);
#pragma unroll
    for (int i = 0; i < (n + 1) / 2; ++i) raw.word[i] = halves.word[i];
  }
  return raw;
}

template <int n>
__device__ __forceinline__ void widen(const Raw<4 * n>& raw, Form form, float (&x)[n]) {
  if (form == Form::f32) return widen<n, Form::f32>(raw, x);
  Raw<2 * n> halves;
#pragma unroll
  for (int i = 0; i < (n + 1) / 2; ++i) halves.word[i] = raw.word[i];
  if (form == Form::bf16) {
    widen<n, Form::bf16>(halves, x);
  } else {
    widen<n, Form::f16>(halves, x);
  }
}

template <int n>
__device__ __forceinline__ void store_row(char* row, Form form, std::int64_t h,
                                          const float (&x)[n]) {
  if (form == Form::f32) return store_raw<4 * n>(row + 4 * h, narrow<n, Form::f32>(x));
  store_raw<2 * n>(row + 2 * h,
                   form == Form::bf16 ? narrow<n, Form::bf16>(x) : narrow<n, Form::f16>(x));
}

}  // namespace shunt::cuda_engine
