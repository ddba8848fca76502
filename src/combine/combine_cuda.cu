// combine on a GPU.
//
// A block takes block.y tokens and a span of block.x vectors of columns; grid.x covers the columns,
// grid.y the tokens. The threads of a token first write its terms into shared memory: of each slot,
// the shared expert and the residual the row, or null, and the weight (barrier: they are there; at
// the loop's end: they may be overwritten). Then a thread sums its own columns: the loads of eight
// or twelve terms are in flight before the first is added. Additions run term by term in f32, each
// one FMA, as the CPU engine's vectors do: its bits, but for NaN payloads and for the sigmoid of a
// shared gate, whose exp is the GPU's.
//
// Where the terms are the rows of 1, 2, 4 or 8 slots and nothing else, a thread reads its token's
// rows and weights itself, and there is no barrier (combine_slots_kernel); of one or two slots
// those of several tokens, so that enough is on its way (combine_tokens_kernel).
//
// Bytes: every row read once, every output written once; inverse and weights again for each span.
// Time predicted: two dependent reads, 2.2 us, and from some MB on bytes / copy bandwidth.
//
// out may be hidden, shared or residual: an element is read by the thread that writes it, before.
#include "combine/engine.hpp"
#include "cuda/carveout.hpp"
#include "cuda/launch.hpp"
#include "cuda/vectors.cuh"

namespace shunt {

namespace {

using namespace cuda_engine;

struct CombineCall {
  RowsView rows, hidden, shared, residual, out;
  const std::int32_t* inverse;
  const std::int32_t* ids;  // null: no zero-compute experts
  const float* weights;
  const float* gate;                 // null: none
  const std::int32_t* valid_tokens;  // null: all
  std::int64_t row_count, tokens, width;
  int slots;
  int terms;  // slots, the shared expert, the residual; then filled up
  std::int32_t identity_from, identity_last;
  bool weighted;
  float shared_scale;
  bool early;  // inverse and weights are older than the grid before this one
};

struct Term {
  const char* row;  // null: adds nothing
  float weight;
  Form form;
};

__device__ Term term(const CombineCall& call, std::int64_t token, int i) {
  if (i < call.slots) {
    const std::int64_t pair = token * call.slots + i;
    const std::int32_t row = call.inverse[pair];
    const float weight = call.weights != nullptr ? call.weights[pair] : 1;
    if (row >= 0) {
      if (row >= call.row_count) return {};
      return {call.rows.data + row * call.rows.row_bytes, call.weighted ? weight : 1,
              call.rows.form};
    }
    if (call.ids == nullptr) return {};
    const std::int32_t id = call.ids[pair];
    if (id < call.identity_from || id > call.identity_last) return {};
    return {call.hidden.data + token * call.hidden.row_bytes, weight, call.hidden.form};
  }
  i -= call.slots;
  if (call.shared.data != nullptr && i-- == 0) {
    const float gate = call.gate != nullptr ? 1 / (1 + expf(-call.gate[token])) : 1;
    return {call.shared.data + token * call.shared.row_bytes, __fmul_rn(call.shared_scale, gate),
            call.shared.form};
  }
  if (call.residual.data != nullptr && i == 0) {
    return {call.residual.data + token * call.residual.row_bytes, 1, call.residual.form};
  }
  return {};
}

// Volatile: else the compiler loads a row, waits and adds it before it loads the next.
template <int bytes>
__device__ __forceinline__ Raw<bytes> load_row(const char* from) {
  static_assert(bytes == 16);
  Raw<bytes> raw;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.word[0]), "=r"(raw.word[1]), "=r"(raw.word[2]), "=r"(raw.word[3])
               : "l"(from));
  return raw;
}

// form: of every row that is read; n: elements of a vector; together: terms whose loads are in
// flight together. call.terms is a multiple of that.
template <Form form, int n, int together>
__global__ void __launch_bounds__(256) combine_kernel(CombineCall call) {
  constexpr int raw_bytes = form == Form::any ? 4 * n : n * form_bytes(form);
  extern __shared__ Term shared_terms[];
  wait_for_predecessor();
  let_successor_start();
  Term* const terms = shared_terms + threadIdx.y * call.terms;
  const std::int64_t valid = call.valid_tokens != nullptr
                                 ? min(std::int64_t{*call.valid_tokens}, call.tokens)
                                 : call.tokens;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  for (std::int64_t group = std::int64_t{blockIdx.y} * blockDim.y; group < call.tokens;
       group += step) {
    const std::int64_t token = group + threadIdx.y;
    if (token < valid) {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < call.terms;
           i += static_cast<int>(blockDim.x)) {
        terms[i] = term(call, token, i);
      }
    }
    __syncthreads();
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x * n;
    for (std::int64_t h = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * n;
         h < call.width && token < call.tokens; h += stride) {
      float sum[n] = {};
      for (int first = 0; first < call.terms && token < valid; first += together) {
        Raw<raw_bytes> raw[together];
        Term now[together];
#pragma unroll
        for (int j = 0; j < together; ++j) now[j] = terms[first + j];
#pragma unroll
        for (int j = 0; j < together; ++j) {
          if (now[j].row == nullptr) continue;
          if constexpr (form == Form::any) {
            raw[j] = load_raw<n>(now[j].row, now[j].form, h);
          } else {
            raw[j] = load_last<raw_bytes>(now[j].row + h * form_bytes(form));
          }
        }
#pragma unroll
        for (int j = 0; j < together; ++j) {
          if (now[j].row == nullptr) continue;
          float x[n];
          if constexpr (form == Form::any) {
            widen<n>(raw[j], now[j].form, x);
          } else {
            widen<n, form>(raw[j], x);
          }
#pragma unroll
          for (int i = 0; i < n; ++i) sum[i] = __fmaf_rn(now[j].weight, x[i], sum[i]);
        }
      }
      store_row<n>(call.out.data + token * call.out.row_bytes, call.out.form, h, sum);
    }
    __syncthreads();
  }
}

template <class T, int count>
struct alignas(count < 4 ? count * sizeof(T) : 16) Several {
  T of[count];
};

// `slots` terms: rows, each times a weight or 1. A thread has one vector of a token. blockIdx.x:
// tokens, blockIdx.y: spans of columns. Registers for eight blocks' rows are few: 64, so that 1024
// threads are on a multiprocessor, each with all its rows on their way.
template <Form form, int n, int slots>
__global__ void __launch_bounds__(256, 4)
    combine_slots_kernel(const __grid_constant__ CombineCall call) {
  constexpr int raw_bytes = n * form_bytes(form);
  if (!call.early) {
    wait_for_predecessor();
    let_successor_start();
  }
  const std::int64_t token = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const unsigned h = (blockIdx.y * blockDim.x + threadIdx.x) * n;
  const bool there = token < call.tokens && h < call.width;
  Several<std::int32_t, slots> rows{};
  Several<float, slots> weight;
#pragma unroll
  for (int j = 0; j < slots; ++j) weight.of[j] = 1;
  bool valid = false;
  if (there) {
    rows = reinterpret_cast<const Several<std::int32_t, slots>*>(call.inverse)[token];
    if (call.weighted) {
      weight = reinterpret_cast<const Several<float, slots>*>(call.weights)[token];
    }
    valid = call.valid_tokens == nullptr || token < *call.valid_tokens;
  }
  if (call.early) {
    wait_for_predecessor();
    let_successor_start();
  }
  if (!there) return;
  const auto count = static_cast<std::uint32_t>(call.row_count);
  const auto row_bytes = static_cast<std::uint32_t>(call.rows.row_bytes);
  const char* const column = call.rows.data + h * form_bytes(form);
  const auto row = [&](int j) { return static_cast<std::uint32_t>(rows.of[j]); };
  const auto at = [&](int j) { return column + std::uint64_t{row(j)} * row_bytes; };
  std::uint32_t last = 0;
#pragma unroll
  for (int j = 0; j < slots; ++j) last = max(last, row(j));
  float sum[n] = {};
  Raw<raw_bytes> raw[slots];
  const auto add = [&](int j) {
    float x[n];
    widen<n, form>(raw[j], x);
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = __fmaf_rn(weight.of[j], x[i], sum[i]);
  };
  if (last < count && valid) {  // the same for all threads of a token
#pragma unroll
    for (int j = 0; j < slots; ++j) raw[j] = load_row<raw_bytes>(at(j));
#pragma unroll
    for (int j = 0; j < slots; ++j) add(j);
  } else if (valid) {  // some are missing; four at a time take the registers of those
    constexpr int together = slots < 4 ? slots : 4;
#pragma unroll
    for (int first = 0; first < slots; first += together) {
#pragma unroll
      for (int j = first; j < first + together; ++j) {
        if (row(j) < count) raw[j] = load_row<raw_bytes>(at(j));
      }
#pragma unroll
      for (int j = first; j < first + together; ++j) {
        if (row(j) < count) add(j);
      }
    }
  }
  store_row<n>(call.out.data + token * call.out.row_bytes, call.out.form, h, sum);
}

// As combine_slots_kernel for `each` tokens a thread, blockDim.y apart. A row that is missing is
// read as the last one, and not added: no branch parts the loads.
template <Form form, int n, int slots, int each>
__global__ void __launch_bounds__(256, 4)
    combine_tokens_kernel(const __grid_constant__ CombineCall call) {
  constexpr int raw_bytes = n * form_bytes(form);
  if (!call.early) {
    wait_for_predecessor();
    let_successor_start();
  }
  const std::int64_t first = std::int64_t{blockIdx.x} * each * blockDim.y + threadIdx.y;
  const auto token_of = [&](int t) { return first + std::int64_t{t} * blockDim.y; };
  const unsigned h = (blockIdx.y * blockDim.x + threadIdx.x) * n;
  const std::int64_t valid = call.valid_tokens != nullptr
                                 ? min(std::int64_t{*call.valid_tokens}, call.tokens)
                                 : call.tokens;
  Several<std::int32_t, slots> rows[each];
  Several<float, slots> weight[each];
#pragma unroll
  for (int t = 0; t < each; ++t) {
#pragma unroll
    for (int j = 0; j < slots; ++j) rows[t].of[j] = -1, weight[t].of[j] = 1;
    if (token_of(t) < valid) {
      rows[t] = reinterpret_cast<const Several<std::int32_t, slots>*>(call.inverse)[token_of(t)];
      if (call.weighted) {
        weight[t] = reinterpret_cast<const Several<float, slots>*>(call.weights)[token_of(t)];
      }
    }
  }
  if (call.early) {
    wait_for_predecessor();
    let_successor_start();
  }
  if (h >= call.width) return;
  const auto count = static_cast<std::uint32_t>(call.row_count);
  const char* const column = call.rows.data + h * form_bytes(form);
  Raw<raw_bytes> raw[each][slots];
#pragma unroll
  for (int t = 0; t < each; ++t) {
#pragma unroll
    for (int j = 0; j < slots; ++j) {
      const std::uint32_t row = min(static_cast<std::uint32_t>(rows[t].of[j]), count - 1);
      raw[t][j] = load_row<raw_bytes>(column + std::uint64_t{row} *
                                                   static_cast<std::uint32_t>(call.rows.row_bytes));
    }
  }
#pragma unroll
  for (int t = 0; t < each; ++t) {
    float sum[n] = {};
#pragma unroll
    for (int j = 0; j < slots; ++j) {
      if (static_cast<std::uint32_t>(rows[t].of[j]) >= count) continue;
      float x[n];
      widen<n, form>(raw[t][j], x);
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] = __fmaf_rn(weight[t].of[j], x[i], sum[i]);
    }
    if (token_of(t) < call.tokens) {
      store_row<n>(call.out.data + token_of(t) * call.out.row_bytes, call.out.form, h, sum);
    }
  }
}

struct Blocks {
  dim3 grid, block;
};

// Narrow rows share a block; wide ones are cut into equal spans, more of them where tokens alone
// would leave multiprocessors idle.
Blocks blocks_of(const Gpu& gpu, const CombineCall& call, int n) {
  const std::int64_t vectors = call.width / n;
  const std::int64_t most = call.tokens < gpu.multiprocessors ? 64 : 256;
  const std::int64_t spans = (vectors + most - 1) / most;
  const std::int64_t across = spans == 1 ? vectors : ((vectors + spans - 1) / spans + 31) / 32 * 32;
  const std::int64_t down =
      std::min(std::max<std::int64_t>(1, 128 / across), std::min<std::int64_t>(8, call.tokens));
  const std::int64_t groups = (call.tokens + down - 1) / down;
  return {{static_cast<unsigned>(std::min<std::int64_t>(spans, 1 << 30)),
           static_cast<unsigned>(std::min<std::int64_t>(groups, 65535))},
          {static_cast<unsigned>(across), static_cast<unsigned>(down)}};
}

template <Form form, int n, int together>
void launch_combine(const Gpu& gpu, CombineCall call) {
  call.terms = (call.terms + together - 1) / together * together;
  const Blocks blocks = blocks_of(gpu, call, n);
  launch("combine", gpu,
         {.grid = blocks.grid,
          .block = blocks.block,
          .shared = blocks.block.y * static_cast<std::size_t>(call.terms) * sizeof(Term)},
         combine_kernel<form, n, together>, call);
}

// Returns false where combine_slots_kernel is not for it.
template <Form form, int n>
bool run_slots(const Gpu& gpu, const CombineCall& call) {
  const auto aligned = reinterpret_cast<std::uintptr_t>(call.inverse) |
                       reinterpret_cast<std::uintptr_t>(call.weights);
  if (call.terms != call.slots || call.ids != nullptr || aligned % 16 != 0 ||
      call.row_count > INT32_MAX || call.rows.row_bytes < 0 || call.rows.row_bytes > INT32_MAX ||
      call.width > (1 << 23)) {
    return false;
  }
  const Blocks blocks = blocks_of(gpu, call, n);
  const auto go = [&](auto* kernel, int each = 1) {
    prefer_shared_memory(kernel);
    const auto down = static_cast<std::int64_t>(blocks.block.y) * each;
    const auto groups = static_cast<unsigned>((call.tokens + down - 1) / down);
    launch("combine", gpu, {.grid = {groups, blocks.grid.x}, .block = blocks.block}, kernel, call);
    return true;
  };
  // Several tokens a thread where multiprocessors have enough blocks even so.
  const bool many =
      call.row_count > 0 &&
      call.tokens * blocks.grid.x >= std::int64_t{16} * blocks.block.y * gpu.multiprocessors;
  switch (call.slots) {
    case 1:
      return many ? go(combine_tokens_kernel<form, n, 1, 4>, 4)
                  : go(combine_slots_kernel<form, n, 1>);
    case 2:
      return many ? go(combine_tokens_kernel<form, n, 2, 2>, 2)
                  : go(combine_slots_kernel<form, n, 2>);
    case 4:
      return go(combine_slots_kernel<form, n, 4>);
    case 8:
      return go(combine_slots_kernel<form, n, 8>);
    default:
      return false;
  }
}

template <Form form, int n>
bool run(const Gpu& gpu, const CombineCall& call) {
  if (call.width % n != 0) return false;
  for (const RowsView* view : {&call.rows, &call.hidden, &call.shared, &call.residual, &call.out}) {
    if (view->data == nullptr) continue;
    if (form != Form::any && view != &call.out && view->form != form) return false;
    if (!view->aligned(n * form_bytes(view->form))) return false;
  }
  if constexpr (form != Form::any) {
    if (run_slots<form, n>(gpu, call)) return true;
    if (call.terms > 8) return launch_combine<form, n, 12>(gpu, call), true;
  }
  launch_combine<form, n, 8>(gpu, call);
  return true;
}

}  // namespace

void combine_cuda(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                  const Tensor& out, bool early) {
  const CombineCall call{
      .rows = RowsView(in.rows),
      .hidden = RowsView(in.hidden),
      .shared = RowsView(in.shared),
      .residual = RowsView(in.residual),
      .out = RowsView(out),
      .inverse = in.inverse.as<std::int32_t>(),
      .ids = in.ids.as<std::int32_t>(),
      .weights = in.weights.as<float>(),
      .gate = in.shared_gate.as<float>(),
      .valid_tokens = in.valid_tokens.as<std::int32_t>(),
      .row_count = in.rows.shape[0],
      .tokens = out.shape[0],
      .width = out.shape[1],
      .slots = spec.slots,
      .terms = spec.slots + (in.shared ? 1 : 0) + (in.residual ? 1 : 0),
      .identity_from = spec.identity_from,
      .identity_last = last_identity(spec),
      .weighted = spec.weighted,
      .shared_scale = spec.shared_scale,
      .early = early,
  };
  if (call.tokens == 0 || call.width == 0) return;
  const Gpu& on = gpu(context);
  switch (call.rows.form) {
    case Form::f32:
      if (run<Form::f32, 4>(on, call)) return;
      break;
    case Form::f16:
      if (run<Form::f16, 8>(on, call)) return;
      break;
    default:
      if (run<Form::bf16, 8>(on, call)) return;
  }
  run<Form::any, 4>(on, call) || run<Form::any, 2>(on, call) || run<Form::any, 1>(on, call);
}

}  // namespace shunt
