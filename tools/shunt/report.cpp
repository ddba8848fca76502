#include "report.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "shunt/error.hpp"

namespace shunt::tool {

namespace {

// NaN and infinities are no JSON: null.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

[[noreturn]] void fail_io(const std::string& path, int code) {
  throw Error(Status::io, fmt::format("{}: cannot be written: {}", path, std::strerror(code)));
}

// 0, or errno.
int write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

// Pipes and devices are written in place: there is nothing to replace.
bool in_place(const std::string& path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

// Absolute, without links and dots as far as it exists.
std::filesystem::path resolved(const std::string& path) {
  std::error_code ignored;
  const auto absolute = std::filesystem::absolute(path, ignored);
  auto whole = std::filesystem::weakly_canonical(absolute, ignored);
  if (whole.empty()) whole = absolute.lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

std::string temporary(const std::string& path) { return fmt::format("{}.{}.part", path, getpid()); }

}  // namespace

Json to_json(const Row& row) {
  return {{"op", row.op},
          {"case", row.label},
          {"dtype", to_string(row.dtype)},
          {"device", row.device},
          {"us", number(row.us)},
          {"us_min", number(row.us_min)},
          {"us_max", number(row.us_max)},
          {"bytes", number(row.bytes)},
          {"flops", number(row.flops)},
          {"floor_us", number(row.floor_us)},
          {"share", number(row.share)},
          {"peers", Json::object()}};
}

Json report_json(const Json& machine, const Json& ceilings, const std::vector<Row>& rows) {
  Json list = Json::array();
  for (const auto& row : rows) list.push_back(to_json(row));
  return {{"machine", machine}, {"ceilings", ceilings}, {"rows", list}};
}

void write_file(const std::string& path, const std::string& text) {
  const bool direct = in_place(path);
  const std::string target = direct ? path : temporary(path);
  const int flags = direct ? O_WRONLY : O_WRONLY | O_CREAT | O_TRUNC;
  const int file = ::open(target.c_str(), flags | O_CLOEXEC, 0666);
  if (file < 0) fail_io(path, errno);
  int code = write_all(file, text);
  if (::close(file) != 0 && code == 0) code = errno;
  if (code == 0 && !direct && ::rename(target.c_str(), path.c_str()) != 0) code = errno;
  if (code != 0) {
    if (!direct) ::unlink(target.c_str());
    fail_io(path, code);
  }
}

void check_writable(const std::string& path) {
  if (in_place(path)) {
    if (::access(path.c_str(), W_OK) != 0) fail_io(path, errno);
    if (std::filesystem::is_directory(path)) fail_io(path, EISDIR);
    return;
  }
  const std::string probe = temporary(path);
  const int file = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) fail_io(path, errno);
  ::close(file);
  ::unlink(probe.c_str());
}

void check_apart(const std::string& option, const std::string& path, const std::string& model,
                 const std::vector<std::pair<std::string, std::string>>& others) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  const auto same = [&](const std::string& other) {
    return fs::equivalent(path, other, ignored) || resolved(path) == resolved(other);
  };
  for (const auto& [name, other] : others) {
    if (other.empty() || !same(other) || in_place(path)) continue;
    throw UsageError(fmt::format("{} is {}: must be another file than {}'s", option, path, name));
  }
  if (model.empty() || !fs::is_regular_file(path, ignored)) return;
  for (const auto& entry : fs::directory_iterator(model, ignored)) {
    if (!fs::equivalent(path, entry.path(), ignored)) continue;
    throw UsageError(
        fmt::format("{} is {}: must be no file that the model's folder has", option, path));
  }
}

void check_outside(const std::string& option, const std::string& path, const std::string& folder) {
  if (path.empty()) return;
  const auto file = resolved(path), within = resolved(folder);
  if (std::mismatch(within.begin(), within.end(), file.begin(), file.end()).first == within.end()) {
    throw UsageError(
        fmt::format("{} is {}: must lie outside {}, which is being made", option, path, folder));
  }
}

std::string fell_back_text(std::int64_t fell_back, std::int64_t experts) {
  return fmt::format(
      "{} of {} experts by magnitude: too few hidden states are routed to them, or none that tell "
      "their inputs apart",
      fell_back, experts);
}

void emit_json(const JsonOption& option, const Json& json) {
  // Names of files and models need not be UTF-8, which JSON must.
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (option.to_stdout()) {
    fmt::print("{}", text);
  } else {
    write_file(option.file, text);
  }
}

}  // namespace shunt::tool
