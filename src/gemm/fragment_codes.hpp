// From codes to operands of the tensor cores, by the bits: what lanes do on the GPU, and what the
// host does to write and to test it. Everything here runs on both.
//
// e2m1 is exact in bf16 and in f16: its sign and its three other bits moved to where the short
// float has its sign, the two lowest bits of its exponent and the highest of its mantissa (bits 15
// and 8 .. 6 of a half in bf16, 11 .. 9 in f16) are the value times 2^-126 or 2^-14, as a subnormal
// where it is 0.5. One multiplication with a scale brings it back.
//
// Two words of 32 bits have 16 codes: two fragments, eight registers. For bf16 their bits lie so
// that a register is one rotation and one mask away: in either word three registers' bits, rotated
// by 0, 4 and 10 (15, 8, 7, 6; 11, 4, 3, 2; 5, 14, 13, 12 of a half), and half of those of the last
// two registers, at 0, 1, 9, 10: with the second word's shifted left by 2 they lie side by side and
// are 6 and 12 away. 12 instructions of the integer unit, where one code after the other takes 20;
// shifts to the left can be multiplications. For f16 two registers of a word are a shift by 0 or 3
// and a mask away; the other two have their three bits in 5 .. 3 and in 2 .. 0 of a half and their
// signs in 14 and 13, which one multiplication by a sum of two powers of two brings to their places
// at once. 12 instructions of that unit too.
//
// Scales, as a factor in both halves of a register: nvfp4's e4m3 have become e5m3 without sign
// (value 2^(E - 10) (1 + m / 8), E > 0) and stand for 2^119 or 2^7 times that, so that a weight is
// decoded to 2^-7 of what it is, exact in either type. Those of mxfp4 and mxfp8 stand relative to
// the row's largest, whose weights are decoded to 2 and 2^7 times what their codes are worth.
// int4's are f16 in units of a power of two of the row's. dense3's are e5m3 too, of which byte 0 is
// zero (no code of its is). What is left out is in the row's factor or in unscale().
//
// dense3: a number is chosen by its code and the one before, so that three codes say what a
// register holds: one look-up among 512 words (book_word). Of 32 of k a lane has of either of its
// rows four pairs of codes, fields 0 to 3 of row q and 4 to 7 of row q + 8. Its word has the second
// codes of the pairs, three bits a field, in bits 23:0, and in 31:24 the last byte of the first
// codes, of which its half has the others. The codes before the pairs are second codes too: those
// of the lane before, or for the first lane of four those of its last one, a field further; before
// the first of 32 is 0.
#pragma once

#include <bit>
#include <cstdint>

#include "core/convert.hpp"
#include "format/dense3_numbers.hpp"
#include "gemm/fragment_layout.hpp"

// Products here are offsets in a tile of 16 KB.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace shunt::cuda_engine {

// ---- two halves at once -------------------------------------------------------------------------

#ifdef __CUDA_ARCH__
template <bool bf16>
__device__ __forceinline__ std::uint32_t times(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  if constexpr (bf16) {
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else  // plus -0: the product as it is
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000U));
#endif
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
}
template <bool bf16>
__device__ __forceinline__ std::uint32_t minus(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  if constexpr (bf16) {
#if __CUDA_ARCH__ >= 900
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else  // times 1
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80U), "r"(b ^ 0x80008000U));
#endif
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
}
__device__ __forceinline__ std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b,
                                                  std::uint32_t which) {
  return __byte_perm(a, b, which);
}
// A register's low or high half in both: a multiplication reads it so.
__device__ __forceinline__ std::uint32_t twice(std::uint32_t pair, bool high) {
  std::uint32_t same;
  if (high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};\n}" : "=r"(same) : "r"(pair));
  } else {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};\n}" : "=r"(same) : "r"(pair));
  }
  return same;
}
__device__ __forceinline__ std::uint32_t rotated(std::uint32_t word, int left) {
  return __funnelshift_l(word, word, static_cast<unsigned>(left));
}
// Bits of a where `mask` has them, else of b.
template <std::uint32_t mask>
__device__ __forceinline__ std::uint32_t chosen(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(c) : "r"(a), "n"(mask), "r"(b));
  return c;
}
// Two instructions in this order, the second of them not on the unit of the first: the compiler
// would shift first, mask then, and add.
__device__ __forceinline__ std::uint32_t even_bytes(std::uint32_t word) {
  std::uint32_t two;
  asm("and.b32 %0, %1, 0x00ff00ff;" : "=r"(two) : "r"(word));
  return two;
}
template <std::uint32_t factor>
__device__ __forceinline__ std::uint32_t times_plus(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "n"(factor), "r"(b));
  return c;
}
__device__ __forceinline__ float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ std::uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float f16_value(std::uint32_t half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<std::uint16_t>(half)));
  return x;
}
// Rounded, in both halves.
template <bool bf16>
__device__ __forceinline__ std::uint32_t both(float x) {
  std::uint32_t pair;
  if constexpr (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
  }
  return pair;
}
#else
template <bool bf16>
float half_value(std::uint32_t half) {
  const auto bits = static_cast<std::uint16_t>(half);
  return bf16 ? shunt::bf16_to_f32(bits) : shunt::f16_to_f32(bits);
}
template <bool bf16>
std::uint32_t half_bits(float x) {
  return bf16 ? shunt::f32_to_bf16(x) : shunt::f32_to_f16(x);
}
template <bool bf16>
std::uint32_t times(std::uint32_t a, std::uint32_t b) {
  return half_bits<bf16>(half_value<bf16>(a) * half_value<bf16>(b)) |
         half_bits<bf16>(half_value<bf16>(a >> 16) * half_value<bf16>(b >> 16)) << 16;
}
template <bool bf16>
std::uint32_t minus(std::uint32_t a, std::uint32_t b) {
  return half_bits<bf16>(half_value<bf16>(a) - half_value<bf16>(b)) |
         half_bits<bf16>(half_value<bf16>(a >> 16) - half_value<bf16>(b >> 16)) << 16;
}
inline std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
  const std::uint64_t all = std::uint64_t{b} << 32 | a;
  std::uint32_t picked = 0;
  for (unsigned i = 0; i < 4; ++i) {
    picked |= static_cast<std::uint32_t>(all >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return picked;
}
inline std::uint32_t twice(std::uint32_t pair, bool high) {
  return (high ? pair >> 16 : pair & 0xffff) * 0x10001U;
}
inline std::uint32_t rotated(std::uint32_t word, int left) { return std::rotl(word, left); }
template <std::uint32_t mask>
inline std::uint32_t chosen(std::uint32_t a, std::uint32_t b) {
  return (a & mask) | (b & ~mask);
}
inline std::uint32_t even_bytes(std::uint32_t word) { return word & 0x00ff00ffU; }
template <std::uint32_t factor>
inline std::uint32_t times_plus(std::uint32_t a, std::uint32_t b) {
  return a * factor + b;
}
inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float f16_value(std::uint32_t half) {
  return shunt::f16_to_f32(static_cast<std::uint16_t>(half));
}
template <bool bf16>
std::uint32_t both(float x) {
  return half_bits<bf16>(x) * 0x10001U;
}
#endif

// ---- codes --------------------------------------------------------------------------------------

// Times 2^-126 (bf16) or 2^-14.
template <bool bf16>
SHUNT_BOTH inline void decode_e2m1(std::uint32_t w0, std::uint32_t w1, std::uint32_t (&to)[8]) {
  if constexpr (bf16) {
    constexpr std::uint32_t mask = 0x81c081c0U, first = 0x06030603U;
    const std::uint32_t both = chosen<first>(w0, w1 << 2);
    to[0] = w0 & mask;
    to[1] = w0 << 4 & mask;
    to[2] = rotated(w0, 10) & mask;
    to[3] = w1 & mask;
    to[4] = w1 << 4 & mask;
    to[5] = rotated(w1, 10) & mask;
    to[6] = both << 6 & mask;
    to[7] = rotated(both, 12) & mask;
  } else {
    // What products carry beyond their bits ends before bit 9 of the next half.
    constexpr std::uint32_t mask = 0x8e008e00U, third = 0x40384038U, fourth = 0x20072007U;
    const std::uint32_t w[2] = {w0, w1};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 2; ++i) {
      to[4 * i] = w[i] & mask;
      to[4 * i + 1] = w[i] << 3 & mask;
      to[4 * i + 2] = (w[i] & third) * (2U + 64U) & mask;
      to[4 * i + 3] = (w[i] & fourth) * (4U + 512U) & mask;
    }
  }
}

// The inverse: e2m1 codes of registers' halves into two words, and what registers hold as codes.
template <bool bf16>
inline void encode_e2m1(const std::uint8_t (&codes)[8][2], std::uint32_t& w0, std::uint32_t& w1) {
  std::uint32_t at[8];
  for (int i = 0; i < 8; ++i) {
    const auto half = [](std::uint32_t code) {
      return (code & 8) << 12 | (code & 7) << (bf16 ? 6 : 9);
    };
    at[i] = half(codes[i][0]) | half(codes[i][1]) << 16;
  }
  if constexpr (bf16) {
    constexpr std::uint32_t first = 0x06030603U;
    const std::uint32_t both = at[6] >> 6 | rotated(at[7], 20);
    w0 = at[0] | at[1] >> 4 | rotated(at[2], 22) | (both & first);
    w1 = at[3] | at[4] >> 4 | rotated(at[5], 22) | (both & ~first) >> 2;
  } else {
    constexpr std::uint32_t sign = 0x80008000U;
    const auto word = [&](const std::uint32_t* a) {
      std::uint32_t w = a[0] | a[1] >> 3;
      w |= (a[2] & sign) >> 1 | (a[2] & ~sign) >> 6;
      return w | (a[3] & sign) >> 2 | (a[3] & ~sign) >> 9;
    };
    w0 = word(&at[0]), w1 = word(&at[4]);
  }
}
template <bool bf16>
inline std::uint8_t e2m1_of(std::uint32_t half) {
  return static_cast<std::uint8_t>((half >> 12 & 8) | (half >> (bf16 ? 6 : 9) & 7));
}

inline void encode_int4(const std::uint8_t (&codes)[8][2], std::uint32_t& w0, std::uint32_t& w1) {
  w0 = w1 = 0;
  for (int i = 0; i < 8; ++i) {
    (i < 4 ? w0 : w1) |= (codes[i][0] | std::uint32_t{codes[i][1]} << 16) << (4 * (i % 4));
  }
}
// Which of the 16 bytes of two fragments of 8-bit codes.
constexpr int wide_byte(int fragment, int reg, int half) {
  return fragment % 2 * 8 + reg / 2 * 4 + half * 2 + (reg % 2 == 0);
}

// The number 128 (bf16) or 1024 with a code added, or a zero point: what int4's are before these
// are taken from those. Byte `which` of a word of zero points, in both halves.
template <bool bf16>
SHUNT_BOTH inline std::uint32_t lifted(std::uint32_t word, int which) {
  return bytes_of(word, bf16 ? 0x43434343U : 0x64646464U,
                  0x4040U | static_cast<std::uint32_t>(which) * 0x0101U);
}
template <bool bf16>
SHUNT_BOTH inline std::uint32_t lifted_codes(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  // One instruction, with the number in a register; there is room for one constant only.
  std::uint32_t both = bf16 ? 0x43004300U : 0x64006400U, all;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(all) : "r"(word), "r"(both));
  return all;
#else
  return (bf16 ? 0x43004300U : 0x64006400U) | (word & 0x000f000fU);
#endif
}
// Codes less their rows' zero points: `zero` lifted, of rows q and q + 8, of either fragment.
template <bool bf16>
SHUNT_BOTH inline void decode_int4(std::uint32_t w0, std::uint32_t w1,
                                   const std::uint32_t (&zero)[2][2], std::uint32_t (&to)[8]) {
  const std::uint32_t w[2] = {w0, w1};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 8; ++i) {
    to[i] = minus<bf16>(lifted_codes<bf16>(w[i / 4] >> (4 * (i % 4))), zero[i / 4][i % 2]);
  }
}

// Four registers of a fragment from its eight bytes. int8: the byte is the number plus 128. fp8: in
// f16 times 2^-8.
template <bool bf16>
SHUNT_BOTH inline void decode_int8(std::uint32_t w0, std::uint32_t w1, std::uint32_t* to) {
  const std::uint32_t w[2] = {w0, w1};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    if constexpr (bf16) {
      // 2^23 + byte as f32; a number of 8 bits is in the upper half of what is left.
      const float low = float_of(bytes_of(w[i / 2], 0x4b000000U, i % 2 == 0 ? 0x7441 : 0x7440));
      const float high = float_of(bytes_of(w[i / 2], 0x4b000000U, i % 2 == 0 ? 0x7443 : 0x7442));
      to[i] = bytes_of(bits_of(low - 8388736.0F), bits_of(high - 8388736.0F), 0x7632);
    } else {
      to[i] =
          minus<false>(bytes_of(w[i / 2], 0x64646464U, i % 2 == 0 ? 0x4341 : 0x4240), 0x64806480U);
    }
  }
}
// Times 2^-120 (bf16) or 2^-8.
template <bool bf16>
SHUNT_BOTH inline void spread_e4m3(std::uint32_t w0, std::uint32_t w1, std::uint32_t* to) {
  const std::uint32_t w[2] = {w0, w1};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t x = i % 2 == 0 ? w[i / 2] : w[i / 2] << 8;
    to[i] = bf16 ? (x & 0x80008000U) | (x >> 4 & 0x07f007f0U)
                 : (x & 0x80008000U) | (x >> 1 & 0x3f803f80U);
  }
}
template <bool bf16>
SHUNT_BOTH inline void decode_e4m3(std::uint32_t w0, std::uint32_t w1, std::uint32_t* to) {
  spread_e4m3<bf16>(w0, w1, to);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4 && bf16; ++i) to[i] = times<true>(to[i], 0x7b807b80U);  // 2^120
}

// ---- dense3 -------------------------------------------------------------------------------------

// Which field register i of two fragments is.
SHUNT_BOTH constexpr int dense3_field(int i) { return i % 2 * 4 + i / 4 * 2 + i % 4 / 2; }

inline void encode_dense3(const std::uint8_t (&codes)[8][2], std::uint32_t& word,
                          std::uint16_t& half) {
  std::uint32_t first = 0, second = 0;
  for (int i = 0; i < 8; ++i) {
    first |= std::uint32_t{codes[i][0]} << (3 * dense3_field(i));
    second |= std::uint32_t{codes[i][1]} << (3 * dense3_field(i));
  }
  word = second | first >> 16 << 24;
  half = static_cast<std::uint16_t>(first);
}

// The codes before a lane's pairs, from the word of dense3_before(lane).
SHUNT_BOTH constexpr int dense3_before(int lane) { return lane % 4 == 0 ? lane + 3 : lane - 1; }
SHUNT_BOTH inline std::uint32_t dense3_codes_before(std::uint32_t word, int lane) {
  const bool first = lane % 4 == 0;
  return word << (first ? 3 : 0) & (first ? ~0x7000U : ~0U);
}

// Eight indices of the book: bits 3 f + 8 .. 3 f of word f % 3 are those of field f.
SHUNT_BOTH inline void dense3_indices(std::uint32_t before, std::uint32_t own, std::uint32_t half,
                                      std::uint32_t (&to)[3]) {
  const std::uint32_t first = bytes_of(half, own, 0x2710U) << 3, second = own << 6;
  constexpr std::uint32_t fields = 7U | 7U << 9 | 7U << 18;
  to[0] = chosen<fields << 6>(second, chosen<fields>(before, first));
  to[1] = chosen<(fields << 9)>(second, chosen<(fields << 3)>(before, first));
  to[2] = chosen<(fields << 12)>(second, chosen<(fields << 6)>(before, first));
}

// Of index: the code before in its lowest three bits, then those of the two numbers; these as
// integers, exact in either type.
template <bool bf16, class Numbers>
SHUNT_BOTH inline std::uint32_t book_word(const Numbers& number_of, std::uint32_t index) {
  const std::uint32_t first = both<bf16>(static_cast<float>(number_of(index & 63))),
                      second = both<bf16>(static_cast<float>(number_of(index >> 3)));
  return (first & 0xffffU) | (second & 0xffff0000U);
}

// ---- scales -------------------------------------------------------------------------------------

// Factors from bytes 0 and 2 of a word (or, `odd`, 1 and 3), one in each half.
template <bool bf16>
SHUNT_BOTH inline std::uint32_t e5m3_factors(std::uint32_t word, bool odd) {
  const std::uint32_t two = odd ? bytes_of(word, 0, 0x4341U) : even_bytes(word);
  return bf16 ? times_plus<16>(two, 0x76007600U) : times_plus<128>(two, 0x30003000U);
}
template <bool bf16>
SHUNT_BOTH inline std::uint32_t power_factors(std::uint32_t word, bool odd) {
  const std::uint32_t two = odd ? bytes_of(word, 0, 0x4341U) : even_bytes(word);
  return two * (bf16 ? 128 : 1024);
}
// dense3's: as e5m3_factors, of what counts as it stands (f16: times 2^-5).
template <bool bf16>
SHUNT_BOTH inline std::uint32_t dense3_factors(std::uint32_t word, bool odd) {
  const std::uint32_t two = odd ? bytes_of(word, 0, 0x4341U) : even_bytes(word);
  return bf16 ? times<true>(two * 16, 0x7a007a00U) : two * 128;  // 2^117
}
inline constexpr int least_e5m3 = 8;  // of any block of zeros
constexpr int most_power(bool bf16) { return bf16 ? 254 : 30; }
// A finite e4m3 other than zero, its sign left out, as e5m3.
constexpr std::uint8_t e5m3_of(std::uint8_t e4m3) {
  int exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
  if (exponent == 0) {  // mantissa 2^-9
    for (exponent = 1; mantissa < 8; mantissa *= 2) --exponent;
    mantissa -= 8;
  }
  return static_cast<std::uint8_t>((exponent + 3) << 3 | mantissa);
}
// With the row's factor, what a sum of decoded weights is to be multiplied with.
SHUNT_BOTH constexpr float unscale(Codes codes, bool bf16) {
  if (codes == Codes::nvfp4 || codes == Codes::sparse) return 128;
  if (codes == Codes::fp8 || codes == Codes::fp8_block) return bf16 ? 1 : 256;
  if (codes == Codes::dense3) return bf16 ? 1 : 32;
  return 1;
}

}  // namespace shunt::cuda_engine

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
