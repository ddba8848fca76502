#include "options.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <utility>

#include "cuda/timing.hpp"

namespace shunt::tool {

namespace {

// The whole text as a number, or nothing.
template <class T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace

CLI::Validator whole_number(std::int64_t low, std::int64_t high, const std::string& note) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        std::int64_t value = 0;
        if (parse_number(text, value) && value >= low && value <= high) return {};
        return fmt::format("'{}' is not a whole number from {} to {}{}", text, low, high, note);
      },
      "");
}

CLI::Validator finite_number(double low, double high) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double value = 0;
        if (parse_number(text, value) && value >= low && value <= high) return {};
        return fmt::format("'{}' is not a number from {} to {}", text, low, high);
      },
      "");
}

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command.add_option("--device", options.device, "engine: cpu or cuda (default: cpu)")
      ->option_text("cpu|cuda")
      ->check(CLI::Validator(
          [](std::string& text) -> std::string {
            if (text == "cpu" || text == "cuda") return {};
            return fmt::format("'{}' is not cpu or cuda", text);
          },
          ""));
  command.add_option("--threads", options.threads, "CPU threads (default 0: every core)")
      ->option_text("N")
      ->check(whole_number(0, 1024, " (0: every core)"));
}

Engine::Engine(const DeviceOptions& options, bool dependent_launch) : limit_(options.threads) {
  if (options.device != "cuda") {
    context_ = cpu({.threads = options.threads});
    return;
  }
  cuda();  // says why where there is no GPU
  stream_ = std::make_unique<cuda_engine::Stream>();
  context_ = cuda({.stream = stream_->get(), .dependent_launch = dependent_launch});
}
Engine::~Engine() = default;

void add_rows_option(CLI::App& command, RowFormat& rows, const std::string& description) {
  std::map<std::string, RowFormat> named;
  for (const RowFormat format :
       {RowFormat::as_dtype, RowFormat::fp8_token, RowFormat::fp8_block, RowFormat::nvfp4}) {
    named.emplace(to_string(format), format);
  }
  command
      .add_option_function<std::string>(
          "--rows", [&rows, named](const std::string& text) { rows = named.at(text); }, description)
      ->option_text("as_dtype|fp8_block|fp8_token|nvfp4")
      ->check(CLI::IsMember(named));
}

void add_dtype_option(CLI::App& command, const std::function<void(DType)>& set,
                      const std::string& description) {
  command
      .add_option_function<std::string>(
          "--dtype",
          [set](const std::string& text) {
            set(text == "f32" ? f32 : text == "bf16" ? bf16 : f16);
          },
          description)
      ->option_text("f32|bf16|f16")
      ->check(CLI::Validator(
          [](std::string& text) -> std::string {
            if (text == "f32" || text == "bf16" || text == "f16") return {};
            return fmt::format("'{}' is not f32, bf16 or f16", text);
          },
          ""));
}

namespace {

// All but the last of `required` have a word: those before --json keep theirs, the word behind it
// is the next one's.
void hand_over(const CLI::App& command, JsonOption& json, const std::vector<Positional>& required) {
  std::vector<std::string> words;
  for (const Positional& one : required) {
    if (one.option->count() > 0) words.push_back(one.option->results().front());
  }
  if (words.size() + 1 != required.size()) return;
  std::size_t before = 0;
  for (const CLI::Option* parsed : command.parse_order()) {
    if (parsed->check_name("--json")) break;
    if (std::any_of(required.begin(), required.end(),
                    [&](const Positional& one) { return one.option == parsed; })) {
      ++before;
    }
  }
  const std::string word = json.taken(required[before].fits);
  if (word.empty()) return;
  words.insert(words.begin() + static_cast<std::ptrdiff_t>(before), word);
  for (std::size_t i = before; i < words.size(); ++i) {
    required[i].option->clear();
    required[i].option->add_result(words[i]);
    required[i].option->run_callback();
  }
}

}  // namespace

void add_json_option(CLI::App& command, JsonOption& option,
                     const std::vector<Positional>& required) {
  command
      .add_option_function<std::string>(
          "--json",
          [&command, &option, required](const std::string& word) {
            option.wanted = true;
            if (word != "-" && word != "{}") option.file = word;
            hand_over(command, option, required);
          },
          "results for machines, into FILE or to standard output")
      ->option_text("[FILE]")
      ->expected(0, 1);
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

std::string JsonOption::taken(const std::function<bool(const std::string&)>& positional) {
  return !file.empty() && positional(file) ? std::exchange(file, {}) : std::string();
}

std::int64_t parse_bytes(const std::string& option, const std::string& text) {
  static const std::map<std::string, double> units = {{"", 1},     {"B", 1},    {"k", 1e3},
                                                      {"K", 1e3},  {"kB", 1e3}, {"M", 1e6},
                                                      {"MB", 1e6}, {"G", 1e9},  {"GB", 1e9}};
  const auto split = text.find_first_not_of("0123456789.");
  const std::string number = text.substr(0, split);
  const auto unit = units.find(split == std::string::npos ? "" : text.substr(split));
  double value = 0;
  if (unit != units.end() && parse_number(number, value) && value * unit->second <= 1e12) {
    return static_cast<std::int64_t>(value * unit->second);
  }
  throw UsageError(
      fmt::format("{}: '{}' is not a size from 0 to 1000G, such as 64M or 1.5G", option, text));
}

std::vector<std::int64_t> parse_list(const std::string& option, const std::string& text,
                                     std::int64_t low, std::int64_t high) {
  std::vector<std::int64_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::int64_t value = 0;
    const std::string item = text.substr(begin, end - begin);
    if (!parse_number(item, value) || value < low || value > high) {
      throw UsageError(
          fmt::format("{}: '{}' in '{}' is not a whole number from {} to {}; a list is 1,16,256",
                      option, item, text, low, high));
    }
    values.push_back(value);
    begin = end + 1;
  }
  return values;
}

}  // namespace shunt::tool
