// A unit of fused_few.cuh: how its weights and rows are copied, what a warp multiplies of a step,
// and its end.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/fragment_rows.cuh"
#include "gemm/fragment_warp.cuh"
#include "gemm/fused_barriers.cuh"

namespace shunt::cuda_engine {

namespace {

// Names weights of 16 bits, as Lane does packed ones.
template <bool bf16_>
struct PlainWeights {
  static constexpr bool bf16 = bf16_;
};

#if defined(SHUNT_SM_90A)

// Weights as RowLayout's tiles: 128 rows by 64 of k.
template <bool bf16_>
struct PlainUnits {
  static constexpr bool bf16 = bf16_;
  static constexpr bool factors = false;
  float sum[2][4];

  // A unit's weights, as one thread copies them step by step.
  class Source {
   public:
    __device__ __forceinline__ Source(const FusedPart& part, const FusedUnit& unit)
        : from_(part.of.tiles + unit.group * part.of.group_bytes +
                std::int64_t{unit.first / 128} * part.tiles_k * 16384 + unit.first % 128 * 128),
          bytes_(part.unit_rows * 128),
          tiles_k_(part.tiles_k) {}
    __device__ __forceinline__ void copy(int step, std::uint32_t to, std::uint32_t full,
                                         const BulkCopies& bulk) const {
      const char* const from = from_ + std::int64_t{step} * 32768;
      if (2 * step + 2 > tiles_k_) {
        bulk.expect(full, bytes_);
        bulk(to, from, bytes_, full);
        return;
      }
      bulk.expect(full, 2 * bytes_);
      bulk(to, from, bytes_, full);
      bulk(to + static_cast<std::uint32_t>(bytes_), from + 16384, bytes_, full);
    }

   private:
    const char* from_;
    int bytes_, tiles_k_;
  };
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& set : sum) set[0] = set[1] = set[2] = set[3] = 0;
  }
  __device__ __forceinline__ float of(int e) const { return sum[0][e] + sum[1][e]; }
  __device__ __forceinline__ void add(const FusedPart& part, int step, const unsigned char* weights,
                                      std::uint32_t tokens, int block, int lane) {
    const int halves = min(2, part.tiles_k - 2 * step);
    // Lanes 0-15 address the first 8 of k of the block's rows, the others the next 8.
    const int row = lane % 16;
    const std::uint32_t line =
        shared_address(weights) + static_cast<std::uint32_t>(block * 2048 + row * 128);
    const auto half_of = [&](int half) {
      const std::uint32_t at = line + static_cast<std::uint32_t>(half * part.unit_rows * 128);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        std::uint32_t b[4];
        ldmatrix_x4(b, tokens + static_cast<std::uint32_t>(128 * half + 64 * pair));
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          std::uint32_t a[4];
          const int piece = 4 * pair + 2 * f + lane / 16;
          ldmatrix_x4(a, at + static_cast<std::uint32_t>((piece ^ row % 8) * 16));
          mma_of<bf16>(sum[f], a, b[2 * f], b[2 * f + 1]);
        }
      }
    };
    half_of(0);
    if (halves == 2) half_of(1);
  }
};

template <class L_>
struct FusedTokens {
  using L = L_;
  static constexpr int tokens = FusedShape::tokens;
  static __device__ __forceinline__ std::uint32_t words_at(std::uint32_t first, int, int part) {
    return first + static_cast<std::uint32_t>(64 * part);
  }
};

// Weights as FragmentLayout's tiles.
template <class L>
struct FragmentUnits {
  static constexpr bool bf16 = L::bf16;
  static constexpr bool factors = true;
  WarpSums<FusedTokens<L>> sums;

  static constexpr TileParts parts = L::parts;
  // Of 16 rows.
  static constexpr int code_bytes = (parts.positions > 0 ? parts.positions : parts.scales) / 8;
  static constexpr int position_bytes = (parts.scales - 8 * code_bytes) / 8;
  static constexpr bool scales_whole = L::codes == Codes::fp8_block;
  static constexpr int scale_bytes = (parts.zeros - parts.scales) / (scales_whole ? 1 : 8);
  static constexpr int zero_bytes = (parts.bytes - parts.zeros) / 8;

  class Source {
   public:
    __device__ __forceinline__ Source(const FusedPart& part, const FusedUnit& unit)
        : from_(part.of.tiles + unit.group * part.of.group_bytes +
                std::int64_t{unit.first / 128} * part.of.steps * parts.bytes),
          blocks_(part.unit_rows / 16),
          block_(unit.first % 128 / 16) {}
    __device__ __forceinline__ void copy(int step, std::uint32_t to, std::uint32_t full,
                                         const BulkCopies& bulk) const {
      const char* const from = from_ + std::int64_t{step} * parts.bytes;
      if (blocks_ == 8) {
        bulk.expect(full, parts.bytes);
        bulk(to, from, parts.bytes, full);
        return;
      }
      const auto piece = [&](int at, int source, int bytes) {
        bulk(to + static_cast<std::uint32_t>(at), from + source, bytes, full);
      };
      const int scales_at = blocks_ * (code_bytes + position_bytes);
      bulk.expect(full, scales_at + (scales_whole ? scale_bytes : blocks_ * scale_bytes) +
                            blocks_ * zero_bytes);
      piece(0, block_ * code_bytes, blocks_ * code_bytes);
      if constexpr (position_bytes > 0) {
        piece(blocks_ * code_bytes, parts.positions + block_ * position_bytes,
              blocks_ * position_bytes);
      }
      if constexpr (scales_whole) {
        piece(scales_at, parts.scales, scale_bytes);
      } else if constexpr (scale_bytes > 0) {
        piece(scales_at, parts.scales + block_ * scale_bytes, blocks_ * scale_bytes);
      }
      if constexpr (zero_bytes > 0) {
        piece(scales_at + parts.zeros - parts.scales, parts.zeros + block_ * zero_bytes,
              blocks_ * zero_bytes);
      }
    }

   private:
    const char* from_;
    int blocks_, block_;
  };
  __device__ __forceinline__ void clear() { sums.clear(); }
  __device__ __forceinline__ float of(int e) const { return sums.of(0, e); }
  __device__ __forceinline__ void add(const FusedPart& part, int, const unsigned char* weights,
                                      std::uint32_t tokens, int block, int lane) {
    const int blocks = part.unit_rows / 16;
    const unsigned char* const scales = weights + blocks * (code_bytes + position_bytes);
    sums.add(weights, weights + blocks * code_bytes - parts.positions, scales - parts.scales,
             tokens, block, lane);
  }
};

template <class W>
struct UnitsOf {
  using Units = FragmentUnits<W>;
};
template <bool bf16>
struct UnitsOf<PlainWeights<bf16>> {
  using Units = PlainUnits<bf16>;
};

// A unit's rows, as one warp copies them step by step: a bulk copy a row where they are as they
// must be and there are 128 of k, else through registers. Rows behind the count stay what they
// were: nobody reads their sums.
template <bool bf16>
class UnitRows {
 public:
  __device__ __forceinline__ UnitRows(const FragmentArgs& args, const FusedUnit& unit, int lane)
      : args_(args), unit_(unit), lane_(lane) {
    int source = 0;
    if (lane < unit.count) source = source_of(args, std::int64_t{unit.row} + lane);
    from_ = std::int64_t{max(source, 0)} * args.source_row_bytes;
    direct_ = args.direct && __all_sync(0xffffffffu, source >= 0);
  }
  __device__ __forceinline__ void copy(int step, std::uint32_t to, std::uint32_t full,
                                       const BulkCopies& bulk) const {
    if (direct_ && std::int64_t{step} * 128 + 128 <= args_.k) {
      if (lane_ == 0) {
        bulk.expect(full, 256 * unit_.count);
      } else {
        arrive_at(full);
      }
#pragma unroll 1
      for (int r = 0; r < unit_.count; ++r) {
        const std::int64_t from = __shfl_sync(0xffffffffu, from_, r);
        if (lane_ == 0) {
          bulk.rows(to + static_cast<std::uint32_t>(r * fused_pitch),
                    args_.source + from + 256 * step, 256, full);
        }
      }
      return;
    }
    const std::int64_t k = std::int64_t{step} * 128 + lane_ % 16 * 8;
#pragma unroll 1
    for (int r = lane_ / 16; r < unit_.count; r += 2) {
      const std::int64_t row = std::int64_t{unit_.row} + r;
      const int source = source_of(args_, row);
      const float scale = args_.row_scale != nullptr ? __ldg(args_.row_scale + row) : 1.0f;
      store_numbers<bf16>(args_, to + static_cast<std::uint32_t>(r * fused_pitch + lane_ % 16 * 16),
                          args_.source + max(source, 0) * args_.source_row_bytes, k,
                          source < 0 ? 0 : args_.k - k, scale);
    }
    fence_for_async();  // bulk copies come to the same place later
    arrive_at(full);
  }

 private:
  const FragmentArgs& args_;
  const FusedUnit& unit_;
  int lane_;
  std::int64_t from_;  // of this lane's row
  bool direct_;
};

// The end of a unit, by one warp: sums of teams in their order, times the row's factor, then as
// finish_sums(). Factors and biases come from memory while the sums are not there yet.
template <bool factors>
class UnitFinish {
 public:
  __device__ __forceinline__ UnitFinish(const FusedPart& part, const FusedUnit& unit, int lane)
      : part_(part), f_(part.of.finish), unit_(unit), lane_(lane) {
    wide_ = f_.paired ? part.unit_rows / 2 : part.unit_rows;
    first_column_ = f_.paired ? unit.first / 2 : unit.first;
    const auto* const from =
        reinterpret_cast<const float*>(part.of.tiles + unit.group * part.of.group_bytes +
                                       part.of.factors_at) +
        unit.first;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int o = lane + 32 * j;
      factor_[j][0] = factor_[j][1] = 1;
      bias_[j][0] = bias_[j][1] = 0;
      if (o >= wide_ || first_column_ + o >= f_.out_columns) continue;
      if constexpr (factors) {
        factor_[j][0] = __ldg(from + row_of(o));
        if (f_.paired) factor_[j][1] = __ldg(from + row_of(o) + 8);
      }
      if (f_.bias != nullptr) {
        bias_[j][0] = bias_of(f_, unit.group, first_column_ + o);
        if (f_.paired) {
          bias_[j][1] = bias_of(f_, unit.group, f_.out_columns + first_column_ + o);
        }
      }
    }
  }

  __device__ __forceinline__ void write(const float* sums) const {
#pragma unroll 1
    for (int j = 0; 32 * j < wide_; ++j) {
      const int o = lane_ + 32 * j;
      const std::int64_t column = first_column_ + o;
      if (o >= wide_ || column >= f_.out_columns) continue;
      float factor[2] = {}, bias[2] = {};  // an index that is not known has no register
#pragma unroll
      for (int i = 0; i < each; ++i) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          if (i == j) factor[side] = factor_[i][side], bias[side] = bias_[i][side];
        }
      }
      const int row = row_of(o);
#pragma unroll 1
      for (int t = 0; t < unit_.count; ++t) {
        float value = sum(sums, t, row, factor[0]);
        if (f_.bias != nullptr) value = __fadd_rn(value, bias[0]);
        if (f_.paired) {
          float up = sum(sums, t, row + 8, factor[1]);
          if (f_.bias != nullptr) up = __fadd_rn(up, bias[1]);
          value = f_.plain ? fast_silu(f_.rule, value, up) : activated(f_.rule, value, up);
        } else if (f_.activates) {
          value = activated(f_.rule, 0.0f, value);
        }
        store_element(f_.out, f_.out_dtype, (std::int64_t{unit_.row} + t) * f_.out_stride + column,
                      value);
      }
    }
  }

 private:
  static constexpr int each = 4;  // results of a token at most, of a lane

  __device__ __forceinline__ int row_of(int o) const { return f_.paired ? o / 8 * 16 + o % 8 : o; }
  __device__ __forceinline__ float sum(const float* sums, int token, int row, float factor) const {
    const int pitch = part_.unit_rows + 4, teams = 256 / part_.unit_rows;
    float of_team[8];
#pragma unroll
    for (int team = 0; team < 8; ++team) {
      of_team[team] = team < teams ? sums[(team * fused_tokens + token) * pitch + row] : 0;
    }
    float all = of_team[0];
#pragma unroll
    for (int team = 1; team < 8; ++team) {
      if (team < teams) all += of_team[team];
    }
    if constexpr (factors) all = __fmul_rn(__fmul_rn(all, part_.of.unscale), factor);
    return all;
  }

  const FusedPart& part_;
  const Finish& f_;
  const FusedUnit& unit_;
  int lane_, wide_;
  std::int64_t first_column_;
  float factor_[each][2], bias_[each][2];
};

#endif

}  // namespace

}  // namespace shunt::cuda_engine
