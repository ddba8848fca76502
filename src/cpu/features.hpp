// What this CPU can do, and which of our instruction sets to use on it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shunt::cpu_engine {

// The sets that kernels are compiled for. Each needs those before it.
enum class Isa : int {
  scalar = 0,       // the compiler's baseline
  avx2 = 1,         // + FMA, F16C
  avx512 = 2,       // F, BW, DQ, VL
  avx512_bf16 = 3,  // + the bf16 dot product, VBMI
  amx_bf16 = 4,     // + tiles of bf16
};
inline constexpr int isa_count = 5;
const char* to_string(Isa isa);

// Which CPUs kernels and distances are chosen as for, where instructions alone do not say what is
// fast. Not the same bits everywhere: int8 has other kernels.
enum class Tuning : int { common = 0, zen5 = 1 };
inline constexpr int tuning_count = 2;
const char* to_string(Tuning tuning);

struct Features {
  std::string brand;   // "AMD EPYC 9654 96-Core Processor"
  std::string vendor;  // "AuthenticAMD"
  int family = 0, model = 0, stepping = 0;
  // A flag is set when both the CPU and the operating system (saved registers) provide it.
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;
  bool avx512_vnni = false, avx512_bf16 = false, avx512_fp16 = false, avx512_vbmi = false,
       avx512_vbmi2 = false;
  bool avx_vnni = false, gfni = false, amx_tile = false, amx_bf16 = false, amx_int8 = false;
  // The operating system lets this process use the tiles' registers: it has been asked.
  bool tiles_permitted = false;
  // vdpbf16ps multiplies more a second than FMA does. By family, not by the flag: Intel's
  // implementations up to Emerald Rapids run it at a quarter of FMA's rate.
  bool fast_bf16_dot = false;
  // By family, as measured; the environment variable SHUNT_CPU_TUNING names another one.
  Tuning tuning = Tuning::common;
  // By tuning, those that follow. Shifts of vectors take nothing from vdpbf16ps, as products do.
  bool shifts_beside_dots = false;
  // Words are multiplied as fast as pairs of bf16, and int8 needs no decoding to them; its codes
  // are best fetched to the L1.
  bool int8_by_words = false;
  // As many loads as products of vectors pass at a time: what saves loads and costs registers pays.
  bool fewer_loads = false;
  // How many bytes before they are read packed weights are best fetched to the L1.
  std::size_t fetch_ahead = 2048;
  // Unless 0: one row's are fetched to the L2 alone then, and to the L1 so many bytes before.
  std::size_t fetch_near = 0;

  std::vector<std::string> flags() const;  // the names of those that are set
};

// Of this CPU, read once, as is SHUNT_CPU_TUNING; a name that is none is left to selected_isa().
const Features& features();
// These, tuned so.
Features tuned(Features features, Tuning tuning);

bool supported(Isa isa);
// The best set for this CPU, by features() alone.
Isa best_isa();
// best_isa(), or what the environment variable SHUNT_ISA names. Throws Error when that is no name
// of a set, or a set that this CPU lacks, and when SHUNT_CPU_TUNING is no name of a tuning.
Isa selected_isa();

// CPUs that this process may use: its affinity mask, bounded by its control group's quota.
int available_cores();

// Of these, those that work without a context (packing, decoding) may take: all, or at most as many
// as the last CoreLimit of this thread that still lives says; 0: all.
int free_cores();
class CoreLimit {
 public:
  explicit CoreLimit(int most);
  ~CoreLimit();
  CoreLimit(const CoreLimit&) = delete;
  CoreLimit& operator=(const CoreLimit&) = delete;

 private:
  int before_;
};

}  // namespace shunt::cpu_engine
