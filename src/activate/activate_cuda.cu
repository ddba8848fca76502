// activate on the GPU: rows of gate and up into rows of out.
//
// A block takes pieces of 1024 columns of a row, one after the other; thread i of 256 computes
// columns i, i + 256, i + 512, i + 768 of a piece, so that a warp reads and writes neighbours. No
// barrier, no shared memory. Bytes: gate and up read once, out written once; about 30 operations
// a number. Bound by memory: 1.3 us + bytes / read bandwidth.
#include "activate/activation.cuh"
#include "activate/cuda_engine.hpp"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256;
constexpr int columns_each = 4;
constexpr std::int64_t piece = threads * columns_each;

struct Matrix {
  void* data;
  std::int64_t stride;
  DType dtype;
};

struct Args {
  cpu_engine::ActivationRule rule;
  Matrix gate, up, out;
  std::int64_t rows, width, pieces;
  const std::int32_t* count;  // rows at or past it are left alone; may be null
};

__global__ void __launch_bounds__(threads) activate_rows(const __grid_constant__ Args args) {
  wait_for_predecessor();
  let_successor_start();
  std::int64_t rows = args.rows;
  if (args.count != nullptr) {
    const std::int64_t count = *args.count;
    rows = count < 0 ? 0 : count < rows ? count : rows;
  }
  const std::int64_t all = rows * args.pieces;
  for (std::int64_t at = blockIdx.x; at < all; at += gridDim.x) {
    const std::int64_t row = at / args.pieces;
    const std::int64_t first = (at - row * args.pieces) * piece + threadIdx.x;
#pragma unroll
    for (int j = 0; j < columns_each; ++j) {
      const std::int64_t i = first + j * threads;
      if (i >= args.width) break;
      const float gate = args.rule.gated ? load_element(args.gate.data, args.gate.dtype,
                                                        row * args.gate.stride + i)
                                         : 0.0f;
      const float up = load_element(args.up.data, args.up.dtype, row * args.up.stride + i);
      store_element(args.out.data, args.out.dtype, row * args.out.stride + i,
                    activated(args.rule, gate, up));
    }
  }
}

Matrix matrix(const Tensor& tensor) { return {tensor.data, tensor.strides[0], tensor.dtype}; }

}  // namespace

void activate(const Gpu& gpu, const cpu_engine::ActivationRule& rule, const Tensor& gate,
              const Tensor& up, const Tensor& out, const Tensor& rows) {
  const Args args{.rule = rule,
                  .gate = matrix(gate),
                  .up = matrix(up),
                  .out = matrix(out),
                  .rows = up.shape[0],
                  .width = up.shape[1],
                  .pieces = (up.shape[1] + piece - 1) / piece,
                  .count = rows.as<const std::int32_t>()};
  const std::int64_t all = args.rows * args.pieces;
  if (all == 0) return;
  const std::int64_t most = std::int64_t{16} * gpu.multiprocessors;
  launch("activate", gpu,
         {.grid = dim3(static_cast<unsigned>(all < most ? all : most)), .block = dim3(threads)},
         activate_rows, args);
}

}  // namespace shunt::cuda_engine
