// What the kernels of packed weights by mma.sync share, Hopper's for few rows and any GPU's: a
// warp's sums of a step.
#pragma once

#include "cuda/hopper.cuh"
#include "gemm/fragment_lane.hpp"

#if defined(__CUDA_ARCH__)

namespace shunt::cuda_engine {

namespace {

// d += a b: m16n8k16, of four registers from `a`.
template <bool bf16>
__device__ __forceinline__ void mma_of(float (&d)[4], const std::uint32_t* a, std::uint32_t b0,
                                       std::uint32_t b1) {
  const std::uint32_t four[4] = {a[0], a[1], a[2], a[3]};
  if constexpr (bf16) {
    mma_16816(__nv_bfloat16(), d, four, b0, b1);
  } else {
    mma_16816(__half(), d, four, b0, b1);
  }
}
// m16n8k32, two of every four of a kept; `selector`: which pair of threads' positions.
template <bool bf16, int selector>
__device__ __forceinline__ void mma_sparse(float (&d)[4], const std::uint32_t* a,
                                           const std::uint32_t (&b)[4], std::uint32_t positions) {
#define SHUNT_MMA_SPARSE(type)                                                                  \
  asm volatile(                                                                                 \
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type               \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, "    \
      "%13;"                                                                                    \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), \
        "r"(positions), "n"(selector))
  if constexpr (bf16) {
    SHUNT_MMA_SPARSE("bf16");
  } else {
    SHUNT_MMA_SPARSE("f16");
  }
#undef SHUNT_MMA_SPARSE
}

// The sums of a warp: 16 rows of weights, or `blocks` times 16, by all tokens.
template <class S, int blocks = 1>
struct WarpSums {
  using L = typename S::L;
  static constexpr int eights = S::tokens / 8;
  // Of products that wait for each other: two blocks are two already, and so are few fragments.
  static constexpr int chains = blocks > 1 || (L::scaled_sums && L::scaled_fragments < 4) ? 1 : 2;
  static constexpr int sets = L::scaled_sums ? 1 : chains;
  float sum[sets][blocks][eights][4];
  typename L::Book book;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& set : sum) {
#pragma unroll
      for (auto& block : set) {
#pragma unroll
        for (auto& eight : block) eight[0] = eight[1] = eight[2] = eight[3] = 0;
      }
    }
  }
  __device__ __forceinline__ float of(int eight, int e, int block = 0) const {
    return sets == 1 ? sum[0][block][eight][e]
                     : sum[0][block][eight][e] + sum[sets - 1][block][eight][e];
  }
  // One step, of the first `some` times eight tokens. `tokens`: this lane's address for ldmatrix of
  // the first eight tokens' first 32 of k. `positions_of`, `scales`: where the tile would begin for
  // these parts of it. Returns bits that need all that was loaded: for once_loaded().
  template <int some = eights>
  __device__ __forceinline__ std::uint32_t add(const unsigned char* tile,
                                               const unsigned char* positions_of,
                                               const unsigned char* scales, std::uint32_t tokens,
                                               int block, int lane) {
    std::uint32_t loaded = 0;
    L mine[blocks];
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
      mine[i].book = book;
      mine[i].load_scales(scales, block + i, lane);
      if constexpr (L::scaled_sums) {
#pragma unroll
        for (int w = 0; w < L::scale_words; w += 4) loaded |= mine[i].scales[w];
      }
    }
    const auto token_words = [&](std::uint32_t(&b)[4], int eight, int part) {
      ldmatrix_x4(b, S::words_at(tokens, eight, part));
    };
    constexpr int each = L::scaled_fragments;
    float part[L::scaled_sums ? chains : 1][L::scaled_sums ? blocks : 1][L::scaled_sums ? some : 1]
              [4];
#pragma unroll
    for (int pair = 0; pair < L::pairs; ++pair) {
      std::uint32_t a[blocks][8], positions[blocks];
#pragma unroll
      for (int i = 0; i < blocks; ++i) {
        mine[i].template decode<false>(tile, block + i, pair, lane, a[i]);
        if constexpr (L::sparse) positions[i] = L::positions(positions_of, block + i, pair, lane);
        if (pair == L::pairs - 1) loaded |= a[i][0] | (L::sparse ? positions[i] : 0);
      }
#pragma unroll
      for (int j = 0; j < some; ++j) {
        std::uint32_t b[4];
        if constexpr (L::sparse) {
          token_words(b, j, 2 * pair);
#pragma unroll
          for (int i = 0; i < blocks; ++i)
            mma_sparse<L::bf16, 0>(sum[0][i][j], a[i], b, positions[i]);
          token_words(b, j, 2 * pair + 1);
#pragma unroll
          for (int i = 0; i < blocks; ++i)
            mma_sparse<L::bf16, 1>(sum[sets - 1][i][j], a[i] + 4, b, positions[i]);
        } else {
          token_words(b, j, pair);
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            const int fragment = 2 * pair + f;
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
              if constexpr (L::scaled_sums) {
                float(&here)[4] = part[f % chains][i][j];
                if (fragment % each < chains) here[0] = here[1] = here[2] = here[3] = 0;
                mma_of<L::bf16>(here, a[i] + 4 * f, b[2 * f], b[2 * f + 1]);
                if (fragment % each == each - 1) {
                  float(&all)[4] = sum[0][i][j];
#pragma unroll
                  for (int e = 0; e < 4; ++e) {
                    const float both = chains == 1 ? here[e] : part[0][i][j][e] + here[e];
                    all[e] = __fmaf_rn(both, mine[i].scale(fragment / each, e / 2), all[e]);
                  }
                }
              } else {
                mma_of<L::bf16>(sum[f % sets][i][j], a[i] + 4 * f, b[2 * f], b[2 * f + 1]);
              }
            }
          }
        }
        if (pair == L::pairs - 1) loaded |= b[0];
      }
    }
    return loaded;
  }
};

}  // namespace

}  // namespace shunt::cuda_engine

#endif
