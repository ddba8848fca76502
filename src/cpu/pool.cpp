#include "cpu/pool.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <csignal>
#include <exception>
#include <utility>

#include "core/check.hpp"
#include "cpu/float_mode.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shunt {

void advise_huge_pages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes >= (std::size_t{2} << 20)) madvise(data, bytes, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

namespace cpu_engine {

namespace {

// Threads that are started meanwhile take no signals: handlers are for the caller's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

// About 20 us of spinning: longer than the gaps between the stages of a layer, far shorter than a
// time slice.
Pool::Pool(int threads, Isa isa)
    : threads_(threads),
      forks_(forks()),
      isa_(isa),
      spins_(threads <= available_cores() ? 2000 : 0),
      parts_(std::make_unique<Part[]>(static_cast<std::size_t>(threads))) {
  if (!supported(isa)) {
    fail(Status::unsupported, "this CPU does not run the instruction set {}", to_string(isa));
  }
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    const SignalsBlocked blocked;
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::exception& error) {  // no thread, or no memory for one
    stop();
    fail(Status::out_of_memory, "threads: only {} of {} could be started: {}", workers_.size() + 1,
         threads, error.what());
  }
}

Pool::~Pool() {
  (void)this->threads();
  stop();
}

unsigned Pool::forks() {
  static std::atomic<unsigned> count{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return count.load(std::memory_order_relaxed);
}

// The workers are the parent's. Their handles must neither be joined nor detached here.
void Pool::abandon() const {
  threads_ = 1;
  // Another thread of the parent may have been at work.
  for (std::size_t i = 0; i < workers_.size() + 1; ++i) {
    parts_[i].taken.store(0, std::memory_order_relaxed);
    parts_[i].loop = 0;
  }
  new std::vector<std::thread>(std::exchange(workers_, {}));
}

void Pool::stop() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::wait_change(const std::atomic<std::uint32_t>& word, std::uint32_t old) const {
  for (int i = 0; i < spins_; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

void Pool::run_erased(Erased fn, void* object) {
  const FloatMode mode;
  Team team(*this, 0);
  if (threads() == 1) {
    fn(object, team);
    return;
  }
  if (busy_.exchange(true, std::memory_order_acquire)) {
    fail(Status::invalid_argument,
         "context: another thread is in a call of it: must be one thread at a time");
  }
  fn_ = fn;
  object_ = object;
  running_.store(static_cast<std::uint32_t>(threads_ - 1), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  call(fn, object, team);
  for (std::uint32_t left = running_.load(std::memory_order_acquire); left != 0;
       left = running_.load(std::memory_order_acquire)) {
    wait_change(running_, left);
  }
  std::exception_ptr thrown;
  if (failed_.exchange(false, std::memory_order_relaxed)) {
    thrown = std::exchange(thrown_, nullptr);
    // Whoever threw may have left loops out: all go on from the latest one.
    std::uint32_t latest = parts_[0].loop;
    for (int i = 1; i < threads_; ++i) {
      const std::uint32_t loop = parts_[static_cast<std::size_t>(i)].loop;
      if (static_cast<std::int32_t>(loop - latest) > 0) latest = loop;
    }
    for (int i = 0; i < threads_; ++i) parts_[static_cast<std::size_t>(i)].loop = latest;
  }
  busy_.store(false, std::memory_order_release);
  if (thrown) std::rethrow_exception(thrown);
}

// The first exception of any thread is kept for the caller.
void Pool::call(Erased fn, void* object, Team& team) {
  try {
    fn(object, team);
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_relaxed)) thrown_ = std::current_exception();
  }
}

void Pool::work(int thread) {
  const FloatMode mode;
  Team team(*this, thread);
  std::uint32_t seen = 0;
  for (;;) {
    wait_change(epoch_, seen);
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    call(fn_, object_, team);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

std::size_t Pool::take(std::uint32_t loop, std::size_t owner, std::size_t size) {
  std::atomic<std::uint64_t>& taken = parts_[owner].taken;
  std::uint64_t seen = taken.load(std::memory_order_relaxed);
  for (;;) {
    const auto age = static_cast<std::int32_t>(loop - static_cast<std::uint32_t>(seen >> 32));
    // Somebody is in a later loop already: every task of this one is taken.
    if (age < 0) return size;
    const std::uint64_t at = age > 0 ? 0 : seen & 0xffffffffu;
    const std::uint64_t start = std::uint64_t{loop} << 32;
    if (at >= size) {
      // Marked even if empty, lest a part fall behind by half of the counter's span.
      if (age > 0) taken.compare_exchange_strong(seen, start, std::memory_order_relaxed);
      return size;
    }
    if (taken.compare_exchange_weak(seen, start | (at + 1), std::memory_order_relaxed)) return at;
  }
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const std::uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_change(phase_, phase);
  }
}

}  // namespace cpu_engine
}  // namespace shunt
