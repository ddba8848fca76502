// What the host side of the CUDA engine shares: memory, copies, what the GPU is. Built with or
// without CUDA; without, every call but built() is never reached.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {
class Context;
}

namespace shunt::cuda_engine {

#if SHUNT_CUDA_BUILT
inline constexpr bool built = true;
#else
inline constexpr bool built = false;
#endif

// A GPU and the stream that orders work on it.
struct Gpu {
  int index = 0;
  void* stream = nullptr;         // cudaStream_t
  bool dependent_launch = false;  // kernels may start before their predecessor has ended
  int compute = 0;                // 90 for 9.0; 80 where its code was built for an older GPU
  int multiprocessors = 0;
  int shared_bytes = 0;     // that a block may ask for
  int largest_cluster = 1;  // blocks that any cluster may have; 1 before Hopper
  int widest_cluster = 1;   // that one may have where the GPU is whole: 16 on Hopper
  // [c]: clusters of c blocks that run at once, each block with a multiprocessor to itself. Groups
  // of multiprocessors are not all whole: 132 of them hold 66 clusters of 2, but 30 of 4.
  std::array<int, 9> clusters{};
  std::size_t l2_bytes = 0;
  double read_gbps = 0;  // of memory, by its clock and width
  double clock_ghz = 0;
  // Counters by which the last block of a kernel knows that it is the last. Zero between kernels:
  // whoever counts resets. Kernels of one context run one after another, so that they can share.
  std::uint32_t* tickets = nullptr;
};

// Who counts with which of Gpu::tickets; 33 and 34: gemm/tile_counter.hpp.
inline constexpr int order_tickets = 0;     // 0 .. 15
inline constexpr int router_tickets = 16;   // 16 .. 31
inline constexpr int router_launches = 32;  // not reset: the number of the last that met (below)
// Where few tokens' sums meet, [16 groups, 4 tokens, 512 columns] of a float and the number of the
// launch that it is from.
inline constexpr int router_meeting = 256;
inline constexpr int ticket_count = router_meeting + 16 * 4 * 512 * 2;

// Yes for the CPU, and for CUDA when the engine is built in. `what`: "route".
Support supported_device(const char* what, Device device);

// 90 for 9.0; 0 where there is no such GPU.
int compute_capability(int index);
int multiprocessors(int index);  // 0 where there is no such GPU
// Shared memory that a block may ask for; 0 where there is no such GPU.
int block_shared_bytes(int index);
// Throws Error{unsupported} when there is no such GPU or it is older than compute capability 8.0.
// Its tickets are freed by close().
Gpu open(void* stream, int index, bool dependent_launch);
void close(const Gpu& gpu) noexcept;
// What a CUDA context works on.
const Gpu& gpu(const Context& context);

// Throws Error{out_of_memory}. 256-byte aligned, zeroed.
void* allocate(const Gpu& gpu, std::size_t bytes);
void release(int index, void* data) noexcept;
// Both wait.
void copy(const Gpu& gpu, void* to, const void* from, std::size_t bytes);
void synchronize(const Gpu& gpu);

}  // namespace shunt::cuda_engine
