// dense3 times rows in blocks of integers (fixed_rows.hpp), in AVX2, and for sets beyond it without
// VBMI: the integers of fixed_dense3_avx512_vbmi.cpp, and so its bits.
//
// Four windows of a column become the bytes of a word, which four look-ups of 16 numbers and a
// choice by the windows' two upper bits turn into numbers, 128 more than they mean. vpmaddwd
// multiplies two of a column at a time by a row's 16-bit numbers, k 0 and 2 or 1 and 3 of four. A
// step is 32 k of 8 columns: some 30 instructions for four of k, and four more for each row.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "gemm/dense3_bf16.hpp"
#include "gemm/fixed_dense3.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine::avx2 {
namespace {

#include "cpu/simd_avx2.hpp"
// What they decode.
#include "gemm/codes_avx2.hpp"
#include "gemm/fixed_codes_avx2.hpp"
// How rows are cut.
#include "gemm/packed_tiles.inl"
// How they become integers.
#include "gemm/fixed_blocks.inl"

struct Dense3Fixed : ByGroups<Dense3Fixed> {
  static constexpr bool of_bytes = true;
  static constexpr float unit = dense3_unit;
  static constexpr std::int32_t more = fixed_dense3_more;

  static constexpr std::size_t group = 32, code_bytes = 768;
  static constexpr int most_rows = 4;
  static constexpr std::size_t columns(int rows) { return rows == 1 ? 64 : 16; }

  struct Tables {};
  template <int level>
  SHUNT_INLINE static void fetch_codes(const char* at, std::size_t column) {
    SHUNT_UNROLL for (int word = 0; word < 3; ++word) {
      if (column % 16 == 0) {
        __builtin_prefetch(at + 4 * column + std::ptrdiff_t{256} * word, 0, level);
      }
    }
  }

  template <int rows>
  SHUNT_STEP static void sums(const Tables&, const char* at, std::size_t column,
                              const char* const (&row)[rows], std::size_t block, std::size_t x,
                              F32 (&to)[rows]) {
    const char* const words = at + 4 * column;
    const Words word[3] = {load_words(words), load_words(words + 256), load_words(words + 512)};
    Whole acc[rows];
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
      acc[r] = whole(reinterpret_cast<const FixedBlock*>(row[r] + block)->start);
    }
    each<0, 8>([&]<int p>() SHUNT_LAMBDA {
      const Words bytes{dense3_bytes(dense3_positive.numbers, dense3_windows<p>(word))};
      const Words even = both(bytes, each_word(0x00ff00ff)), odd = upper_bytes(bytes);
      SHUNT_UNROLL for (int r = 0; r < rows; ++r) {
        std::int32_t pair[2];
        __builtin_memcpy(pair, row[r] + x + std::ptrdiff_t{8} * p, sizeof pair);
        acc[r] = add_products(acc[r], even, each_word(pair[0]));
        acc[r] = add_products(acc[r], odd, each_word(pair[1]));
      }
    });
    SHUNT_UNROLL for (int r = 0; r < rows; ++r) to[r] = to_f32(acc[r]);
  }
};

}  // namespace

const FixedFormat fixed_dense3 = {fix_row<Dense3Fixed, fixed_dense3_less>,
                                  fixed_multiply<Dense3Fixed>};

}  // namespace shunt::cpu_engine::avx2
