// A line on standard error that says how far a long computation is, where a terminal shows it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace shunt::tool {

// What the line says, by times that are given. How long the rest takes is told by what was done
// since the first call: what was done before that, as in a conversion that is taken up again, took
// none of this time. Names may change on the way, as shards of one conversion do; another total, or
// less done than before, is another computation.
class ProgressLine {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Empty within a tenth of a second of the line before, where it would say nothing new but how
  // far. total > 0.
  std::string at(Time now, const std::string& what, std::int64_t done, std::int64_t total);

 private:
  std::string what_;
  std::int64_t first_ = 0, done_ = 0, total_ = 0;
  Time begun_, last_;
};

class Progress {
 public:
  Progress();
  ~Progress();  // takes the line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // At most ten times a second.
  void show(const std::string& what, std::int64_t done, std::int64_t total);
  void clear();  // what is shown next is another computation

 private:
  bool wanted_;
  bool shown_ = false;
  ProgressLine line_;
};

}  // namespace shunt::tool
