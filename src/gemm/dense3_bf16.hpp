// The code book of dense3 (format/dense3.hpp) as bf16, for files that are compiled for one
// instruction set. The first number is padding: a reader of words may begin one before the table.
#pragma once

#include <cstdint>

namespace shunt::cpu_engine {

alignas(64) inline constexpr std::uint16_t dense3_padded[65] = {
    0,      0xc02c, 0xbfe5, 0xc02b, 0xbff4, 0xc051, 0xbfea, 0xc023, 0xbff2, 0xbfc5, 0xbf76,
    0xbfaf, 0xbf57, 0xbfab, 0xbf63, 0xbfb4, 0xbf7f, 0xbf5e, 0xbedc, 0xbf4f, 0xbeb0, 0xbf48,
    0xbec1, 0xbf50, 0xbedb, 0xbebc, 0xbca1, 0xbec8, 0x3ca1, 0xbec1, 0x3c2e, 0xbeb9, 0x3bcc,
    0x3d42, 0x3ec0, 0xbc78, 0x3ebc, 0xbc96, 0x3ecb, 0x3d09, 0x3edb, 0x3efa, 0x3f53, 0x3ec4,
    0x3f40, 0x3eb0, 0x3f4d, 0x3ee3, 0x3f6a, 0x3f88, 0x3fb7, 0x3f6a, 0x3fab, 0x3f5c, 0x3fb0,
    0x3f7c, 0x3fc8, 0x4001, 0x4028, 0x3fee, 0x4052, 0x3fec, 0x4029, 0x3fe7, 0x4030};
inline constexpr const std::uint16_t* dense3_bf16 = dense3_padded + 1;

// Their bytes apart, for look-ups of bytes.
struct Dense3Bytes {
  alignas(64) std::uint8_t lower[64], upper[64];
  constexpr Dense3Bytes() : lower{}, upper{} {
    for (int i = 0; i < 64; ++i) {
      lower[i] = static_cast<std::uint8_t>(dense3_bf16[i] & 0xff);
      upper[i] = static_cast<std::uint8_t>(dense3_bf16[i] >> 8);
    }
  }
};
inline constexpr Dense3Bytes dense3_bytes_of_bf16;

}  // namespace shunt::cpu_engine
