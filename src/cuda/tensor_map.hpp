// Tensor maps for bulk tensor copies: host only, through the runtime, so that nothing links
// libcuda.
#pragma once

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <cstdint>

namespace shunt::cuda_engine {

// `count` rows of `width` 16-bit elements as boxes of 64 elements x `rows`, 128 bytes swizzled;
// zeros beyond the edges. Data at multiples of 16 bytes, rows too. Returns false where the driver
// is too old or refuses.
inline bool map_rows(CUtensorMap& map, const void* data, bool bf16, std::int64_t count,
                     std::int64_t width, std::int64_t stride, int rows) {
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
  if (count == 1) stride = (width + 7) / 8 * 8;  // whatever it is, there is no second row
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(count)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(rows)};
  const cuuint32_t every[2] = {1, 1};
  return encode_tiled(
             &map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void*>(data), size, pitch, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace shunt::cuda_engine
