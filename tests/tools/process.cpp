#include "process.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace shunt::test {

namespace {

constexpr int limit_seconds = 120;

struct Pipe {
  int ends[2] = {-1, -1};
  Pipe() {
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  }
};

// In the child: only calls that are safe after fork.
[[noreturn]] void become(std::vector<char*>& argv, std::vector<char*>& envp,
                         const Surroundings& around, const Pipe& out, const Pipe& err) {
  ::dup2(::open("/dev/null", O_RDONLY), 0);
  const auto end_of = [](const std::string& path, const Pipe& pipe) {
    return path.empty() ? pipe.ends[1] : ::open(path.c_str(), O_WRONLY);
  };
  ::dup2(end_of(around.stdout_path, out), 1);
  ::dup2(end_of(around.stderr_path, err), 2);
  for (const auto* pipe : {&out, &err}) {
    ::close(pipe->ends[0]);
    ::close(pipe->ends[1]);
  }
  if (around.file_limit >= 0) {
    const rlimit limit{static_cast<rlim_t>(around.file_limit),
                       static_cast<rlim_t>(around.file_limit)};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::signal(SIGXFSZ, SIG_IGN);
  }
  if (around.data_limit >= 0) {
    const rlimit limit{static_cast<rlim_t>(around.data_limit),
                       static_cast<rlim_t>(around.data_limit)};
    ::setrlimit(RLIMIT_DATA, &limit);
  }
  for (int stream = 0; around.streams_closed && stream < 3; ++stream) ::close(stream);
  ::execve(argv[0], argv.data(), envp.data());
  ::_exit(127);
}

}  // namespace

Outcome shunt(const std::vector<std::string>& args, const Surroundings& around) {
  std::vector<std::string> words = {SHUNT_COMMAND};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = *entry;
    if (around.environment.count(variable.substr(0, variable.find('='))) == 0) {
      variables.push_back(variable);
    }
  }
  for (const auto& [name, value] : around.environment) variables.push_back(name + "=" + value);
  const auto pointers = [](std::vector<std::string>& strings) {
    std::vector<char*> list;
    for (auto& s : strings) list.push_back(s.data());
    list.push_back(nullptr);
    return list;
  };
  std::vector<char*> argv = pointers(words);
  std::vector<char*> envp = pointers(variables);

  const Pipe out;
  const Pipe err;
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) become(argv, envp, around, out, err);
  ::close(out.ends[1]);
  ::close(err.ends[1]);

  Outcome outcome;
  std::array<pollfd, 2> waiting = {pollfd{out.ends[0], POLLIN, 0}, pollfd{err.ends[0], POLLIN, 0}};
  std::array<std::string*, 2> texts = {&outcome.out, &outcome.err};
  const auto start = std::chrono::steady_clock::now();
  while (waiting[0].fd >= 0 || waiting[1].fd >= 0) {
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(limit_seconds)) {
      ::kill(child, SIGKILL);
      ADD_FAILURE() << "the command took over " << limit_seconds << " s";
      break;
    }
    ::poll(waiting.data(), waiting.size(), 1000);
    for (std::size_t i = 0; i < 2; ++i) {
      if (waiting[i].fd < 0 || waiting[i].revents == 0) continue;
      std::array<char, 65536> buffer;
      const ssize_t got = ::read(waiting[i].fd, buffer.data(), buffer.size());
      if (got > 0) {
        texts[i]->append(buffer.data(), static_cast<std::size_t>(got));
      } else {
        waiting[i].fd = -1;
      }
    }
  }
  ::close(out.ends[0]);
  ::close(err.ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

Folder::Folder() {
  std::string name = (std::filesystem::temp_directory_path() / "shunt-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
  root_ = name;
}
Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

std::string Folder::copy_of(const std::string& checkpoint) const {
  const auto to = root_ / std::filesystem::path(checkpoint).filename();
  std::filesystem::copy(checkpoint, to, std::filesystem::copy_options::recursive);
  return to.string();
}

std::vector<std::string> Folder::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(root_)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}
void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

int longest_line(const std::string& text) {
  int longest = 0;
  int width = 0;
  for (const char c : text) {
    if (c == '\n') {
      width = 0;
    } else if ((c & 0xc0) != 0x80) {
      longest = std::max(longest, ++width);
    }
  }
  return longest;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void expect_failure(const Outcome& outcome, int code, const std::string& who,
                    const std::string& part) {
  EXPECT_EQ(outcome.signal, 0);
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_EQ(outcome.err.rfind(who + ": ", 0), 0u) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, part)) << "wanted '" << part << "' in: " << outcome.err;
}

}  // namespace shunt::test
