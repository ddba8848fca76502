// How results of the wgmma kernels for packed weights leave: host only.
#pragma once

#include "gemm/fragment_product.hpp"
#include "gemm/store_map.hpp"

namespace shunt::cuda_engine {

// `map` for bulk stores, from registers, of results in the operands' type; where they cannot reach
// the rows of out, or it has another type, finish.plain and .situ are false after this.
inline void map_results(CUtensorMap& map, Finish& finish, bool bf16, std::int64_t rows) {
  const bool mapped =
      (finish.plain || finish.situ) && finish.out_dtype == (bf16 ? DType::bf16 : DType::f16) &&
      reinterpret_cast<std::uintptr_t>(finish.out) % 16 == 0 && finish.out_stride % 8 == 0 &&
      map_row_ends(map, finish.out, bf16, rows, finish.out_columns, finish.out_stride,
                   finish.paired ? 32 : 64, 64);
  finish.plain = finish.plain && mapped;
  finish.situ = finish.situ && mapped;
}

}  // namespace shunt::cuda_engine
