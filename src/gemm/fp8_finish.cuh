// The end of a tile of fp8 for many rows: a warp's 16 tokens by 128 rows of weights, scaled,
// biased, activated, and written in f32, 16 bits, or fp8 with a scale for 128 columns.
#pragma once

#include "cuda/fp8.cuh"
#include "gemm/finish.cuh"
#include "gemm/packed_product.hpp"
#include "gemm/store_map.hpp"
#include "gemm/wgmma.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int pitch = 144;  // bytes of a row that is turned

// How a tile ends.
enum class End {
  any,       // as `args` says
  plain16,   // 16 bits, neither bias nor activation, out at multiples of 16 bytes
  places16,  // likewise, to the rows' places (RowPlaces)
  pairs8,    // block scales, SiLU of pairs, no limit or bias, then fp8 at multiples of 16 bytes
  pairs16,   // the same pairs, then 16 bits
};

#if defined(SHUNT_SM_90A)

// Out of line: a copy for each of a thread's elements would compile for minutes.
__device__ __noinline__ float any_activation(const cpu_engine::ActivationRule& rule, float gate,
                                             float up) {
  return activated(rule, gate, up);
}

__device__ __forceinline__ float magnitude(float x) {
  const float size = fabsf(x);
  return size < __int_as_float(0x7f800000) ? size : 0;
}

// Where a warp's 16 tokens by 128 rows of weights end up.
struct Where {
  int group, row, count;  // `row`: of out, the warp's first; `count`: how many of 16 there are
  std::int64_t first;     // of the weights' rows
};

// store_box() in two: several boxes, and one commit, which waits for hundreds of clocks.
__device__ __forceinline__ void put_box(const void* map, std::uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void commit_boxes() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Four 8x8 tiles of 16-bit numbers: lane l gives the address of 16 bytes, line l % 8 of tile l / 8.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// acc[4 j + e]: row lane / 4 + 8 (e / 2), weights' row 8 j + 2 (lane % 4) + e % 2.
class WarpFinish {
 public:
  __device__ __forceinline__ WarpFinish(const PackedArgs& args, unsigned char* turn, int lane)
      : args_(args), f_(args.finish), turn_(turn), lane_(lane), row_(lane / 4), pair_(lane % 4) {}

  // The scales of rows and columns, where they are the format's.
  __device__ __forceinline__ void scale(float (&acc)[64], const Where& at) const {
    if (args_.block_scales) return;
    const float* const columns = reinterpret_cast<const float*>(
        args_.tiles + at.group * args_.group_bytes + args_.scales_at + at.first * 4);
    const std::int64_t last = args_.walk.rows - 1;
    const auto row = [&](int r) {
      return args_.row_scales[min(std::int64_t{at.row} + row_ + r, last) * args_.row_scale_stride];
    };
    scale(acc, {row(0), row(8)}, columns);
  }
  // The same from shared memory: `rows`, the warp's, and `columns`.
  __device__ __forceinline__ void scale(float (&acc)[64], const float* rows,
                                        const float* columns) const {
    scale(acc, {rows[row_], rows[row_ + 8]}, columns);
  }

  // The bias and the activation, in place: of pairs the first 32 numbers, acc[4 j + e] of column
  // 8 j + 2 (lane % 4) + e % 2 of the pairs.
  template <End end>
  __device__ __forceinline__ void activate(float (&acc)[64], const Where& at) const {
    if (end == End::any && f_.bias != nullptr) {
      const std::int64_t last = f_.out_columns - 1, first = f_.paired ? at.first / 2 : at.first;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const std::int64_t column = first + (f_.paired ? j / 2 * 8 : j * 8) + 2 * pair_;
        const std::int64_t side = f_.paired && j % 2 == 1 ? f_.out_columns : 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float bias = bias_of(f_, at.group, side + min(column + e, last));
          acc[4 * j + e] = __fadd_rn(acc[4 * j + e], bias);
          acc[4 * j + 2 + e] = __fadd_rn(acc[4 * j + 2 + e], bias);
        }
      }
    }
    constexpr bool pairs = end == End::pairs8 || end == End::pairs16;
    if (pairs || f_.paired) {
      if (pairs || (f_.plain && is_unlimited(f_.rule))) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int gate = i / 4 * 8 + i % 4;
          acc[i] = unlimited_silu(f_.rule, acc[gate], acc[gate + 4]);
        }
      } else if (f_.plain) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int gate = i / 4 * 8 + i % 4;
          acc[i] = fast_silu(f_.rule, acc[gate], acc[gate + 4]);
        }
      } else if (end == End::any && f_.situ) {  // no other end has it
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int gate = i / 4 * 8 + i % 4;
          acc[i] = fast_situ(f_.rule, acc[gate], acc[gate + 4]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int gate = i / 4 * 8 + i % 4;
          acc[i] = any_activation(f_.rule, acc[gate], acc[gate + 4]);
        }
      }
    } else if (f_.activates) {
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = any_activation(f_.rule, 0, acc[i]);
    }
  }

  // `columns` numbers of a row, a multiple of 64, from acc[from].
  template <int columns>
  __device__ __forceinline__ void write(const float (&acc)[64], const Where& at) const {
    const std::int64_t first = f_.paired ? at.first / 2 : at.first;
    if (f_.out_dtype == DType::f32) {
      write_f32<columns>(acc, at, first);
    } else if (f_.out_dtype == DType::bf16) {
      write_16<columns, true>(acc, at, first);
    } else {
      write_16<columns, false>(acc, at, first);
    }
  }

  // Columns 64 h to 64 h + 63 of rows in 16 bits, to a box's 16 lines of 128 bytes, swizzled.
  template <bool bf16>
  __device__ __forceinline__ void put_16(const float (&acc)[64], int h, std::uint32_t lines) const {
    const int line = lane_ % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* const d = acc + 32 * h + 4 * j;
      const std::uint32_t four[4] = {pack<bf16>(d[0], d[1]), pack<bf16>(d[2], d[3]),
                                     pack<bf16>(d[4], d[5]), pack<bf16>(d[6], d[7])};
      const int piece = (j + lane_ / 16) ^ (line % 8);
      stmatrix_x4(lines + static_cast<std::uint32_t>(line * 128 + 16 * piece), four);
    }
  }
  // 128 columns of rows in 16 bits to the rows' places, each row times its weight. A box would have
  // to be copied out by the one warp that is free, which held the slot too long.
  template <bool bf16>
  __device__ __forceinline__ void write_places(const float (&acc)[64], const Where& at) const {
    const int last = at.count - 1, line = lane_ / 8, v = lane_ % 8;
    std::int64_t to[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      to[n] = place_of(f_, std::int64_t{at.row} + min(line + 4 * n, last)).row * f_.out_stride;
    }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      by[r] = place_of(f_, std::int64_t{at.row} + min(row_ + 8 * r, last)).weight;
    }
    const std::uint32_t turned =
        shared_address(turn_) + static_cast<std::uint32_t>(lane_ % 16 * pitch + lane_ / 16 * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float* const d = acc + 32 * h + 4 * j;
        std::uint32_t four[4] = {pack<bf16>(d[0], d[1]), pack<bf16>(d[2], d[3]),
                                 pack<bf16>(d[4], d[5]), pack<bf16>(d[6], d[7])};
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = weighed<bf16>(four[i], by[i % 2]);
        stmatrix_x4(turned + static_cast<std::uint32_t>(16 * j), four);
      }
      __syncwarp();
      const std::int64_t column = at.first + 64 * h + 8 * v;
      const unsigned char* const from = turn_ + line * pitch + 16 * v;
      auto* const out = static_cast<std::uint16_t*>(f_.out) + column;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (line + 4 * n <= last && column < f_.out_columns) {
          *reinterpret_cast<uint4*>(out + to[n]) =
              *reinterpret_cast<const uint4*>(from + 4 * n * pitch);
        }
      }
      __syncwarp();
    }
  }
  // 64 columns of pairs in 16 bits, in pieces of 16 bytes.
  template <bool bf16>
  __device__ __forceinline__ void write_pairs16(const float (&acc)[64], const Where& at) const {
    const int line = lane_ / 8, v = lane_ % 8;
    const std::uint32_t turned =
        shared_address(turn_) + static_cast<std::uint32_t>(lane_ % 16 * pitch + lane_ / 16 * 16);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* const d = acc + 4 * j;
      const std::uint32_t four[4] = {pack<bf16>(d[0], d[1]), pack<bf16>(d[2], d[3]),
                                     pack<bf16>(d[4], d[5]), pack<bf16>(d[6], d[7])};
      stmatrix_x4(turned + static_cast<std::uint32_t>(16 * j), four);
    }
    __syncwarp();
    const std::int64_t column = at.first / 2 + 8 * v;
    const unsigned char* const from = turn_ + line * pitch + 16 * v;
    auto* to = static_cast<std::uint16_t*>(f_.out) + (std::int64_t{at.row} + line) * f_.out_stride +
               column;
    const int lines = column < f_.out_columns ? at.count - line : 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (4 * n < lines) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + 4 * n * pitch);
      }
      to += 4 * f_.out_stride;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void scales_of(const Where& at, const float (&most)[2],
                                            bool with_scales, float (&factor)[2]) const {
    const std::int64_t first = f_.paired ? at.first / 2 : at.first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const DeviceFp8Scale scale = device_fp8_scale(most[r], 0, false);
      factor[r] = scale.factor;
      if (with_scales && pair_ == 0 && row_ + 8 * r < at.count && first < f_.out_columns) {
        args_.out_scales[(std::int64_t{at.row} + row_ + 8 * r) * args_.out_scale_stride +
                         first / 128 * args_.out_scale_step] = scale.scale;
      }
    }
  }

  // Results in 16 bits, as they are before they become fp8; the largest magnitudes of the two rows.
  template <int columns>
  __device__ __forceinline__ void round(float (&acc)[64], DType between, const Where& at,
                                        float (&most)[2]) const {
    // One question for all: else there is a branch for each of them.
    if (between == DType::bf16) {
#pragma unroll
      for (int i = 0; i < columns / 2; i += 2) {
        const std::uint32_t two = pack<true>(acc[i], acc[i + 1]);
        acc[i] = __uint_as_float(two << 16);
        acc[i + 1] = __uint_as_float(two & 0xffff0000u);
      }
    } else if (between == DType::f16) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) acc[i] = f16_to_f32(f32_to_f16(acc[i]));
    }
    const std::int64_t first = f_.paired ? at.first / 2 : at.first;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(acc[i]));  // NaN is no maximum
    }
    if (__builtin_expect(first + columns > f_.out_columns ||
                             !(fmaxf(most[0], most[1]) < __int_as_float(0x7f800000)),
                         0)) {
      most[0] = most[1] = 0;  // without infinities, and what is no column
      const auto left = static_cast<int>(f_.out_columns - first) - 2 * pair_;
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) {
        const bool inside = i / 4 * 8 + i % 2 < left;
        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], inside ? magnitude(acc[i]) : 0);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
    }
  }
  // Pairs of `halves` times 64 columns, all of them at multiples of 16 bytes. Two tiles of 8
  // columns take turns in shared memory, two columns each, and are put right when they are read.
  template <int halves>
  __device__ __forceinline__ void write_pairs8(const float (&acc)[2][64], const Where& at,
                                               const float (&most)[2], bool with_scales) const {
    float factor[2];
    scales_of(at, most, with_scales, factor);
    const std::uint32_t line =
        shared_address(turn_) + static_cast<std::uint32_t>(lane_ % 16 * pitch + lane_ / 16 * 16);
#pragma unroll
    for (int n = 0; n < 2 * halves; ++n) {
      std::uint32_t four[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const x = acc[n / 2] + 16 * (n % 2) + 8 * (q / 2) + 2 * (q % 2);
        const float by = factor[q % 2];
        four[q] = to_e4m3x2(__fmul_rn(x[0], by), __fmul_rn(x[1], by)) |
                  to_e4m3x2(__fmul_rn(x[4], by), __fmul_rn(x[5], by)) << 16;
      }
      stmatrix_x4(line + static_cast<std::uint32_t>(32 * n), four);
    }
    __syncwarp();
    constexpr int vectors = 4 * halves, together = 32 / vectors;  // of a line, lines
    const int first_line = lane_ / vectors, v = lane_ % vectors;
    const std::int64_t column = at.first / 2 + 16 * v;
    const unsigned char* const from = turn_ + first_line * pitch + 16 * v;
    char* to =
        static_cast<char*>(f_.out) + (std::int64_t{at.row} + first_line) * f_.out_stride + column;
    const int lines = column < f_.out_columns ? at.count - first_line : 0;
#pragma unroll
    for (int n = 0; n < 16 / together; ++n) {
      const uint4 x = *reinterpret_cast<const uint4*>(from + n * together * pitch);
      if (n * together < lines) {
        *reinterpret_cast<uint4*>(to) =
            make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                       __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632));
      }
      to += together * f_.out_stride;
    }
    __syncwarp();  // else the compiler keeps operands of the next tile in ordinary registers
  }
  template <int columns>
  __device__ __forceinline__ void write_fp8(const float (&acc)[64], const Where& at,
                                            const float (&most)[2], bool with_scales) const {
    const std::int64_t first = f_.paired ? at.first / 2 : at.first;
    float factor[2];
    scales_of(at, most, with_scales, factor);
#pragma unroll
    for (int i = 0; i < columns / 2; i += 2) {
      const int r = i / 2 % 2;
      *reinterpret_cast<std::uint16_t*>(turn_ + (row_ + 8 * r) * pitch + i / 4 * 8 + 2 * pair_) =
          static_cast<std::uint16_t>(
              to_e4m3x2(__fmul_rn(acc[i], factor[r]), __fmul_rn(acc[i + 1], factor[r])));
    }
    store_lines<columns, 1>(at, first);
  }

 private:
  // By the scales of this thread's two rows.
  __device__ __forceinline__ void scale(float (&acc)[64], const float (&row)[2],
                                        const float* columns) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 column = *reinterpret_cast<const float2*>(columns + 8 * j + 2 * pair_);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc[4 * j + e] =
            __fmul_rn(acc[4 * j + e], __fmul_rn(row[e / 2], e % 2 == 0 ? column.x : column.y));
      }
    }
  }
  template <int columns>
  __device__ __forceinline__ void write_f32(const float (&acc)[64], const Where& at,
                                            std::int64_t first) const {
    auto* const out = static_cast<float*>(f_.out);
    const bool pairs = f_.out_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(out) % 8 == 0;
#pragma unroll
    for (int i = 0; i < columns / 2; i += 2) {
      const int r = row_ + 8 * (i / 2 % 2);
      const std::int64_t column = first + i / 4 * 8 + 2 * pair_;
      if (r >= at.count || column >= f_.out_columns) continue;
      float* const to = out + (std::int64_t{at.row} + r) * f_.out_stride + column;
      if (pairs && column + 1 < f_.out_columns) {
        *reinterpret_cast<float2*>(to) = make_float2(acc[i], acc[i + 1]);
      } else {
        to[0] = acc[i];
        if (column + 1 < f_.out_columns) to[1] = acc[i + 1];
      }
    }
  }
  template <int columns, bool bf16>
  __device__ __forceinline__ void write_16(const float (&acc)[64], const Where& at,
                                           std::int64_t first) const {
#pragma unroll
    for (int c = 0; c < columns / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        *reinterpret_cast<std::uint32_t*>(turn_ + (row_ + 8 * (i / 2 % 2)) * pitch + i / 4 * 16 +
                                          4 * pair_) =
            pack<bf16>(acc[32 * c + i], acc[32 * c + i + 1]);
      }
      store_lines<64, 2>(at, first + 64 * c);
    }
  }
  // What the warp has left in its 16 lines, of `columns` elements of `width` bytes.
  template <int columns, int width>
  __device__ __forceinline__ void store_lines(const Where& at, std::int64_t first) const {
    constexpr int each = 16 / width, vectors = columns / each;  // of 16 bytes
    __syncwarp();
    char* const out = static_cast<char*>(f_.out);
    const bool aligned = f_.out_stride * width % 16 == 0 && first * width % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
#pragma unroll
    for (int n = 0; n < vectors / 2; ++n) {
      const int line = (lane_ + 32 * n) / vectors, v = (lane_ + 32 * n) % vectors;
      const std::int64_t column = first + v * each, left = f_.out_columns - column;
      if (line >= at.count || left <= 0) continue;
      const unsigned char* const from = turn_ + line * pitch + 16 * v;
      char* const to = out + ((std::int64_t{at.row} + line) * f_.out_stride + column) * width;
      if (aligned && left >= each) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int b = 0; b < min(left, std::int64_t{each}) * width; ++b) {
          to[b] = static_cast<char>(from[b]);
        }
      }
    }
    __syncwarp();
  }

  const PackedArgs& args_;
  const Finish& f_;
  unsigned char* turn_;
  int lane_, row_, pair_;
};

#endif

}  // namespace

}  // namespace shunt::cuda_engine
