// What the subcommands share on the command line, and how they fail.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/features.hpp"
#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"
#include "shunt/tensor.hpp"

// CLI11's headers are large: only what registers options reads them.
namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace shunt::cuda_engine {
class Stream;
}

namespace shunt::tool {

inline constexpr int exit_done = 0;
inline constexpr int exit_failed = 1;  // bad input, or a mismatch
inline constexpr int exit_usage = 2;

// A command line that no file and no machine could make right.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A subcommand registers its options and hands over what to do; main() runs the one that was named.
using Action = std::function<int()>;
void add_run(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_convert(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

// Where the computation runs.
struct DeviceOptions {
  std::string device = "cpu";
  int threads = 0;
};
void add_device_options(CLI::App& command, DeviceOptions& options);
// An engine, opened. A GPU's has a stream of its own: the default one cannot be captured.
// Work without a context, packing and decoding, keeps to options.threads as long as it lives.
class Engine {
 public:
  // Throws Error{unsupported} for an engine that this build or this machine has not.
  explicit Engine(const DeviceOptions& options, bool dependent_launch = false);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  const Context& context() const { return context_; }

 private:
  cpu_engine::CoreLimit limit_;
  std::unique_ptr<cuda_engine::Stream> stream_;
  Context context_;
};

void add_dtype_option(CLI::App& command, const std::function<void(DType)>& set,
                      const std::string& description);
inline void add_dtype_option(CLI::App& command, DType& dtype, const std::string& description) {
  add_dtype_option(
      command, [&dtype](DType given) { dtype = given; }, description);
}
// --rows as_dtype|fp8_block|fp8_token|nvfp4
void add_rows_option(CLI::App& command, RowFormat& rows, const std::string& description);

// --json [FILE]: absent, to standard output, or into a file.
struct JsonOption {
  bool wanted = false;
  std::string file;  // empty: standard output
  // FILE, where it fits a positional argument that is missing; else "". It is FILE no more then.
  std::string taken(const std::function<bool(const std::string&)>& positional);
  bool to_stdout() const { return wanted && file.empty(); }
};
// A positional argument that a command requires; nothing but a word that fits is handed over to it.
struct Positional {
  CLI::Option* option;
  bool (*fits)(const std::string&);
};
// CLI11 gives --json the word behind it, if any. Where that leaves one of `required` (in order)
// without a word, it is none of FILE but the argument that stands in its place.
void add_json_option(CLI::App& command, JsonOption& option,
                     const std::vector<Positional>& required = {});
bool is_folder(const std::string& path);

// Accepts whole numbers in [low, high]; says what is legal otherwise.
CLI::Validator whole_number(std::int64_t low, std::int64_t high, const std::string& note = {});
// The same for numbers; neither NaN nor an infinity is one.
CLI::Validator finite_number(double low, double high);
// parse(text), whose refusal becomes a UsageError that names `option`.
template <class Parse>
auto parse_option(const std::string& option, const Parse& parse, const std::string& text) {
  try {
    return parse(text);
  } catch (const Error& error) {
    throw UsageError(option + ": " + error.what());
  }
}
// "64M", "1G", "1.5GB", "4096" in bytes; throws UsageError naming `option`.
std::int64_t parse_bytes(const std::string& option, const std::string& text);
// "1,16,256", each in [low, high]; throws UsageError naming `option`.
std::vector<std::int64_t> parse_list(const std::string& option, const std::string& text,
                                     std::int64_t low, std::int64_t high);

}  // namespace shunt::tool
