#include "cpu/features.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/check.hpp"
#include "cpu/fetch_distances.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace shunt::cpu_engine {
namespace {

#if defined(__x86_64__)
struct Leaf {
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
};
Leaf cpuid(std::uint32_t leaf, std::uint32_t subleaf = 0) {
  Leaf r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}
bool bit(std::uint32_t word, int index) { return (word >> index) & 1U; }

// Register state that the operating system saves (XCR0).
std::uint64_t saved_state() {
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

// Linux gives a process the tiles' registers, 8 KB a thread, when it asks for them.
bool permit_tiles() {
#if defined(SYS_arch_prctl)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

std::string text(std::initializer_list<std::uint32_t> words) {
  std::string s;
  for (const std::uint32_t word : words) {
    char bytes[4];
    std::memcpy(bytes, &word, 4);
    s.append(bytes, 4);
  }
  s.erase(std::find(s.begin(), s.end(), '\0'), s.end());
  const auto first = s.find_first_not_of(' ');
  if (first == std::string::npos) return {};
  return s.substr(first, s.find_last_not_of(' ') - first + 1);
}

Features detect() {
  Features f;
  const Leaf id = cpuid(0);
  f.vendor = text({id.b, id.d, id.c});
  if (cpuid(0x80000000U).a >= 0x80000004U) {
    const Leaf x = cpuid(0x80000002U), y = cpuid(0x80000003U), z = cpuid(0x80000004U);
    f.brand = text({x.a, x.b, x.c, x.d, y.a, y.b, y.c, y.d, z.a, z.b, z.c, z.d});
  }
  const Leaf one = cpuid(1);
  const std::uint32_t base_family = (one.a >> 8) & 15, base_model = (one.a >> 4) & 15;
  f.family = static_cast<int>(base_family == 15 ? 15 + ((one.a >> 20) & 255) : base_family);
  f.model = static_cast<int>(base_family == 6 || base_family == 15
                                 ? base_model + (((one.a >> 16) & 15) << 4)
                                 : base_model);
  f.stepping = static_cast<int>(one.a & 15);

  const std::uint64_t saved = bit(one.c, 27) ? saved_state() : 0;
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6;
  const bool tiles = (saved & 0x60000) == 0x60000;
  const Leaf seven = cpuid(7), seven_one = cpuid(7, 1);
  f.avx2 = ymm && bit(seven.b, 5);
  f.fma = ymm && bit(one.c, 12);
  f.f16c = ymm && bit(one.c, 29);
  f.avx_vnni = ymm && bit(seven_one.a, 4);
  f.gfni = bit(seven.c, 8);
  f.avx512f = zmm && bit(seven.b, 16);
  f.avx512dq = zmm && bit(seven.b, 17);
  f.avx512bw = zmm && bit(seven.b, 30);
  f.avx512vl = zmm && bit(seven.b, 31);
  f.avx512_vbmi = zmm && bit(seven.c, 1);
  f.avx512_vbmi2 = zmm && bit(seven.c, 6);
  f.avx512_vnni = zmm && bit(seven.c, 11);
  f.avx512_fp16 = zmm && bit(seven.d, 23);
  f.avx512_bf16 = zmm && bit(seven_one.a, 5);
  f.amx_bf16 = tiles && bit(seven.d, 22);
  f.amx_tile = tiles && bit(seven.d, 24);
  f.amx_int8 = tiles && bit(seven.d, 25);
  f.tiles_permitted = f.amx_tile && permit_tiles();

  // AMD family 0x19 (Zen 4) and later: two multiplications where FMA has one, measured. Intel:
  // family 6 model 207 measured at half of FMA's; its neighbours are taken to be alike.
  f.fast_bf16_dot = f.avx512_bf16 && f.vendor == "AuthenticAMD" && f.family >= 0x19;
  // AMD family 0x1a (Zen 5), of 43 GB/s a core: Zen 4 and a Xeon of 15 to 17 gain nothing by the
  // distance; Zen 4 shifts where it looks up, and has int8 as fast either way.
  return tuned(f, f.vendor == "AuthenticAMD" && f.family >= 0x1a ? Tuning::zen5 : Tuning::common);
}
#else
Features detect() { return {}; }
#endif

// The share of CPUs that a control group of this folder may use; 0: it says nothing.
double quota_of(const std::string& folder) {
  double quota = -1, period = 0;
  if (std::ifstream v2(folder + "/cpu.max"); v2) {
    std::string word;
    if (v2 >> word >> period && word != "max") quota = std::atof(word.c_str());
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

// By the process's own control group and those that it is in, v2 and v1; 0 when there is no quota.
// /proc/self/cgroup has a line a hierarchy: number:controllers:path.
int quota_cpus() {
  double least = 0;
  const auto look = [&](const std::string& root, std::string path) {
    for (;;) {
      const double quota = quota_of(root + path);
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos) return;
      path.resize(slash);
    }
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    line.resize(second);
    line.replace(0, first, "");
    line += ',';  // ":cpu,cpuacct,", ":,"
    if (line == ":,") look("/sys/fs/cgroup", path);
    if (line.find(":cpu,") == 0 || line.find(",cpu,") != std::string::npos) {
      look("/sys/fs/cgroup/cpu", path);
    }
  }
  // Of a group that is this mount's root, which it may be by another name.
  look("/sys/fs/cgroup", "");
  look("/sys/fs/cgroup/cpu", "");
  return least > 0 ? std::max(1, static_cast<int>(std::lround(least))) : 0;
}

constexpr const char* tuning_variable = "SHUNT_CPU_TUNING";

const char* wanted_tuning() {
  const char* wanted = std::getenv(tuning_variable);
  return wanted == nullptr ? "" : wanted;
}

}  // namespace

const char* to_string(Tuning tuning) { return tuning == Tuning::zen5 ? "zen5" : "common"; }

Features tuned(Features f, Tuning tuning) {
  const bool zen5 = tuning == Tuning::zen5;
  f.tuning = tuning;
  // Measured on Zen 5 and on a Xeon with AMX (docs/notes/cpu-packed.md).
  f.fetch_ahead = zen5 || f.amx_tile ? fetch_far_bytes : Features{}.fetch_ahead;
  f.fetch_near = f.amx_tile ? fetch_near_bytes : 0;
  f.shifts_beside_dots = zen5;
  f.int8_by_words = zen5 && f.avx512_vnni;
  f.fewer_loads = zen5;
  return f;
}

const char* to_string(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::amx_bf16:
      return "amx_bf16";
  }
  return "?";
}

std::vector<std::string> Features::flags() const {
  std::vector<std::string> names;
  const auto add = [&](bool set, const char* name) {
    if (set) names.emplace_back(name);
  };
  add(avx2, "avx2"), add(fma, "fma"), add(f16c, "f16c"), add(avx512f, "avx512f");
  add(avx512bw, "avx512bw"), add(avx512dq, "avx512dq"), add(avx512vl, "avx512vl");
  add(avx512_vnni, "avx512_vnni"), add(avx512_bf16, "avx512_bf16");
  add(avx512_fp16, "avx512_fp16"), add(avx512_vbmi, "avx512_vbmi");
  add(avx512_vbmi2, "avx512_vbmi2"), add(avx_vnni, "avx_vnni"), add(gfni, "gfni");
  add(amx_tile, "amx_tile"), add(amx_bf16, "amx_bf16"), add(amx_int8, "amx_int8");
  return names;
}

const Features& features() {
  static const Features found = [] {
    Features f = detect();
    for (int i = 0; i < tuning_count; ++i) {
      const auto tuning = static_cast<Tuning>(i);
      if (std::strcmp(wanted_tuning(), to_string(tuning)) == 0) f = tuned(f, tuning);
    }
    return f;
  }();
  return found;
}

bool supported(Isa isa) {
  const Features& f = features();
  const bool avx2 = f.avx2 && f.fma && f.f16c;
  const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl;
  switch (isa) {
    case Isa::scalar:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512_bf16:
      return avx512 && f.avx512_bf16 && f.avx512_vbmi;
    case Isa::amx_bf16:
      return avx512 && f.avx512_bf16 && f.avx512_vbmi && f.gfni && f.amx_tile && f.amx_bf16 &&
             f.tiles_permitted;
  }
  return false;
}

Isa best_isa() {
  if (supported(Isa::amx_bf16)) return Isa::amx_bf16;
  if (supported(Isa::avx512_bf16) && features().fast_bf16_dot) return Isa::avx512_bf16;
  if (supported(Isa::avx512)) return Isa::avx512;
  if (supported(Isa::avx2)) return Isa::avx2;
  return Isa::scalar;
}

Isa selected_isa() {
  if (*wanted_tuning() != '\0' && std::strcmp(wanted_tuning(), to_string(features().tuning)) != 0) {
    fail(Status::unsupported, "{} is '{}': must be {} or {}, set before the process starts",
         tuning_variable, wanted_tuning(), to_string(Tuning::common), to_string(Tuning::zen5));
  }
  const char* wanted = std::getenv("SHUNT_ISA");
  if (wanted == nullptr || *wanted == '\0') return best_isa();
  std::string have;
  for (int i = 0; i < isa_count; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!supported(isa)) continue;
    if (std::strcmp(wanted, to_string(isa)) == 0) return isa;
    have += (have.empty() ? "" : ", ") + std::string(to_string(isa));
  }
  fail(Status::unsupported, "SHUNT_ISA is '{}': this CPU runs {}", wanted, have);
}

int available_cores() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  if (const int quota = quota_cpus(); quota > 0) cpus = std::min(cpus, quota);
  return std::max(cpus, 1);
}

namespace {
thread_local int most_cores = 0;
}  // namespace

int free_cores() {
  const int cores = available_cores();
  return most_cores > 0 ? std::min(most_cores, cores) : cores;
}
CoreLimit::CoreLimit(int most) : before_(most_cores) { most_cores = most; }
CoreLimit::~CoreLimit() { most_cores = before_; }

}  // namespace shunt::cpu_engine
