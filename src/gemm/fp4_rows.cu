// Rows in f32 | bf16 | f16 become NVFP4 for Blackwell's products: compiled, not run.
//
// A warp has a row, a lane one block of 16 (or 32) after the other. Bytes: a row from memory, once
// more from L2 behind its largest magnitude, and a quarter of 16 bits written.
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fp4_rows.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int warps = 8;

struct Args {
  const void* rows;
  DType dtype;
  std::int64_t stride, source_rows, count, k;
  const std::int32_t* permutation;
  int slots;
  const float* weight;
  Fp4Rows to;
};

template <int scaled>
__global__ void __launch_bounds__(32 * warps) round_to_fp4(const Args args) {
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t row = std::int64_t{blockIdx.x} * warps + static_cast<int>(threadIdx.x) / 32;
  if (row >= args.count) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t from = row;
  if (args.permutation != nullptr) {
    const std::int32_t pair = args.permutation[row];
    from = pair < 0 ? -1 : pair / args.slots;
  }
  const bool there = from >= 0 && from < args.source_rows;
  const float weight = args.weight != nullptr ? args.weight[row] : 1.0f;
  const auto load = [&](std::int64_t i) {
    if (!there) return 0.0f;
    const float x = load_element(args.rows, args.dtype, from * args.stride + i);
    return args.weight != nullptr ? __fmul_rn(x, weight) : x;
  };
  const Fp4Rows& to = args.to;
  const float scale = round_row_to_fp4<scaled>(load, args.k, to.codes + row * to.code_stride,
                                               to.scales + row * to.scale_stride, lane);
  if (lane == 0) to.row_scales[row] = scale;
}

}  // namespace

void round_rows_to_fp4(const Gpu& gpu, const Fp4RowProduct& p, const Fp4Rows& to) {
  const std::int64_t count = p.out.shape[0];
  if (count == 0) return;
  launch(
      "grouped_gemm: rows to nvfp4", gpu,
      {.grid = dim3(static_cast<unsigned>((count + warps - 1) / warps)), .block = dim3(32 * warps)},
      p.layout.sparse() ? round_to_fp4<32> : round_to_fp4<16>,
      Args{.rows = p.rows.data,
           .dtype = p.rows.dtype,
           .stride = p.rows.strides[0],
           .source_rows = p.rows.shape[0],
           .count = count,
           .k = p.layout.k,
           .permutation = p.permutation,
           .slots = p.slots,
           .weight = p.row_scale,
           .to = to});
}

}  // namespace shunt::cuda_engine
