// The passes of passes.hpp on the GPU.
//
// A block of 256 threads takes rows blockIdx.x, blockIdx.x + gridDim.x, ..; a thread takes eight
// columns, and eight more 2048 further on. Sums over a row have the order of the CPU engine: 16
// lanes, each a chain over every 16th number, folded by halves. The block lays 2048 products at a
// time into shared memory, 16 threads add them up, and the barriers mean: the products are there;
// they are used up.
//
// Bytes: a row read once and written once; of a norm, unless a block's registers hold all of it,
// read twice, the second time from a cache. They hold 8192 columns where rows are few, and 2048
// where they are many, whose blocks hide each other's chains and are bound by memory. A row of 4096
// takes some 2 us, most of it the chains.
#include <algorithm>
#include <utility>

#include "activate/activation.cuh"
#include "cuda/carveout.hpp"
#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/valid_rows.cuh"
#include "cuda/vectors.cuh"
#include "layer/eights.cuh"
#include "layer/passes.hpp"
#include "layer/plan.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256;
constexpr int lanes = 16;
constexpr int piece = 8 * threads;

struct Rows {
  void* data = nullptr;  // null: not given
  DType dtype = DType::f32;
  std::int64_t stride = 0;
  Rows() = default;
  // A matrix by rows, or a vector.
  explicit Rows(const Tensor& t)
      : data(t.data), dtype(t.dtype), stride(t.rank == 2 ? t.strides[0] : 0) {}
  __device__ char* row(std::int64_t t) const {
    return static_cast<char*>(data) + t * stride * (dtype == DType::f32 ? 4 : 2);
  }
  __device__ void load(std::int64_t t, std::int64_t column, std::int64_t width,
                       float (&x)[8]) const {
    load_eight(row(t), dtype, column, width, x);
  }
  __device__ void store(std::int64_t t, std::int64_t column, std::int64_t width,
                        const float (&x)[8]) const {
    store_eight(row(t), dtype, column, width, x);
  }
};

struct Norm {
  bool enabled = false;
  bool weight_first = false;
  float epsilon = 0, multiplier = 1;
  Rows weight{};
  Norm() = default;
  Norm(const NormSpec& spec, const Tensor& given)
      : enabled(spec.enabled),
        weight_first(spec.weight_first),
        epsilon(spec.epsilon),
        multiplier(spec.multiplier),
        weight(given) {}
};

// run(number, column) for the first columns of a thread's eights, numbers below `pieces`.
template <int pieces, class Run>
__device__ __forceinline__ void each_piece(std::int64_t first, std::int64_t width, const Run& run) {
#pragma unroll
  for (int p = 0; p < pieces; ++p) {
    const std::int64_t column = first + p * piece + 8 * threadIdx.x;
    if (column < width) run(p, column);
  }
}

struct alignas(16) Shared {
  float products[piece];
  float sum;
};

// Every thread gets the sum of a row's products; term(number, column, x) makes eight of them, of
// so many pieces before any are added up.
template <int pieces, class Term>
__device__ float row_sum(Shared& shared, std::int64_t width, const Term& term) {
  const int thread = static_cast<int>(threadIdx.x);
  float sum = 0;
  const auto add = [&](std::int64_t first, const float(&x)[8]) {
    const int count = static_cast<int>(width - first < piece ? width - first : piece);
    if (8 * thread < count) {
      auto* const to = reinterpret_cast<float4*>(shared.products + 8 * thread);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    __syncthreads();
    if (thread < lanes) {
#pragma unroll 8
      for (int i = thread; i < count; i += lanes) sum = __fadd_rn(sum, shared.products[i]);
    }
    __syncthreads();
  };
  for (std::int64_t first = 0; first < width; first += pieces * piece) {
    float x[pieces][8];
    each_piece<pieces>(first, width, [&](int p, std::int64_t column) { term(p, column, x[p]); });
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      if (first + p * piece < width) add(first + p * piece, x[p]);
    }
  }
  if (thread < lanes) {
    for (int half = lanes / 2; half > 0; half /= 2) {
      sum = __fadd_rn(sum, __shfl_down_sync((1u << lanes) - 1, sum, half));
    }
    if (thread == 0) shared.sum = sum;
  }
  __syncthreads();
  return shared.sum;  // written again only behind the next sum's barriers
}

__device__ float norm_factor(const Norm& norm, std::int64_t width, float squares) {
  const float mean = __fdiv_rn(squares, static_cast<float>(width));
  return __fdiv_rn(norm.multiplier, __fsqrt_rn(__fadd_rn(mean, norm.epsilon)));
}

// What a thread has of a row that is normalised, and of the norm's weight. A row of up to so many
// pieces is read once, and the weight before the launch before this one has ended.
template <int pieces>
class NormRow {
 public:
  __device__ __forceinline__ NormRow(const Norm& norm, std::int64_t width)
      : norm_(norm), width_(width), held_(width <= pieces * piece) {
    if (held_)
      each_piece<pieces>(0, width, [&](int p, std::int64_t column) { load_weight(p, column); });
  }
  // squares of what load(column, x) gives, eight numbers of the row, for row_sum(). A longer row's
  // are given to keep(column, x), from which load_again() gets them.
  template <class Load, class Keep>
  __device__ __forceinline__ float squares(Shared& shared, const Load& load, const Keep& keep) {
    return row_sum<pieces>(shared, width_, [&](int p, std::int64_t column, float(&x)[8]) {
      load(column, x);
      if (!held_) {
        keep(column, x);
        load_weight(p, column);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        numbers_[p][i] = x[i];
        if (norm_.weight_first) x[i] = __fmul_rn(x[i], weight_[p][i]);
        x[i] = __fmul_rn(x[i], x[i]);
      }
    });
  }
  // put(column, x) of all results.
  template <class Again, class Put>
  __device__ __forceinline__ void normalise(float factor, const Again& load_again, const Put& put) {
    for (std::int64_t first = 0; first < width_; first += pieces * piece) {
      each_piece<pieces>(first, width_, [&](int p, std::int64_t column) {
        if (!held_) {
          load_again(column, numbers_[p]);
          load_weight(p, column);
        }
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i] = numbers_[p][i];
          if (norm_.weight_first) x[i] = __fmul_rn(x[i], weight_[p][i]);
          x[i] = __fmul_rn(x[i], factor);
          if (weighed() && !norm_.weight_first) x[i] = __fmul_rn(x[i], weight_[p][i]);
        }
        put(column, x);
      });
    }
  }

 private:
  __device__ __forceinline__ bool weighed() const { return norm_.weight.data != nullptr; }
  __device__ __forceinline__ void load_weight(int p, std::int64_t column) {
    if (weighed()) norm_.weight.load(0, column, width_, weight_[p]);
  }

  const Norm& norm_;
  std::int64_t width_;
  bool held_;
  float weight_[pieces][8], numbers_[pieces][8];
};

template <int pieces>
__global__ void __launch_bounds__(threads)
    norm_rows(const __grid_constant__ Norm norm, const __grid_constant__ Rows x, std::int64_t rows,
              std::int64_t width, const __grid_constant__ Rows out, const std::int32_t* valid) {
  __shared__ Shared shared;
  NormRow<pieces> row(norm, width);
  wait_for_predecessor();
  let_successor_start();
  rows = valid_rows(valid, rows);
  for (std::int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
    const auto load = [&](std::int64_t column, float(&eight)[8]) {
      x.load(t, column, width, eight);
    };
    const float squares = row.squares(shared, load, [](std::int64_t, const float(&)[8]) {});
    row.normalise(
        norm_factor(norm, width, squares), load,
        [&](std::int64_t column, const float(&eight)[8]) { out.store(t, column, width, eight); });
  }
}

// Row t of x times a vector, by the whole block.
__device__ __forceinline__ float row_dot(Shared& shared, const Rows& x, std::int64_t t,
                                         const Rows& gate, std::int64_t width) {
  return row_sum<1>(shared, width, [&](int, std::int64_t column, float(&eight)[8]) {
    float weight[8];
    x.load(t, column, width, eight);
    gate.load(0, column, width, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = __fmul_rn(eight[i], weight[i]);
  });
}

__global__ void __launch_bounds__(threads)
    dot_rows(Rows x, Rows gate, std::int64_t rows, std::int64_t width, float* logits,
             const std::int32_t* valid) {
  __shared__ Shared shared;
  wait_for_predecessor();
  let_successor_start();
  rows = valid_rows(valid, rows);
  for (std::int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
    const float sum = row_dot(shared, x, t, gate, width);
    if (threadIdx.x == 0) logits[t] = sum;
  }
}

struct FinishArgs {
  Rows wide;
  Rows shared;
  const float* shared_logits;
  float shared_scale;
  Rows bias;
  Norm norm;
  Rows residual, out;
  const std::int32_t* valid;
  std::int64_t rows, width;
};

// A thread reads again only columns that it wrote itself: no barrier but those of a norm's sum.
// 0 pieces: no norm.
template <int pieces>
__global__ void __launch_bounds__(threads) finish(const __grid_constant__ FinishArgs args) {
  __shared__ Shared shared;
  const std::int64_t width = args.width;
  NormRow<pieces == 0 ? 1 : pieces> row(args.norm, pieces == 0 ? 0 : width);
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t valid = valid_rows(args.valid, args.rows);
  for (std::int64_t t = blockIdx.x; t < args.rows; t += gridDim.x) {
    const auto each = [&](auto&& run) {
      for (std::int64_t column = 8 * threadIdx.x; column < width; column += piece) run(column);
    };
    if (t >= valid) {
      each([&](std::int64_t column) {
        const float zeros[8] = {};
        args.out.store(t, column, width, zeros);
      });
      continue;
    }
    float gate = args.shared_scale;
    if (args.shared_logits != nullptr) {
      gate = __fmul_rn(gate, times_sigmoid(1.0f, args.shared_logits[t]));
    }
    const auto summed = [&](std::int64_t column, float(&x)[8]) {
      float other[8];
      args.wide.load(t, column, width, x);
      if (args.shared.data != nullptr) {
        args.shared.load(t, column, width, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], __fmul_rn(gate, other[i]));
      }
      if (args.bias.data != nullptr) {
        args.bias.load(0, column, width, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], other[i]);
      }
    };
    const auto put = [&](std::int64_t column, float(&x)[8]) {
      if (args.residual.data != nullptr) {
        float other[8];
        args.residual.load(t, column, width, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fadd_rn(x[i], other[i]);
      }
      args.out.store(t, column, width, x);
    };
    if constexpr (pieces > 0) {
      const float squares = row.squares(shared, summed, [&](std::int64_t column, float(&x)[8]) {
        args.wide.store(t, column, width, x);
      });
      row.normalise(
          norm_factor(args.norm, width, squares),
          [&](std::int64_t column, float(&x)[8]) { args.wide.load(t, column, width, x); }, put);
    } else {
      each([&](std::int64_t column) {
        float x[8];
        summed(column, x);
        put(column, x);
      });
    }
  }
}

__global__ void __launch_bounds__(threads)
    copy_both(const std::int32_t* ids, const float* weights, std::int64_t from_columns,
              std::int32_t* to_ids, float* to_weights, std::int64_t columns, std::int64_t count) {
  wait_for_predecessor();
  let_successor_start();
  for (std::int64_t at = std::int64_t{blockIdx.x} * threads + threadIdx.x; at < count;
       at += std::int64_t{gridDim.x} * threads) {
    const std::int64_t from = at / columns * from_columns + at % columns;
    if (to_ids != nullptr) to_ids[at] = ids[from];
    if (to_weights != nullptr) to_weights[at] = weights[from];
  }
}

struct Slot {
  std::int32_t* ids;  // of the slot in the first row
  float* weights;     // likewise
  std::int64_t stride, rows;
  std::int32_t id;
  float scale;
  const std::int32_t* valid;
  __device__ void set(std::int64_t t, bool there, float weight) const {
    ids[t * stride] = there ? id : -1;
    weights[t * stride] = there ? weight : 0.0F;
  }
};

__global__ void __launch_bounds__(threads) fill_slots(const __grid_constant__ Slot slot) {
  let_successor_start();
  const std::int64_t there = valid_rows(slot.valid, slot.rows);
  const std::int64_t t = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  if (t < slot.rows) slot.set(t, t < there, slot.scale);
  wait_for_predecessor();
}

__global__ void __launch_bounds__(threads)
    fill_gated_slots(const __grid_constant__ Slot slot, Rows x, Rows gate, std::int64_t width) {
  __shared__ Shared shared;
  let_successor_start();
  const std::int64_t there = valid_rows(slot.valid, slot.rows);
  for (std::int64_t t = blockIdx.x; t < slot.rows; t += gridDim.x) {
    const float logit = t < there ? row_dot(shared, x, t, gate, width) : 0.0F;
    if (threadIdx.x == 0) {
      slot.set(t, t < there, __fmul_rn(slot.scale, times_sigmoid(1.0f, logit)));
    }
  }
  wait_for_predecessor();
}

// Enough blocks to fill the GPU eight deep.
Shape shape_for(const Gpu& gpu, std::int64_t blocks) {
  const std::int64_t most = std::int64_t{8} * gpu.multiprocessors;
  return {.grid = dim3(static_cast<unsigned>(blocks < most ? blocks : most)),
          .block = dim3(threads)};
}

// A warp a token.
__global__ void __launch_bounds__(threads)
    clear_rows(const std::int32_t* inverse, const std::int32_t* valid, std::int64_t rows,
               std::uint16_t* out, std::int64_t stride, std::int64_t width) {
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t there = valid_rows(valid, rows);
  const std::int64_t t = std::int64_t{blockIdx.x} * (threads / 32) + threadIdx.x / 32;
  if (t >= rows || (t < there && inverse[t] >= 0)) return;
  for (std::int64_t i = threadIdx.x % 32; i < width; i += 32) out[t * stride + i] = 0;
}

// As launch(), of kernels between products that want all of shared memory.
template <class Kernel, class... Arguments>
void launch_between_products(const char* what, const Gpu& gpu, const Shape& shape, Kernel* kernel,
                             Arguments&&... arguments) {
  prefer_shared_memory(kernel);
  launch(what, gpu, shape, kernel, std::forward<Arguments>(arguments)...);
}

// Whether rows are so few that registers for all of one keep no other's block away.
bool holds_rows(const Gpu& gpu, std::int64_t rows) { return rows <= gpu.multiprocessors; }

}  // namespace

void rms_norm(const Gpu& gpu, const NormSpec& spec, const Tensor& x, const Tensor& weight,
              const Tensor& out, const Tensor& valid) {
  if (x.shape[0] == 0) return;
  launch_between_products("rms_norm", gpu, shape_for(gpu, x.shape[0]),
                          holds_rows(gpu, x.shape[0]) ? norm_rows<4> : norm_rows<1>,
                          Norm(spec, weight), Rows(x), x.shape[0], x.shape[1], Rows(out),
                          valid.as<const std::int32_t>());
}

void gate_logits(const Gpu& gpu, const Tensor& x, const Tensor& gate, float* logits,
                 const Tensor& valid) {
  if (x.shape[0] == 0) return;
  launch_between_products("gate_logits", gpu, shape_for(gpu, x.shape[0]), dot_rows, Rows(x),
                          Rows(gate), x.shape[0], x.shape[1], logits,
                          valid.as<const std::int32_t>());
}

void finish_rows(const Gpu& gpu, const Finish& f) {
  if (f.out.shape[0] == 0) return;
  const FinishArgs args{.wide = Rows(f.wide),
                        .shared = Rows(f.shared),
                        .shared_logits = f.shared_logits,
                        .shared_scale = f.shared_scale,
                        .bias = Rows(f.bias),
                        .norm = Norm(f.norm, f.norm_weight),
                        .residual = Rows(f.residual),
                        .out = Rows(f.out),
                        .valid = f.valid.as<const std::int32_t>(),
                        .rows = f.out.shape[0],
                        .width = f.out.shape[1]};
  launch_between_products("finish_rows", gpu, shape_for(gpu, args.rows),
                          !f.norm.enabled              ? finish<0>
                          : holds_rows(gpu, args.rows) ? finish<4>
                                                       : finish<1>,
                          args);
}

void clear_unrouted(const Gpu& gpu, const Tensor& inverse, const Tensor& valid, const Tensor& out) {
  const std::int64_t rows = out.shape[0], each = threads / 32;
  if (rows == 0) return;
  launch_between_products(
      "clear_unrouted", gpu,
      {.grid = dim3(static_cast<unsigned>((rows + each - 1) / each)), .block = dim3(threads)},
      clear_rows, inverse.as<const std::int32_t>(), valid.as<const std::int32_t>(), rows,
      out.as<std::uint16_t>(), out.strides[0], out.shape[1]);
}

void copy_columns(const Gpu& gpu, const std::int32_t* ids, const float* weights,
                  std::int64_t from_columns, const Tensor& to_ids, const Tensor& to_weights) {
  const Tensor& to = to_ids ? to_ids : to_weights;
  if (to.elements() == 0) return;
  launch_between_products("copy_columns", gpu,
                          shape_for(gpu, (to.elements() + threads - 1) / threads), copy_both, ids,
                          weights, from_columns, to_ids.as<std::int32_t>(), to_weights.as<float>(),
                          to.shape[1], to.elements());
}

void fill_slot(const Gpu& gpu, const SharedSlot& s) {
  const Slot slot{.ids = s.ids.as<std::int32_t>() + s.slot,
                  .weights = s.weights.as<float>() + s.slot,
                  .stride = s.ids.shape[1],
                  .rows = s.ids.shape[0],
                  .id = s.id,
                  .scale = s.scale,
                  .valid = s.valid.as<const std::int32_t>()};
  if (s.gate) {
    return launch_between_products("fill_slot", gpu, shape_for(gpu, slot.rows), fill_gated_slots,
                                   slot, Rows(s.x), Rows(s.gate), s.x.shape[1]);
  }
  launch_between_products("fill_slot", gpu,
                          {.grid = dim3(static_cast<unsigned>((slot.rows + threads - 1) / threads)),
                           .block = dim3(threads)},
                          fill_slots, slot);
}

}  // namespace shunt::cuda_engine
