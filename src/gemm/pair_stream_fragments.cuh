// Few pairs of packed weights (pair_stream.cuh): tiles of fragment_layout.hpp, decoded in
// registers; rows of 16 bits as they are. A slot is what 16 rows have of a tile: codes, positions,
// scales and zero points as they lie, one behind the other.
#pragma once

#include "gemm/fragment_book.cuh"
#include "gemm/fragment_warp.cuh"
#include "gemm/pair_stream.cuh"

namespace shunt::cuda_engine {

namespace {

template <class L_, int depth_, int blocks_>
class StreamFragments {
 public:
  using L = L_;
  static constexpr bool bf16 = L::bf16, rounds = false;
  static constexpr int tokens = 8, blocks = blocks_, rows = 16 * blocks, depth = depth_;
  // Codes of 8 bits lost by it (docs/notes/cuda-layer.md, "A warp brings its own rows").
  static constexpr bool loads_only_row = !eight_bits(L::codes);
  static constexpr int step_numbers = 128;  // along k
  static constexpr int book_bytes = L::Book::bytes;
  static constexpr int code_bytes = blocks * L::pairs * 32 * lane_bytes(L::codes);
  static constexpr int position_bytes = L::sparse ? 256 * blocks : 0;
  static constexpr bool of_tile = L::codes == Codes::fp8_block;  // scales
  static constexpr int scale_bytes = of_tile ? 16
                                     : L::codes == Codes::int8 || L::codes == Codes::fp8
                                         ? 0
                                         : 32 * blocks * L::scale_words;
  // Zero points are as far behind the scales as they are in a tile.
  static constexpr int zeros_at = L::parts.zeros - L::parts.scales,
                       zero_bytes = 8 * blocks * L::groups;
  static constexpr int slot_bytes =
      (code_bytes + position_bytes + (L::groups > 0 ? zeros_at + zero_bytes : scale_bytes) + 15) /
      16 * 16;
  static constexpr int pitch(int steps) { return steps * 256 + 16; }

#if defined(SHUNT_SM_90A)
  // As WarpSums wants them.
  static __device__ __forceinline__ std::uint32_t words_at(std::uint32_t first, int, int part) {
    return first + static_cast<std::uint32_t>(64 * part);
  }
  __device__ __forceinline__ void write_book(unsigned char* to, int thread, int threads) {
    sums_.book = book_at<L>(to, lane_);
    cuda_engine::write_book<L>(to, thread, threads);
  }
  struct Ahead {};
  // From step `begin` of rows `first` .. of the group's weights on.
  __device__ __forceinline__ StreamFragments(const PairArgs& args, int group, int first, int begin,
                                             int lane)
      : group_(args.tiles + group * args.group_bytes),
        tile_(group_ + (std::int64_t{first / 128} * args.steps + begin) * L::parts.bytes +
              16 * lane),
        lane_(lane),
        block_(first % 128 / 16) {
    sums_.clear();
  }
  __device__ __forceinline__ void load_factors(const PairArgs& args, int first) {
    const auto* const factors =
        reinterpret_cast<const float*>(group_ + args.scales_at) + first + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 2 * blocks; ++i) factors_[i] = __ldg(factors + 8 * i);
  }
  __device__ __forceinline__ static void stage(const PairArgs& args, const StreamedRows& of,
                                               unsigned char* shared, const Staging& by) {
    stage_as_they_are(args, of, shared_address(shared), step_numbers, by);
  }
  // The next step, to a slot: where the lane's first 16 bytes go.
  __device__ __forceinline__ void copy(std::uint32_t slot) {
    copy_by_lanes<code_bytes>(slot, tile_ + block_ * (code_bytes / blocks), lane_);
    std::uint32_t to = slot + code_bytes;
    if constexpr (L::sparse) {
      copy_by_lanes<position_bytes>(
          to, tile_ + L::parts.positions + block_ * (position_bytes / blocks), lane_);
      to += position_bytes;
    }
    if constexpr (scale_bytes > 0) {
      copy_by_lanes<scale_bytes>(
          to, tile_ + L::parts.scales + (of_tile ? 0 : block_ * (scale_bytes / blocks)), lane_);
    }
    if constexpr (L::groups > 0) {  // 8 to 64 bytes, at multiples of 8
      if (8 * lane_ < zero_bytes) {
        const int back = 8 * lane_;  // eight bytes a lane
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                         to + static_cast<std::uint32_t>(zeros_at - back)),
                     "l"(tile_ + L::parts.zeros + block_ * (zero_bytes / blocks) - back)
                     : "memory");
      }
    }
    tile_ += L::parts.bytes;
  }
  __device__ __forceinline__ void begin(const PairArgs& args, unsigned char* shared, int count,
                                        int lane) {
    tokens_ = shared_address(shared) +
              static_cast<std::uint32_t>(min(lane % 8, count - 1) * args.pitch + lane / 8 * 16);
  }
  __device__ __forceinline__ void multiply(const unsigned char* slot, std::uint32_t, int at) {
    const unsigned char* const positions = slot + code_bytes - L::parts.positions;
    const unsigned char* const scales = slot + code_bytes + position_bytes - L::parts.scales;
    sums_.add(slot, positions, scales, tokens_ + static_cast<std::uint32_t>(at * 256), 0, lane_);
  }
  __device__ __forceinline__ void value(int b, float (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums_.of(0, i, b);
  }
  __device__ __forceinline__ void scale(const PairArgs& args, int b, float (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      d[i] = __fmul_rn(d[i], __fmul_rn(factors_[2 * b + i / 2], args.unscale));
  }

 private:
  const char *group_, *tile_;  // the latter the lane's
  int lane_, block_;
  std::uint32_t tokens_ = 0;
  float factors_[2 * blocks];
  WarpSums<StreamFragments, blocks> sums_;
#endif
};

template <class L, int blocks>
struct OfLane {
  template <int depth>
  using Stream = StreamFragments<L, depth, blocks>;
  static constexpr int bytes = StreamFragments<L, 1, blocks>::slot_bytes;
};

// 9 KB of a warp under way, or 7. Tiles of 32 rows of weights where those of 16 do not fit, each
// with all of k: shared out as well they were slower than the kernels for few rows.
template <class L>
bool launch_fragment_stream(const Gpu& gpu, const PairArgs& args) {
  using One = OfLane<L, 1>;
  using Two = OfLane<L, 2>;
  constexpr int deep = 9 * 1024 / One::bytes, shallow = 7 * 1024 / One::bytes;
  constexpr bool wide = eight_bits(L::codes);
  // Measured: docs/notes/cuda-layer.md, "Fewer warps for one token".
  constexpr int one = wide ? 5 : L::codes == Codes::int4 ? (deep < 5 ? deep : 5) : 0;
  // Of codes of four bits, but of a second product beside others. Likewise, "Longer parts, with
  // even shares and late starts".
  constexpr bool four = !wide && L::codes != Codes::dense3;
  const bool first = args.slots > 0;
  const bool longer = four && args.early && (first || !args.beside);
  // Likewise, "Tiles of 32 rows in every format".
  const int longest_of_early = wide ? 16 : L::codes == Codes::int4 ? 10 : 12;
  // Likewise, "Weights of down behind those of gate_up".
  const int most_late = L::codes == Codes::dense3 ? 0 : L::codes == Codes::int4 ? 16 : 24;
  return launch_pair_stream<One::template Stream, deep, shallow, one>(
             gpu, args,
             {.least = 1,
              .most = 24,
              .longest = wide || longer ? 16 : 10,
              .longest_of_more = four && !args.early ? 32 : 24,
              .longest_of_early = longest_of_early,
              .most_late = most_late,
              .of_one = wide ? 8 : 0}) ||
         launch_pair_stream<Two::template Stream, 9 * 1024 / Two::bytes, 0>(
             gpu, args,
             {.least = 1,
              .most = 16,
              .longest = 16,
              .most_parts = 1,
              .longest_of_early = longest_of_early,
              .most_late = most_late});
}

}  // namespace

}  // namespace shunt::cuda_engine
