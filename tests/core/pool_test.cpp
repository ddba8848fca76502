#include "cpu/pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/error.hpp"

namespace shunt {
namespace {

TEST(Pool, EveryThreadRunsOnceEachTime) {
  for (const int threads : {1, 2, 3, 7}) {
    cpu_engine::Pool pool(threads);
    std::vector<int> runs(static_cast<std::size_t>(threads), 0);
    for (int i = 0; i < 200; ++i) {
      pool.run([&](int thread) { ++runs[static_cast<std::size_t>(thread)]; });
    }
    for (const int count : runs) EXPECT_EQ(count, 200);
  }
}

TEST(Pool, BarrierSeparatesPhases) {
  for (const int threads : {2, 4}) {
    cpu_engine::Pool pool(threads);
    std::vector<int> data(static_cast<std::size_t>(threads), 0);
    bool right = true;
    std::atomic<int> wrong{0};
    for (int i = 1; i <= 100; ++i) {
      pool.run([&](int thread) {
        data[static_cast<std::size_t>(thread)] = i;
        pool.barrier();
        for (const int value : data) wrong += value != i;
        pool.barrier();
        data[static_cast<std::size_t>((thread + 1) % threads)] = -i;
        pool.barrier();
        for (const int value : data) wrong += value != -i;
      });
    }
    right = wrong == 0;
    EXPECT_TRUE(right);
  }
}

TEST(Pool, SplitCoversTheRangeOnce) {
  cpu_engine::Pool pool(3);
  for (const std::int64_t total : {0, 1, 5, 64, 65, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(total));
    pool.split(total, 8, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(begin % 8, 0);
      for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    });
    for (const auto& count : seen) EXPECT_EQ(count, 1);
  }
}

TEST(Context, RefusesThreadCountsByName) {
  for (const int threads : {-1, 1025}) {
    try {
      cpu({.threads = threads});
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(std::to_string(threads)), std::string::npos);
    }
  }
}

TEST(Context, AnEmptyOneSaysSo) {
  const Context empty;
  EXPECT_THROW(empty.device(), Error);
  EXPECT_THROW(empty.threads(), Error);
  EXPECT_THROW(empty.allocate(1), Error);
  EXPECT_THROW(empty.synchronize(), Error);
}

TEST(Context, CopiesFromAndToMemoryThatIsThere) {
  const Context context = cpu({.threads = 1});
  int one = 1;
  EXPECT_NO_THROW(context.copy(nullptr, nullptr, 0));
  EXPECT_THROW(context.copy(&one, nullptr, 4), Error);
  EXPECT_THROW(context.copy(nullptr, &one, 4), Error);
}

// A caller's handlers run on its own threads.
TEST(Context, ThreadsOfThePoolTakeNoSignals) {
  const Context context = cpu({.threads = 3});
  std::atomic<int> open{0};
  const std::thread::id caller = std::this_thread::get_id();
  context.pool().run([&](int) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    if (std::this_thread::get_id() != caller && sigismember(&blocked, SIGTERM) == 0) ++open;
  });
  EXPECT_EQ(open, 0);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  EXPECT_EQ(sigismember(&blocked, SIGTERM), 0);
}

TEST(Context, AllocatesZeroedAlignedMemory) {
  const Context context = cpu({.threads = 2});
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{5} << 20}) {
    const Buffer buffer = context.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_EQ(buffer.bytes(), bytes);
    const auto* data = static_cast<const char*>(buffer.data());
    EXPECT_EQ(data[0], 0);
    EXPECT_EQ(data[bytes - 1], 0);
  }
  EXPECT_EQ(context.allocate(0).data(), nullptr);
  EXPECT_THROW(context.allocate(SIZE_MAX), Error);
}

}  // namespace
}  // namespace shunt
