// Loops of inline assembly: 24 independent accumulators for AVX-512 and 12 for AVX2, more than any
// CPU's latency times its units, and nothing for a compiler to spill or drop.
#include "cpu/ceilings.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "cpu/features.hpp"

namespace shunt::cpu_engine {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Keeps what a loop read.
std::atomic<std::uint64_t> sink{0};

using Loop = void (*)(std::int64_t rounds);

#if SHUNT_X86

#define SHUNT_12(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define SHUNT_24(op) \
  SHUNT_12(op) op(12) op(13) op(14) op(15) op(16) op(17) op(18) op(19) op(20) op(21) op(22) op(23)
#define SHUNT_CLEAR_Z(i) "vpxord %%zmm" #i ",%%zmm" #i ",%%zmm" #i "\n\t"
#define SHUNT_CLEAR_Y(i) "vxorps %%ymm" #i ",%%ymm" #i ",%%ymm" #i "\n\t"
#define SHUNT_FMA_Z(i) "vfmadd231ps %%zmm30,%%zmm31,%%zmm" #i "\n\t"
#define SHUNT_FMA_Y(i) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i "\n\t"
#define SHUNT_DOT_BF16(i) "vdpbf16ps %%zmm30,%%zmm31,%%zmm" #i "\n\t"
#define SHUNT_DOT_INT8(i) "vpdpbusd %%zmm30,%%zmm31,%%zmm" #i "\n\t"
#define SHUNT_FMA_FP16(i) "vfmadd231ph %%zmm30,%%zmm31,%%zmm" #i "\n\t"
#define SHUNT_ZMM                                                                               \
  "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10",      \
      "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", \
      "zmm21", "zmm22", "zmm23", "zmm30", "zmm31"

#define SHUNT_LOOP_Z(name, op)                                                      \
  __attribute__((target("avx512f"))) void name(std::int64_t rounds) {               \
    __asm__ volatile(SHUNT_24(SHUNT_CLEAR_Z) SHUNT_CLEAR_Z(30)                      \
                         SHUNT_CLEAR_Z(31) "1:\n\t" SHUNT_24(op) "dec %0\n\tjnz 1b" \
                     : "+r"(rounds)::SHUNT_ZMM, "cc");                              \
  }
SHUNT_LOOP_Z(fma_avx512, SHUNT_FMA_Z)
SHUNT_LOOP_Z(dot_bf16, SHUNT_DOT_BF16)
SHUNT_LOOP_Z(dot_int8, SHUNT_DOT_INT8)
SHUNT_LOOP_Z(fma_fp16, SHUNT_FMA_FP16)

// Tiles of 16 rows and 32 of k.
void dot_tiles(std::int64_t rounds) {
  struct alignas(64) {
    std::uint8_t palette = 1, unused[15] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile(
      "ldtilecfg %1\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\t1:\n\t"
      "tdpbf16ps %%tmm5,%%tmm4,%%tmm0\n\ttdpbf16ps %%tmm5,%%tmm4,%%tmm1\n\t"
      "tdpbf16ps %%tmm5,%%tmm4,%%tmm2\n\ttdpbf16ps %%tmm5,%%tmm4,%%tmm3\n\t"
      "dec %0\n\tjnz 1b\n\ttilerelease"
      : "+r"(rounds)
      : "m"(config)
      : "cc");
}

__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t rounds) {
  __asm__ volatile(SHUNT_12(SHUNT_CLEAR_Y) SHUNT_CLEAR_Y(14)
                       SHUNT_CLEAR_Y(15) "1:\n\t" SHUNT_12(SHUNT_FMA_Y)
                           SHUNT_12(SHUNT_FMA_Y) "dec %0\n\tjnz 1b"
                   : "+r"(rounds)::"ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7",
                     "ymm8", "ymm9", "ymm10", "ymm11", "ymm14", "ymm15", "cc");
}

#define SHUNT_READ(load, prefetch, stride)                                           \
  __asm__ volatile("1:\n\t" load prefetch "add $" stride ",%0\n\tcmp %1,%0\n\tjb 1b" \
                   : "+r"(p)                                                         \
                   : "r"(end)                                                        \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "memory", "cc")

void read_avx512(const char* p, const char* end, bool prefetch) {
#define SHUNT_LOAD_Z                                                                           \
  "vmovdqu64 (%0),%%zmm0\n\tvmovdqu64 64(%0),%%zmm1\n\tvmovdqu64 128(%0),%%zmm2\n\tvmovdqu64 " \
  "192(%0),%%zmm3\n\t"
#define SHUNT_AHEAD \
  "prefetcht0 2048(%0)\n\tprefetcht0 2112(%0)\n\tprefetcht0 2176(%0)\n\tprefetcht0 2240(%0)\n\t"
  if (prefetch) {
    SHUNT_READ(SHUNT_LOAD_Z, SHUNT_AHEAD, "256");
  } else {
    SHUNT_READ(SHUNT_LOAD_Z, "", "256");
  }
}

void read_sse2(const char* p, const char* end, bool prefetch) {
#define SHUNT_LOAD_X \
  "movdqu (%0),%%xmm0\n\tmovdqu 16(%0),%%xmm1\n\tmovdqu 32(%0),%%xmm2\n\tmovdqu 48(%0),%%xmm3\n\t"
  if (prefetch) {
    SHUNT_READ(SHUNT_LOAD_X, "prefetcht0 2048(%0)\n\t", "64");
  } else {
    SHUNT_READ(SHUNT_LOAD_X, "", "64");
  }
}

void read_part(const char* p, const char* end, bool prefetch) {
  supported(Isa::avx512) ? read_avx512(p, end, prefetch) : read_sse2(p, end, prefetch);
}

// Instructions a round times lanes times two.
constexpr double fma_ops_avx512 = 24.0 * 16 * 2, fma_ops_avx2 = 24.0 * 8 * 2;
constexpr double tile_ops = 4.0 * 16 * 16 * 32 * 2;

#else

void read_part(const char* p, const char* end, bool) {
  std::uint64_t bits = 0;
  for (; p < end; p += 64) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, p, sizeof word);
    bits |= word;
  }
  sink.fetch_or(bits, std::memory_order_relaxed);
}

#endif

// Without vectors of our own choosing: what the compiler makes of the baseline.
void multiply_add_scalar(std::int64_t rounds) {
  typedef float Float4 __attribute__((vector_size(16)));
  Float4 a[12] = {};
  Float4 factor = {1.5F, 1.5F, 1.5F, 1.5F};
  for (std::int64_t r = 0; r < rounds; ++r) {
    __asm__ volatile("" : "+m"(factor));
    for (Float4& x : a) x = x * factor + factor;
  }
  Float4 total = {};
  for (const Float4& x : a) total += x;
  sink.fetch_or(static_cast<std::uint64_t>(total[0] > 0), std::memory_order_relaxed);
}

double per_second(Pool& pool, Loop loop, double ops_per_round, double seconds) {
  // How many rounds fill the time, from a run that is long enough to be timed.
  std::int64_t rounds = 2000;
  double took = 0;
  for (;; rounds *= 4) {
    const double start = now();
    loop(rounds);
    took = now() - start;
    if (took > 5e-4) break;
  }
  rounds = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(seconds / took * static_cast<double>(rounds)));
  const double start = now();
  pool.run([&](Team&) { loop(rounds); });
  const double elapsed = now() - start;
  return ops_per_round * static_cast<double>(rounds) * pool.threads() / elapsed;
}

}  // namespace

double read_bytes_per_second(Pool& pool, const void* memory, std::size_t bytes) {
  const auto* p = static_cast<const char*>(memory);
  double best = 0;
  for (const bool prefetch : {false, true}) {
    const double start = now();
    pool.run([&](Team& team) {
      const auto [begin, end] =
          share(static_cast<std::int64_t>(bytes / 4096 * 4096), team.index(), team.threads(), 4096);
      if (begin < end) read_part(p + begin, p + end, prefetch);
    });
    best = std::max(best, static_cast<double>(bytes) / (now() - start));
  }
  return best;
}

double f32_fma_per_second(Pool& pool, double seconds) {
#if SHUNT_X86
  if (supported(Isa::avx512)) return per_second(pool, fma_avx512, fma_ops_avx512, seconds);
  if (supported(Isa::avx2)) return per_second(pool, fma_avx2, fma_ops_avx2, seconds);
#endif
  return per_second(pool, multiply_add_scalar, 12.0 * 4 * 2, seconds);
}

double bf16_dot_per_second([[maybe_unused]] Pool& pool, [[maybe_unused]] double seconds) {
#if SHUNT_X86
  if (supported(Isa::avx512_bf16)) return per_second(pool, dot_bf16, 2 * fma_ops_avx512, seconds);
#endif
  return 0;
}

double bf16_tiles_per_second([[maybe_unused]] Pool& pool, [[maybe_unused]] double seconds) {
#if SHUNT_X86
  if (supported(Isa::amx_bf16)) return per_second(pool, dot_tiles, tile_ops, seconds);
#endif
  return 0;
}

double int8_dot_per_second([[maybe_unused]] Pool& pool, [[maybe_unused]] double seconds) {
#if SHUNT_X86
  if (supported(Isa::avx512) && features().avx512_vnni) {
    return per_second(pool, dot_int8, 4 * fma_ops_avx512, seconds);
  }
#endif
  return 0;
}

double fp16_fma_per_second([[maybe_unused]] Pool& pool, [[maybe_unused]] double seconds) {
#if SHUNT_X86
  if (supported(Isa::avx512) && features().avx512_fp16) {
    return per_second(pool, fma_fp16, 2 * fma_ops_avx512, seconds);
  }
#endif
  return 0;
}

}  // namespace shunt::cpu_engine
