// The grouped GEMM in 16 bits of GPUs that have no kernel of their own here (A100, Ada, ..), for
// prepared weights and rows that can be copied as they lie: mma.sync, since compute capability 8.0.
//
// A block computes tiles of `tokens` rows by 128 or 256 rows of weights (mma_tiles.hpp), one after
// the other; tile_search.cuh says where a tile lies. k goes by in steps of 64 or 128 bytes a row, a
// ring of them in shared memory, copied asynchronously in pieces of 16 bytes: a tile of prepared
// weights is one long read. Pieces are exchanged by the row, so that ldmatrix meets no bank twice.
// The one barrier of a step means: every thread's part of the next step has landed, and this step
// has been read, so that its part of the ring may be written.
//
// A warp has a part of the tile as m16n8k16 products, tokens as A. A sum runs over k from first to
// last, whatever the tile: a row's bits depend on itself and its weights alone. A warp's sums go
// through its own part of the ring's last stage to the epilogue, eight tokens at a time, which so
// stores pieces of 16 bytes and is there once; the other stages fill with the next tile meanwhile.
//
// Bytes: weights of the groups hit once from memory and, within L2, once a tile of tokens; rows
// once a tile of weights. Few rows: (weights + rows) / read bandwidth; in flight 3 blocks x 3
// stages x 16 KB a multiprocessor. Many rows: at mma.sync's rate on an A100, 1024 products a clock
// and multiprocessor, tiles of 128 x 256 take 24 bytes a clock from the L2.
#include <iterator>
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "gemm/finish_eight.cuh"
#include "gemm/hopper_product.hpp"
#include "gemm/mma_tiles.hpp"
#include "gemm/tile_search.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int tile_rows = 128, tile_bytes = 128 * 128;  // of prepared weights, by 64 along k

// mma_tiles[nth]; warps that do not lie along the tokens lie beside each other.
template <int nth>
struct Tiles {
  static constexpr MmaTiles of = mma_tiles[nth];
  static constexpr int tokens = of.tokens, weights = of.weights, pieces = of.pieces, down = of.down,
                       stages = of.stages, blocks = of.blocks, shared_bytes = of.shared_bytes;
  static constexpr int threads = 32 * of.warps, across = of.warps / down;
  static constexpr int warp_tokens = tokens / down, warp_weights = weights / across;
  static constexpr int m = warp_tokens / 16, n = warp_weights / 8;
  static constexpr int line = 16 * pieces;
  static constexpr int stage_bytes = (tokens + weights) * line;
  static constexpr int lines_at_once = threads / pieces;  // that the block copies
  static_assert(pieces == 4 || pieces == 8);
  static_assert(lines_at_once % 8 == 0 && tile_rows % lines_at_once == 0);
  static_assert(tokens % lines_at_once == 0 && n % 2 == 0 && stages * stage_bytes == shared_bytes);

  // Where piece p of row r lies in its line: at p ^ exchanged(r).
  static __device__ int exchanged(int row) { return pieces == 8 ? row % 8 : row / 2 % 4; }
};

// What a warp multiplies of 16 of k.
template <class Shape>
struct Fragments {
  std::uint32_t a[Shape::m][4], b[Shape::n / 2][4];
};

template <class T, class Shape>
struct Sums {
  float c[Shape::m][Shape::n][4] = {};

  __device__ __forceinline__ void add(const Fragments<Shape>& f) {
#pragma unroll
    for (int i = 0; i < Shape::m; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::n; ++j) {
        mma_16816(T(), c[i][j], f.a[i], f.b[j / 2][2 * (j % 2)], f.b[j / 2][2 * (j % 2) + 1]);
      }
    }
  }
};

// Where a thread's fragments lie in a stage: tokens' lines, then those of weights.
template <class Shape>
class Reader {
 public:
  __device__ __forceinline__ Reader() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int a_row = first_token() + lane % 16;
    const int b_row = first_weight() + lane / 16 * 8 + lane % 8;
    a_ = static_cast<std::uint32_t>(a_row * Shape::line);
    b_ = static_cast<std::uint32_t>((Shape::tokens + b_row) * Shape::line);
    a_piece_ = static_cast<std::uint32_t>((lane / 16 ^ Shape::exchanged(a_row)) * 16);
    b_piece_ = static_cast<std::uint32_t>((lane / 8 % 2 ^ Shape::exchanged(b_row)) * 16);
  }
  static __device__ int first_token() {
    return static_cast<int>(threadIdx.x) / 32 / Shape::across * Shape::warp_tokens;
  }
  static __device__ int first_weight() {
    return static_cast<int>(threadIdx.x) / 32 % Shape::across * Shape::warp_weights;
  }
  // Of the `nth` 16 of k.
  __device__ __forceinline__ void read(std::uint32_t stage, std::uint32_t nth,
                                       Fragments<Shape>& f) const {
#pragma unroll
    for (std::uint32_t j = 0; j < Shape::n / 2; ++j) {
      ldmatrix_x4(f.b[j], stage + b_ + j * 16 * Shape::line + (b_piece_ ^ nth * 32));
    }
#pragma unroll
    for (std::uint32_t i = 0; i < Shape::m; ++i) {
      ldmatrix_x4(f.a[i], stage + a_ + i * 16 * Shape::line + (a_piece_ ^ nth * 32));
    }
  }

 private:
  std::uint32_t a_, b_, a_piece_, b_piece_;
};

// Eight tokens of a warp at a time through its part of `shared`, one stage's bytes.
template <class T, class Shape>
__device__ __forceinline__ void write_tile(const HopperArgs& args, const TileSearch::Tile& at,
                                           const Sums<T, Shape>& sums, char* shared) {
  constexpr int pitch = Shape::warp_weights + 8;  // floats: a warp's stores meet no bank twice
  constexpr int box_floats = 8 * pitch;
  static_assert(Shape::threads / 32 * box_floats * int{sizeof(float)} <= Shape::stage_bytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const box =
      reinterpret_cast<float*>(shared) + static_cast<int>(threadIdx.x) / 32 * box_floats;
  const Finish& f = args.finish;
  const int halves = f.paired ? 2 : 1;  // of a column: gate and up, eight of each in turn
  const std::int64_t first_column =
      (at.column * Shape::weights + Reader<Shape>::first_weight()) / halves;
  constexpr int all_shift = Shape::warp_weights == 64 ? 3 : 2;
  static_assert(Shape::warp_weights == 8 << all_shift);
  const int shift = all_shift + 1 - halves;
#pragma unroll 1
  for (int eight = 0; eight < 2 * Shape::m; ++eight) {
    const std::int64_t first_row = at.row + Reader<Shape>::first_token() + 8 * eight;
    if (first_row >= at.end) return;
#pragma unroll
    for (int i = 0; i < 2 * Shape::m; ++i) {
      if (i != eight) continue;  // sums are registers
#pragma unroll
      for (int j = 0; j < Shape::n; ++j) {
        const float(&c)[4] = sums.c[i / 2][j];
        *reinterpret_cast<float2*>(box + lane / 4 * pitch + lane % 4 * 2 + 8 * j) = {
            c[i % 2 * 2], c[i % 2 * 2 + 1]};
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 8 << shift; i += 32) {
      const int token = i >> shift, o = 8 * (i & ((1 << shift) - 1));
      const std::int64_t row = first_row + token, column = first_column + o;
      if (row >= at.end || column >= f.out_columns) continue;
      finish_eight<std::is_same_v<T, __nv_bfloat16>>(args.finish, args.row_scale, at.group, row,
                                                     column, box + token * pitch + o * halves);
    }
    __syncwarp();
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::blocks)
    multiply_tiles(const __grid_constant__ HopperArgs args) {
  extern __shared__ __align__(128) char shared[];
  wait_for_predecessor();
  let_successor_start();

  // This thread moves piece `part` of line `line` and of those further by multiples of
  // lines_at_once, which are exchanged alike.
  const int line = static_cast<int>(threadIdx.x) / Shape::pieces,
            part = static_cast<int>(threadIdx.x) % Shape::pieces;
  constexpr int row_lines = Shape::tokens / Shape::lines_at_once,
                weight_lines = Shape::weights / Shape::lines_at_once,
                high = Shape::weights / tile_rows;  // tiles of prepared weights
  const std::uint32_t ring = shared_address(shared);
  const auto in_stage =
      static_cast<std::uint32_t>(line * Shape::line + (part ^ Shape::exchanged(line)) * 16);
  const int in_tile = line * 128, piece_in_tile = (part ^ line % 8) * 16;
  const int steps = static_cast<int>((args.k_bytes + Shape::line - 1) / Shape::line);
  const std::int64_t all_steps_bytes = std::int64_t{args.steps} * tile_bytes;
  const Reader<Shape> reader;

  // Where a tile's pieces that this thread moves come from.
  const char* row_from[row_lines];  // null: zeros
  const char* weights_from = nullptr;
  int tiles_there = 0;
  const auto copy_step = [&](int step, int stage) {
    const std::uint32_t to =
        ring + static_cast<std::uint32_t>(stage * Shape::stage_bytes) + in_stage;
    const std::int64_t done = std::int64_t{step} * Shape::line;
#pragma unroll
    for (int i = 0; i < row_lines; ++i) {
      const bool some = row_from[i] != nullptr && done + 16 * part < args.k_bytes;
      cp_async_16(to + static_cast<std::uint32_t>(i * Shape::lines_at_once * Shape::line),
                  some ? row_from[i] + done : args.source, some ? 16 : 0);
    }
    const char* const from =
        Shape::pieces == 8
            ? weights_from + std::int64_t{step} * tile_bytes + piece_in_tile
            : weights_from + std::int64_t{step / 2} * tile_bytes + (piece_in_tile ^ step % 2 * 64);
#pragma unroll
    for (int i = 0; i < weight_lines; ++i) {
      const int row = i * Shape::lines_at_once, tile = row / tile_rows;
      const bool some = tile == 0 || tile < tiles_there;
      cp_async_16(to + static_cast<std::uint32_t>((Shape::tokens + row) * Shape::line),
                  from + (some ? tile * all_steps_bytes : 0) + row % tile_rows * 128,
                  some ? 16 : 0);
    }
  };
  const auto start = [&](const TileSearch::Tile& at) {
#pragma unroll
    for (int i = 0; i < row_lines; ++i) {
      const std::int64_t row = at.row + line + i * Shape::lines_at_once;
      row_from[i] = nullptr;
      if (row >= at.end) continue;
      std::int64_t from = row;
      if (args.permutation != nullptr) {
        const std::int32_t pair = args.permutation[row];
        from = pair < 0 ? -1 : pair / args.slots;
      }
      if (from >= 0 && from < args.source_rows) {
        row_from[i] = args.source + from * args.source_row_bytes + 16 * part;
      }
    }
    weights_from =
        args.tiles + at.group * args.group_bytes + at.column * high * all_steps_bytes + in_tile;
    tiles_there = static_cast<int>(args.row_tiles - at.column * high);
#pragma unroll
    for (int s = 0; s < Shape::stages - 1; ++s) {
      if (s < steps) copy_step(s, s);
      cp_async_commit();  // an empty group too: the count of groups is that of steps
    }
  };

  TileSearch search(args.walk, args.groups, Shape::tokens, args.columns);
  std::int64_t number = blockIdx.x;
  TileSearch::Tile at = search.find(number);
  if (at.group < 0) return;
  start(at);
  while (true) {
    // Fragments are read while those before them are multiplied, a step's first ones too.
    cp_async_wait<Shape::stages - 2>();
    __syncthreads();
    Sums<T, Shape> sums;
    Fragments<Shape> fragments[2];
    reader.read(ring, 0, fragments[0]);
    int stage = 0, free_stage = Shape::stages - 1;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      const int next_stage = stage + 1 == Shape::stages ? 0 : stage + 1;
      constexpr int parts = Shape::pieces / 2;
#pragma unroll
      for (int part_of_step = 0; part_of_step < parts; ++part_of_step) {
        const bool last = part_of_step == parts - 1;
        if (last) {
          cp_async_wait<Shape::stages - 2>();
          __syncthreads();
        }
        reader.read(
            ring + static_cast<std::uint32_t>((last ? next_stage : stage) * Shape::stage_bytes),
            last ? 0 : part_of_step + 1, fragments[(part_of_step + 1) % 2]);
        if (part_of_step == 0) {
          if (s + Shape::stages - 1 < steps) copy_step(s + Shape::stages - 1, free_stage);
          cp_async_commit();
        }
        sums.add(fragments[part_of_step % 2]);
      }
      free_stage = stage;
      stage = next_stage;
    }
    cp_async_wait<0>();
    __syncthreads();
    // The next tile's first steps arrive while this one is written by way of the last stage.
    number += gridDim.x;
    const TileSearch::Tile next = search.find(number);
    if (next.group >= 0) start(next);
    write_tile(args, at, sums, shared + (Shape::stages - 1) * Shape::stage_bytes);
    if (next.group < 0) return;
    at = next;
  }
}

template <class T, class Shape>
void enqueue(const Gpu& gpu, const HopperArgs& args, int blocks) {
  launch("grouped_gemm", gpu,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(Shape::threads),
          .shared = Shape::shared_bytes},
         multiply_tiles<T, Shape>, args);
}

template <class T>
void enqueue_planned(const Gpu& gpu, const ProductPlan& plan, const HopperArgs& args) {
  if (plan.tile_tokens == Tiles<0>::tokens) return enqueue<T, Tiles<0>>(gpu, args, plan.blocks);
  if (plan.tile_tokens == Tiles<1>::tokens) return enqueue<T, Tiles<1>>(gpu, args, plan.blocks);
  static_assert(std::size(mma_tiles) == 3);
  enqueue<T, Tiles<2>>(gpu, args, plan.blocks);
}

}  // namespace

bool mma_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& p, HopperArgs args) {
  if (args.tiles == nullptr) return false;
  const int high = plan.tile_rows / tile_rows;
  args.columns = (args.row_tiles + high - 1) / high;
  p.layout.dtype == DType::bf16 ? enqueue_planned<__nv_bfloat16>(gpu, plan, args)
                                : enqueue_planned<__half>(gpu, plan, args);
  return true;
}

}  // namespace shunt::cuda_engine
