// The CPU engine's threads: the caller is one of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/features.hpp"
#include "cpu/float_mode.hpp"

namespace shunt::cpu_engine {

// Part `index` of `parts` of [0, total), in multiples of `grain` but for the end.
inline std::pair<std::int64_t, std::int64_t> share(std::int64_t total, int index, int parts,
                                                   std::int64_t grain = 1) {
  const std::int64_t units = (total + grain - 1) / grain;
  const std::int64_t begin = units * index / parts * grain;
  const std::int64_t end = units * (index + 1) / parts * grain;
  return {begin < total ? begin : total, end < total ? end : total};
}

class Team;

// A fixed number of threads that run one function together. Workers spin for some microseconds
// after a call and then sleep in a futex; with more threads than cores they do not spin at all.
// One caller at a time, which run() sees to; it does not nest. In the child of a fork, which has
// the calling thread alone, so has the pool.
class Pool {
 public:
  explicit Pool(int threads, Isa isa = selected_isa());
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const {
    if (threads_ > 1 && forks() != forks_) abandon();
    return threads_;
  }
  // The instruction set of the kernels that work on this pool.
  Isa isa() const { return isa_; }

  // fn(team) on every thread; returns when all have. What one of them throws reaches the caller
  // then, the first of several; where threads meet at barriers fn must not throw. It may take the
  // Team& or, when that is all it needs, the number of the thread, 0 being the caller.
  template <class Fn>
  void run(Fn&& fn) {
    using Plain = std::remove_reference_t<Fn>;
    run_erased([](void* object, Team& team) { (*static_cast<Plain*>(object))(team); },
               const_cast<void*>(static_cast<const void*>(&fn)));
  }
  // fn(begin, end) over [0, total) in one contiguous part a thread, multiples of `grain`. Totals up
  // to `grain` stay on the caller.
  template <class Fn>
  void split(std::int64_t total, std::int64_t grain, Fn&& fn) {
    if (threads() == 1 || total <= grain) {
      const FloatMode mode;
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
  friend class Team;
  // `taken`: the number of a loop and how many tasks of this thread's part are taken in it. A value
  // from an older loop counts as none, so that nobody need reset it. `loop`: the thread's own count
  // of loops.
  struct alignas(64) Part {
    std::atomic<std::uint64_t> taken{0};
    std::uint32_t loop = 0;
  };
  // The next task of that thread's part; `size` when there is none.
  std::size_t take(std::uint32_t loop, std::size_t owner, std::size_t size);

  // How often this process and its parents have forked since the library was loaded.
  static unsigned forks();
  void abandon() const;

  using Erased = void (*)(void*, Team&);
  void run_erased(Erased fn, void* object);
  void call(Erased fn, void* object, Team& team);
  void work(int thread);
  void stop();
  void wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t old) const;

  mutable int threads_;
  unsigned forks_;
  Isa isa_;
  int spins_;
  std::unique_ptr<Part[]> parts_;
  Erased fn_ = nullptr;
  void* object_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> running_{0};
  alignas(64) std::atomic<std::uint32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  std::atomic<bool> stop_{false}, busy_{false}, failed_{false};
  std::exception_ptr thrown_;  // by whoever set failed_
  mutable std::vector<std::thread> workers_;
};

// One thread's view of a run.
class Team {
 public:
  int index() const { return index_; }  // 0 .. threads() - 1; 0 is the caller
  int threads() const { return pool_.threads_; }
  Isa isa() const { return pool_.isa_; }
  operator int() const { return index_; }  // NOLINT(google-explicit-constructor)

  void barrier() { pool_.barrier(); }

  // fn(task) for every task in [0, tasks), on some thread each. A thread has a contiguous part of
  // them, first to last, and takes from the others' parts when it is through. All threads must call
  // it with the same number. Returns when no task is left to take, while other threads may still be
  // at theirs: a barrier() makes sure of them.
  template <class Fn>
  void for_each(std::size_t tasks, Fn&& fn) {
    const std::uint32_t loop = ++pool_.parts_[static_cast<std::size_t>(index_)].loop;
    const auto count = static_cast<std::size_t>(threads());
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t owner = static_cast<std::size_t>(index_) + i;
      if (owner >= count) owner -= count;
      const std::size_t first = (tasks * owner + count - 1) / count;
      const std::size_t size = (tasks * (owner + 1) + count - 1) / count - first;
      for (std::size_t at = pool_.take(loop, owner, size); at < size;
           at = pool_.take(loop, owner, size)) {
        fn(first + at);
      }
    }
  }

 private:
  friend class Pool;
  Team(Pool& pool, int index) : pool_(pool), index_(index) {}
  Pool& pool_;
  int index_;
};

}  // namespace shunt::cpu_engine

namespace shunt {
// A hint to the system; does nothing where it does not know it.
void advise_huge_pages(void* data, std::size_t bytes);
}  // namespace shunt
