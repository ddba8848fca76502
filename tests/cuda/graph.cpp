#include "cuda/graph.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace shunt::test {

namespace {

void expect(cudaError_t error, const char* what) {
  EXPECT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}
cudaStream_t of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

Stream::Stream() {
  cudaStream_t stream = nullptr;
  expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
}
Stream::~Stream() { cudaStreamDestroy(of(stream_)); }

Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) : stream_(stream.get()) {
  expect(cudaStreamBeginCapture(of(stream_), cudaStreamCaptureModeGlobal), "begin of the capture");
  try {
    enqueue();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "capture: " << error.what();
  }
  cudaGraph_t graph = nullptr;
  expect(cudaStreamEndCapture(of(stream_), &graph), "end of the capture");
  cudaGraphExec_t executable = nullptr;
  if (graph != nullptr) {
    expect(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  graph_ = executable;
}
Graph::~Graph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
}

void Graph::replay() const {
  if (graph_ == nullptr) return;
  expect(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), of(stream_)), "cudaGraphLaunch");
  expect(cudaStreamSynchronize(of(stream_)), "cudaStreamSynchronize");
}

}  // namespace shunt::test
