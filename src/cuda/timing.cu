#include "cuda/timing.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

#include "cuda/current.hpp"
#include "cuda/launch.hpp"

namespace shunt::cuda_engine {

namespace {

// Events and graphs that go when the scope does.
struct Event {
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

struct Graph {
  Graph() = default;
  ~Graph() {
    if (ready != nullptr) cudaGraphExecDestroy(ready);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
};

void capture(cudaStream_t stream, Graph& graph, const std::function<void()>& work) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph.graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph.graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&graph.ready, graph.graph, 0), "cudaGraphInstantiate");
  check(cudaGraphUpload(graph.ready, stream), "cudaGraphUpload");
}

// SplitMix64 of a counter.
__device__ std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
__device__ T rounded(float value);
template <>
__device__ float rounded(float value) {
  return value;
}
template <>
__device__ __nv_bfloat16 rounded(float value) {
  return __float2bfloat16(value);
}
template <>
__device__ __half rounded(float value) {
  return __float2half(value);
}

// Each thread makes pairs of deviates (Box and Muller) of one 64-bit number, a grid's width apart.
template <class T>
__global__ void fill_normal_kernel(T* out, std::int64_t n, float deviation, std::uint64_t seed) {
  wait_for_predecessor();
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; 2 * i < n; i += step) {
    const std::uint64_t bits = mixed(mixed(seed) + static_cast<std::uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;  // in (0, 1)
    const float angle = static_cast<float>(bits & 0xffffff) * 0x1p-23f;  // of pi
    const float radius = deviation * sqrtf(-2.0f * logf(u));
    out[2 * i] = rounded<T>(radius * cospif(angle));
    if (2 * i + 1 < n) out[2 * i + 1] = rounded<T>(radius * sinpif(angle));
  }
}

}  // namespace

Stream::Stream(int index) {
  const Current current(index);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
}

Stream::~Stream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

GraphTimes time_in_graph(const Context& context, const std::function<void(std::int64_t)>& enqueue,
                         const GraphOptions& options) {
  const cudaStream_t stream = stream_of(gpu(context));
  enqueue(0);  // loads the kernels: a capture is no place for that
  context.synchronize();
  const std::int64_t rounds =
      std::max<std::int64_t>(1, (options.calls + options.rotations - 1) / options.rotations);
  GraphTimes times{.calls = rounds * options.rotations};
  Graph graph;
  capture(stream, graph, [&] {
    for (std::int64_t i = 0; i < times.calls; ++i) enqueue(i % options.rotations);
  });
  const Event begin, end;
  const auto sample = [&](int replays) {  // microseconds a call
    check(cudaEventRecord(begin.event, stream), "cudaEventRecord");
    for (int i = 0; i < replays; ++i) {
      check(cudaGraphLaunch(graph.ready, stream), "cudaGraphLaunch");
    }
    check(cudaEventRecord(end.event, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end.event), "a replay of the graph");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(milliseconds) /
           (static_cast<double>(replays) * static_cast<double>(times.calls));
  };
  sample(2);  // clocks rise, pages are touched
  const double probe = std::max(sample(2), 0.01) * static_cast<double>(times.calls);
  // Long samples, so that the start of a replay does not show; enough of them for a median.
  const int samples = std::max(options.least_samples, 1);
  const double replays = 1e6 * options.seconds / samples / probe;
  const int each = static_cast<int>(std::clamp(replays, 1.0, 1000.0));
  std::vector<double> all;
  all.reserve(static_cast<std::size_t>(samples));
  for (int i = 0; i < samples; ++i) all.push_back(sample(each));
  std::sort(all.begin(), all.end());
  times.us = all[all.size() / 2];
  times.us_min = all.front();
  times.us_max = all.back();
  times.samples = samples;
  return times;
}

void fill_normal(const Context& context, Tensor out, float deviation, std::uint64_t seed) {
  const std::int64_t n = out.elements();
  if (n == 0) return;
  const Shape shape{.grid = dim3(static_cast<unsigned>(std::min<std::int64_t>(n / 512 + 1, 2048))),
                    .block = dim3(256)};
  const auto fill = [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    launch("fill_normal", gpu(context), shape, fill_normal_kernel<T>, data, n, deviation, seed);
  };
  switch (out.dtype) {
    case DType::f32:
      return fill(out.as<float>());
    case DType::bf16:
      return fill(out.as<__nv_bfloat16>());
    case DType::f16:
      return fill(out.as<__half>());
    default:
      throw Error(Status::invalid_argument,
                  "fill_normal: out is " + out.describe() + ": must be f32, bf16 or f16");
  }
}

}  // namespace shunt::cuda_engine
