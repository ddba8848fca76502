// Few pairs of 16 bits (pair_stream.cuh): tiles of cuda_layout.hpp, rows as they are. A slot is 16
// rows by 64 along k as they lie, 128 bytes a row, swizzled.
#pragma once

#include "gemm/pair_stream.cuh"

namespace shunt::cuda_engine {

namespace {

template <class T, int depth_>
class Stream16 {
 public:
  static constexpr int blocks = 1, rows = 16, depth = depth_, slot_bytes = 2048;
  static constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>, rounds = false;
  static constexpr bool loads_only_row = false;
  static constexpr int book_bytes = 0;
  static constexpr int pitch(int steps) { return steps * 128 + 16; }

#if defined(SHUNT_SM_90A)
  struct Ahead {};
  // From step `begin` of rows `first` .. of the group's weights on.
  __device__ __forceinline__ Stream16(const PairArgs& args, int group, int first, int begin,
                                      int lane)
      : from_(args.tiles + group * args.group_bytes +
              (std::int64_t{first / 128} * args.steps + begin) * tile_bytes + first % 128 * 128 +
              16 * lane),
        lane_(lane) {}
  __device__ __forceinline__ static void load_factors(const PairArgs&, int) {}
  __device__ __forceinline__ static void stage(const PairArgs& args, const StreamedRows& of,
                                               unsigned char* shared, const Staging& by) {
    stage_as_they_are(args, of, shared_address(shared), 64, by);
  }
  // The next step, to a slot: where the lane's first 16 bytes go.
  __device__ __forceinline__ void copy(std::uint32_t slot) {
    copy_by_lanes<slot_bytes>(slot, from_, lane_);
    from_ += tile_bytes;
  }
  __device__ __forceinline__ void begin(const PairArgs& args, unsigned char* shared, int count,
                                        int lane) {
    token_ = shared_address(shared) +
             static_cast<std::uint32_t>(min(lane % 8, count - 1) * args.pitch + lane / 8 * 16);
  }
  __device__ __forceinline__ void multiply(const unsigned char*, std::uint32_t slot, int at) {
    const std::uint32_t row = slot + static_cast<std::uint32_t>(lane_ % 16 * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t b[4];
      ldmatrix_x4(b, token_ + static_cast<std::uint32_t>(at * 128 + 64 * half));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t a[4];
        const int piece = (4 * half + 2 * i + lane_ / 16) ^ lane_ % 8;
        ldmatrix_x4(a, row + static_cast<std::uint32_t>(16 * piece));
        mma_16816(T{}, sums_[i], a, b[2 * i], b[2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ void value(int, float (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums_[0][i] + sums_[1][i];
  }
  __device__ __forceinline__ static void scale(const PairArgs&, int, float (&)[4]) {}

 private:
  static constexpr int tile_bytes = 128 * 64 * 2;
  const char* from_;
  int lane_;
  std::uint32_t token_ = 0;
  float sums_[2][4] = {};
#endif
};

// Where parts of k do not fit, all of k a warp: a first product, which waits for ids, has longer
// ones, or goes in rounds.
template <template <int> class Stream>
bool launch_stream_16(const Gpu& gpu, const PairArgs& args) {
  const bool waits = !args.early;
  const PairLimits parts{
      .least = 2, .most = 24, .longest = 16, .longest_of_more = waits && args.tokens > 1 ? 32 : 24};
  const PairLimits whole_k{.least = 1,
                           .most = 24,
                           .longest = 16,
                           .most_parts = 1,
                           .longest_of_more = waits ? 32 : 16,
                           .in_rounds = true};
  return launch_pair_stream<Stream, 5, 3>(gpu, args, parts) ||
         launch_pair_stream<Stream, 5, 3>(gpu, args, whole_k);
}

}  // namespace

}  // namespace shunt::cuda_engine
