#include "shunt/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/temporary.hpp"

namespace shunt {
namespace {

using test::error_of;
using test::length_bytes;
using test::safetensors_bytes;
using test::TemporaryFolder;
using test::write_file;

TEST(Safetensors, ReadsWhatItWrites) {
  const TemporaryFolder folder;
  const std::string path = folder / "all.safetensors";
  std::vector<unsigned char> bytes(64);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i);
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (int d = 0; d <= static_cast<int>(DType::f4_e2m1); ++d) {
    const auto dtype = static_cast<DType>(d);
    tensors.emplace_back(to_string(dtype), view(bytes.data(), dtype, {2, 4}));
  }
  tensors.emplace_back("scalar", view(bytes.data(), DType::f32, {}));
  tensors.emplace_back("empty", view(nullptr, DType::bf16, {0, 7}));
  tensors.emplace_back("a \"name\"\n", view(bytes.data(), DType::i64, {1, 1, 1, 2}));
  write_safetensors(path, tensors, {{"by", "a test"}});

  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("by"), "a test");
  for (const auto& [name, expected] : tensors) {
    SCOPED_TRACE(name);
    const Tensor got = file.get(name);
    EXPECT_EQ(got.describe(), expected.describe());
    EXPECT_TRUE(got.contiguous());
    ASSERT_EQ(got.bytes(), expected.bytes());
    if (expected.bytes() == 0) continue;
    EXPECT_EQ(std::memcmp(got.data, expected.data, static_cast<std::size_t>(got.bytes())), 0);
    // Aligned to its elements, wherever the header ends.
    const auto address = reinterpret_cast<std::uintptr_t>(got.data);
    EXPECT_EQ(address % static_cast<std::uintptr_t>(std::max(1, bits(got.dtype) / 8)), 0u);
  }
}

TEST(Safetensors, ViewsOutliveTheObjectThatGaveThem) {
  const TemporaryFolder folder;
  const float values[2] = {1, 2};
  write_safetensors(folder / "f", {{"x", view(values, {2})}});
  SafetensorsFile copy;
  {
    const SafetensorsFile file = SafetensorsFile::open(folder / "f");
    copy = file;
  }
  EXPECT_EQ(copy.get("x").as<float>()[1], 2);
}

struct BadHeader {
  const char* name;
  std::string bytes;
  const char* message;  // a part of it
};

const std::string good = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

std::string padded(std::string header) {
  header.append((8 - header.size() % 8) % 8, ' ');
  return header;
}

std::string nested(int depth) {
  return std::string(static_cast<std::size_t>(depth), '[') +
         std::string(static_cast<std::size_t>(depth), ']');
}

std::vector<BadHeader> bad_headers() {
  const std::string huge = "18446744073709551615";
  return {
      {"empty", "", "0 bytes"},
      {"seven_bytes", std::string(7, '\0'), "7 bytes"},
      {"no_header", length_bytes(2), "only 0 bytes follow"},
      {"truncated_header", length_bytes(good.size()) + good.substr(0, 20), "truncated"},
      {"header_over_limit", length_bytes(100'000'001) + "{}", "must be at most 100000000"},
      {"header_of_all_ones", std::string(8, '\xff') + "{}", "must be at most"},
      {"truncated_data", safetensors_bytes(good, 7), "data_offsets is [0,8]"},
      {"data_left_over", safetensors_bytes(padded(good), 9),
       "the last 1 bytes belong to no tensor"},
      {"not_json", safetensors_bytes("what?", 0), "not JSON"},
      {"empty_header", safetensors_bytes("", 0), "not JSON"},
      {"binary_header", safetensors_bytes(std::string("\0\x01{}", 4), 0), "not JSON"},
      {"bad_utf8", safetensors_bytes("{\"\xff\":{}}", 0), "not JSON"},
      {"an_array", safetensors_bytes("[1]", 0), "must be an object"},
      {"deep", safetensors_bytes(R"({"x":)" + nested(1000) + "}", 0), "nests deeper"},
      {"duplicate_tensor",
       safetensors_bytes(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                         R"("x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                         16),
       "'x' stands twice"},
      {"duplicate_field",
       safetensors_bytes(R"({"x":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})",
                         8),
       "'dtype' stands twice"},
      {"tensor_no_object", safetensors_bytes(R"({"x":7})", 0), "tensor 'x' is 7"},
      {"unknown_field",
       safetensors_bytes(R"({"x":{"dtype":"F32","shape":[],"data_offsets":[0,4],"device":"gpu"}})",
                         4),
       "'device' is unknown"},
      {"no_dtype", safetensors_bytes(R"({"x":{"shape":[2],"data_offsets":[0,8]}})", 8),
       "dtype is missing"},
      {"no_shape", safetensors_bytes(R"({"x":{"dtype":"F32","data_offsets":[0,8]}})", 8),
       "shape is missing"},
      {"no_offsets", safetensors_bytes(R"({"x":{"dtype":"F32","shape":[2]}})", 8),
       "data_offsets is missing"},
      {"unknown_dtype", safetensors_bytes(one("\"F31\"", "[2]", "[0,8]"), 8), "dtype is \"F31\""},
      {"dtype_number", safetensors_bytes(one("32", "[2]", "[0,8]"), 8), "dtype is 32"},
      {"shape_text", safetensors_bytes(one("\"F32\"", "\"2\"", "[0,8]"), 8), "shape is \"2\""},
      {"shape_negative", safetensors_bytes(one("\"F32\"", "[-2]", "[0,8]"), 8), "holds -2"},
      {"shape_float", safetensors_bytes(one("\"F32\"", "[2.0]", "[0,8]"), 8), "holds 2.0"},
      {"shape_nan", safetensors_bytes(one("\"F32\"", "[NaN]", "[0,8]"), 8), "holds \"NaN\""},
      {"shape_over_63_bits", safetensors_bytes(one("\"F32\"", "[" + huge + "]", "[0,8]"), 8),
       "holds "
       "18446744073709551615"},
      {"shape_overflows",
       safetensors_bytes(one("\"F32\"", "[4294967296,4294967296,2]", "[0,8]"), 8),
       "overflows 64 bits"},
      // 2^62 elements of 32 bits wrap to 0 bytes.
      {"shape_wraps_to_nothing",
       safetensors_bytes(one("\"F32\"", "[4611686018427387904]", "[0,0]"), 0), "overflows 64 bits"},
      {"zero_hides_overflow",
       safetensors_bytes(one("\"F32\"", "[0,4294967296,4294967296]", "[0,0]"), 0),
       "overflows 64 bits"},
      {"shape_lies", safetensors_bytes(one("\"F32\"", "[3]", "[0,8]"), 8), "[3] takes 12"},
      {"half_a_byte", safetensors_bytes(one("\"F4\"", "[3]", "[0,2]"), 2), "no whole number"},
      {"offsets_one", safetensors_bytes(one("\"F32\"", "[2]", "[0]"), 8), "must be [begin, end]"},
      {"offsets_three", safetensors_bytes(one("\"F32\"", "[2]", "[0,8,8]"), 8), "must be [begin"},
      {"offsets_text", safetensors_bytes(one("\"F32\"", "[2]", "[0,\"8\"]"), 8), "holds \"8\""},
      {"offsets_negative", safetensors_bytes(one("\"F32\"", "[2]", "[-8,0]"), 8), "holds -8"},
      {"offsets_descend", safetensors_bytes(one("\"F32\"", "[2]", "[8,0]"), 8), "ascending"},
      {"offsets_outside", safetensors_bytes(one("\"F32\"", "[2]", "[8,16]"), 8), "within the 8"},
      {"offsets_huge",
       safetensors_bytes(one("\"F32\"", "[2]", "[9223372036854775799,9223372036854775807]"), 8),
       "within the 8"},
      {"gap", safetensors_bytes(one("\"U8\"", "[2]", "[2,4]"), 4), "2 bytes before tensor 'x'"},
      {"overlap",
       safetensors_bytes(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                         R"("y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                         6),
       "'x' and 'y' overlap at byte"},
      {"same_bytes_twice",
       safetensors_bytes(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                         R"("y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                         4),
       "overlap"},
      {"metadata_number", safetensors_bytes(R"({"__metadata__":{"a":1}})", 0),
       "__metadata__ 'a' is 1"},
      {"metadata_text", safetensors_bytes(R"({"__metadata__":"a"})", 0), "__metadata__ is \"a\""},
  };
}

class BadHeaders : public testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaders, AreRefusedInOneLineThatNamesTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.safetensors";
  write_file(path, GetParam().bytes);
  Status status = Status::ok;
  const std::string message = error_of([&] { SafetensorsFile::open(path); }, &status);
  EXPECT_EQ(status, Status::bad_file);
  EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
  EXPECT_EQ(message.find(path), 0u) << message;
  for (const char c : message) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << message;
  EXPECT_LT(message.size(), 600u) << message;
}

INSTANTIATE_TEST_SUITE_P(Safetensors, BadHeaders, testing::ValuesIn(bad_headers()),
                         [](const auto& test) { return std::string(test.param.name); });

// Writers that do not fill the header up leave tensors at any byte.
TEST(Safetensors, AlignsWhatTheFileDoesNot) {
  const TemporaryFolder folder;
  const std::string path = folder / "f";
  const std::string header = R"({"half":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},)"
                             R"("x":{"dtype":"F64","shape":[1,2],"data_offsets":[6,22]},)"
                             R"("bytes":{"dtype":"U8","shape":[2],"data_offsets":[22,24]}})";
  for (std::size_t filled = 0; filled < 8; ++filled) {
    std::string bytes = safetensors_bytes(header + std::string(filled, ' '), 24);
    const std::size_t begin = bytes.size() - 24;
    const std::uint16_t half[3] = {0x3f80, 0x4000, 0xc040};
    const double x[2] = {-1.5, 0x1p-300};
    std::memcpy(bytes.data() + begin, half, 6);
    std::memcpy(bytes.data() + begin + 6, x, 16);
    bytes[begin + 22] = 7, bytes[begin + 23] = 9;
    write_file(path, bytes);
    const SafetensorsFile file = SafetensorsFile::open(path);
    const Tensor one = file.get("half"), two = file.get("x");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(one.data) % 2, 0u) << filled;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(two.data) % 8, 0u) << filled;
    EXPECT_EQ(std::memcmp(one.data, half, 6), 0) << filled;
    EXPECT_EQ(static_cast<const double*>(two.data)[0], x[0]) << filled;
    EXPECT_EQ(static_cast<const double*>(two.data)[1], x[1]) << filled;
    EXPECT_EQ(two.shape[1], 2) << filled;
    EXPECT_EQ(static_cast<const unsigned char*>(file.get("bytes").data)[1], 9) << filled;
    EXPECT_EQ(file.flat("x").data, two.data) << filled;  // the same memory each time
  }
}

TEST(Safetensors, AcceptsWhatIsUnusualButLegal) {
  const TemporaryFolder folder;
  const std::string path = folder / "f";
  // Nothing but a header; a tensor of five dimensions, which only its own reader misses.
  write_file(path, safetensors_bytes("{}", 0));
  EXPECT_TRUE(SafetensorsFile::open(path).names().empty());
  write_file(path, safetensors_bytes(one("\"U8\"", "[1,1,1,1,3]", "[0,3]"), 3));
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_TRUE(file.contains("x"));
  EXPECT_NE(error_of([&] { file.get("x"); }).find("5 dimensions"), std::string::npos);
  EXPECT_NE(error_of([&] { file.get("y"); }).find("no tensor 'y'"), std::string::npos);
}

TEST(Safetensors, FilesThatCannotBeOpened) {
  const TemporaryFolder folder;
  Status status = Status::ok;
  const std::string missing = error_of([&] { SafetensorsFile::open(folder / "none"); }, &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(missing.find("No such file"), std::string::npos) << missing;
  EXPECT_NE(error_of([&] { SafetensorsFile::open(folder.path()); }).find("a directory"),
            std::string::npos);
  EXPECT_NE(error_of([&] { SafetensorsFile::open("/dev/null"); }).find("regular file"),
            std::string::npos);
  if (::geteuid() != 0) {  // root may read anything
    write_file(folder / "secret", "x");
    ::chmod((folder / "secret").c_str(), 0);
    EXPECT_NE(error_of([&] { SafetensorsFile::open(folder / "secret"); }).find("Permission"),
              std::string::npos);
  }
}

// ---- writing ------------------------------------------------------------------------------------

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

TEST(WriteSafetensors, IsAlignedSortedAndReplacesWholeFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "out.safetensors";
  write_file(path, "an older file");
  const float f[3] = {1, 2, 3};
  const std::uint8_t u[3] = {1, 2, 3};
  write_safetensors(path,
                    {{"b", view(u, DType::u8, {3})}, {"c", view(f, {3})}, {"a", view(f, {1})}});
  const std::string bytes = test::read_file(path);
  const auto length = static_cast<unsigned char>(bytes[0]);
  EXPECT_EQ(length % 8, 0);
  const std::string header = bytes.substr(8, length);
  EXPECT_LT(header.find("\"a\""), header.find("\"c\""));
  EXPECT_LT(header.find("\"c\""), header.find("\"b\""));
  EXPECT_EQ(files_of(folder.path()).size(), 1u);
  EXPECT_EQ(SafetensorsFile::open(path).get("c").as<float>()[2], 3);
}

TEST(WriteSafetensors, WritesThroughLinksAndIntoDevices) {
  const TemporaryFolder folder;
  const float f[1] = {5};
  write_file(folder / "real", "");
  std::filesystem::create_symlink(folder / "real", folder / "link");
  write_safetensors(folder / "link", {{"x", view(f, {1})}});
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(SafetensorsFile::open(folder / "real").get("x").as<float>()[0], 5);
  write_safetensors("/dev/null", {{"x", view(f, {1})}});
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(WriteSafetensors, AFullDiskLeavesNothingBehind) {
  const TemporaryFolder folder;
  const float f[1] = {5};
  Status status = Status::ok;
  const std::string full = error_of(
      [&] {
        write_safetensors("/dev/full", {{"x", view(f, {1})}});
      },
      &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(full.find("No space left"), std::string::npos) << full;

  // The same of a file: a limit on its size stands in for the disk.
  const std::string path = folder / "out";
  write_file(path, "an older file");
  const std::vector<float> large(1 << 16);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string cut = error_of(
      [&] {
        write_safetensors(path, {{"x", view(large.data(), {1 << 16})}});
      },
      &status);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(cut.find("cannot write it"), std::string::npos) << cut;
  EXPECT_EQ(test::read_file(path), "an older file");
  EXPECT_EQ(files_of(folder.path()).size(), 1u);
}

TEST(WriteSafetensors, RefusesPlacesAndTensors) {
  const TemporaryFolder folder;
  const float f[4] = {};
  const Tensor x = view(f, {2, 2});
  Status status = Status::ok;
  EXPECT_NE(error_of(
                [&] {
                  write_safetensors(folder / "no/where", {{"x", x}});
                },
                &status)
                .find("No such file"),
            std::string::npos);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(error_of([&] {
              write_safetensors(folder.path(), {{"x", x}});
            }).find("a directory"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { write_safetensors("", {{"x", x}}); }), "path is '': must name a file");
  EXPECT_EQ(error_of([&] { SafetensorsFile::open(""); }, &status), "path is '': must name a file");
  EXPECT_EQ(status, Status::invalid_argument);
  Tensor rankless = x;
  rankless.rank = 100;
  EXPECT_NE(error_of([&] {
              write_safetensors(folder / "f", {{"x", rankless}});
            }).find("f32 of rank 100: must be dense"),
            std::string::npos);
  EXPECT_NE(error_of(
                [&] {
                  write_safetensors(folder / "f", {{"x", x}, {"x", x}});
                },
                &status)
                .find("given twice"),
            std::string::npos);
  EXPECT_EQ(status, Status::invalid_argument);
  EXPECT_NE(error_of([&] {
              write_safetensors(folder / "f", {{"__metadata__", x}});
            }).find("reserved"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              write_safetensors(folder / "f", {{"x", view(x.data, DType::f4_e2m1, {3})}});
            }).find("'x' is f4_e2m1 [3]: must be a whole number of bytes"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              write_safetensors(folder / "f", {{"x", x.transposed()}});
            }).find("must be dense"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              write_safetensors(folder / "f", {{"a\xff", x}});
            }).find("is not UTF-8"),
            std::string::npos);
  for (const auto& [key, value] : {std::pair{"k\xff", "v"}, std::pair{"k", "v\xff"}}) {
    EXPECT_NE(error_of([&] {
                write_safetensors(folder / "f", {{"x", x}}, {{key, value}});
              }).find("is not UTF-8"),
              std::string::npos);
  }
  EXPECT_TRUE(files_of(folder.path()).empty());
}

}  // namespace
}  // namespace shunt
