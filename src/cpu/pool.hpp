// The CPU engine's threads: the caller is one of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace shunt::cpu_engine {

// Cores this process may run on (its affinity mask).
int available_cores();

// Part `index` of `parts` of [0, total), in multiples of `grain` but for the end.
inline std::pair<std::int64_t, std::int64_t> share(std::int64_t total, int index, int parts,
                                                   std::int64_t grain = 1) {
  const std::int64_t units = (total + grain - 1) / grain;
  const std::int64_t begin = units * index / parts * grain;
  const std::int64_t end = units * (index + 1) / parts * grain;
  return {begin < total ? begin : total, end < total ? end : total};
}

// A fixed number of threads that run one function together. Workers spin for some microseconds
// after a call and then sleep in a futex; with more threads than cores they do not spin at all.
// One caller at a time; run() does not nest.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // fn(thread) on every thread, 0 being the caller; returns when all have. fn must not throw.
  template <class Fn>
  void run(Fn&& fn) {
    using Plain = std::remove_reference_t<Fn>;
    run_erased([](void* object, int thread) { (*static_cast<Plain*>(object))(thread); },
               const_cast<void*>(static_cast<const void*>(&fn)));
  }
  // fn(begin, end) over [0, total) in one contiguous part a thread, multiples of `grain`. Totals up
  // to `grain` stay on the caller.
  template <class Fn>
  void split(std::int64_t total, std::int64_t grain, Fn&& fn) {
    if (threads_ == 1 || total <= grain) {
      if (total > 0) fn(std::int64_t{0}, total);
      return;
    }
    run([&](int thread) {
      const auto [begin, end] = share(total, thread, threads_, grain);
      if (begin < end) fn(begin, end);
    });
  }
  // Inside run(): waits until every thread has come here. All threads must call it equally often.
  void barrier();

 private:
  using Erased = void (*)(void*, int);
  void run_erased(Erased fn, void* object);
  void work(int thread);
  void stop();
  void wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t old) const;

  int threads_;
  int spins_;
  Erased fn_ = nullptr;
  void* object_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> running_{0};
  alignas(64) std::atomic<std::uint32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace shunt::cpu_engine

namespace shunt {
// A hint to the system; does nothing where it does not know it.
void advise_huge_pages(void* data, std::size_t bytes);
}  // namespace shunt
