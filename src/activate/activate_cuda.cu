// activate on the GPU: rows of gate and up into rows of out.
//
// Rows of one type at multiples of 16 bytes: a thread computes eight neighbours, whose bytes it
// reads and writes at once; a block has the threads of one row, or of several. Other rows: a block
// takes pieces of 1024 columns, thread i columns i, i + 256, i + 512, i + 768. No barrier, no
// shared memory. Bytes: gate and up read once, out written once; 50 operations a number (SwiGLU).
// Bound by memory: 1.3 us + bytes / read bandwidth.
#include <algorithm>

#include "activate/cuda_engine.hpp"
#include "activate/quick.cuh"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/valid_rows.cuh"
#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256;
constexpr int columns_each = 4;
constexpr std::int64_t piece = threads * columns_each;
constexpr int each = 8;  // numbers of a thread

struct VectorArgs {
  cpu_engine::ActivationRule rule;
  RowsView gate, up, out;
  std::int64_t rows;
  int vectors;                // of a row
  const std::int32_t* count;  // rows at or past it are left alone; may be null
};

template <Form form, Quick quick>
__global__ void __launch_bounds__(threads)
    activate_vectors(const __grid_constant__ VectorArgs args) {
  wait_for_predecessor();
  let_successor_start();
  constexpr int bytes = each * form_bytes(form);
  const std::int64_t rows = valid_rows(args.count, args.rows);
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < rows;
       row += step) {
    for (int v = static_cast<int>(threadIdx.x); v < args.vectors;
         v += static_cast<int>(blockDim.x)) {
      const std::int64_t at = std::int64_t{v} * bytes;
      Raw<bytes> raw_gate{};
      if (quick != Quick::no || args.rule.gated) {
        raw_gate = load_raw<bytes>(args.gate.data + row * args.gate.row_bytes + at);
      }
      const Raw<bytes> raw_up = load_raw<bytes>(args.up.data + row * args.up.row_bytes + at);
      float gate[each], up[each];
      widen<each, form>(raw_gate, gate);
      widen<each, form>(raw_up, up);
      Activate<quick, each, Division::compilers>{args.rule, gate, up}();
      store_raw(args.out.data + row * args.out.row_bytes + at, narrow<each, form>(up));
    }
  }
}

template <Form form, Quick quick>
void start_vectors(const Gpu& gpu, const VectorArgs& args) {
  const int across = std::min((args.vectors + 31) / 32 * 32, threads), down = threads / across;
  const std::int64_t blocks = (args.rows + down - 1) / down;
  const std::int64_t most = std::int64_t{64} * gpu.multiprocessors;
  launch("activate", gpu,
         {.grid = dim3(static_cast<unsigned>(std::min(blocks, most))),
          .block = dim3(static_cast<unsigned>(across), static_cast<unsigned>(down))},
         activate_vectors<form, quick>, args);
}

template <Form form>
void start_form(const Gpu& gpu, const VectorArgs& args) {
  with_quick(args.rule, [&]<Quick quick>() { start_vectors<form, quick>(gpu, args); });
}

struct Matrix {
  void* data;
  std::int64_t stride;
  DType dtype;
};

struct Args {
  cpu_engine::ActivationRule rule;
  Matrix gate, up, out;
  std::int64_t rows, width, pieces;
  const std::int32_t* count;
};

__global__ void __launch_bounds__(threads) activate_rows(const __grid_constant__ Args args) {
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t all = valid_rows(args.count, args.rows) * args.pieces;
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
  const std::int64_t width = up.shape[1];
  const auto* const count = rows.as<const std::int32_t>();
  if (up.shape[0] == 0 || width == 0) return;
  const VectorArgs vectors{.rule = rule,
                           .gate = RowsView(gate),
                           .up = RowsView(up),
                           .out = RowsView(out),
                           .rows = up.shape[0],
                           .vectors = static_cast<int>(width / each),
                           .count = count};
  const bool aligned = width % each == 0 && width < std::int64_t{1} << 31 &&
                       out.dtype == up.dtype && vectors.up.aligned(16) && vectors.out.aligned(16) &&
                       (!rule.gated || (gate.dtype == up.dtype && vectors.gate.aligned(16)));
  if (aligned) {
    switch (vectors.up.form) {
      case Form::f32:
        return start_form<Form::f32>(gpu, vectors);
      case Form::f16:
        return start_form<Form::f16>(gpu, vectors);
      default:
        return start_form<Form::bf16>(gpu, vectors);
    }
  }
  const Args args{.rule = rule,
                  .gate = matrix(gate),
                  .up = matrix(up),
                  .out = matrix(out),
                  .rows = up.shape[0],
                  .width = width,
                  .pieces = (width + piece - 1) / piece,
                  .count = count};
  const std::int64_t all = args.rows * args.pieces;
  const std::int64_t most = std::int64_t{16} * gpu.multiprocessors;
  launch("activate", gpu,
         {.grid = dim3(static_cast<unsigned>(all < most ? all : most)), .block = dim3(threads)},
         activate_rows, args);
}

}  // namespace shunt::cuda_engine
