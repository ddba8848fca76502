// Few pairs of fp8 with a scale for 128 x 128 weights (pair_stream.cuh): tiles of
// packed_layout.hpp; rows of 16 bits are rounded as gather() rounds them, by each block for itself.
//
// A slot is 16 rows by 128 along k as they lie, 128 bytes a row, swizzled, and the step's scales.
// The step's products are summed from 0 and times both scales join the sum, as in fp8_few_rows.cu.
// Hopper's mma.sync makes f16 of e4m3 anyway, of rows as often as of weights: here rows are f16
// from the start, weights as they come. Products and their sums are those of f32.
#include "gemm/fp8_rounding.cuh"
#include "gemm/packed_layout.hpp"
#include "gemm/pair_stream.cuh"

namespace shunt::cuda_engine {

namespace {

template <int depth_>
class StreamFp8 {
 public:
  static constexpr int blocks = 1, rows = 16, depth = depth_, slot_bytes = rows * 128 + 16;
  static constexpr bool weighs = false;
  static constexpr int book_bytes = 0;
  // A row's numbers, 32 in the order of mma.sync's lanes: the q-th of four has 4 q .. and 16 + 4 q
  // .. Its scales follow; then as much as keeps rows apart that are read together.
  static constexpr int pitch(int steps) {
    return (steps * 256 + (steps + 15) / 16 * 64) / 128 * 128 + 64;
  }

#if defined(SHUNT_SM_90A)
  // From step `begin` of rows `first` .. of the group's weights on.
  __device__ __forceinline__ StreamFp8(const PairArgs& args, int group, int first, int begin,
                                       int lane)
      : lane_(lane) {
    const char* const of_group = args.tiles + group * args.group_bytes;
    const std::int64_t tile = std::int64_t{first / 128} * args.steps + begin;
    from_ = of_group + tile * tile_bytes + first % 128 * 128 + 16 * lane;
    scales_ = of_group + args.scales_at + tile * 16;
  }
  __device__ __forceinline__ static void load_factors(const PairArgs&, int) {}
  // The next step, to a slot: where the lane's first 16 bytes go.
  __device__ __forceinline__ void copy(std::uint32_t slot) {
    copy_by_lanes<rows * 128>(slot, from_, lane_);
    if (lane_ == 0) copy_once_16(slot + rows * 128, scales_);
    from_ += tile_bytes;
    scales_ += 16;
  }
  // A half of a warp has 128 numbers of a row at a time, two or four times on their way at once.
  __device__ __forceinline__ static void stage(const PairArgs& args, const StreamedRows& of,
                                               unsigned char* shared, int thread, int threads) {
    args.steps > threads / 8 ? stage_by<4>(args, of, shared, thread, threads)
                             : stage_by<2>(args, of, shared, thread, threads);
  }
  __device__ __forceinline__ void begin(const PairArgs& args, unsigned char* shared, int count,
                                        int lane) {
    token_ = shared + min(lane / 4, count - 1) * args.pitch + lane % 4 * 16;
    // Of the columns that this lane has sums of: there or not, some row's.
    const auto of_column = [&](int column) {
      return reinterpret_cast<const float*>(shared + min(column, count - 1) * args.pitch +
                                            args.steps * 256);
    };
    token_scales_[0] = of_column(2 * (lane % 4));
    token_scales_[1] = of_column(2 * (lane % 4) + 1);
  }
  __device__ __forceinline__ void multiply(const unsigned char* memory, std::uint32_t slot,
                                           int at) {
    const std::uint32_t row = slot + static_cast<std::uint32_t>(lane_ % 16 * 128);
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 32 along k each
      const uint4 token = *reinterpret_cast<const uint4*>(token_ + at * 256 + i * 64);
      std::uint32_t a[4], wide[4][2];
      const int piece = (2 * i + lane_ / 16) ^ lane_ % 8;
      ldmatrix_x4(a, row + static_cast<std::uint32_t>(16 * piece));
#pragma unroll
      for (int j = 0; j < 4; ++j) widen(a[j], wide[j]);
      const std::uint32_t first[4] = {wide[0][0], wide[1][0], wide[0][1], wide[1][1]};
      const std::uint32_t second[4] = {wide[2][0], wide[3][0], wide[2][1], wide[3][1]};
      mma_16816(__half{}, d[i % 2], first, token.x, token.y);
      mma_16816(__half{}, d[i % 2], second, token.z, token.w);
    }
    const float2 of_weights = *reinterpret_cast<const float2*>(memory + rows * 128);
    const float scale[2] = {token_scales_[0][at], token_scales_[1][at]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums_[i] = __fmaf_rn(d[0][i] + d[1][i],
                           __fmul_rn(scale[i % 2], i < 2 ? of_weights.x : of_weights.y), sums_[i]);
    }
  }
  __device__ __forceinline__ void value(int, float (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums_[i];
  }
  __device__ __forceinline__ static void scale(const PairArgs&, int, float (&)[4]) {}

 private:
  static constexpr int tile_bytes = static_cast<int>(PackedLayout::tile_bytes);

  template <int batch>
  __device__ __forceinline__ static void stage_by(const PairArgs& args, const StreamedRows& of,
                                                  unsigned char* shared, int thread, int threads) {
    const int half = thread / 16, part = thread % 16, halves = threads / 16;
    const bool bf16 = args.source_dtype == DType::bf16;
#pragma unroll 1
    for (int t = 0; t < of.count; ++t) {
      const char* const from = of.source(args, t);
      unsigned char* const row = shared + t * args.pitch;
#pragma unroll 1
      for (int base = half; base - half < args.steps; base += batch * halves) {
        uint4 word[batch];
#pragma unroll
        for (int n = 0; n < batch; ++n) {
          const int k = (base + n * halves) * 128 + 8 * part;
          word[n] = {0, 0, 0, 0};
          if (k < args.k) word[n] = __ldcg(reinterpret_cast<const uint4*>(from + 2 * k));
        }
        float x[batch][8], scale[batch];
        std::uint32_t rounded[batch][2];
#pragma unroll
        for (int n = 0; n < batch; ++n) {
          const std::uint32_t words[4] = {word[n].x, word[n].y, word[n].z, word[n].w};
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
            x[n][i] = bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
          }
        }
        quantise<batch>(x, rounded, scale);
#pragma unroll
        for (int n = 0; n < batch; ++n) {
          const int at = base + n * halves;
          if (at >= args.steps) continue;
          unsigned char* const to =
              row + at * 256 + part / 4 * 64 + part % 2 * 32 + part % 4 / 2 * 8;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            std::uint32_t wide[2];
            widen(rounded[n][i], wide);
            *reinterpret_cast<uint2*>(to + 16 * i) = make_uint2(wide[0], wide[1]);
          }
          if (part == 0) reinterpret_cast<float*>(row + args.steps * 256)[at] = scale[n];
        }
      }
    }
  }

  // Four e4m3 as f16.
  __device__ __forceinline__ static void widen(std::uint32_t four, std::uint32_t (&out)[2]) {
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(out[0]), "=r"(out[1])
        : "r"(four));
  }

  const char *from_, *scales_;
  int lane_;
  const unsigned char* token_ = nullptr;
  const float* token_scales_[2];
  float sums_[4] = {};
#endif
};

}  // namespace

bool pair_stream_fp8(const Gpu& gpu, const PairArgs& args) {
  return launch_pair_stream<StreamFp8, 5, 0>(gpu, args, {.least = 2, .most = 16, .longest = 16});
}

}  // namespace shunt::cuda_engine
