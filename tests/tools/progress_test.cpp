// The line that says how far a long computation is.
#include "progress.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "process.hpp"
#include "terminal.hpp"

namespace shunt::test {
namespace {

using tool::ProgressLine;

ProgressLine::Time at(double seconds) {
  return ProgressLine::Time() + std::chrono::hours(1) +
         std::chrono::duration_cast<ProgressLine::Time::duration>(
             std::chrono::duration<double>(seconds));
}

// What a line says behind its name.
std::string left(const std::string& line) {
  const auto comma = line.rfind(", ");
  return comma == std::string::npos ? std::string() : line.substr(comma + 2);
}

std::string shard(std::int64_t weights) { return "shard " + std::to_string((weights - 1) / 10); }

// 20 shards of 10 weights, a second each.
TEST(ProgressLine, TheRestIsOfAllShards) {
  ProgressLine line;
  for (std::int64_t done = 1; done <= 200; ++done) {
    const std::string text = line.at(at(static_cast<double>(done)), shard(done), done, 200);
    EXPECT_NE(text.find(shard(done)), std::string::npos) << text;
    // Of the first four it is too early to tell.
    const bool told = done > 4 && done < 200;
    const double rest = static_cast<double>(200 - done) * 1e6;
    EXPECT_EQ(left(text), told ? tool::duration(rest) + " left" : "") << done;
  }
  const std::string whole = line.at(at(201), shard(200), 200, 200);
  EXPECT_EQ(whole.substr(whole.find("  ")), "  100 %  shard 19");
}

// 15 of 20 shards were there at the beginning.
TEST(ProgressLine, WhatWasDoneBeforeTookNoTime) {
  ProgressLine line;
  EXPECT_EQ(left(line.at(at(0), shard(151), 151, 200)), "");
  EXPECT_EQ(left(line.at(at(1.5), shard(152), 152, 200)), "72.0 s left");
  EXPECT_EQ(left(line.at(at(13.5), shard(160), 160, 200)), "60.0 s left");
}

TEST(ProgressLine, AnotherComputationBeginsAnew) {
  ProgressLine line;
  line.at(at(0), "nvfp4", 1, 100);
  EXPECT_EQ(left(line.at(at(50), "nvfp4", 51, 100)), "49.0 s left");
  // Another total under the same name.
  EXPECT_EQ(left(line.at(at(60), "nvfp4", 60, 1000)), "");
  EXPECT_EQ(left(line.at(at(62), "nvfp4", 160, 1000)), "16.8 s left");
  // Less than before.
  EXPECT_EQ(left(line.at(at(70), "int8", 10, 1000)), "");
  EXPECT_EQ(left(line.at(at(74), "int8", 50, 1000)), "95.0 s left");
}

TEST(ProgressLine, AtMostTenTimesASecond) {
  ProgressLine line;
  EXPECT_NE(line.at(at(0), "a", 1, 100), "");
  EXPECT_EQ(line.at(at(0.05), "a", 2, 100), "");
  EXPECT_NE(line.at(at(0.06), "b", 3, 100), "") << "another name";
  EXPECT_EQ(line.at(at(0.12), "b", 4, 100), "");
  EXPECT_NE(line.at(at(0.17), "b", 5, 100), "");
  EXPECT_NE(line.at(at(0.18), "b", 100, 100), "") << "the last";
  EXPECT_EQ(line.at(at(5), "b", 100, 100).find("left"), std::string::npos);
}

// A terminal, and what was written to it.
class Terminal {
 public:
  Terminal() : ours_(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    std::array<char, 128> name{};
    if (ours_ < 0 || ::grantpt(ours_) != 0 || ::unlockpt(ours_) != 0 ||
        ::ptsname_r(ours_, name.data(), name.size()) != 0) {
      return;
    }
    path_ = name.data();
    // Keeps it alive when whoever writes to it has gone.
    theirs_ = ::open(path_.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);
    // It holds some kB: read at once, or its writer waits.
    if (theirs_ >= 0) reader_ = std::thread([this] { read(); });
  }
  ~Terminal() {
    (void)text();
    for (const int end : {ours_, theirs_}) {
      if (end >= 0) ::close(end);
    }
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool open() const { return theirs_ >= 0; }
  const std::string& path() const { return path_; }
  // All of it; nothing is read any more.
  std::string text() {
    if (reader_.joinable()) {
      EXPECT_EQ(::write(theirs_, last_.data(), last_.size()), std::ssize(last_));
      reader_.join();
    }
    return text_.substr(0, text_.find(last_));
  }

 private:
  void read() {
    const auto start = std::chrono::steady_clock::now();
    while (text_.find(last_) == std::string::npos &&
           std::chrono::steady_clock::now() - start < std::chrono::seconds(150)) {
      pollfd waiting{ours_, POLLIN, 0};
      if (::poll(&waiting, 1, 1000) <= 0) continue;
      std::array<char, 4096> buffer;
      const ssize_t got = ::read(ours_, buffer.data(), buffer.size());
      if (got <= 0) return;
      text_.append(buffer.data(), static_cast<std::size_t>(got));
    }
  }

  const std::string last_ = "<end of the test>";
  int ours_, theirs_ = -1;
  std::string path_, text_;
  std::thread reader_;
};

TEST(Progress, IsDrawnOnATerminalAndTakenAway) {
  const Folder folder;
  const auto drawn_on = [&](const std::string& kind, Terminal& terminal) {
    const Outcome outcome =
        shunt({"convert", tiny_moe, folder.path(kind), "--to", "int8"},
              {.environment = {{"TERM", kind}}, .stderr_path = terminal.path()});
    EXPECT_EQ(outcome.code, 0) << terminal.text();
    return terminal.text();
  };
  Terminal terminal, dumb;
  if (!terminal.open() || !dumb.open()) GTEST_SKIP() << "no pseudo-terminals here";
  const std::string drawn = drawn_on("xterm", terminal), away = "\r\033[K";
  EXPECT_TRUE(drawn.starts_with(away + "·")) << drawn;
  EXPECT_TRUE(contains(drawn, "█  100 %  model.safetensors" + away)) << drawn;
  EXPECT_TRUE(drawn.ends_with(away)) << drawn;
  EXPECT_FALSE(contains(drawn, "\n")) << drawn;
  EXPECT_EQ(drawn_on("dumb", dumb), "");
}

}  // namespace
}  // namespace shunt::test
