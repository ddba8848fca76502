// The layer inside a CUDA graph: captured once, replayed over other hidden states, another routing
// and another number of valid tokens, none of which the host tells the graph: example_layer_graph
// [DIR]. Compares every replay with a plain call, bit for bit.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <shunt/shunt.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

constexpr std::int64_t capacity = 64;  // tokens that the graph has room for

// What a call reads and writes on the GPU. A graph keeps these addresses; what they hold may
// change.
struct Batch {
  explicit Batch(const shunt::Context& gpu, const shunt::Layer& layer)
      : hidden(layer.spec().hidden),
        k(layer.spec().route.top_k),
        x(gpu.allocate(static_cast<std::size_t>(capacity * hidden) * sizeof(float))),
        y(gpu.allocate(x.bytes())),
        ids(gpu.allocate(static_cast<std::size_t>(capacity * k) * sizeof(std::int32_t))),
        valid(gpu.allocate(sizeof(std::int32_t))),
        workspace(gpu.allocate(layer.workspace_bytes(capacity))) {
    const shunt::Device at = gpu.device();
    in = {.hidden = shunt::view(x.data(), shunt::f32, {capacity, hidden}, at),
          .valid_tokens = shunt::view(valid.data(), shunt::i32, {1}, at)};
    out = {.output = shunt::view(y.data(), shunt::f32, {capacity, hidden}, at),
           .ids = shunt::view(ids.data(), shunt::i32, {capacity, k}, at)};
  }
  std::int64_t hidden, k;
  shunt::Buffer x, y, ids, valid, workspace;
  shunt::LayerInputs in;
  shunt::LayerOutputs out;
};

struct Result {
  std::vector<float> y;
  std::vector<std::int32_t> ids;
  Result(const shunt::Context& gpu, const Batch& batch)
      : y(batch.y.bytes() / sizeof(float)), ids(batch.ids.bytes() / sizeof(std::int32_t)) {
    gpu.copy(y.data(), batch.y.data(), batch.y.bytes());
    gpu.copy(ids.data(), batch.ids.data(), batch.ids.bytes());
  }
  bool operator==(const Result& other) const {
    return ids == other.ids && std::memcmp(y.data(), other.y.data(), y.size() * sizeof(float)) == 0;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  shunt::cuda();  // says why, where there is no GPU
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const shunt::Context gpu = shunt::cuda({.stream = stream, .dependent_launch = true});
  const auto model = shunt::Checkpoint::open(argc > 1 ? argv[1] : "models/tiny-moe");
  const shunt::Layer layer(model, model.first_moe_layer(), gpu, {.dtype = shunt::bf16});
  const Batch batch(gpu, layer);

  // A first call loads the kernels, which a capture may not do.
  layer.forward(batch.in, batch.out, batch.workspace);
  gpu.synchronize();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.forward(batch.in, batch.out, batch.workspace);  // among whatever else a model does
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(capacity * batch.hidden));
  std::vector<std::int32_t> before;
  int wrong = 0;
  for (const std::int32_t valid : {64, 1, 17, 0, 63}) {
    for (float& value : x) value = normal(random);
    gpu.copy(batch.x.data(), x.data(), batch.x.bytes());
    gpu.copy(batch.valid.data(), &valid, sizeof valid);
    check(cudaGraphLaunch(replay, stream));
    const Result replayed(gpu, batch);
    layer.forward(batch.in, batch.out, batch.workspace);
    const Result plain(gpu, batch);

    std::size_t moved = 0;
    for (std::size_t i = 0; i < before.size(); ++i) moved += before[i] != replayed.ids[i];
    before = replayed.ids;
    const bool same = replayed == plain;
    wrong += !same;
    std::printf("%2d valid tokens, %3zu of %3zu choices moved: %s\n", valid, moved, before.size(),
                same ? "the graph gives what a call gives" : "THE GRAPH DIFFERS FROM A CALL");
  }
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  // For ctest: skipped where there is no GPU.
  const auto* const ours = dynamic_cast<const shunt::Error*>(&error);
  return ours != nullptr && ours->status() == shunt::Status::unsupported ? 77 : 1;
}
