// What a lane of a warp does with a tile of packed weights: from the tile's bytes to the registers
// of A fragments and to the scales of sums. The kernels run it on shared memory, the tests on the
// host.
#pragma once

#include <cstring>
#include <type_traits>

#include "gemm/fragment_codes.hpp"

// Products here are offsets in a tile of 16 KB.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace shunt::cuda_engine {

template <int words>
SHUNT_BOTH inline void load_words(const unsigned char* from, std::uint32_t (&to)[words]) {
#ifdef __CUDA_ARCH__
  if constexpr (words == 8) {
    const uint4 a = *reinterpret_cast<const uint4*>(from);
    const uint4 b = *reinterpret_cast<const uint4*>(from + 16);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
  } else if constexpr (words == 4) {
    const uint4 a = *reinterpret_cast<const uint4*>(from);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  } else if constexpr (words == 2) {
    const uint2 a = *reinterpret_cast<const uint2*>(from);
    to[0] = a.x, to[1] = a.y;
  } else {
    to[0] = *reinterpret_cast<const std::uint32_t*>(from);
  }
#else
  std::memcpy(to, from, 4 * words);
#endif
}

SHUNT_BOTH inline std::uint32_t load_half(const unsigned char* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const std::uint16_t*>(from);
#else
  std::uint16_t half = 0;
  std::memcpy(&half, from, sizeof half);
  return half;
#endif
}

// Where a lane finds dense3's pairs of numbers: 32 copies of each of 512 words beside each other in
// shared memory, of which a lane takes its own, so that no two meet in one bank. On the host it is
// worked out. Of other codes nothing.
template <Codes codes, bool bf16>
struct Book {
  static constexpr int bytes = 0;
};
template <bool bf16>
struct Book<Codes::dense3, bf16> {
  static constexpr int copies = 32;
  static constexpr int bytes = 512 * 4 * copies;
  static constexpr int shift = 7;  // of 4 * copies bytes
#ifdef __CUDA_ARCH__
  std::uint32_t at = 0, own = 0;  // where it begins, and the lane's own word of each pair's
  __device__ __forceinline__ std::uint32_t word(std::uint32_t indices, int bit) const {
    const std::uint32_t index = bit < shift ? indices << (shift - bit) : indices >> (bit - shift);
    std::uint32_t pair;  // not volatile: a book is written once
    asm("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at + ((index & 511U << shift) | own)));
    return pair;
  }
#else
  static std::uint32_t word(std::uint32_t indices, int bit) {
    return book_word<bf16>([](std::uint32_t window) { return dense3_numbers[window]; },
                           indices >> bit & 511);
  }
#endif
};

// 16 rows (`block`) of a tile.
template <Codes codes_, int groups_, bool bf16_>
struct Lane {
  static constexpr Codes codes = codes_;
  static constexpr int groups = groups_;
  static constexpr bool bf16 = bf16_;
  static constexpr bool sparse = codes == Codes::sparse;
  static constexpr TileParts parts = tile_parts(codes, groups);
  static constexpr int pairs = pairs_of(codes);
  // Sums may be scaled apart, of so many fragments. Where weights are decoded once for many rows,
  // all but fp8_block's take their scales before, rounded.
  static constexpr bool scaled_sums =
      codes == Codes::int4 || codes == Codes::fp8_block || codes == Codes::dense3;
  static constexpr int scaled_fragments = codes == Codes::int4     ? 8 / (groups > 0 ? groups : 1)
                                          : codes == Codes::dense3 ? 2
                                                                   : 8;
  static constexpr int scale_words = codes == Codes::nvfp4 || sparse       ? 4
                                     : mx(codes) || codes == Codes::dense3 ? 2
                                     : codes == Codes::int4                ? groups
                                     : codes == Codes::fp8_block           ? 2
                                                                           : 1;
  using Book = cuda_engine::Book<codes, bf16>;
  Book book;
  std::uint32_t scales[scale_words];
  // Of int4: zero points, nibbles of rows q then q + 8, the even ones' bytes and the odd ones'.
  std::uint32_t zeros[groups == 8 ? 2 : 1][2];

  SHUNT_BOTH void load_scales(const unsigned char* tile, int block, int lane) {
    const unsigned char* const from = tile + parts.scales;
    if constexpr (codes == Codes::fp8_block) {
      load_words<2>(from, scales);
    } else if constexpr (codes == Codes::nvfp4 || sparse || mx(codes) || codes == Codes::int4 ||
                         codes == Codes::dense3) {
      load_words<scale_words>(from + scales_at(block, lane / 4, 2 * scale_words), scales);
    }
    if constexpr (codes == Codes::int4) {
      const unsigned char* const at = tile + parts.zeros + (block * 8 + lane / 4) * groups;
      std::uint32_t nibbles[groups == 8 ? 2 : 1];
      if constexpr (groups >= 4) {
        load_words<groups / 4>(at, nibbles);
      } else {
        nibbles[0] = groups == 2 ? at[0] | static_cast<std::uint32_t>(at[1]) << 8 : at[0];
      }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < (groups == 8 ? 2 : 1); ++i) {
        zeros[i][0] = nibbles[i] & 0x0f0f0f0fU;
        zeros[i][1] = nibbles[i] >> 4 & 0x0f0f0f0fU;
      }
    }
  }

  // Scale `group` of int4, dense3 or fp8_block, of row q or q + 8.
  SHUNT_BOTH float scale(int group, int upper) const {
    if constexpr (codes == Codes::fp8_block) {
      return float_of(scales[upper]);
    } else if constexpr (codes == Codes::dense3) {
      const std::uint32_t e5m3 = scales[upper] >> (8 * group) & 0xff;
      return float_of(e5m3 << 20) * (bf16 ? 0x1p117F : 0x1p112F);
    } else {
      const int half = upper * groups + group;
      return f16_value(scales[half / 2] >> (16 * (half % 2)) & 0xffff);
    }
  }

  // A lane's part of the codes of fragments 2 pair and 2 pair + 1 of the block.
  // dense3: the codes before, its word and its half.
  static constexpr int code_words = codes == Codes::dense3 ? 3 : eight_bits(codes) ? 4 : 2;
  SHUNT_BOTH static void load_codes(const unsigned char* tile, int block, int pair, int lane,
                                    std::uint32_t (&w)[code_words]) {
    if constexpr (codes == Codes::dense3) {
      std::uint32_t one[1];
      load_words<1>(tile + codes_at(codes, block, pair, dense3_before(lane)), one);
      w[0] = dense3_codes_before(one[0], lane);
      load_words<1>(tile + codes_at(codes, block, pair, lane), one);
      w[1] = one[0];
      w[2] = load_half(tile + dense3_half_at(block, pair, lane));
    } else {
      load_words<code_words>(tile + codes_at(codes, block, pair, lane), w);
    }
  }

  // The fragments, from load_codes(). `rounded`: int4's and dense3's times their scales, rounded.
  template <bool rounded>
  SHUNT_BOTH void decode(const std::uint32_t (&w)[code_words], int pair,
                         std::uint32_t (&to)[8]) const {
    if constexpr (codes == Codes::dense3) {
      look_up(w, to);
      if constexpr (rounded) scale_registers(pair, to);
    } else if constexpr (codes == Codes::int8) {
      decode_int8<bf16>(w[0], w[1], to);
      decode_int8<bf16>(w[2], w[3], to + 4);
    } else if constexpr (codes == Codes::mxfp8) {
      spread_e4m3<bf16>(w[0], w[1], to);
      spread_e4m3<bf16>(w[2], w[3], to + 4);
      scale_registers(pair, to);
    } else if constexpr (eight_bits(codes)) {
      decode_e4m3<bf16>(w[0], w[1], to);
      decode_e4m3<bf16>(w[2], w[3], to + 4);
    } else if constexpr (codes == Codes::int4) {
      std::uint32_t zero[2][2];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int f = 0; f < 2; ++f) {
        const int group = (2 * pair + f) * groups / 8;
        zero[f][0] = zero_point(group);
        zero[f][1] = zero_point(groups + group);
      }
      decode_int4<bf16>(w[0], w[1], zero, to);
      if constexpr (rounded) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int f = 0; f < 2; ++f) {
          const int group = (2 * pair + f) * groups / 8;
          const std::uint32_t low = both<bf16>(scale(group, 0)), high = both<bf16>(scale(group, 1));
          to[4 * f] = times<bf16>(to[4 * f], low);
          to[4 * f + 1] = times<bf16>(to[4 * f + 1], high);
          to[4 * f + 2] = times<bf16>(to[4 * f + 2], low);
          to[4 * f + 3] = times<bf16>(to[4 * f + 3], high);
        }
      }
    } else {
      decode_e2m1<bf16>(w[0], w[1], to);
      scale_registers(pair, to);
    }
  }
  template <bool rounded>
  SHUNT_BOTH void decode(const unsigned char* tile, int block, int pair, int lane,
                         std::uint32_t (&to)[8]) const {
    std::uint32_t w[code_words];
    load_codes(tile, block, pair, lane, w);
    decode<rounded>(w, pair, to);
  }

  // dense3: the fragments before their scales, as soon as there are codes; and with them (`to` may
  // be the same).
  static constexpr bool looks_up = codes == Codes::dense3;
  SHUNT_BOTH void look_up(const std::uint32_t (&w)[code_words], std::uint32_t (&to)[8]) const {
    std::uint32_t indices[3];
    dense3_indices(w[0], w[1], w[2], indices);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) {
      const int field = dense3_field(i);
      to[i] = book.word(indices[field % 3], 3 * field);
    }
  }
  SHUNT_BOTH void round_scaled(const std::uint32_t (&numbers)[8], int pair,
                               std::uint32_t (&to)[8]) const {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) to[i] = times<bf16>(numbers[i], factor(pair, i));
  }

  // Of rows q (low half) and q + 8, 32 of k: for the threads of mma.sp that `half` selects.
  SHUNT_BOTH static std::uint32_t positions(const unsigned char* tile, int block, int half,
                                            int lane) {
    std::uint32_t word[1];
    load_words<1>(tile + parts.positions + positions_at(block, half, lane), word);
    return word[0];
  }

 private:
  SHUNT_BOTH std::uint32_t zero_point(int nibble) const {
    return lifted<bf16>(zeros[nibble / 8][nibble % 2], nibble % 8 / 2);
  }
  SHUNT_BOTH void scale_registers(int pair, std::uint32_t (&to)[8]) const {
    round_scaled(to, pair, to);
  }
  // Of register i of a pair, in both halves; where registers share one, the compiler sees it.
  SHUNT_BOTH std::uint32_t factor(int pair, int i) const {
    const int upper = i % 2;
    if constexpr (mx(codes)) {
      return twice(power_factors<bf16>(scales[upper], pair % 2 == 1), pair >= 2);
    } else if constexpr (codes == Codes::dense3) {
      return twice(dense3_factors<bf16>(scales[upper], pair % 2 == 1), pair >= 2);
    } else {
      const int which = sparse ? (2 * pair + i / 4) * 2 + i % 4 / 2 : 2 * pair + i / 4;
      return twice(e5m3_factors<bf16>(scales[2 * upper + which / 4], which % 2 == 1),
                   which % 4 >= 2);
    }
  }
};

// f(the type of a layout's Lane), of int4 and of 8-bit codes.
template <bool bf16, class F>
void with_int4_lane(const FragmentLayout& layout, const F& f) {
  switch (layout.groups()) {
    case 1:
      return f(std::type_identity<Lane<Codes::int4, 1, bf16>>());
    case 2:
      return f(std::type_identity<Lane<Codes::int4, 2, bf16>>());
    case 4:
      return f(std::type_identity<Lane<Codes::int4, 4, bf16>>());
    default:
      return f(std::type_identity<Lane<Codes::int4, 8, bf16>>());
  }
}
template <bool bf16, class F>
void with_wide_lane(const FragmentLayout& layout, const F& f) {
  switch (layout.codes()) {
    case Codes::int8:
      return f(std::type_identity<Lane<Codes::int8, 0, bf16>>());
    case Codes::fp8:
      return f(std::type_identity<Lane<Codes::fp8, 0, bf16>>());
    case Codes::mxfp8:
      return f(std::type_identity<Lane<Codes::mxfp8, 0, bf16>>());
    default:
      return f(std::type_identity<Lane<Codes::fp8_block, 0, bf16>>());
  }
}

}  // namespace shunt::cuda_engine

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
