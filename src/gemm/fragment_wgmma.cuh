// wgmma with A from registers, for weights that were decoded into them: m64nNk16, and m64nNk32
// where two of every four of A are kept. Of its warpgroup a warp has 16 rows of A, in the registers
// of mma.m16n8k16. Only where compiled for sm_90a.
//
// A register that an instruction under way reads must not be written: decode into others, and wait.
#pragma once

#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_WGMMA(type, wide, a0, a1, a2, a3, b_at, ...)                                 \
  if constexpr (n == wide)                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #wide "k16.f32." type "." type        \
                 " {" SHUNT_R##wide "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at \
                                    ", 1, 1, 1, 0;"                                        \
                 : SHUNT_D##wide                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#define SHUNT_SPARSE(type, wide, a0, a1, a2, a3, b_at, e_at, s_at)                         \
  if constexpr (n == wide)                                                                 \
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #wide "k32.f32." type "." type     \
                 " {" SHUNT_R##wide "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at \
                                    ", %" #e_at ", %" #s_at ", 1, 1, 1, 0;"                \
                 : SHUNT_D##wide                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(positions),     \
                   "n"(selector));

// d += a b for the first n / 2 floats of d, four registers from `a`; b is a wgmma_descriptor().
template <int n, bool bf16, int floats>
__device__ __forceinline__ void wgmma_registers(float (&d)[floats], const std::uint32_t* a,
                                                std::uint64_t b) {
  static_assert(is_width<n> && floats >= n / 2);
  if constexpr (bf16) {
    SHUNT_EACH_WIDTH(SHUNT_WGMMA, "bf16")
  } else {
    SHUNT_EACH_WIDTH(SHUNT_WGMMA, "f16")
  }
}
// Of 32 of k; `selector`: which pair of threads of each four has the positions.
template <int n, bool bf16, int selector, int floats>
__device__ __forceinline__ void wgmma_sparse(float (&d)[floats], const std::uint32_t* a,
                                             std::uint64_t b, std::uint32_t positions) {
  static_assert(is_width<n> && floats >= n / 2);
  if constexpr (bf16) {
    SHUNT_EACH_WIDTH(SHUNT_SPARSE, "bf16")
  } else {
    SHUNT_EACH_WIDTH(SHUNT_SPARSE, "f16")
  }
}

#undef SHUNT_SPARSE
#undef SHUNT_WGMMA

// Two products and their commit, of one of a few widths: the least that holds `count` columns. The
// branch is inside, with all of a group in each of its arms: only so does ptxas let groups overlap;
// and a loop for each width would not find its registers.
#define SHUNT_OPERANDS(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, positions, columns)            \
  "{\n.reg .pred more;\n.reg .b32 x<8>, e, count;\n.reg .b64 y<2>;\n"                         \
  "mov.b32 x0, %" #a0 ";\nmov.b32 x1, %" #a1 ";\nmov.b32 x2, %" #a2 ";\nmov.b32 x3, %" #a3    \
  ";\nmov.b32 x4, %" #a4 ";\nmov.b32 x5, %" #a5 ";\nmov.b32 x6, %" #a6 ";\nmov.b32 x7, %" #a7 \
  ";\nmov.b64 y0, %" #b0 ";\nmov.b64 y1, %" #b1 ";\nmov.b32 e, %" #positions                  \
  ";\nmov.b32 count, %" #columns ";\n"
#define SHUNT_DENSE(type, wide, from)                                                   \
  "wgmma.mma_async.sync.aligned.m64n" #wide "k16.f32." type "." type " {" SHUNT_R##wide \
      "}, {x" from ", 1, 1, 1, 0;\n"
#define SHUNT_SPARSE(type, wide, from)                                                     \
  "wgmma.mma_async.sp.sync.aligned.m64n" #wide "k32.f32." type "." type " {" SHUNT_R##wide \
      "}, {x" from ", 1, 1, 1, 0;\n"
#define SHUNT_GROUP(first, second) \
  "wgmma.fence.sync.aligned;\n" first second "wgmma.commit_group.sync.aligned;\nbra.uni done;\n"
#define SHUNT_DENSE_GROUP(type, wide)                        \
  SHUNT_GROUP(SHUNT_DENSE(type, wide, "0, x1, x2, x3}, y0"), \
              SHUNT_DENSE(type, wide, "4, x5, x6, x7}, y1"))
#define SHUNT_SPARSE_GROUP(type, wide)                              \
  SHUNT_GROUP(SHUNT_SPARSE(type, wide, "0, x1, x2, x3}, y0, e, 0"), \
              SHUNT_SPARSE(type, wide, "4, x5, x6, x7}, y1, e, 1"))
#define SHUNT_BEYOND(wide) "setp.gt.s32 more, count, " #wide ";\n@more bra.uni beyond" #wide ";\n"
#define SHUNT_TWO(X, type, a, b) SHUNT_BEYOND(a) X(type, a) "beyond" #a ":\n" X(type, b)
#define SHUNT_FOUR(X, type, a, b, c, d) \
  SHUNT_BEYOND(b) SHUNT_TWO(X, type, a, b) "beyond" #b ":\n" SHUNT_TWO(X, type, c, d)
#define SHUNT_EIGHT(X, type, a, b, c, d, e, f, g, h) \
  SHUNT_BEYOND(d) SHUNT_FOUR(X, type, a, b, c, d) "beyond" #d ":\n" SHUNT_FOUR(X, type, e, f, g, h)
#define SHUNT_UPTO_128(X, type) SHUNT_FOUR(X, type, 80, 96, 112, 128)
#define SHUNT_UPTO_160(X, type) SHUNT_FOUR(X, type, 112, 128, 144, 160)
#define SHUNT_UPTO_192(X, type) SHUNT_EIGHT(X, type, 32, 64, 96, 128, 144, 160, 176, 192)
#define SHUNT_UPTO_256(X, type) SHUNT_EIGHT(X, type, 32, 64, 96, 128, 160, 192, 224, 256)
#define SHUNT_STATEMENT(X, type, most, ...)                                                   \
  if constexpr (widest == most)                                                               \
  asm volatile(SHUNT_OPERANDS(__VA_ARGS__) SHUNT_UPTO_##most(X, type) "done:\n}"              \
               : SHUNT_D##most                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), \
                 "r"(a[7]), "l"(b), "l"(b_next), "r"(positions), "r"(count))
#define SHUNT_STATEMENTS(X, type)                                                        \
  SHUNT_STATEMENT(X, type, 128, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75);         \
  SHUNT_STATEMENT(X, type, 160, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91);         \
  SHUNT_STATEMENT(X, type, 192, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107); \
  SHUNT_STATEMENT(X, type, 256, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139)

template <bool first, class A, class B>
__device__ __forceinline__ auto& either(A& a, B& b) {
  if constexpr (first) {
    return a;
  } else {
    return b;
  }
}

// d += a b, then d += a[4..] b_next: 16 of k each, or 32 of weights that are `sparse`, with their
// positions. Begins with wgmma_fence() and ends with wgmma_commit().
template <int widest, bool bf16, bool sparse, int floats>
__device__ __forceinline__ void wgmma_group(float (&d)[floats], const std::uint32_t (&a)[8],
                                            std::uint64_t b, std::uint64_t b_next,
                                            std::uint32_t positions, int count) {
  static_assert(widest == 128 || widest == 160 || widest == 192 || widest == 256);
  static_assert(floats >= widest / 2);
  if constexpr (sparse && bf16) {
    SHUNT_STATEMENTS(SHUNT_SPARSE_GROUP, "bf16");
  } else if constexpr (sparse) {
    SHUNT_STATEMENTS(SHUNT_SPARSE_GROUP, "f16");
  } else if constexpr (bf16) {
    SHUNT_STATEMENTS(SHUNT_DENSE_GROUP, "bf16");
  } else {
    SHUNT_STATEMENTS(SHUNT_DENSE_GROUP, "f16");
  }
}

#undef SHUNT_STATEMENTS
#undef SHUNT_STATEMENT
#undef SHUNT_UPTO_256
#undef SHUNT_UPTO_192
#undef SHUNT_UPTO_160
#undef SHUNT_UPTO_128
#undef SHUNT_EIGHT
#undef SHUNT_FOUR
#undef SHUNT_TWO
#undef SHUNT_BEYOND
#undef SHUNT_SPARSE_GROUP
#undef SHUNT_SPARSE
#undef SHUNT_DENSE_GROUP
#undef SHUNT_GROUP
#undef SHUNT_DENSE
#undef SHUNT_OPERANDS

}  // namespace shunt::cuda_engine

#endif
