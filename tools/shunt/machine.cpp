#include "machine.hpp"

#include <fmt/core.h>
#include <sys/times.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "cpu/ceilings.hpp"
#include "cpu/features.hpp"

namespace shunt::tool {

namespace {

constexpr double peak_seconds = 0.004;
constexpr std::int64_t least_read = std::int64_t{64} << 20;

// A line of /proc/meminfo, in bytes; 0 when there is none.
std::int64_t memory_line(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size() + 1, key + ":") == 0) {
      return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
    }
  }
  return 0;
}

// What the read bandwidth is measured on: four times the last cache, for not every cache forgets
// what was used least recently.
const Buffer& read_memory(const Context& context) {
  static const Buffer memory = [&] {
    const std::int64_t room = memory_available() / 8;
    return context.allocate(static_cast<std::size_t>(
        std::clamp(4 * last_cache_bytes(), least_read, std::max(least_read, room))));
  }();
  return memory;
}

std::array<std::int64_t, 2> cpu_ticks() {  // busy, all
  std::ifstream file("/proc/stat");
  std::string word;
  file >> word;
  std::array<std::int64_t, 2> ticks{};
  std::int64_t value = 0;
  for (int i = 0; i < 8 && file >> value; ++i) {  // user nice system idle iowait irq softirq steal
    ticks[1] += value;
    if (i != 3 && i != 4) ticks[0] += value;
  }
  return ticks;
}

double own_ticks() {
  tms used{};
  times(&used);
  return static_cast<double>(used.tms_utime + used.tms_stime);
}

}  // namespace

std::string cpu_name() { return cpu_engine::features().brand; }
std::string isa_name() { return cpu_engine::to_string(cpu_engine::selected_isa()); }
std::int64_t memory_total() { return memory_line("MemTotal"); }
std::int64_t last_cache_bytes() {
  return std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
}
std::int64_t memory_available() { return memory_line("MemAvailable"); }

Json machine_json(const Context& context) {
  utsname system{};
  uname(&system);
  std::ostringstream compiler;
#if defined(__clang__)
  compiler << "clang " << __clang_major__ << "." << __clang_minor__;
#else
  compiler << "g++ " << __GNUC__ << "." << __GNUC_MINOR__;
#endif
  return {{"cpu", cpu_name()},
          {"cores", cpu_engine::available_cores()},
          {"threads", context.threads()},
          {"isa", isa_name()},
          {"memory_bytes", memory_total()},
          {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
          {"compiler", compiler.str()},
          {"shunt", SHUNT_VERSION}};
}

double Ceilings::floor_us(double bytes, double operations) const {
  const double memory = read > 0 ? bytes / read : 0;
  const double arithmetic = flops > 0 ? operations / flops : 0;
  return std::max(memory, arithmetic) * 1e6;
}

double measure_read(const Context& context) {
  const Buffer& memory = read_memory(context);
  return cpu_engine::read_bytes_per_second(context.pool(), memory.data(), memory.bytes());
}

Ceilings measure_ceilings(const Context& context, DType dtype) {
  Ceilings ceilings;
  ceilings.read = measure_read(context);
  ceilings.flops = cpu_engine::f32_fma_per_second(context.pool(), peak_seconds);
  if (dtype == DType::bf16) {
    const auto take = [&](const char* name, double flops) {
      if (flops <= ceilings.flops) return;
      ceilings.flops = flops;
      ceilings.peak = name;
    };
    take("bf16 dot", cpu_engine::bf16_dot_per_second(context.pool(), peak_seconds));
    take("bf16 tiles", cpu_engine::bf16_tiles_per_second(context.pool(), peak_seconds));
  }
  return ceilings;
}

Json ceilings_json(const Ceilings& ceilings, DType dtype) {
  return {{"read_GBps", ceilings.read / 1e9},
          {std::string(to_string(dtype)) + "_GFLOPs", ceilings.flops / 1e9}};
}

Ceilings mean(const Ceilings& a, const Ceilings& b) {
  return {(a.read + b.read) / 2, (a.flops + b.flops) / 2, b.peak};
}

Ceilings better(const Ceilings& a, const Ceilings& b) {
  return {std::max(a.read, b.read), std::max(a.flops, b.flops),
          a.flops > b.flops ? a.peak : b.peak};
}

std::vector<Peak> measure_peaks(const Context& context) {
  cpu_engine::Pool& pool = context.pool();
  std::vector<Peak> peaks = {
      {"f32 FMA", "f32_GFLOPs", cpu_engine::f32_fma_per_second(pool)},
      {"bf16 dot", "bf16_GFLOPs", cpu_engine::bf16_dot_per_second(pool)},
      {"bf16 tiles", "bf16_tiles_GFLOPs", cpu_engine::bf16_tiles_per_second(pool)},
      {"int8 dot", "int8_GOPs", cpu_engine::int8_dot_per_second(pool), false},
      {"fp16 FMA", "fp16_GFLOPs", cpu_engine::fp16_fma_per_second(pool)}};
  peaks.erase(std::remove_if(peaks.begin(), peaks.end(),
                             [](const Peak& peak) { return peak.per_second <= 0; }),
              peaks.end());
  return peaks;
}

double busy_share(double seconds) {
  const auto before = cpu_ticks();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const auto after = cpu_ticks();
  const auto all = static_cast<double>(after[1] - before[1]);
  return all > 0 ? static_cast<double>(after[0] - before[0]) / all : -1;
}

LoadWatch::LoadWatch() : ticks_(cpu_ticks()), own_(own_ticks()) {}

double LoadWatch::others() const {
  const auto now = cpu_ticks();
  const auto all = static_cast<double>(now[1] - ticks_[1]);
  const double busy = static_cast<double>(now[0] - ticks_[0]) - (own_ticks() - own_);
  return all > 0 ? std::clamp(busy / all, 0.0, 1.0) : 0;
}

std::string LoadWatch::note() const {
  const double share = others();
  if (share < 0.1) return {};
  return fmt::format("others used {:.0f} % of this machine meanwhile: expect better alone\n",
                     share * 100);
}

double wait_until_idle(double seconds) {
  constexpr double step = 0.25;
  constexpr double idle = 0.1;
  double busy = busy_share(step);
  for (double waited = step; busy > idle && waited < seconds; waited += step) {
    busy = busy_share(step);
  }
  return busy;
}

}  // namespace shunt::tool
