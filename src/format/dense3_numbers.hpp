// The 64 numbers of dense3's code book (dense3.hpp), for files that are compiled for one
// instruction set as well: nothing of the standard library.
#pragma once

namespace shunt {

// By window, the code before in bits 2:0 and the code itself in 5:3; in units of dense3_unit.
inline constexpr float dense3_unit = 0x1p-5F;
alignas(64) inline constexpr signed char dense3_numbers[64] = {
    -86, -57, -86, -61, -105, -59, -82, -61, -49, -31, -44, -27, -43, -28, -45, -32,
    -28, -14, -26, -11, -25,  -12, -26, -14, -12, -1,  -13, 1,   -12, 0,   -12, 0,
    2,   12,  0,   12,  -1,   13,  1,   14,  16,  26,  12,  24,  11,  26,  14,  29,
    34,  46,  29,  43,  28,   44,  32,  50,  64,  84,  60,  106, 59,  85,  58,  87};

}  // namespace shunt
