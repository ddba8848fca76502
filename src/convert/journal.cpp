#include "convert/journal.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::size_t max_journal_bytes = 1u << 30;
constexpr std::int64_t end_bytes = 1 << 20;  // of a file, that its fingerprint reads

[[noreturn]] void refuse_io(const std::string& path, const char* what) {
  fail(Status::io, "{}: {}: {}", path, what, std::strerror(errno));
}

}  // namespace

void write_whole(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) refuse_io(path, "cannot be created");
  std::size_t done = 0;
  int code = 0;
  while (done < text.size() && code == 0) {
    const ssize_t written = ::write(file, text.data() + done, text.size() - done);
    if (written < 0 && errno != EINTR) code = errno;
    if (written > 0) done += static_cast<std::size_t>(written);
  }
  if (code == 0 && ::fsync(file) != 0) code = errno;
  if (::close(file) != 0 && code == 0) code = errno;
  if (code == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) code = errno;
  if (code != 0) {
    ::unlink(temporary.c_str());
    errno = code;
    refuse_io(path, "cannot be written");
  }
}

void copy_whole(const std::string& from, const std::string& to) {
  const std::string temporary = to + ".new";
  std::error_code code;
  fs::remove(temporary, code);  // may be one that cannot be written to
  fs::copy_file(from, temporary, code);
  if (!code) fs::permissions(temporary, fs::perms::owner_write, fs::perm_options::add, code);
  if (!code) {
    const int file = ::open(temporary.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0 || ::fsync(file) != 0) code = {errno, std::generic_category()};
    if (file >= 0) ::close(file);
  }
  if (!code) fs::rename(temporary, to, code);
  if (!code) return;
  std::error_code ignored;
  fs::remove(temporary, ignored);
  fail(Status::io, "{}: cannot be copied to {}: {}", from, to, code.message());
}

void check_readable(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) refuse_io(path, "cannot be read");
  ::close(file);
}

std::string fingerprint(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) refuse_io(path, "cannot be read");
  const auto size = static_cast<std::int64_t>(file.tellg());
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  std::string buffer(static_cast<std::size_t>(end_bytes), '\0');
  for (const std::int64_t begin : {std::int64_t{0}, std::max(end_bytes, size - end_bytes)}) {
    const std::int64_t count = std::min(end_bytes, size - begin);
    if (count <= 0) continue;
    file.seekg(begin);
    file.read(buffer.data(), count);
    for (std::int64_t i = 0; i < count; ++i) {
      hash =
          (hash ^ static_cast<unsigned char>(buffer[static_cast<std::size_t>(i)])) * 0x100000001b3u;
    }
  }
  return fmt::format("{} bytes, {:016x}", size, hash);
}

std::string mark_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) refuse_io(path, "cannot be read");
  std::string mark = fingerprint(path);
  if (status.st_size > 2 * end_bytes) {
    mark += fmt::format(", written at {}.{:09}", status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
  }
  return mark;
}

PartialFolder::PartialFolder(const std::string& out, const Json& settings)
    : path_(out + ".partial"), journal_(path_ + "/" + journal_name) {
  if (::mkdir(path_.c_str(), 0777) != 0 && errno != EEXIST) refuse_io(path_, "cannot be created");
  lock_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) refuse_io(path_, "cannot be opened");
  try {
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        fail(Status::io, "{}: another process is converting into it", path_);
      }
      // A file system without locks: nobody else can be told apart, and nobody is kept out.
      if (errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) {
        refuse_io(path_, "cannot be locked");
      }
    }
    if (file_exists(journal_)) {
      try {
        json_ = Json(parse_object(journal_, read_text(journal_, max_journal_bytes)));
      } catch (const Error& error) {
        if (error.status() != Status::bad_file) throw;
        fail(error.status(), "{}: remove {} to begin anew", error.what(), path_);
      }
      // A plain comparison: keys have lost their order on the way.
      if (!json_.contains("settings") || !json_.contains("finished") ||
          !json_["finished"].is_object() ||
          nlohmann::json(json_["settings"]) != nlohmann::json(settings)) {
        fail(Status::invalid_argument,
             "{}: holds an interrupted conversion of another checkpoint, of one that was written "
             "since, or "
             "with other settings: "
             "remove it to begin anew",
             path_);
      }
      std::error_code code;
      fs::directory_iterator entry(path_, code);
      for (; !code && entry != fs::directory_iterator(); entry.increment(code)) {
        std::error_code ignored;
        if (fs::symlink_status(entry->path(), ignored).type() == fs::file_type::regular) continue;
        fail(Status::invalid_argument,
             "{}: is no file, which is all that an interrupted conversion holds: remove it",
             entry->path().string());
      }
    } else {
      ::unlink((journal_ + ".new").c_str());  // of a journal that was interrupted itself
      if (!fs::is_empty(path_)) {
        fail(Status::invalid_argument,
             "{}: is there and holds no interrupted conversion: remove it", path_);
      }
      json_ = {{"settings", settings}, {"finished", Json::object()}};
      save();
      new_ = true;
    }
  } catch (...) {  // the destructor does not run
    ::close(lock_);
    throw;
  }
}

PartialFolder::~PartialFolder() {
  if (lock_ >= 0) ::close(lock_);
}

bool PartialFolder::discard_if_unused() {
  if (!new_ || !json_["finished"].empty()) return false;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  return true;
}

void PartialFolder::save() const { write_whole(journal_, json_.dump(1) + "\n"); }

Json PartialFolder::finished(const std::string& name) const {
  const Json& all = json_.at("finished");
  const auto found = all.find(name);
  if (found == all.end()) return nullptr;
  const auto bytes = found->find("bytes");
  if (!found->is_object() || bytes == found->end()) return nullptr;  // as if it were not
  std::error_code ignored;
  const auto size = fs::file_size(file(name), ignored);
  if (ignored || *bytes != size) return nullptr;
  const auto mark = found->find("mark");
  if (mark == found->end() || *mark != mark_of(file(name))) return nullptr;
  return *found;
}

void PartialFolder::finish(const std::string& name, const Json& what) {
  json_["finished"][name] = what;
  json_["finished"][name]["bytes"] = fs::file_size(file(name));
  json_["finished"][name]["mark"] = mark_of(file(name));
  save();
}

void PartialFolder::publish(const std::string& out) {
  ::fsync(lock_);
  if (::rename(path_.c_str(), out.c_str()) != 0) refuse_io(out, "cannot be given its name");
  // Last: were it the other way round, an interruption would leave a folder that nobody knows.
  ::unlink((out + "/" + journal_name).c_str());
}

}  // namespace shunt
