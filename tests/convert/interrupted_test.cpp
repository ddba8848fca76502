// Conversions that end on their way or go on, and what is refused before one begins.
#include "convert/conversion.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "convert/cases.hpp"
#include "convert/journal.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The model in three files with an index, tensors dealt out by turns.
void split_model(const std::string& source, const std::string& folder) {
  fs::create_directory(folder);
  fs::copy_file(source + "/config.json", folder + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
  std::array<std::vector<std::pair<std::string, Tensor>>, 3> shards;
  Json map = Json::object();
  std::size_t next = 0;
  for (const std::string& name : file.names()) {
    const std::size_t shard = next++ % 3;
    shards[shard].emplace_back(name, file.get(name));
    map[name] = "model-0000" + std::to_string(shard + 1) + "-of-00003.safetensors";
  }
  for (std::size_t i = 0; i < 3; ++i) {
    write_safetensors(folder + "/model-0000" + std::to_string(i + 1) + "-of-00003.safetensors",
                      shards[i], {{"format", "pt"}});
  }
  write_file(folder + "/model.safetensors.index.json",
             Json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
}

TEST(Convert, AnInterruptedConversionGoesOnAndGivesTheSameBytes) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  const ConversionOptions options = to("int4:32");
  convert_checkpoint(cpu(), in, folder / "whole", options);

  // The second file's first expert ends it, as a full disk would.
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00002-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  Status status = Status::ok;
  const std::string message =
      error_of([&] { convert_checkpoint(cpu(), in, out, options, stop); }, &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("no space; what is finished stays in " + out + ".partial"),
            std::string::npos)
      << message;
  EXPECT_FALSE(fs::exists(out));
  const std::string finished = out + ".partial/model-00001-of-00003.safetensors";
  const auto when = fs::last_write_time(finished);

  EXPECT_NE(
      error_of([&] { convert_checkpoint(cpu(), in, out, to("int4:64")); }).find("other settings"),
      std::string::npos);
  const ConversionReport report = convert_checkpoint(cpu({.threads = 3}), in, out, options);
  EXPECT_EQ(report.shards, 3);
  EXPECT_EQ(report.shards_resumed, 1);
  EXPECT_EQ(report.experts.size(), 32u);
  EXPECT_EQ(fs::last_write_time(out + "/model-00001-of-00003.safetensors"), when);
  EXPECT_FALSE(fs::exists(out + ".partial"));
  EXPECT_EQ(contents(out), contents(folder / "whole"));

  // Files and index agree.
  const Json index = Json::parse(read_file(out + "/model.safetensors.index.json"));
  std::size_t tensors = 0;
  for (const char* shard : {"1", "2", "3"}) {
    const std::string name = std::string("model-0000") + shard + "-of-00003.safetensors";
    for (const std::string& tensor : SafetensorsFile::open(out + "/" + name).names()) {
      EXPECT_EQ(index["weight_map"][tensor], name);
      ++tensors;
    }
  }
  EXPECT_EQ(index["weight_map"].size(), tensors);
}

// What stays, and what to do with it, is said; nothing stays where nothing is finished.
TEST(Convert, ARefusalOnTheWaySaysWhatStays) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  for (const char* file : {"00002-of", "00001-of"}) {
    const ConversionProgress stop = [&](const std::string& at, std::int64_t, std::int64_t) {
      if (at.find(file) != std::string::npos) throw Error(Status::invalid_argument, "no number");
    };
    const std::string message =
        error_of([&] { convert_checkpoint(cpu(), in, out, to("int4:32"), stop); });
    const bool first = std::string(file) == "00001-of";
    EXPECT_EQ(message, first ? "no number"
                             : "no number; what is finished stays in " + out +
                                   ".partial: remove it to convert otherwise");
    EXPECT_EQ(fs::exists(out + ".partial"), !first);
    fs::remove_all(out + ".partial");
  }
}

// A file that was said to be finished and is not whole any more is made again.
TEST(Convert, ATornFileIsMadeAgain) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00003-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16"), stop); });
  fs::resize_file(out + ".partial/model-00001-of-00003.safetensors", 100);
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to("bf16"));
  EXPECT_EQ(report.shards_resumed, 1);
  convert_checkpoint(cpu(), in, folder / "whole", to("bf16"));
  EXPECT_EQ(contents(out), contents(folder / "whole"));
}

// So is one that was written to since, and a link in its place is not followed.
TEST(Convert, AFileWrittenToIsMadeAgain) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out", elsewhere = folder / "elsewhere";
  split_model(golden("qwen3_moe"), in);
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00003-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  convert_checkpoint(cpu(), in, folder / "whole", to("bf16"));
  error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16"), stop); });
  const std::string finished = out + ".partial/model-00001-of-00003.safetensors";
  std::string bytes = read_file(finished);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] + 1);
  write_file(finished, bytes);
  const std::string third = out + ".partial/model-00003-of-00003.safetensors";
  fs::remove(third);
  write_file(elsewhere, "x");
  fs::create_symlink(elsewhere, third);
  EXPECT_NE(error_of([&] {
              convert_checkpoint(cpu(), in, out, to("bf16"));
            }).find("model-00003-of-00003.safetensors: is no file, which is all that"),
            std::string::npos);
  fs::remove(third);
  EXPECT_EQ(convert_checkpoint(cpu(), in, out, to("bf16")).shards_resumed, 1);
  EXPECT_EQ(read_file(elsewhere), "x");
  EXPECT_EQ(contents(out), contents(folder / "whole"));
}

// A journal that was changed since is refused, or what it says of a file is as if it were not.
TEST(Convert, AChangedJournalIsNotBelieved) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00003-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16"), stop); });
  const std::string path = out + ".partial/" + journal_name;
  const Json whole = Json::parse(read_file(path));
  const std::string file = "model-00001-of-00003.safetensors";
  const auto with = [&](const std::function<void(Json&)>& change) {
    Json changed = whole;
    change(changed);
    write_file(path, changed.dump());
    return error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16"), stop); });
  };
  for (const char* row :
       {"5", "[]", "[0, 0, 1000000000, 1.0, 1.0, 1, false]", "[99, 0, 0, 1.0, 1.0, 1, false]",
        "[0, -1, 0, 1.0, 1.0, 1, false]", R"([0, 0, 0, "x", 1.0, 1, false])"}) {
    const std::string message =
        with([&](Json& json) { json["finished"][file]["experts"][0] = Json::parse(row); });
    EXPECT_NE(message.find(path + ": finished['" + file + "'].experts holds "), std::string::npos)
        << message;
    EXPECT_NE(message.find("to begin anew"), std::string::npos) << message;
  }
  EXPECT_NE(with([&](Json& json) { json["finished"][file]["experts"] = 5; }).find("is no list"),
            std::string::npos);
  EXPECT_NE(with([&](Json& json) {
              json["finished"][file]["experts"] = Json::array();
            }).find("are too few"),
            std::string::npos);
  EXPECT_NE(with([](Json& json) { json["finished"] = Json::array(); }).find("to begin anew"),
            std::string::npos);
  for (const char* text : {"{\"settings\": ", "null", ""}) {
    write_file(path, text);
    const std::string message = error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16")); });
    EXPECT_NE(message.find("remove " + out + ".partial to begin anew"), std::string::npos)
        << message;
    EXPECT_EQ(message.find("json.exception"), std::string::npos) << message;
  }
  // As a version wrote that told files by their size alone.
  EXPECT_NE(with([&](Json& json) { json["finished"][file].erase("mark"); }).find("no space"),
            std::string::npos);
  for (const char* nothing : {"{}", "5", "null"}) {
    EXPECT_NE(
        with([&](Json& json) { json["finished"][file] = Json::parse(nothing); }).find("no space"),
        std::string::npos);
  }
  convert_checkpoint(cpu(), in, out, to("bf16"));
  convert_checkpoint(cpu(), in, folder / "whole", to("bf16"));
  EXPECT_EQ(contents(out), contents(folder / "whole"));
}

TEST(Convert, BitsDoNotDependOnThreads) {
  const TemporaryFolder folder;
  const std::string in = golden("qwen3_moe");
  ConversionOptions options = pruned("sparse_nvfp4", PruneMethod::obs);
  options.calibrate = in + "/golden.safetensors";
  for (const int threads : {1, 3}) {
    convert_checkpoint(cpu({.threads = threads}), in, folder / std::to_string(threads), options);
  }
  EXPECT_EQ(contents(folder / "1"), contents(folder / "3"));
}

TEST(Convert, RefusesBeforeItWrites) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  const auto message = [&](const std::string& in, const std::string& where,
                           const ConversionOptions& options) {
    const std::string text = error_of([&] { convert_checkpoint(cpu(), in, where, options); });
    EXPECT_FALSE(fs::exists(out));
    EXPECT_FALSE(fs::exists(out + ".partial")) << text;
    return text;
  };
  EXPECT_NE(message(tiny_moe, tiny_moe, to("nvfp4")).find("itself"), std::string::npos);
  EXPECT_NE(message(tiny_moe, tiny_moe + "/../tiny-moe/", to("nvfp4")).find("itself"),
            std::string::npos);
  EXPECT_NE(message(tiny_moe, folder.path(), to("nvfp4")).find("exists"), std::string::npos);
  // Shards under the names of what is written beside them.
  for (const char* shard :
       {"conversion.json", "conversion.json.new", "config.json.new", "tokenizer.json.new"}) {
    const TemporaryFolder other;
    const std::string in = other / "in";
    split_model(golden("qwen3_moe"), in);
    fs::rename(in + "/model-00002-of-00003.safetensors", in + "/" + shard);
    const std::string index = in + "/model.safetensors.index.json";
    Json json = Json::parse(read_file(index));
    for (auto& item : json["weight_map"].items()) {
      if (item.value() == "model-00002-of-00003.safetensors") item.value() = shard;
    }
    write_file(index, json.dump());
    EXPECT_NE(message(in, out, to("nvfp4")).find(in + "/" + shard + " is a shard: must not be"),
              std::string::npos)
        << shard;
  }
  const std::string partial = folder / "model.partial";
  copy_without_recordings("qwen3_moe", partial);
  EXPECT_NE(message(partial, folder / "model", to("nvfp4")).find("is worked on in " + partial),
            std::string::npos);
  EXPECT_NE(message(tiny_moe, folder / "no/out", to("nvfp4")).find("no folder"), std::string::npos);
  EXPECT_NE(message(folder / "none", out, to("nvfp4")).find("none"), std::string::npos);
  ConversionOptions options = pruned("bf16", PruneMethod::obs);
  options.calibrate.clear();
  EXPECT_NE(message(tiny_moe, out, options).find("obs needs"), std::string::npos);
  options.calibrate = golden("qwen3_moe") + "/golden.safetensors";
  EXPECT_NE(message(tiny_moe, out, options).find("model.layers.0.mlp.input"), std::string::npos);

  EXPECT_EQ(
      message(tiny_moe, out, pruned("dense3", PruneMethod::magnitude)),
      "format is 'dense3': does not hold every 0, which pruned weights are: must be one of f32, "
      "bf16, f16, fp8_tensor, fp8_channel, fp8_block, mxfp8, nvfp4, mxfp4, int8, int4, "
      "sparse_nvfp4");

  // Hidden states that say nothing.
  const auto hidden = [&](float value, std::int64_t tokens) {
    const std::vector<float> rows(256 * 2, value);
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (int layer = 0; layer < 4; ++layer) {
      tensors.emplace_back("layers." + std::to_string(layer) + ".input",
                           view(rows.data(), {layer < 3 ? 2 : tokens, 256}));
    }
    options.calibrate = folder / "hidden.safetensors";
    write_safetensors(options.calibrate, tensors, {});
    return message(tiny_moe, out, options);
  };
  EXPECT_NE(hidden(1, 0).find("'layers.3.input' is f32 [0, 256]: holds no hidden states"),
            std::string::npos);
  EXPECT_NE(hidden(std::nanf(""), 2).find("'layers.0.input' has nan at [0, 0]: must be finite"),
            std::string::npos);

  // No experts anywhere.
  fs::create_directory(folder / "dense");
  fs::copy_file(golden("qwen3_moe") + "/model.safetensors", folder / "dense/model.safetensors");
  std::string config = read_file(golden("qwen3_moe") + "/config.json");
  const std::string field = "\"mlp_only_layers\": []";
  config.replace(config.find(field), field.size(), "\"mlp_only_layers\": [0, 1]");
  write_file(folder / "dense/config.json", config);
  EXPECT_NE(message(folder / "dense", out, to("nvfp4")).find("no MoE layer"), std::string::npos);
  EXPECT_EQ(
      error_of([] { conversion_from_string("fp2"); }),
      "format is 'fp2': must be one of f32, bf16, f16, fp8_tensor, fp8_channel, fp8_block, "
      "mxfp8, nvfp4, mxfp4, int8, int4, dense3, sparse_nvfp4, or int4:GROUP, GROUP a multiple "
      "of 16");
  // Nothing is recommended that is refused in turn.
  for (const char* text : {"int4:7", "int4:", "int4:7:zeros", "nvfp4:16", "nvfp4:ordered"}) {
    EXPECT_EQ(error_of([&] { conversion_from_string(text); }),
              std::string("format is '") + text +
                  "': only int4 has a group, a multiple of 16 below 2^31: int4:64");
  }
  EXPECT_NE(error_of([] { conversion_from_string("plain"); }).find("'plain': must be one of f32"),
            std::string::npos);
}

TEST(Convert, SpecsSayWhatTheyAre) {
  for (const std::string text : {"f32", "bf16", "f16", "int8", "int4:64", "nvfp4", "dense3"}) {
    EXPECT_EQ(to_string(conversion_from_string(text)), text);
  }
  EXPECT_EQ(to_string(pruned("nvfp4", PruneMethod::wanda).spec), "nvfp4, 2:4 by wanda");
  EXPECT_EQ(to_string(pruned("bf16", PruneMethod::magnitude, PrunePattern::pairs).spec),
            "bf16, 2:4-pairs by magnitude");
}

// The error of a conversion, of reading or writing, before the first weight.
std::string refused_before_it_begins(const std::string& in, const std::string& out) {
  const ConversionProgress begun = [](const std::string&, std::int64_t, std::int64_t) {
    throw Error(Status::internal, "begun");
  };
  Status status = Status::ok;
  const std::string message =
      error_of([&] { convert_checkpoint(cpu(), in, out, to("nvfp4"), begun); }, &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_FALSE(fs::exists(out + ".partial"));
  return message;
}

// A disk without room for what is to be written: said before any of it is.
TEST(Convert, ADiskThatIsTooSmall) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  copy_without_recordings("qwen3_moe", in);
  write_file(in + "/tokenizer.json", "");
  std::error_code none;  // a file of holes, which takes no room itself
  fs::resize_file(in + "/tokenizer.json", fs::space(in).available + (std::uintmax_t{4} << 30),
                  none);
  if (none) GTEST_SKIP() << "no such file here: " << none.message();
  const std::string message = refused_before_it_begins(in, out);
  EXPECT_NE(message.find(" bytes more: the disk has "), std::string::npos) << message;
}

// A file to be copied that cannot be read: said before anything is converted.
TEST(Convert, AFileThatCannotBeRead) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out", tokenizer = in + "/tokenizer.json";
  copy_without_recordings("qwen3_moe", in);
  fs::create_symlink("/proc/sys/vm/compact_memory", tokenizer);  // the superuser's neither
  if (!fs::exists(tokenizer) || std::ifstream(tokenizer)) GTEST_SKIP() << "no such file here";
  const std::string message = refused_before_it_begins(in, out);
  EXPECT_EQ(message, tokenizer + ": cannot be read: Permission denied");
}

TEST(Convert, LeavesFoldersOfOthersAlone) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "out.partial");
  write_file(folder / "out.partial/mine", "x");
  EXPECT_NE(error_of([&] {
              convert_checkpoint(cpu(), tiny_moe, folder / "out", to("bf16"));
            }).find("no interrupted conversion"),
            std::string::npos);
  EXPECT_EQ(read_file(folder / "out.partial/mine"), "x");
}

// What makes other weights is another conversion: hidden states, damping, and the source itself.
TEST(Convert, AnInterruptedConversionOfOtherInputsIsNotGoneOnWith) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out", states = folder / "states";
  split_model(golden("qwen3_moe"), in);
  fs::copy_file(golden("qwen3_moe") + "/golden.safetensors", states);
  ConversionOptions options = to("bf16");
  options.spec.prune = true;
  options.spec.pruning.method = PruneMethod::obs;
  options.calibrate = states;
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00002-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  const auto go_on = [&](const ConversionOptions& with) {
    return error_of([&] { convert_checkpoint(cpu(), in, out, with, stop); });
  };
  EXPECT_NE(go_on(options).find("no space"), std::string::npos);
  ConversionOptions other = options;
  other.spec.pruning.damping = 0.02;
  EXPECT_NE(go_on(other).find("other settings"), std::string::npos);
  const std::string bytes = read_file(states);
  std::string changed = bytes;
  changed[changed.size() - 4] = static_cast<char>(changed[changed.size() - 4] ^ 1);
  write_file(states, changed);
  EXPECT_NE(go_on(options).find("other settings"), std::string::npos);
  write_file(states, bytes);
  EXPECT_NE(go_on(options).find("no space"), std::string::npos);
}

// A disk that is full ends it, and leaves what was there.
TEST(Journal, WholeFilesAreWrittenOrNot) {
  const TemporaryFolder folder;
  write_whole(folder / "file", "before");
  fs::create_symlink("/dev/full", folder / "file.new");
  Status status = Status::ok;
  const std::string message = error_of([&] { write_whole(folder / "file", "behind"); }, &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("file: cannot be written: No space left"), std::string::npos) << message;
  EXPECT_EQ(read_file(folder / "file"), "before");
  EXPECT_FALSE(fs::exists(fs::symlink_status(folder / "file.new")));
  write_whole(folder / "file", "behind");
  EXPECT_EQ(read_file(folder / "file"), "behind");
}

// What lies between the ends is not read: that it may have changed shows by the time.
TEST(Journal, MarksSeeThatALargeFileWasWritten) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  for (const std::size_t size : {std::size_t{2} << 20, (std::size_t{2} << 20) + 1}) {
    write_file(path, std::string(size, 'a'));
    const std::string before = mark_of(path);
    EXPECT_EQ(mark_of(path), before);
    fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
    EXPECT_EQ(mark_of(path) == before, size == std::size_t{2} << 20);
  }
}

// The first and the last of 2^20 bytes each, and the size.
TEST(Journal, FingerprintsSeeBothEnds) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  const auto of = [&](const std::string& bytes) {
    write_file(path, bytes);
    return fingerprint(path);
  };
  constexpr std::size_t end = 1 << 20;
  for (const std::size_t size : {std::size_t{20}, end, end + end / 2, 3 * end}) {
    const std::string plain(size, 'a');
    const std::string before = of(plain);
    EXPECT_EQ(of(plain), before);
    EXPECT_NE(of(plain + 'a'), before);
    for (const std::size_t at :
         {std::size_t{0}, std::size_t{17}, std::min(end, size) - 1, size - std::min(end, size),
          size - std::min(end, size) / 2 - 1, size - 1}) {
      std::string changed = plain;
      changed[at] = 'b';
      EXPECT_NE(of(changed), before) << at << " of " << size;
    }
  }
}

}  // namespace
}  // namespace shunt::test
