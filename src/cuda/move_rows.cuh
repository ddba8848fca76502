// Rows moved one by one through a map of row numbers: gather, the shuffles.
//
// A warp moves four vectors a lane at a time: 4 rows of a strip of 32 vectors, 2 of 64 or 1 of 128,
// as `shift` says (strip = 32 << shift vectors, rows = 4 >> shift). All four loads are in flight
// before the first store. Blocks run along the rows first and along the strips of columns second,
// so that where rows are read many times what is read again is a strip of them, which the L2 holds.
// The rows' numbers come one lane each, for the next step while this one's vectors arrive. No
// shared memory, no barrier.
//
// Bytes: every row read once for each time it is asked for, written once. Time: 1.3 us + bytes that
// leave the L2 / bandwidth.
#pragma once

#include <algorithm>

#include "cuda/launch.hpp"
#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

inline constexpr int move_warps = 8;  // of a block

struct MoveShape {
  std::int64_t vectors = 0;  // of a row
  int shift = 2;             // 0 .. 2
  int blocks = 1;            // along the rows, at most; each goes on to further rows
};

// Strips of 2 kB, or as many bytes as leave `read_rows` of them a quarter of the L2.
inline MoveShape move_shape(const Gpu& gpu, std::int64_t vectors, int vector_bytes,
                            std::int64_t read_rows) {
  MoveShape shape{.vectors = vectors, .blocks = 16 * gpu.multiprocessors};
  const auto strip = [&] { return std::int64_t{32 << shape.shift} * vector_bytes; };
  while (shape.shift > 0 && (vectors <= 32 << (shape.shift - 1) ||
                             strip() * read_rows > static_cast<std::int64_t>(gpu.l2_bytes / 4))) {
    --shape.shift;
  }
  return shape;
}

// One item of work: a row to read and a row to write.
struct MoveItem {
  std::int64_t from = -1;  // -1: nothing to do; -2: zeros
  std::int64_t to = 0;
  float weight = 1;
};

// Copies bytes.
template <int bytes>
struct CopyVector {
  static constexpr int from_bytes = bytes, to_bytes = bytes;
  __device__ static Raw<bytes> apply(const Raw<bytes>& raw, float) { return raw; }
};
// `n` elements, times the row's weight in f32.
template <Form from, Form to, int n>
struct ConvertVector {
  static constexpr int from_bytes = n * form_bytes(from), to_bytes = n * form_bytes(to);
  __device__ static Raw<to_bytes> apply(const Raw<from_bytes>& raw, float weight) {
    float x[n];
    widen<n, from>(raw, x);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = __fmul_rn(weight, x[i]);
    return narrow<n, to>(x);
  }
};

// Map: items() of work and item(i), safe for any contents of device memory.
template <class Vector, class Map>
__global__ void __launch_bounds__(32 * move_warps)
    move_rows_kernel(Map map, RowsView from, RowsView to, MoveShape shape) {
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warp = std::int64_t{blockIdx.x} * move_warps + threadIdx.x / 32;
  const std::int64_t step = std::int64_t{gridDim.x} * move_warps * (4 >> shape.shift);
  const std::int64_t items = map.items();
  const std::int64_t strip = 32 << shape.shift;

  for (std::int64_t left = blockIdx.y * strip; left < shape.vectors; left += gridDim.y * strip) {
    std::int64_t first = warp * (4 >> shape.shift);
    const int ahead = (lane & 3) >> shape.shift;
    MoveItem next = first + ahead < items ? map.item(first + ahead) : MoveItem{};
    for (; first < items; first += step) {
      const MoveItem mine = next;
      Raw<Vector::from_bytes> raw[4];
      bool reads[4], writes[4];
      std::int64_t column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t row = __shfl_sync(0xffffffffu, mine.from, j);
        column[j] = left + 32 * (j & ((1 << shape.shift) - 1)) + lane;
        writes[j] = row != -1 && column[j] < shape.vectors;
        reads[j] = writes[j] && row >= 0;
        if (reads[j]) {
          raw[j] = load_raw<Vector::from_bytes>(from.data + row * from.row_bytes +
                                                column[j] * Vector::from_bytes);
        }
      }
      if (first + step + ahead < items) next = map.item(first + step + ahead);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t row = __shfl_sync(0xffffffffu, mine.to, j);
        const float weight = __shfl_sync(0xffffffffu, mine.weight, j);
        Raw<Vector::to_bytes> out{};
        if (reads[j]) out = Vector::apply(raw[j], weight);
        if (writes[j]) {
          store_raw(to.data + row * to.row_bytes + column[j] * Vector::to_bytes, out);
        }
      }
      if (first + step + ahead >= items) next = {};
    }
  }
}

template <class Vector, class Map>
void move_rows(const char* what, const Gpu& gpu, const MoveShape& shape, std::int64_t most_items,
               const Map& map, const RowsView& from, const RowsView& to) {
  if (most_items == 0 || shape.vectors == 0) return;
  const std::int64_t rows = move_warps * (4 >> shape.shift);
  const std::int64_t strip = 32 << shape.shift;
  const auto grid = [](std::int64_t size, std::int64_t each, std::int64_t most) {
    return static_cast<unsigned>(std::min((size + each - 1) / each, most));
  };
  launch(what, gpu,
         {.grid = {grid(most_items, rows, shape.blocks), grid(shape.vectors, strip, 65535)},
          .block = {32 * move_warps}},
         move_rows_kernel<Vector, Map>, map, from, to, shape);
}

// Rows of `row_bytes` bytes copied in the widest vectors that lie aligned in both.
template <class Map>
void copy_rows(const char* what, const Gpu& gpu, std::int64_t row_bytes, std::int64_t read_rows,
               std::int64_t most_items, const Map& map, const RowsView& from, const RowsView& to) {
  const auto go = [&]<int bytes>() {
    if (row_bytes % bytes != 0 || !from.aligned(bytes) || !to.aligned(bytes)) return false;
    move_rows<CopyVector<bytes>>(what, gpu, move_shape(gpu, row_bytes / bytes, bytes, read_rows),
                                 most_items, map, from, to);
    return true;
  };
  if (go.template operator()<16>() || go.template operator()<8>() || go.template operator()<4>() ||
      go.template operator()<2>()) {
    return;
  }
  go.template operator()<1>();
}

}  // namespace shunt::cuda_engine
