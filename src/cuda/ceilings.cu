// Kernels that do one thing only, as fast as the GPU does it.
//
// read:   each thread loads `unroll` vectors of 16 bytes, a block's width apart, all in flight at
//         once, and folds them; the sum is stored only if it equals a value that it never has.
// mix:    a block reads some vectors a thread and writes some, in one piece each, as they come; the
//         stores say that they are not read again.
// touch:  one thread adds 1 to one element that the launch before it wrote.
// tensor: every warpgroup multiplies random bf16, A in registers and B in shared memory, 64 x 128 x
//         16 an instruction, without ever waiting for memory.
#include "cuda/ceilings.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda/timing.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr int tensor_warpgroups = 3;
constexpr int tensor_rounds = 400;
constexpr double flops_of_round = 2.0 * 64 * 128 * 16 * 8;  // of one warpgroup

__device__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

template <int unroll>
__global__ void __launch_bounds__(512) read_kernel(const uint4* from, unsigned* sink) {
  wait_for_predecessor();
  const uint4* mine = from + std::int64_t{blockIdx.x} * blockDim.x * unroll + threadIdx.x;
  uint4 v[unroll];
#pragma unroll
  for (int i = 0; i < unroll; ++i) v[i] = load_once(mine + i * static_cast<int>(blockDim.x));
  let_successor_start();
  unsigned fold = 0;
#pragma unroll
  for (int i = 0; i < unroll; ++i) fold += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  if (fold == 0x9e3779b9u) *sink = fold;  // the memory is all zeros
}

__device__ void store_once(uint4* to, const uint4& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// `to` starts where `from` ends. As many reads as writes: a copy; else all reads go into each
// write.
template <int reads, int writes>
__global__ void __launch_bounds__(512) mix_kernel(const uint4* from, uint4* to) {
  wait_for_predecessor();
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t block = blockIdx.x;
  uint4 v[reads + 1] = {};
#pragma unroll
  for (int i = 0; i < reads; ++i) {
    v[i] = load_once(from + block * reads * threads + i * threads + threadIdx.x);
  }
  let_successor_start();
  if constexpr (reads != writes) {
#pragma unroll
    for (int i = 1; i < reads; ++i) {
      v[0].x ^= v[i].x, v[0].y ^= v[i].y, v[0].z ^= v[i].z, v[0].w ^= v[i].w;
    }
  }
#pragma unroll
  for (int i = 0; i < writes; ++i) {
    store_once(to + block * writes * threads + i * threads + threadIdx.x,
               v[reads == writes ? i : 0]);
  }
}

__global__ void touch_kernel(unsigned* element) {
  wait_for_predecessor();
  *element += 1;
  let_successor_start();
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SHUNT_ACC8(i)                                                                   \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
      "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
__device__ void multiply(float (&acc)[64], const unsigned (&a)[4], std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : SHUNT_ACC8(0), SHUNT_ACC8(8), SHUNT_ACC8(16), SHUNT_ACC8(24), SHUNT_ACC8(32),
        SHUNT_ACC8(40), SHUNT_ACC8(48), SHUNT_ACC8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef SHUNT_ACC8

// Two bf16 of either sign and magnitude 1/8 to 1/2.
__device__ unsigned random_pair(unsigned x) {
  x = (x ^ 0x5bd1e995u) * 0x9e3779b1u;
  x ^= x >> 15;
  x *= 0x85ebca77u;
  x ^= x >> 13;
  return (x & 0x80ff80ffu) | 0x3e003e00u;
}
#endif

__global__ void __launch_bounds__(128 * tensor_warpgroups, 1) tensor_kernel(float* sink) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Eight tiles of B, 128 x 16 each, as 8 x 8 matrices of 128 contiguous bytes: no swizzle.
  __shared__ alignas(128) unsigned tiles[8][1024];
  for (unsigned i = threadIdx.x; i < 8 * 1024; i += blockDim.x) tiles[0][i] = random_pair(i);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  wait_for_predecessor();
  float acc[64] = {};
  unsigned a[4];
  for (int i = 0; i < 4; ++i) a[i] = random_pair(threadIdx.x * 4 + i);
  const auto address = static_cast<std::uint64_t>(__cvta_generic_to_shared(&tiles[0][0]));
  // Start, 128 bytes between matrices along K, 256 along N; all in units of 16 bytes.
  const std::uint64_t b =
      address >> 4 | std::uint64_t{128 >> 4} << 16 | std::uint64_t{256 >> 4} << 32;
  for (int round = 0; round < tensor_rounds; ++round) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      multiply(acc, a, b + static_cast<std::uint64_t>(tile * (4096 >> 4)));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += acc[i];
  if (sum == 12345.678f) *sink = sum;
#endif
}

unsigned blocks(std::size_t bytes, int unroll, int threads) {
  return static_cast<unsigned>(bytes / (16u * static_cast<unsigned>(unroll * threads)));
}

// One launch that reads `bytes`, a power of two from 256 kB on: the best of several forms.
double read_us(const Context& context, const Buffer& memory, std::size_t bytes, unsigned* sink) {
  const auto places = static_cast<std::int64_t>(memory.bytes() / bytes);
  const Gpu& on = gpu(context);
  double best = std::numeric_limits<double>::infinity();
  const auto attempt = [&](auto kernel, int unroll, int threads) {
    const auto enqueue = [&](std::int64_t i) {
      launch("read", on,
             {.grid = dim3(blocks(bytes, unroll, threads)),
              .block = dim3(static_cast<unsigned>(threads))},
             kernel,
             reinterpret_cast<const uint4*>(static_cast<const char*>(memory.data()) +
                                            static_cast<std::size_t>(i) * bytes),
             sink);
    };
    // Enough different places for four times a large L2 in each replay.
    const std::int64_t rotations = std::min(
        places,
        std::max<std::int64_t>(4, (std::int64_t{256} << 20) / static_cast<std::int64_t>(bytes)));
    const GraphTimes times =
        time_in_graph(context, enqueue, {.rotations = rotations, .calls = 16, .seconds = 0.02});
    best = std::min(best, times.us);
  };
  if (bytes <= (std::size_t{4} << 20)) {
    attempt(read_kernel<1>, 1, 128);
    attempt(read_kernel<1>, 1, 256);
    attempt(read_kernel<2>, 2, 256);
  }
  if (bytes >= (std::size_t{1} << 20)) attempt(read_kernel<4>, 4, 512);
  return best;
}

// What a launch takes that reads and writes in a proportion.
class MixTimer {
 public:
  MixTimer(const Context& context, const Buffer& memory) : context_(context), memory_(memory) {}

  // The best of several forms: one vector a thread at a time, in small blocks or large ones; more.
  template <int reads, int writes, int more>
  Ceilings::Mix mix() const {
    Ceilings::Mix found{.written = static_cast<double>(writes) / (reads + writes)};
    for (int i = 0; i < Ceilings::mix_sizes; ++i) {
      const double bytes = Ceilings::mix_bytes[i];
      found.us[i] = bytes < 10e6 ? us<reads, writes>(bytes, 64) : us<reads, writes>(bytes, 256);
      if (bytes < 1e6) continue;
      found.us[i] = std::min(
          found.us[i], bytes < 10e6 ? us<reads, writes>(bytes, 256)
                                    : us<reads * more, writes * more>(bytes, more > 2 ? 512 : 128));
    }
    return found;
  }

 private:
  template <int reads, int writes>
  double us(double bytes, int threads) const {
    const std::int64_t unit = std::int64_t{16} * threads * (reads + writes);
    const auto count = static_cast<std::int64_t>(bytes) / unit;
    const std::int64_t one = count * unit;
    const std::int64_t from = count * threads * reads;
    const Gpu& on = gpu(context_);
    const auto enqueue = [&](std::int64_t i) {
      auto* base = reinterpret_cast<uint4*>(static_cast<char*>(memory_.data()) + i * one);
      launch("mix", on,
             {.grid = dim3(static_cast<unsigned>(count)),
              .block = dim3(static_cast<unsigned>(threads))},
             mix_kernel<reads, writes>, base, base + from);
    };
    // Past the L2 in a replay, if that is not too many launches.
    const auto places =
        std::min<std::int64_t>(static_cast<std::int64_t>(memory_.bytes()) / one, 256);
    const std::int64_t rotations =
        std::clamp<std::int64_t>((std::int64_t{256} << 20) / one, 3, places);
    return time_in_graph(context_, enqueue, {.rotations = rotations, .calls = 16, .seconds = 0.01})
        .us;
  }

  const Context& context_;
  const Buffer& memory_;
};

}  // namespace

double Ceilings::Mix::rate() const {
  constexpr int last = mix_sizes - 1;
  return 1e6 * (mix_bytes[last] - mix_bytes[last - 1]) / (us[last] - us[last - 1]);
}

double Ceilings::floor_us(double bytes, double operations, double written) const {
  double memory = read > 0 ? read_start_us + 1e6 * bytes / read : 0;
  const double part = bytes > 0 ? written / bytes : 0;
  double below = 0;  // the mix before, and its time
  for (const Mix& mix : mixes) {
    if (part <= below || mix.us[0] <= 0) break;
    // On the line through the two sizes around it, or through the two next to it.
    int i = 0;
    while (i + 2 < mix_sizes && bytes > mix_bytes[i + 1]) ++i;
    const double along = (bytes - mix_bytes[i]) / (mix_bytes[i + 1] - mix_bytes[i]);
    const double here = mix.us[i] + along * (mix.us[i + 1] - mix.us[i]);
    const double share = std::min((part - below) / (mix.written - below), 1.0);
    memory += share * (here - memory);
    below = mix.written;
  }
  const double arithmetic = bf16_flops > 0 ? 1e6 * operations / bf16_flops : 0;
  return std::max({launch_us, memory, arithmetic});
}

Ceilings measure_ceilings(const Context& context) {
  const Gpu& on = gpu(context);
  const Buffer memory = context.allocate(std::size_t{1} << 30);
  const Buffer small = context.allocate(256);
  auto* element = static_cast<unsigned*>(small.data());
  Ceilings found;

  const auto touch = [&](std::int64_t) { launch("touch", on, {}, touch_kernel, element); };
  found.launch_us = time_in_graph(context, touch, {.calls = 256, .seconds = 0.02}).us;

  // A line under every measured time: the slope of the large reads, and the least of what is left.
  const std::size_t sizes[] = {std::size_t{256} << 10, std::size_t{1} << 20, std::size_t{16} << 20,
                               std::size_t{512} << 20};
  std::vector<double> times;
  for (const std::size_t bytes : sizes) times.push_back(read_us(context, memory, bytes, element));
  found.read = 1e6 * static_cast<double>(sizes[3] - sizes[2]) / (times[3] - times[2]);
  found.read_start_us = times[0];
  for (std::size_t i = 0; i < times.size(); ++i) {
    found.read_start_us =
        std::min(found.read_start_us, times[i] - 1e6 * static_cast<double>(sizes[i]) / found.read);
  }

  const MixTimer timer(context, memory);
  found.mixes[0] = timer.mix<8, 1, 1>();
  found.mixes[1] = timer.mix<1, 1, 4>();
  found.mixes[2] = timer.mix<1, 8, 2>();
  found.mixes[3] = timer.mix<0, 1, 4>();

  if (on.compute == 90) {
    const auto multiply_all = [&](std::int64_t) {
      launch("tensor", on,
             {.grid = dim3(static_cast<unsigned>(on.multiprocessors)),
              .block = dim3(128 * tensor_warpgroups)},
             tensor_kernel, static_cast<float*>(small.data()));
    };
    const double us =
        time_in_graph(context, multiply_all, {.calls = 4, .seconds = 0.01, .least_samples = 5}).us;
    found.bf16_flops =
        1e6 * flops_of_round * tensor_rounds * tensor_warpgroups * on.multiprocessors / us;
  }
  return found;
}

}  // namespace shunt::cuda_engine
