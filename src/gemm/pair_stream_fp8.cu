// Few pairs of fp8 with a scale for 128 x 128 weights (pair_stream.cuh): tiles of
// packed_layout.hpp; rows of 16 bits are rounded as gather() rounds them, by each block for itself.
//
// A slot is 16 rows by 128 along k as they lie, 128 bytes a row, swizzled, and the step's scales.
// The step's products are summed from 0 and times both scales join the sum, as in fp8_few_rows.cu.
// Hopper's mma.sync makes f16 of e4m3 first: products and their sums are those of f32.
#include "gemm/fp8_rounding.cuh"
#include "gemm/packed_layout.hpp"
#include "gemm/pair_stream.cuh"

namespace shunt::cuda_engine {

namespace {

template <int depth_>
class StreamFp8 {
 public:
  static constexpr int rows = 16, depth = depth_, slot_bytes = 2048 + 16;
  // A row's bytes, 16 more against conflicts, and its scales.
  static constexpr int pitch(int steps) { return steps * 128 + 16 + (steps + 3) / 4 * 16; }

#if defined(SHUNT_SM_90A)
  // From step `begin` of rows `first` .. of the group's weights on.
  __device__ __forceinline__ StreamFp8(const PairArgs& args, int group, int first, int begin,
                                       int lane)
      : lane_(lane) {
    const char* const of_group = args.tiles + group * args.group_bytes;
    const std::int64_t tile = std::int64_t{first / 128} * args.steps + begin;
    from_ = of_group + tile * tile_bytes + first % 128 * 128;
    scales_ = of_group + args.scales_at + tile * 16;
  }
  __device__ __forceinline__ static void load_factors(const PairArgs&, int) {}
  // The next step.
  __device__ __forceinline__ void copy(std::uint32_t slot) {
    copy_by_lanes<2048>(slot, from_, lane_);
    if (lane_ == 0) cp_async_16(slot + 2048, scales_);
    from_ += tile_bytes;
    scales_ += 16;
  }
  // A half of a warp has 128 numbers of a row at a time.
  __device__ __forceinline__ static void stage(const PairArgs& args, const StreamedRows& of,
                                               unsigned char* shared, int thread, int threads) {
    const int half = thread / 16, part = thread % 16, halves = threads / 16;
    const bool bf16 = args.source_dtype == DType::bf16;
#pragma unroll 1
    for (int t = 0; t < of.count; ++t) {
      const char* const from = of.source(args, t);
      unsigned char* const row = shared + t * args.pitch;
#pragma unroll 1
      for (int base = 0; base < args.steps; base += halves) {
        const int at = base + half, k = at * 128 + 8 * part;
        uint4 word = {0, 0, 0, 0};
        if (k < args.k) word = __ldcg(reinterpret_cast<const uint4*>(from + 2 * k));
        const std::uint32_t words[4] = {word.x, word.y, word.z, word.w};
        float x[1][8], scale[1];
        std::uint32_t rounded[1][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
          x[0][i] = bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
        }
        quantise<1>(x, rounded, scale);
        if (at >= args.steps) continue;
        *reinterpret_cast<uint2*>(row + at * 128 + 8 * part) =
            make_uint2(rounded[0][0], rounded[0][1]);
        if (part == 0) {
          reinterpret_cast<float*>(row + args.steps * 128 + 16)[at] = scale[0];
        }
      }
    }
  }
  __device__ __forceinline__ void begin(const PairArgs& args, unsigned char* shared, int token,
                                        int lane) {
    token_ =
        shared_address(shared) + static_cast<std::uint32_t>(token * args.pitch + lane / 8 * 16);
    // Of the columns that this lane has sums of: there or not, some row's.
    const auto of_column = [&](int column) {
      return reinterpret_cast<const float*>(shared + min(column, args.tokens - 1) * args.pitch +
                                            args.steps * 128 + 16);
    };
    token_scales_[0] = of_column(2 * (lane % 4));
    token_scales_[1] = of_column(2 * (lane % 4) + 1);
  }
  __device__ __forceinline__ void multiply(const unsigned char* memory, std::uint32_t slot,
                                           int at) {
    const std::uint32_t row = slot + static_cast<std::uint32_t>(lane_ % 16 * 128);
    float d[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t b[4];
      ldmatrix_x4(b, token_ + static_cast<std::uint32_t>(at * 128 + 64 * half));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t a[4];
        const int piece = (4 * half + 2 * i + lane_ / 16) ^ lane_ % 8;
        ldmatrix_x4(a, row + static_cast<std::uint32_t>(16 * piece));
        mma_16832(d[i], a, b[2 * i], b[2 * i + 1]);
      }
    }
    const float2 of_weights = *reinterpret_cast<const float2*>(memory + 2048);
    const float scale[2] = {token_scales_[0][at], token_scales_[1][at]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums_[i] = __fmaf_rn(d[0][i] + d[1][i],
                           __fmul_rn(scale[i % 2], i < 2 ? of_weights.x : of_weights.y), sums_[i]);
    }
  }
  __device__ __forceinline__ void value(float (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums_[i];
  }
  __device__ __forceinline__ static void scale(const PairArgs&, float (&)[4]) {}

 private:
  static constexpr int tile_bytes = static_cast<int>(PackedLayout::tile_bytes);

  __device__ __forceinline__ static void mma_16832(float (&d)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  const char *from_, *scales_;
  int lane_;
  std::uint32_t token_ = 0;
  const float* token_scales_[2];
  float sums_[4] = {};
#endif
};

}  // namespace

bool pair_stream_fp8(const Gpu& gpu, const PairArgs& args) {
  return launch_pair_stream<StreamFp8, 5, 0>(gpu, args, {.least = 2, .most = 16, .longest = 16});
}

}  // namespace shunt::cuda_engine
