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
using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Progress::Progress() {
  const char* term = std::getenv("TERM");
  wanted_ = isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (shown_) tell("\r\033[K");
  shown_ = false;
}

void Progress::show(const std::string& what, std::int64_t done, std::int64_t total) {
  if (!wanted_ || total <= 0) return;
  const auto now = Clock::now();
  if (what != what_) {
    what_ = what;
    begun_ = now;
  } else if (seconds(now - last_) < 0.1 && done < total) {
    return;
  }
  last_ = now;
  shown_ = true;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const int filled = std::clamp(static_cast<int>(share * bar_columns), 0, bar_columns);
  std::string bar;
  for (int i = 0; i < bar_columns; ++i) bar += i < filled ? "█" : "·";
  const double spent = seconds(now - begun_);
  const std::string left = share > 0.02 && spent > 1
                               ? fmt::format(", {} left", duration(spent * (1 / share - 1) * 1e6))
                               : std::string();
  tell(fmt::format("\r\033[K{}  {}  {}{}", bar, percent(share), what, left));
}

}  // namespace shunt::tool
