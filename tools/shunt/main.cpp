// The command `shunt`: names its subcommands, runs one, and turns what it throws into a line.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "options.hpp"
#include "shunt/error.hpp"
#include "terminal.hpp"

namespace shunt::tool {
namespace {

// One line, whatever the message was made of.
void complain(const std::string& who, std::string message) {
  for (auto& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  while (!message.empty() && message.back() == ' ') message.pop_back();
  tell(fmt::format("{}: {}\n", who, message));
}

// A standard stream that is closed would lend its number to the next file that is opened, which
// would then get what is meant for the stream.
void hold_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) != -1) continue;
    (void)open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // fails as before
  }
}

std::string speaker(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "shunt" : "shunt " + chosen.front()->get_name();
}

// An option with an empty word behind it, as a shell leaves where a variable is not set: it would
// pass for one that was not given.
std::string given_empty(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* option : command->get_options()) {
      const auto& words = option->results();
      const bool empty = std::any_of(words.begin(), words.end(),
                                     [](const std::string& word) { return word.empty(); });
      const bool wants_word = option->get_expected_min() > 0;  // --json may stand alone
      if (empty && wants_word && !option->get_positional()) return option->get_name();
    }
  }
  return {};
}

int run_action(const Action& action, const std::string& who) {
  try {
    return action();
  } catch (const UsageError& error) {
    complain(who, fmt::format("{} (see {} --help)", error.what(), who));
    return exit_usage;
  } catch (const Error& error) {
    complain(who, error.what());
  } catch (const std::bad_alloc&) {
    complain(who, "out of memory");
  } catch (const std::exception& error) {
    complain(who, error.what());
  }
  return exit_failed;
}

int main_of(int argc, char** argv) {
  CLI::App app("Shunt computes the mixture-of-experts layers of language models.", "shunt");
  app.set_version_flag("--version", "shunt " SHUNT_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 bad input or a mismatch, 2 usage.\n"
      "Example:\n"
      "  shunt run --model models/tiny-moe");
  app.get_formatter()->column_width(34);

  Action action;
  add_run(app, action);
  add_inspect(app, action);
  add_convert(app, action);
  add_eval(app, action);
  add_bench(app, action);
  add_info(app, action);

  if (argc < 2) {
    tell(app.help());
    return exit_usage;
  }
  // CLI11 would say no more than that a subcommand is required.
  const std::string first = argv[1];
  const auto known = app.get_subcommands([](const CLI::App*) { return true; });
  const bool own = first == "-h" || first == "--help" || first == "--version";
  if (!own && std::none_of(known.begin(), known.end(),
                           [&](const CLI::App* one) { return one->get_name() == first; })) {
    complain("shunt", fmt::format("'{}' is no subcommand; run, inspect, convert, eval, bench "
                                  "and info are (see shunt --help)",
                                  first));
    return exit_usage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      app.exit(error);  // help, version: to standard output
      return exit_done;
    }
    const std::string who = speaker(app);
    complain(who, fmt::format("{} (see {} --help)", error.what(), who));
    return exit_usage;
  }
  if (const std::string option = given_empty(app); !option.empty()) {
    const std::string who = speaker(app);
    complain(who, fmt::format("{} '': must not be empty (see {} --help)", option, who));
    return exit_usage;
  }
  return run_action(action, speaker(app));
}

}  // namespace
}  // namespace shunt::tool

int main(int argc, char** argv) {
  int code = shunt::tool::exit_failed;
  shunt::tool::hold_standard_streams();
  (void)std::signal(SIGXFSZ, SIG_IGN);  // a file that may grow no more is an error to be told
  try {
    code = shunt::tool::main_of(argc, argv);
  } catch (const std::exception& error) {
    shunt::tool::complain("shunt", error.what());
  }
  // Output that never arrived is a failure.
  const bool unflushed = std::fflush(stdout) != 0;
  if ((unflushed || std::ferror(stdout) != 0) && code == 0) {
    shunt::tool::complain("shunt: standard output",
                          unflushed ? std::strerror(errno) : "cannot be written");
    code = shunt::tool::exit_failed;
  }
  return code;
}
