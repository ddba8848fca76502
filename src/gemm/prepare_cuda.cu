// Weights into the layout of cuda_layout.hpp, and back.
//
// write_rows: a block of 32 x 8 threads moves tiles of 32 rows by 32 k. It reads a tile with
// neighbouring threads along whichever of the two the source holds closer together, and after the
// barrier writes it with neighbouring threads along k; the second barrier lets the next tile in.
// Bytes: every number read once and written once; a source read along its short stride moves
// whole sectors. Not on the hot path.
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "gemm/cuda_engine.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int side = 32;
constexpr int lines = 8;

struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0, k_stride = 0;
};

struct Args {
  RowLayout layout;
  Matrix first, second;  // gate and up, or the matrix; or where read_rows writes
  void* prepared;
  std::int64_t row_tiles, k_tiles;
};

__device__ float load_source(const Args& args, std::int64_t at, std::int64_t k) {
  if (at >= args.layout.rows() || k >= args.layout.k) return 0;
  const std::int64_t row = args.layout.source(at);
  if (row < 0) return 0;
  const std::int64_t firsts = args.layout.out_columns();
  const Matrix& m = row < firsts ? args.first : args.second;
  return load_element(m.data, m.dtype,
                      (row < firsts ? row : row - firsts) * m.row_stride + k * m.k_stride);
}

__global__ void __launch_bounds__(side* lines) write_rows(const __grid_constant__ Args args) {
  __shared__ float tile[side][side + 1];
  wait_for_predecessor();
  const std::int64_t padded = args.layout.padded_k();
  const bool along_k = llabs(args.first.k_stride) <= llabs(args.first.row_stride);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  for (std::int64_t t = blockIdx.x; t < args.row_tiles * args.k_tiles; t += gridDim.x) {
    const std::int64_t row = t / args.k_tiles * side, k = t % args.k_tiles * side;
    for (int line = y; line < side; line += lines) {
      if (along_k) {
        tile[line][x] = load_source(args, row + line, k + x);
      } else {
        tile[x][line] = load_source(args, row + x, k + line);
      }
    }
    __syncthreads();
    for (int line = y; line < side; line += lines) {
      if (row + line < args.layout.padded_rows() && k + x < padded) {
        store_element(args.prepared, args.layout.dtype, args.layout.element(row + line, k + x),
                      tile[line][x]);
      }
    }
    __syncthreads();
  }
}

// A thread a number, neighbours along k.
__global__ void __launch_bounds__(side* lines) read_rows(const __grid_constant__ Args args) {
  wait_for_predecessor();
  const std::int64_t all = args.layout.rows() * args.layout.k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t at = i / args.layout.k, k = i % args.layout.k;
    const std::int64_t row = args.layout.source(at);
    if (row < 0) continue;
    store_element(args.first.data, args.first.dtype,
                  row * args.first.row_stride + k * args.first.k_stride,
                  load_element(args.prepared, args.layout.dtype, args.layout.element(at, k)));
  }
}

Matrix matrix(const Tensor& tensor) {
  return {tensor.data, tensor.dtype, tensor.strides[0], tensor.strides[1]};
}

unsigned blocks(const Gpu& gpu, std::int64_t tiles) {
  const std::int64_t most = std::int64_t{8} * gpu.multiprocessors;
  return static_cast<unsigned>(tiles < most ? tiles : most);
}

}  // namespace

void write_group(const Gpu& gpu, const RowLayout& layout, const Tensor& gate, const Tensor& up,
                 void* to) {
  const Args args{.layout = layout,
                  .first = matrix(gate),
                  .second = matrix(up),
                  .prepared = to,
                  .row_tiles = (layout.padded_rows() + side - 1) / side,
                  .k_tiles = (layout.padded_k() + side - 1) / side};
  if (args.row_tiles * args.k_tiles == 0) return;
  launch("prepare", gpu,
         {.grid = dim3(blocks(gpu, args.row_tiles * args.k_tiles)), .block = dim3(side, lines)},
         write_rows, args);
}

void read_group(const Gpu& gpu, const RowLayout& layout, const void* from, const Tensor& out) {
  const Args args{.layout = layout,
                  .first = matrix(out),
                  .second = {},
                  .prepared = const_cast<void*>(from),
                  .row_tiles = 0,
                  .k_tiles = 0};
  const std::int64_t all = layout.rows() * layout.k;
  if (all == 0) return;
  launch("unprepare", gpu,
         {.grid = dim3(blocks(gpu, (all + side * lines - 1) / (side * lines))),
          .block = dim3(side * lines)},
         read_rows, args);
}

}  // namespace shunt::cuda_engine
