// A line on standard error that says how far a long computation is, where a terminal shows it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace shunt::tool {

class Progress {
 public:
  Progress();
  ~Progress();  // takes the line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // At most ten times a second.
  void show(const std::string& what, std::int64_t done, std::int64_t total);
  void clear();

 private:
  bool wanted_;
  bool shown_ = false;
  std::string what_;
  std::chrono::steady_clock::time_point begun_, last_;
};

}  // namespace shunt::tool
