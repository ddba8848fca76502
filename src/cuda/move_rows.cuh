// Rows moved through a map of row numbers: gather, the shuffles.
//
// A warp moves four vectors a lane at a time: 4 rows of a strip of 32 vectors, 2 of 64 or 1 of 128,
// as `shift` says (strip = 32 << shift vectors, rows = 4 >> shift). All four loads are in flight
// before the first store. No shared memory, no barrier. Two kernels:
//
// move_rows: an item of work is a row to write, and the map says which row to read. Blocks run
//   along the rows first and along the strips of columns second: where rows are read many times,
//   what is read again is a strip of them, which the L2 holds while it is small (measured: up to a
//   twelfth of the L2). The rows' numbers come one lane each, for the next step while this one's
//   vectors arrive.
// spread_rows: an item is a row to read, and the map says to which `targets` rows it is written.
//
// Bytes: move_rows reads a row each time it is asked for (but the L2 answers most of that),
// spread_rows once; every row is written once. Time: 1.3 us + bytes / the bandwidth of a copy.
#pragma once

#include <algorithm>

#include "cuda/launch.hpp"
#include "cuda/vectors.cuh"

namespace shunt::cuda_engine {

struct MoveShape {
  std::int64_t vectors = 0;  // of a row
  int shift = 2;             // 0 .. 2
  int warps = 8;             // of a block
  int blocks = 1;            // along the rows, at most; each goes on to further rows
};

// `items` of work at most; `read_rows`: how many rows are read many times, 0 for none.
inline MoveShape move_shape(const Gpu& gpu, std::int64_t vectors, int vector_bytes,
                            std::int64_t items, std::int64_t read_rows) {
  MoveShape shape{.vectors = vectors, .blocks = 8 * gpu.multiprocessors};
  const auto strip = [&] { return std::int64_t{32 << shape.shift}; };
  while (shape.shift > 0 &&
         (vectors <= strip() / 2 ||
          strip() * vector_bytes * read_rows > static_cast<std::int64_t>(gpu.l2_bytes / 12))) {
    --shape.shift;
  }
  // Few rows: in small blocks, on as many multiprocessors as there are.
  const std::int64_t rows = 4 >> shape.shift;
  const std::int64_t warps = (items + rows - 1) / rows * ((vectors + strip() - 1) / strip());
  shape.warps = static_cast<int>(std::clamp<std::int64_t>(warps / gpu.multiprocessors, 1, 8));
  return shape;
}

// A row to read and a row to write.
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
__global__ void __launch_bounds__(256)
    move_rows_kernel(Map map, RowsView from, RowsView to, MoveShape shape) {
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warp = std::int64_t{blockIdx.x} * shape.warps + threadIdx.x / 32;
  const std::int64_t step = std::int64_t{gridDim.x} * shape.warps * (4 >> shape.shift);
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
      const std::int64_t coming = first + step + ahead;
      next = coming < items ? map.item(coming) : MoveItem{};
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
    }
  }
}

// Map: tokens to read, each with `targets` rows to write; target(i) is target i % targets of token
// i / targets, a row below row_count(), or what is skipped; weight(row).
template <class Vector, class Map>
__global__ void __launch_bounds__(256)
    spread_rows_kernel(Map map, RowsView from, RowsView to, MoveShape shape) {
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int together = 4 >> shape.shift;
  const std::int64_t warp = std::int64_t{blockIdx.x} * shape.warps + threadIdx.x / 32;
  const std::int64_t step = std::int64_t{gridDim.x} * shape.warps * together;
  const std::int64_t strip = 32 << shape.shift;
  const std::int32_t rows = map.row_count();

  for (std::int64_t left = blockIdx.y * strip; left < shape.vectors; left += gridDim.y * strip) {
    for (std::int64_t first = warp * together; first < map.tokens; first += step) {
      Raw<Vector::from_bytes> raw[4];
      bool reads[4];
      std::int64_t column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t token = first + (j >> shape.shift);
        column[j] = left + 32 * (j & ((1 << shape.shift) - 1)) + lane;
        reads[j] = token < map.tokens && column[j] < shape.vectors;
        if (reads[j]) {
          raw[j] = load_raw<Vector::from_bytes>(from.data + token * from.row_bytes +
                                                column[j] * Vector::from_bytes);
        }
      }
      // The targets of these tokens stand one after another: 32 at a time, a lane each.
      const std::int64_t begin = first * map.targets;
      const std::int64_t end = min(first + together, map.tokens) * map.targets;
      int token = 0, left_of_token = map.targets;
      for (std::int64_t at = begin; at < end; at += 32) {
        std::int32_t mine = at + lane < end ? map.target(at + lane) : -1;
        if (mine >= rows) mine = -1;
        const float my_weight = mine >= 0 ? map.weight(mine) : 0.0f;
        const int here = static_cast<int>(min(std::int64_t{32}, end - at));
        for (int i = 0; i < here; ++i) {
          const std::int32_t row = __shfl_sync(0xffffffffu, mine, i);
          const float weight = __shfl_sync(0xffffffffu, my_weight, i);
          if (row >= 0) {
            char* const line = to.data + row * to.row_bytes;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if ((j >> shape.shift) == token && reads[j]) {
                store_raw(line + column[j] * Vector::to_bytes, Vector::apply(raw[j], weight));
              }
            }
          }
          if (--left_of_token == 0) ++token, left_of_token = map.targets;
        }
      }
    }
  }
}

template <class Map>
using RowsKernel = void(Map, RowsView, RowsView, MoveShape);

template <class Map>
void launch_rows(const char* what, const Gpu& gpu, RowsKernel<Map>* kernel, const MoveShape& shape,
                 std::int64_t items, const Map& map, const RowsView& from, const RowsView& to) {
  if (items == 0 || shape.vectors == 0) return;
  const std::int64_t rows = shape.warps * (4 >> shape.shift), strip = 32 << shape.shift;
  const auto grid = [](std::int64_t size, std::int64_t each, std::int64_t most) {
    return static_cast<unsigned>(std::min((size + each - 1) / each, most));
  };
  launch(what, gpu,
         {.grid = {grid(items, rows, shape.blocks), grid(shape.vectors, strip, 65535)},
          .block = {static_cast<unsigned>(32 * shape.warps)}},
         kernel, map, from, to, shape);
}

// Calls go<bytes>() with the widest vectors that lie aligned in rows of `row_bytes` of both.
template <class Go>
void with_widest_copy(std::int64_t row_bytes, const RowsView& from, const RowsView& to,
                      const Go& go) {
  const auto fits = [&](int bytes) {
    return row_bytes % bytes == 0 && from.aligned(bytes) && to.aligned(bytes);
  };
  if (fits(16)) return go.template operator()<16>();
  if (fits(8)) return go.template operator()<8>();
  if (fits(4)) return go.template operator()<4>();
  if (fits(2)) return go.template operator()<2>();
  go.template operator()<1>();
}

}  // namespace shunt::cuda_engine
