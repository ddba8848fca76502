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

template <bool bf16_, int depth_>
class StreamFp8 {
 public:
  static constexpr bool bf16 = bf16_, rounds = true;
  static constexpr bool loads_only_row = false;
  static constexpr int blocks = 1, rows = 16, depth = depth_, slot_bytes = rows * 128 + 16;
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
  // A row on its way to shared memory, rounded: a half of a warp has 128 numbers of it at a time,
  // four times on their way at once. Half of that is rounded when it is there, the rest at the end.
  class Ahead {
   public:
    __device__ __forceinline__ void begin(const PairArgs& args, const char* from, unsigned char* to,
                                          const Staging& by) {
      from_ = from, to_ = to, half_ = by.thread / 16, halves_ = by.threads / 16;
      first_ = by.begin, end_ = by.end;
      if (end_ - first_ <= halves_) {
        std::uint32_t words[1][4];
        load(args, first_, words);
        put(args, first_, words);
        return;
      }
      std::uint32_t words[2][4];
      load(args, first_, words);
      load(args, first_ + 2 * halves_, words_);
      put(args, first_, words);
    }
    __device__ __forceinline__ void end(const PairArgs& args) {
#pragma unroll 1
      for (int at = first_ + 2 * halves_; at < end_; at += 2 * halves_) {
        std::uint32_t next[2][4];
        load(args, at + 2 * halves_, next);
        put(args, at, words_);
#pragma unroll
        for (int i = 0; i < 8; ++i) words_[i / 4][i % 4] = next[i / 4][i % 4];
      }
    }

   private:
    // Eight numbers a lane of steps at + half_ and, where they are two, halves_ further; zeros
    // behind k.
    template <int batch>
    __device__ __forceinline__ void load(const PairArgs& args, int at,
                                         std::uint32_t (&words)[batch][4]) const {
#pragma unroll
      for (int n = 0; n < batch; ++n) {
        const int column = (at + half_ + n * halves_) * 128 + 8 * part();
        uint4 word = {0, 0, 0, 0};
        if (column < args.k) word = __ldcg(reinterpret_cast<const uint4*>(from_ + 2 * column));
        words[n][0] = word.x, words[n][1] = word.y, words[n][2] = word.z, words[n][3] = word.w;
      }
    }
    template <int batch>
    __device__ __forceinline__ void put(const PairArgs& args, int at,
                                        const std::uint32_t (&words)[batch][4]) const {
      std::uint32_t rounded[batch][2];
      float scale[batch];
      quantise<bf16, batch>(words, rounded, scale);
#pragma unroll
      for (int n = 0; n < batch; ++n) {
        const int step = at + half_ + n * halves_;
        if (step >= end_) continue;
        unsigned char* const to =
            to_ + step * 256 + part() / 4 * 64 + part() % 2 * 32 + part() % 4 / 2 * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          std::uint32_t wide[2];
          widen(rounded[n][i], wide);
          *reinterpret_cast<uint2*>(to + 16 * i) = make_uint2(wide[0], wide[1]);
        }
        if (part() == 0) reinterpret_cast<float*>(to_ + args.steps * 256)[step] = scale[n];
      }
    }
    __device__ __forceinline__ static int part() { return static_cast<int>(threadIdx.x) % 16; }

    const char* from_;
    unsigned char* to_;
    int half_, halves_, first_, end_;
    std::uint32_t words_[2][4];
  };
  __device__ __forceinline__ static void stage(const PairArgs& args, const StreamedRows& of,
                                               unsigned char* shared, const Staging& by) {
    const int count = __shfl_sync(0xffffffffu, of.count, 0);  // the compiler sees: one of a warp
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      Ahead row;
      row.begin(args, of.source(args, t), shared + t * args.pitch, by);
      row.end(args);
    }
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

template <bool bf16>
struct OfType {
  template <int depth>
  using Stream = StreamFp8<bf16, depth>;
};

// Two tokens' first product has all of k a warp where that is not too long and fills the GPU.
template <bool bf16>
bool launch_stream_fp8(const Gpu& gpu, const PairArgs& args) {
  const PairLimits parts{.least = 2, .most = 16, .longest = 16, .of_one = 8, .left_of_one = 4};
  const PairLimits whole_k{
      .least = 1, .most = 16, .longest = 16, .most_parts = 1, .block_warps = 8, .fills = true};
  const bool first_of_two =
      args.tokens == 2 && !args.early && !args.beside && args.steps <= whole_k.longest;
  return (first_of_two &&
          launch_pair_stream<OfType<bf16>::template Stream, 5, 0, 6>(gpu, args, whole_k)) ||
         launch_pair_stream<OfType<bf16>::template Stream, 5, 0, 6>(gpu, args, parts);
}

}  // namespace

bool pair_stream_fp8(const Gpu& gpu, const PairArgs& args) {
  return args.source_dtype == DType::bf16 ? launch_stream_fp8<true>(gpu, args)
                                          : launch_stream_fp8<false>(gpu, args);
}

}  // namespace shunt::cuda_engine
