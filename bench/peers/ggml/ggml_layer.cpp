// Times a mixture-of-experts layer on ggml's CPU backend: the graph that llama.cpp builds for it,
// from hidden states [T, H] in f32 to output [T, H] in f32. Router, softmax, the k best,
// renormalised; gate and up by ggml_mul_mat_id, SwiGLU, down, the weighted sum.
//
//   ggml_layer TYPE E K H I THREADS ROTATE_BYTES SECONDS T...
//
// TYPE: f32, f16, bf16, q8_0, q4_0, q4_K, mxfp4 or nvfp4, of the experts. Weights rotate past
// ROTATE_BYTES. Prints "ggml VERSION", then one line a buffer type (ggml's own layout, and those it
// repacks weights into) and number of tokens: "BUFFER T MICROSECONDS", the median of calls that
// take SECONDS. Inputs are random, sixteen in turn.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

struct Shape {
  std::int64_t experts, top_k, hidden, intermediate;
};

struct FreeContext {
  void operator()(ggml_context* c) const { ggml_free(c); }
  void operator()(ggml_backend_buffer* b) const { ggml_backend_buffer_free(b); }
  void operator()(ggml_gallocr* a) const { ggml_gallocr_free(a); }
  void operator()(ggml_backend* b) const { ggml_backend_free(b); }
  void operator()(ggml_threadpool* p) const { ggml_threadpool_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, FreeContext>;

Owned<ggml_context> context_of(std::size_t tensors) {
  return Owned<ggml_context>(
      ggml_init({ggml_tensor_overhead() * tensors + ggml_graph_overhead(), nullptr, true}));
}

// Random numbers, of one expert and repeated for all: no time depends on them.
void fill(ggml_tensor* tensor, std::mt19937& random) {
  const std::int64_t columns = tensor->ne[0], rows = tensor->ne[1], matrices = tensor->ne[2];
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
  std::vector<float> plain(static_cast<std::size_t>(columns * rows));
  for (float& x : plain) x = normal(random);
  const std::size_t bytes = ggml_row_size(tensor->type, columns) * static_cast<std::size_t>(rows);
  std::vector<char> all(bytes * static_cast<std::size_t>(matrices));
  if (tensor->type == GGML_TYPE_F32) {
    std::memcpy(all.data(), plain.data(), bytes);
  } else {
    ggml_quantize_chunk(tensor->type, plain.data(), all.data(), 0, rows, columns, nullptr);
  }
  for (std::int64_t e = 1; e < matrices; ++e) {
    std::memcpy(all.data() + static_cast<std::size_t>(e) * bytes, all.data(), bytes);
  }
  ggml_backend_tensor_set(tensor, all.data(), 0, all.size());
}

// A layer's weights in one kind of buffer.
struct Weights {
  Owned<ggml_context> experts, plain;
  Owned<ggml_backend_buffer> experts_memory, plain_memory;
  ggml_tensor *router, *gate, *up, *down;

  Weights(const Shape& s, ggml_type type, ggml_backend_buffer_type_t memory)
      : experts(context_of(3)), plain(context_of(1)) {
    router = ggml_new_tensor_2d(plain.get(), GGML_TYPE_F32, s.hidden, s.experts);
    gate = ggml_new_tensor_3d(experts.get(), type, s.hidden, s.intermediate, s.experts);
    up = ggml_new_tensor_3d(experts.get(), type, s.hidden, s.intermediate, s.experts);
    down = ggml_new_tensor_3d(experts.get(), type, s.intermediate, s.hidden, s.experts);
    plain_memory.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(plain.get(), ggml_backend_cpu_buffer_type()));
    experts_memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(experts.get(), memory));
    if (!experts_memory || !plain_memory) throw std::runtime_error("no memory for the weights");
  }
  void fill_all(std::mt19937& random) const {
    for (ggml_tensor* tensor : {router, gate, up, down}) fill(tensor, random);
  }
};

// The graph over one layer's weights, for T tokens.
struct Layer {
  Owned<ggml_context> context = context_of(64);
  ggml_tensor *x, *out, *product;
  ggml_cgraph* graph;

  Layer(const Shape& s, const Weights& w, std::int64_t tokens) {
    ggml_context* const c = context.get();
    x = ggml_new_tensor_2d(c, GGML_TYPE_F32, s.hidden, tokens);
    ggml_set_input(x);
    ggml_tensor* const scores = ggml_soft_max(c, ggml_mul_mat(c, w.router, x));
    ggml_tensor* const ids = ggml_argsort_top_k(c, scores, static_cast<int>(s.top_k));
    ggml_tensor* weights =
        ggml_get_rows(c, ggml_reshape_3d(c, scores, 1, s.experts, tokens), ids);  // [1, k, T]
    weights = ggml_reshape_2d(c, weights, s.top_k, tokens);
    weights = ggml_div(c, weights, ggml_sum_rows(c, weights));
    weights = ggml_reshape_3d(c, weights, 1, s.top_k, tokens);
    ggml_tensor* const rows = ggml_reshape_3d(c, x, s.hidden, 1, tokens);
    ggml_tensor* const gate = ggml_mul_mat_id(c, w.gate, rows, ids);  // [I, k, T]
    ggml_tensor* const up = ggml_mul_mat_id(c, w.up, rows, ids);
    product = gate;
    ggml_tensor* const down = ggml_mul_mat_id(c, w.down, ggml_swiglu_split(c, gate, up), ids);
    ggml_tensor* const weighted = ggml_mul(c, down, weights);  // [H, k, T]
    const auto slot = [&](std::int64_t k) {
      return ggml_view_2d(c, weighted, s.hidden, tokens, weighted->nb[2],
                          static_cast<std::size_t>(k) * weighted->nb[1]);
    };
    out = slot(0);
    for (std::int64_t k = 1; k < s.top_k; ++k) out = ggml_add(c, out, slot(k));
    if (s.top_k == 1) out = ggml_cont(c, out);
    ggml_set_output(out);
    graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, out);
  }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double time_layers(ggml_backend_t backend, const Shape& s, const std::vector<Weights>& weights,
                   std::int64_t tokens, double seconds, std::mt19937& random) {
  std::vector<Layer> layers;
  for (const Weights& w : weights) layers.emplace_back(s, w, tokens);
  Owned<ggml_gallocr> memory(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  // Made beforehand: threads that wait for their next call would fall asleep meanwhile.
  std::vector<std::vector<float>> inputs(16);
  std::normal_distribution<float> normal;
  for (std::vector<float>& x : inputs) {
    x.resize(static_cast<std::size_t>(s.hidden * tokens));
    for (float& value : x) value = normal(random);
  }
  std::vector<double> times;
  const double begin = seconds_now();
  for (std::size_t i = 0; i < 2 * layers.size() + 3 || seconds_now() - begin < seconds; ++i) {
    Layer& layer = layers[i % layers.size()];
    if (!ggml_gallocr_alloc_graph(memory.get(), layer.graph)) throw std::runtime_error("no memory");
    const std::vector<float>& x = inputs[i % inputs.size()];
    ggml_backend_tensor_set(layer.x, x.data(), 0, x.size() * sizeof(float));
    const double start = seconds_now();
    if (ggml_backend_graph_compute(backend, layer.graph) != GGML_STATUS_SUCCESS) {
      throw std::runtime_error("the graph failed");
    }
    if (i >= layers.size()) times.push_back(1e6 * (seconds_now() - start));
  }
  std::vector<float> result(static_cast<std::size_t>(s.hidden));
  ggml_backend_tensor_get(layers[0].out, result.data(), 0, result.size() * sizeof(float));
  for (const float value : result) {
    if (!std::isfinite(value)) throw std::runtime_error("a result is not finite");
  }
  return median(times);
}

int run(int argc, char** argv) {
  const std::map<std::string, ggml_type> types{
      {"f32", GGML_TYPE_F32},     {"f16", GGML_TYPE_F16},    {"bf16", GGML_TYPE_BF16},
      {"q8_0", GGML_TYPE_Q8_0},   {"q4_0", GGML_TYPE_Q4_0},  {"q4_K", GGML_TYPE_Q4_K},
      {"mxfp4", GGML_TYPE_MXFP4}, {"nvfp4", GGML_TYPE_NVFP4}};
  if (argc < 10 || !types.contains(argv[1])) {
    std::fprintf(stderr, "ggml_layer TYPE E K H I THREADS ROTATE_BYTES SECONDS T...\n");
    return 2;
  }
  const ggml_type type = types.at(argv[1]);
  const Shape s{std::atoll(argv[2]), std::atoll(argv[3]), std::atoll(argv[4]), std::atoll(argv[5])};
  const double rotate = std::atof(argv[7]), seconds = std::atof(argv[8]);

  Owned<ggml_backend> backend(ggml_backend_cpu_init());
  ggml_backend_cpu_set_n_threads(backend.get(), std::atoi(argv[6]));
  // Threads that stay, as llama.cpp has them: without a pool each call starts and joins its own.
  ggml_threadpool_params threads = ggml_threadpool_params_default(std::atoi(argv[6]));
  const Owned<ggml_threadpool> pool(ggml_threadpool_new(&threads));
  ggml_backend_cpu_set_threadpool(backend.get(), pool.get());
  ggml_backend_dev_t device = ggml_backend_get_device(backend.get());
  std::vector<ggml_backend_buffer_type_t> buffers{ggml_backend_cpu_buffer_type()};
  const auto extra =
      reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  for (auto* at = extra != nullptr ? extra(device) : nullptr; at != nullptr && *at != nullptr;
       ++at) {
    buffers.push_back(*at);
  }
  std::printf("ggml %s\n", ggml_version());
  std::mt19937 random(1);
  for (ggml_backend_buffer_type_t memory : buffers) {
    std::vector<Weights> weights;
    const double bytes = 3.0 * static_cast<double>(s.experts * s.intermediate) *
                         static_cast<double>(ggml_row_size(type, s.hidden));
    weights.emplace_back(s, type, memory);
    if (!ggml_backend_dev_supports_op(device, Layer(s, weights[0], 1).product)) continue;
    while (bytes * static_cast<double>(weights.size()) < rotate) {
      weights.emplace_back(s, type, memory);
    }
    for (const Weights& layer : weights) layer.fill_all(random);
    for (int i = 9; i < argc; ++i) {
      const double us =
          time_layers(backend.get(), s, weights, std::atoll(argv[i]), seconds, random);
      std::printf("%s %s %.1f\n", ggml_backend_buft_name(memory), argv[i], us);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ggml_layer: %s\n", error.what());
    return 1;
  }
}
