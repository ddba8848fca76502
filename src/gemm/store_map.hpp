// Tensor maps for bulk copies of a group's rows, and no row behind them: host only, through the
// runtime.
#pragma once

#include "cuda/tensor_map.hpp"

namespace shunt::cuda_engine {

// `count` rows of `width` elements, for copies of a box, `box_width` elements (32 or 64; as many
// bytes again are swizzled) x `rows`, that end at row `end`, whatever it is: what lies further is
// not stored, and comes as zeros. Coordinates of the last `n` rows before `end`: (column, rows - n,
// end). Two dimensions walk along rows: the first, of `rows` only, cuts the box off; the second
// says where it ends.
inline bool map_row_ends(CUtensorMap& map, void* data, bool bf16, std::int64_t count,
                         std::int64_t width, std::int64_t stride, int box_width, int rows) {
  if (count == 1) stride = (width + 7) / 8 * 8;  // whatever it is, there is no second row
  const auto pitch = static_cast<cuuint64_t>(stride) * 2;
  const char* const first =
      static_cast<const char*>(data) - static_cast<std::int64_t>(pitch) * rows;
  return map_tensor<3>(map, first, bf16,
                       {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows),
                        static_cast<cuuint64_t>(count) + 1},
                       {pitch, pitch},
                       {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(rows), 1},
                       box_width == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace shunt::cuda_engine
