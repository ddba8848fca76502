#include "cuda/launch.hpp"
#include "cuda/marks.hpp"

namespace shunt::cuda_engine {

namespace {

__global__ void hold(long long nanoseconds) {
  wait_for_predecessor();
  long long begin = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

Marks::Marks(const Gpu& gpu) : gpu_(gpu) { launch("marks", gpu_, {}, hold, 500000LL); }

Marks::~Marks() {
  for (void* event : events_) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void Marks::mark() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  events_.push_back(event);
  check(cudaEventRecord(event, stream_of(gpu_)), "cudaEventRecord");
}

std::vector<double> Marks::seconds() const {
  std::vector<double> times;
  if (events_.empty()) return times;
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(events_.back())), "cudaEventSynchronize");
  for (std::size_t i = 1; i < events_.size(); ++i) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(events_[i - 1]),
                               static_cast<cudaEvent_t>(events_[i])),
          "cudaEventElapsedTime");
    times.push_back(static_cast<double>(milliseconds) * 1e-3);
  }
  return times;
}

}  // namespace shunt::cuda_engine
