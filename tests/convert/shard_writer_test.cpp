// A safetensors file written a piece at a time is the file that is written at once.
#include "convert/shard_writer.hpp"

#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/temporary.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

TEST(ShardWriter, MakesTheFileThatIsWrittenAtOnce) {
  const TemporaryFolder folder;
  const std::vector<float> b = {1, 2, 3, 4, 5, 6};
  const std::vector<std::uint8_t> a = {7, 8, 9};
  const std::vector<std::int64_t> c = {10};
  write_safetensors(folder / "at_once",
                    {{"b", view(b.data(), {2, 3})},
                     {"a", view(a.data(), DType::u8, {3})},
                     {"c", view(c.data(), DType::i64, {1})},
                     {"empty", view(b.data(), {0, 4})}},
                    {{"format", "pt"}});
  const std::vector<PlannedTensor> planned = {{"a", DType::u8, {3}},
                                              {"empty", DType::f32, {0, 4}},
                                              {"b", DType::f32, {2, 3}},
                                              {"c", DType::i64, {1}}};
  ShardWriter writer(folder / "piecewise", planned);
  writer.write("b", b.data() + 3, 12, 12);
  writer.write("a", a.data(), 3);
  writer.write("c", c.data(), 8);
  writer.write("b", b.data(), 12);
  writer.finish();
  EXPECT_EQ(read_file(folder / "piecewise"), read_file(folder / "at_once"));
  EXPECT_EQ(writer.file_bytes(), static_cast<std::int64_t>(read_file(folder / "at_once").size()));
  EXPECT_EQ(ShardWriter::planned_bytes(planned), writer.file_bytes());
}

TEST(ShardWriter, RefusesWhatWasNotPlanned) {
  const TemporaryFolder folder;
  ShardWriter writer(folder / "x", {{"a", DType::u8, {3}}});
  const char bytes[4] = {};
  EXPECT_NE(error_of([&] { writer.write("b", bytes, 1); }).find("'b'"), std::string::npos);
  EXPECT_NE(error_of([&] { writer.write("a", bytes, 4); }).find("4 bytes"), std::string::npos);
  EXPECT_NE(error_of([&] { writer.write("a", bytes, 2, 2); }).find("4 bytes"), std::string::npos);
  writer.write("a", bytes, 2);
  EXPECT_NE(error_of([&] { writer.finish(); }).find("2 of its 3"), std::string::npos);
  Status status = Status::ok;
  error_of([&] { ShardWriter(folder / "no/folder", {}); }, &status);
  EXPECT_EQ(status, Status::io);
}

TEST(ShardWriter, FollowsNoLink) {
  const TemporaryFolder folder;
  write_file(folder / "elsewhere", "x");
  std::filesystem::create_symlink(folder / "elsewhere", folder / "shard");
  Status status = Status::ok;
  const std::string message = error_of(
      [&] {
        ShardWriter(folder / "shard", {{"a", DType::u8, {3}}});
      },
      &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("shard: cannot be created"), std::string::npos) << message;
  EXPECT_EQ(read_file(folder / "elsewhere"), "x");
}

TEST(ShardWriter, SaysThatADiskIsFull) {
  Status status = Status::ok;
  const std::string message = error_of(
      [] {
        ShardWriter("/dev/full", {{"a", DType::u8, {3}}});
      },
      &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("/dev/full: cannot be written: No space left"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace shunt::test
