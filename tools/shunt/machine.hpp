// This machine: what it is, and what it can do at best, measured when asked.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/tensor.hpp"

namespace shunt::tool {

using Json = nlohmann::ordered_json;

// {"cpu", "cores", "threads", "isa", "memory_bytes", "system", "compiler", "shunt"}
Json machine_json(const Context& context);
std::string cpu_name();
std::string isa_name();  // the instruction set that the engine uses
std::int64_t memory_total();
std::int64_t memory_available();
std::int64_t last_cache_bytes();  // 0 where the system does not say

struct Ceilings {
  double read = 0;               // bytes a second
  double flops = 0;              // a second, for the dtype asked for
  const char* peak = "f32 FMA";  // the instruction that reaches it
  // The least time in microseconds that `bytes` and `flops` need.
  double floor_us(double bytes, double operations) const;
};
// The peak that a dtype's GEMM is measured against: FMA for f32 and f16, the best of FMA, the bf16
// dot and tiles for bf16.
Ceilings measure_ceilings(const Context& context, DType dtype);
// One short measurement of the read bandwidth alone.
double measure_read(const Context& context);
Ceilings mean(const Ceilings& a, const Ceilings& b);
Ceilings better(const Ceilings& a, const Ceilings& b);  // each figure the larger
// {"read_GBps": .., "f32_GFLOPs" | "bf16_GFLOPs" | "f16_GFLOPs": ..}
Json ceilings_json(const Ceilings& ceilings, DType dtype);

// Every peak that this CPU has an instruction for.
struct Peak {
  std::string name;  // "bf16 dot"
  std::string key;   // "bf16_GFLOPs"
  double per_second = 0;
  bool floating = true;
};
std::vector<Peak> measure_peaks(const Context& context);

// The share of all cores that something used during the last `seconds` of sleep; -1 if unknown.
double busy_share(double seconds);
// Sleeps until less than a tenth of the machine is busy, at most `seconds`. Returns what was seen
// last.
double wait_until_idle(double seconds);

// What others took of this machine since it was made: times taken meanwhile are not ours alone.
class LoadWatch {
 public:
  LoadWatch();
  double others() const;     // share of all cores; the hypervisor's own part counts
  std::string note() const;  // a line when it is worth one, else empty

 private:
  std::array<std::int64_t, 2> ticks_;
  double own_;  // ticks of this process
};

}  // namespace shunt::tool
