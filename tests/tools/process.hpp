// The command as others see it: a process with arguments, an exit code, and two streams.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "models.hpp"

namespace shunt::test {

struct Outcome {
  int code = -1;  // exit code; -1 when a signal ended it
  int signal = 0;
  std::string out, err;
};

struct Surroundings {
  std::map<std::string, std::string> environment;  // added to ours
  std::int64_t file_limit = -1;                    // RLIMIT_FSIZE in bytes, SIGXFSZ ignored
  std::int64_t data_limit = -1;                    // RLIMIT_DATA in bytes: memory but of files
  std::string stdout_path, stderr_path;            // standard output, error go there
  bool streams_closed = false;                     // all three
};

// Runs `shunt ARGS`; a process that takes over two minutes is killed.
Outcome shunt(const std::vector<std::string>& args, const Surroundings& around = {});

// A folder that is gone with the object.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path(const std::string& name = {}) const { return (root_ / name).string(); }
  // A copy of a checkpoint, files and all; its path.
  std::string copy_of(const std::string& checkpoint) const;
  std::vector<std::string> entries() const;

 private:
  std::filesystem::path root_;
};

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);
int longest_line(const std::string& text);  // in code points
bool contains(const std::string& text, const std::string& part);

// What every failure must look like: the code, nothing but one line of error, and it says `part`.
void expect_failure(const Outcome& outcome, int code, const std::string& who,
                    const std::string& part);

}  // namespace shunt::test
