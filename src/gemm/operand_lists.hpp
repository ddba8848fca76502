// The operands of an asm statement of wgmma, whose sums are many. Of a product n columns wide,
// SHUNT_Rn are the sums by their numbers, SHUNT_Dn the floats of d, read and written.
#pragma once

#define SHUNT_F4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SHUNT_F8(i) SHUNT_F4(i), SHUNT_F4((i) + 4)
#define SHUNT_R8 "%0, %1, %2, %3"
#define SHUNT_D8 SHUNT_F4(0)
#define SHUNT_R16 SHUNT_R8 ", %4, %5, %6, %7"
#define SHUNT_D16 SHUNT_F8(0)
#define SHUNT_R32 SHUNT_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SHUNT_D32 SHUNT_D16, SHUNT_F8(8)
#define SHUNT_R48 SHUNT_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SHUNT_D48 SHUNT_D32, SHUNT_F8(16)
#define SHUNT_R64 SHUNT_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SHUNT_D64 SHUNT_D48, SHUNT_F8(24)
#define SHUNT_R80 SHUNT_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SHUNT_D80 SHUNT_D64, SHUNT_F8(32)
#define SHUNT_R96 SHUNT_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SHUNT_D96 SHUNT_D80, SHUNT_F8(40)
#define SHUNT_R112 SHUNT_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SHUNT_D112 SHUNT_D96, SHUNT_F8(48)
#define SHUNT_R128 SHUNT_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SHUNT_D128 SHUNT_D112, SHUNT_F8(56)
#define SHUNT_R144 SHUNT_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SHUNT_D144 SHUNT_D128, SHUNT_F8(64)
#define SHUNT_R160 SHUNT_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SHUNT_D160 SHUNT_D144, SHUNT_F8(72)
#define SHUNT_R176 SHUNT_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SHUNT_D176 SHUNT_D160, SHUNT_F8(80)
#define SHUNT_R192 SHUNT_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SHUNT_D192 SHUNT_D176, SHUNT_F8(88)
#define SHUNT_R208 SHUNT_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SHUNT_D208 SHUNT_D192, SHUNT_F8(96)
#define SHUNT_R224 SHUNT_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SHUNT_D224 SHUNT_D208, SHUNT_F8(104)
#define SHUNT_R240 SHUNT_R224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SHUNT_D240 SHUNT_D224, SHUNT_F8(112)
#define SHUNT_R256 SHUNT_R240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SHUNT_D256 SHUNT_D240, SHUNT_F8(120)

// X(type, n, the numbers of the first operands behind the sums) for each width that there is.
#define SHUNT_EACH_WIDTH(X, type)                 \
  X(type, 8, 4, 5, 6, 7, 8, 9, 10)                \
  X(type, 16, 8, 9, 10, 11, 12, 13, 14)           \
  X(type, 32, 16, 17, 18, 19, 20, 21, 22)         \
  X(type, 48, 24, 25, 26, 27, 28, 29, 30)         \
  X(type, 64, 32, 33, 34, 35, 36, 37, 38)         \
  X(type, 80, 40, 41, 42, 43, 44, 45, 46)         \
  X(type, 96, 48, 49, 50, 51, 52, 53, 54)         \
  X(type, 112, 56, 57, 58, 59, 60, 61, 62)        \
  X(type, 128, 64, 65, 66, 67, 68, 69, 70)        \
  X(type, 144, 72, 73, 74, 75, 76, 77, 78)        \
  X(type, 160, 80, 81, 82, 83, 84, 85, 86)        \
  X(type, 176, 88, 89, 90, 91, 92, 93, 94)        \
  X(type, 192, 96, 97, 98, 99, 100, 101, 102)     \
  X(type, 208, 104, 105, 106, 107, 108, 109, 110) \
  X(type, 224, 112, 113, 114, 115, 116, 117, 118) \
  X(type, 240, 120, 121, 122, 123, 124, 125, 126) \
  X(type, 256, 128, 129, 130, 131, 132, 133, 134)
