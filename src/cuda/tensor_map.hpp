// Tensor maps for bulk tensor copies: host only, through the runtime, so that nothing links
// libcuda.
#pragma once

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <cstdint>

namespace shunt::cuda_engine {

// What every map has in common: 16-bit elements, zeros beyond the edges. `sizes` and `box` in
// elements, the innermost first; `pitches` in bytes, multiples of 16, of the outer dimensions. Data
// at multiples of 16 bytes. Returns false where the driver is too old or refuses.
template <unsigned rank>
bool map_tensor(CUtensorMap& map, const void* data, bool bf16, const cuuint64_t (&sizes)[rank],
                const cuuint64_t (&pitches)[rank - 1], const cuuint32_t (&box)[rank],
                CUtensorMapSwizzle swizzle) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode_tiled = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(found)
               : nullptr;
  }();
  if (encode_tiled == nullptr) return false;
  cuuint32_t every[rank];
  for (cuuint32_t& e : every) e = 1;
  return encode_tiled(&map,
                      bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      rank, const_cast<void*>(data), sizes, pitches, box, every,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// `count` rows of `width` 16-bit elements as boxes of 64 elements x `rows`, 128 bytes swizzled.
inline bool map_rows(CUtensorMap& map, const void* data, bool bf16, std::int64_t count,
                     std::int64_t width, std::int64_t stride, int rows) {
  if (count == 1) stride = (width + 7) / 8 * 8;  // whatever it is, there is no second row
  return map_tensor<2>(map, data, bf16,
                       {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(count)},
                       {static_cast<cuuint64_t>(stride) * 2}, {64, static_cast<cuuint32_t>(rows)},
                       CU_TENSOR_MAP_SWIZZLE_128B);
}

// Likewise, as boxes of unit, 2 unit, .. count x unit rows: so many rows as a tile has come by one
// copy, and no row more.
template <int count>
struct RowMaps {
  CUtensorMap of[count];
};
template <int count>
bool map_rows(RowMaps<count>& maps, const void* data, bool bf16, std::int64_t rows,
              std::int64_t width, std::int64_t stride, int unit) {
  for (int i = 0; i < count; ++i) {
    if (!map_rows(maps.of[i], data, bf16, rows, width, stride, unit * (i + 1))) return false;
  }
  return true;
}

}  // namespace shunt::cuda_engine
