// How the calling thread rounds, and whether it flushes small numbers to zero.
#pragma once

namespace shunt::cpu_engine {

// While it lives: to nearest even, and denormals are numbers. Whoever calls may have set his thread
// otherwise (torch.set_flush_denormal, -ffast-math), and workers have not: bits would depend on who
// takes which task.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : before_(__builtin_ia32_stmxcsr()) {
    if (other()) __builtin_ia32_ldmxcsr(usual);
  }
  ~FloatMode() {
    if (other()) __builtin_ia32_ldmxcsr(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  static constexpr unsigned usual = 0x1f80, flags = 0x3f;  // flags: what has happened so far
  bool other() const { return (before_ & ~flags) != usual; }
  unsigned before_;
#endif
};

}  // namespace shunt::cpu_engine
