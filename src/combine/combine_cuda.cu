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
// Bytes: every row read once, every output written once; inverse and weights again for each span.
// Time predicted: two dependent reads, 2.2 us, and from some MB on bytes / copy bandwidth.
//
// out may be hidden, shared or residual: an element is read by the thread that writes it, before.
#include "combine/engine.hpp"
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
  std::int32_t identity_from;
  bool weighted;
  float shared_scale;
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
    if (call.ids == nullptr || call.ids[pair] < call.identity_from) return {};
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

template <Form form, int n, int together>
void launch_combine(const Gpu& gpu, CombineCall call) {
  call.terms = (call.terms + together - 1) / together * together;
  // Narrow rows share a block; wide ones are cut into equal spans, more of them where tokens alone
  // would leave multiprocessors idle.
  const std::int64_t vectors = call.width / n;
  const std::int64_t most = call.tokens < gpu.multiprocessors ? 64 : 256;
  const std::int64_t spans = (vectors + most - 1) / most;
  const std::int64_t across = spans == 1 ? vectors : ((vectors + spans - 1) / spans + 31) / 32 * 32;
  const std::int64_t down =
      std::min(std::max<std::int64_t>(1, 128 / across), std::min<std::int64_t>(8, call.tokens));
  const std::int64_t groups = (call.tokens + down - 1) / down;
  launch("combine", gpu,
         {.grid = {static_cast<unsigned>(std::min<std::int64_t>(spans, 1 << 30)),
                   static_cast<unsigned>(std::min<std::int64_t>(groups, 65535))},
          .block = {static_cast<unsigned>(across), static_cast<unsigned>(down)},
          .shared = static_cast<std::size_t>(down * call.terms) * sizeof(Term)},
         combine_kernel<form, n, together>, call);
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
    if (call.terms > 8) return launch_combine<form, n, 12>(gpu, call), true;
  }
  launch_combine<form, n, 8>(gpu, call);
  return true;
}

}  // namespace

void combine_cuda(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                  const Tensor& out) {
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
      .weighted = spec.weighted,
      .shared_scale = spec.shared_scale,
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
