#include "progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "terminal.hpp"

namespace shunt::tool {

namespace {

constexpr int bar_columns = 24;
// Before so much time and work nobody can tell how long the rest takes.
constexpr double least_seconds = 1, least_share = 0.02;
using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

std::string ProgressLine::at(Time now, const std::string& what, std::int64_t done,
                             std::int64_t total) {
  const bool begins = total != total_ || done < done_;
  if (begins) {
    total_ = total;
    first_ = done;
    begun_ = now;
  }
  done_ = done;
  if (!begins && what == what_ && seconds(now - last_) < 0.1 && done < total) return {};
  what_ = what;
  last_ = now;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const int filled = std::clamp(static_cast<int>(share * bar_columns), 0, bar_columns);
  std::string bar;
  for (int i = 0; i < bar_columns; ++i) bar += i < filled ? "█" : "·";
  const double spent = seconds(now - begun_);
  const auto worked = static_cast<double>(done - first_), rest = static_cast<double>(total - done);
  const bool known = rest > 0 && spent > least_seconds && worked > least_share * (worked + rest);
  const std::string left =
      known ? fmt::format(", {} left", duration(spent * rest / worked * 1e6)) : std::string();
  return fmt::format("{}  {}  {}{}", bar, percent(share), what, left);
}

Progress::Progress() {
  const char* term = std::getenv("TERM");
  wanted_ = isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (shown_) tell("\r\033[K");
  shown_ = false;
  line_ = {};
}

void Progress::show(const std::string& what, std::int64_t done, std::int64_t total) {
  if (!wanted_ || total <= 0) return;
  const std::string line = line_.at(Clock::now(), what, done, total);
  if (line.empty()) return;
  shown_ = true;
  tell("\r\033[K" + line);
}

}  // namespace shunt::tool
