// What of a conversion is finished, beside what is not: so that an interrupted one goes on.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace shunt {

// The file in it that says so, until it has its own name.
inline constexpr const char* journal_name = "conversion.json";

// The folder "<out>.partial" while one process works in it.
class PartialFolder {
 public:
  // Makes it, or opens one that was left. Throws Error: another process is at work in it; it was
  // begun with other settings; the system refuses.
  PartialFolder(const std::string& out, const nlohmann::ordered_json& settings);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // What was said of a file when it was finished; null when it is not, or has changed since.
  nlohmann::ordered_json finished(const std::string& file) const;
  void finish(const std::string& file, const nlohmann::ordered_json& what);
  // Leaves no trace of a folder that this object made and in which nothing is finished. Whether.
  bool discard_if_unused();
  // Gives the folder its name and forgets the journal.
  void publish(const std::string& out);

 private:
  void save() const;
  std::string path_, journal_;
  nlohmann::ordered_json json_;
  int lock_ = -1;
  bool new_ = false;
};

// Size and contents of a file in a few words: of all of a small one, of both ends of a large one.
std::string fingerprint(const std::string& path);
// That, and of a file with more between its ends when it was last written, which shows that this
// may have changed.
std::string mark_of(const std::string& path);
// Writes a file whole, or throws Error{io}; it is on disk when this returns.
void write_whole(const std::string& path, const std::string& text);
// The same of a copy, which its owner may write to whatever `from` allows.
void copy_whole(const std::string& from, const std::string& to);
// Throws Error{io} for a file that cannot be opened to be read.
void check_readable(const std::string& path);

}  // namespace shunt
