// Rows moved through a map of row numbers: gather, the shuffles. No shared memory, no barrier. Two
// kernels:
//
// move_rows: an item of work is a row to write, and the map says which row to read. A warp moves
//   four vectors a lane at a time: 4 rows of a strip of 32 vectors, 2 of 64 or 1 of 128, as `shift`
//   says (strip = 32 << shift vectors, rows = 4 >> shift). All four loads are in flight before the
//   first store. Blocks run along the rows first and along the strips of columns second: where rows
//   are read many times, what is read again is a strip of them, which the L2 holds while it is
//   small (measured: up to a twelfth of the L2). The rows' numbers come one lane each, for the next
//   step while this one's vectors arrive.
// spread_rows: an item is a row to read, and the map says to which `targets` rows it is written. A
//   block takes block.y items and a span of columns; a thread reads `each` vectors of its item, a
//   block's width apart, and the numbers of eight targets, all in flight at once, and stores the
//   vectors to each target. One short chain of a load and a store, and nothing else to wait for:
//   few rows take 0.2 us more than a launch that only reads.
//
// spread_few: the same where all of it is fewer blocks than multiprocessors: a block for each
//   target, which reads its token again, so that a thread has one store.
//
// Bytes: move_rows reads a row each time it is asked for (but the L2 answers most of that),
// spread_rows once; every row is written once. Time: bytes / the bandwidth of as many reads and
// writes, of which spread_rows has reached 91 to 98 % where it moves 32 MB or more.
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
  static constexpr bool copies = true;
  __device__ static Raw<bytes> apply(const Raw<bytes>& raw, float) { return raw; }
};
// `n` elements, times the row's weight in f32.
template <Form from, Form to, int n>
struct ConvertVector {
  static constexpr int from_bytes = n * form_bytes(from), to_bytes = n * form_bytes(to);
  static constexpr bool copies = false;
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
//
// Copies get by with 32 registers, so that a multiprocessor holds 2048 threads.
template <class Vector, int each, class Map>
__global__ void __launch_bounds__(128, Vector::copies ? 16 : 1)
    spread_rows_kernel(Map map, RowsView from, RowsView to, int vectors, std::int64_t first_group) {
  constexpr int together = 8;
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t token = (first_group + blockIdx.y) * blockDim.y + threadIdx.y;
  if (token >= map.tokens) return;
  const std::int32_t rows = map.row_count();
  const int width = static_cast<int>(blockDim.x);
  const int first = static_cast<int>(blockIdx.x) * width * each + static_cast<int>(threadIdx.x);

  Raw<Vector::from_bytes> raw[each];
  bool reads[each];
  const char* const read =
      from.data + token * from.row_bytes + std::int64_t{first} * Vector::from_bytes;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    reads[j] = first + j * width < vectors;
    if (reads[j]) raw[j] = load_raw<Vector::from_bytes>(read + j * width * Vector::from_bytes);
  }
  char* const column = to.data + std::int64_t{first} * Vector::to_bytes;
  for (int begin = 0; begin < map.targets; begin += together) {
    std::int32_t row[together];
    float weight[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      row[i] = begin + i < map.targets ? map.target(token * map.targets + begin + i) : -1;
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (row[i] >= rows) row[i] = -1;
      weight[i] = row[i] >= 0 ? map.weight(row[i]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (row[i] < 0) continue;
      char* const line = column + row[i] * to.row_bytes;
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (reads[j]) {
          store_raw(line + j * width * Vector::to_bytes, Vector::apply(raw[j], weight[i]));
        }
      }
    }
  }
}

// load_raw() that starts where it stands: the assembler moves a plain load behind the test of
// whether its value is needed, and then it waits for the row's number first.
template <int bytes>
__device__ __forceinline__ Raw<bytes> load_at_once(const char* from) {
#if __CUDA_ARCH__ >= 700
  if constexpr (bytes == 16) {
    Raw<bytes> raw;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.word[0]), "=r"(raw.word[1]), "=r"(raw.word[2]), "=r"(raw.word[3])
                 : "l"(from)
                 : "memory");
    return raw;
  }
#endif
  return load_raw<bytes>(from);
}

// Copies alone. Grid: spans of columns, targets, tokens.
template <class Vector, class Map>
__global__ void __launch_bounds__(128)
    spread_few_kernel(Map map, RowsView from, RowsView to, int vectors) {
  wait_for_predecessor();
  const int token = static_cast<int>(blockIdx.z);
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int column = min(at, vectors - 1);
  const auto raw = load_at_once<Vector::from_bytes>(from.data + token * from.row_bytes +
                                                    std::int64_t{column} * Vector::from_bytes);
  const std::int32_t row = map.target(token * map.targets + static_cast<int>(blockIdx.y));
  const std::int32_t rows = map.row_count();
  let_successor_start();  // before the loads, it costs up to 0.03 us
  if (row < 0 || row >= rows || at >= vectors) return;
  store_raw(to.data + row * to.row_bytes + std::int64_t{column} * Vector::to_bytes, raw);
}

// Vectors a thread: one while all of them fit on the GPU at once, so that every multiprocessor has
// some; else so many that a row is a block's, up to `most`, so that fewer blocks come and go.
inline int spread_vectors(const Gpu& gpu, std::int64_t tokens, std::int64_t vectors, int most) {
  if (tokens * vectors <= std::int64_t{2048} * gpu.multiprocessors || vectors <= 128) return 1;
  return vectors <= 256 || most < 4 ? 2 : 4;
}

template <class Vector, class Map>
void launch_spread(const char* what, const Gpu& gpu, std::int64_t vectors, const Map& map,
                   const RowsView& from, const RowsView& to) {
  if (map.tokens == 0 || vectors == 0) return;
  constexpr int most = Vector::copies ? 4 : 2;
  if constexpr (Vector::copies) {
    const std::int64_t blocks = (vectors + 127) / 128;
    if (blocks * map.targets * map.tokens <= gpu.multiprocessors) {
      return launch(what, gpu,
                    {.grid = {static_cast<unsigned>(blocks), static_cast<unsigned>(map.targets),
                              static_cast<unsigned>(map.tokens)},
                     .block = {static_cast<unsigned>(
                         std::min<std::int64_t>((vectors + blocks - 1) / blocks, 128))}},
                    spread_few_kernel<Vector, Map>, map, from, to, static_cast<int>(vectors));
    }
  }
  const int each = spread_vectors(gpu, map.tokens, vectors, most);
  const std::int64_t threads = (vectors + each - 1) / each;
  const std::int64_t spans = (threads + 127) / 128;
  const std::int64_t across = spans == 1 ? threads : ((threads + spans - 1) / spans + 31) / 32 * 32;
  // Narrow rows share a block.
  const std::int64_t down =
      std::clamp<std::int64_t>(128 / across, 1, std::min<std::int64_t>(map.tokens, 64));
  const std::int64_t groups = (map.tokens + down - 1) / down;
  constexpr std::int64_t at_once = 65535;  // blocks along y
  auto* const kernel = each == 1   ? spread_rows_kernel<Vector, 1, Map>
                       : each == 2 ? spread_rows_kernel<Vector, 2, Map>
                                   : spread_rows_kernel<Vector, most, Map>;
  for (std::int64_t first = 0; first < groups; first += at_once) {
    launch(what, gpu,
           {.grid = {static_cast<unsigned>(spans),
                     static_cast<unsigned>(std::min(groups - first, at_once))},
            .block = {static_cast<unsigned>(across), static_cast<unsigned>(down)}},
           kernel, map, from, to, static_cast<int>(vectors), first);
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
