// Prepared weights in place, on disk and back.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/prepared_file.hpp"
#include "shunt/gemm.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {
namespace {

using test::Array;
using test::error_of;
using test::random_array;
using test::TemporaryFolder;

std::vector<char> bytes_of(const Context& context, const PreparedWeights& weights) {
  std::vector<char> bytes(weights.bytes);
  context.copy(bytes.data(), weights.data, bytes.size());
  return bytes;
}

struct Prepared {
  Buffer memory;
  PreparedWeights weights;
  Prepared(const Context& context, DType dtype, int groups, int n, int k, bool paired) {
    const Array source = random_array(DType::f32, {groups, n, k}, 31);
    memory = context.allocate(prepared_bytes(context, dtype, groups, n, k, paired));
    std::vector<Tensor> first, second;
    for (int g = 0; g < groups; ++g) {
      first.push_back(source.tensor[g].rows(0, paired ? n / 2 : n));
      second.push_back(source.tensor[g].rows(n / 2, n));
    }
    weights = paired ? prepare_paired(context, dtype, first, second, memory)
                     : prepare(context, dtype, first, memory);
    context.synchronize();
  }
};

TEST(SavedWeights, ComeBackAsTheyWere) {
  const Context context = test::engine();
  const TemporaryFolder folder;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool paired : {false, true}) {
      const Prepared given(context, dtype, 3, 50, 21, paired);
      const std::string path = folder / "weights.safetensors";
      save_prepared(context, given.weights, path);
      Buffer memory;
      const PreparedWeights read = load_prepared(context, path, memory);
      EXPECT_EQ(read.dtype, dtype);
      EXPECT_EQ(read.groups, 3);
      EXPECT_EQ(read.n, 50);
      EXPECT_EQ(read.k, 21);
      EXPECT_EQ(read.paired, paired);
      EXPECT_EQ(read.device, context.device());
      EXPECT_EQ(read.data, memory.data());
      EXPECT_EQ(bytes_of(context, read), bytes_of(context, given.weights));
    }
  }
}

// Packed ones too, as far as this engine has a layout for them.
TEST(SavedWeights, PackedOnesComeBackAsTheyWere) {
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "weights.safetensors";
  const Array source = random_array(DType::f32, {2, 40, 96}, 32);
  for (const char* name :
       {"fp8_block", "fp8_channel", "nvfp4", "int4:32", "sparse_nvfp4", "dense3"}) {
    const FormatSpec format = format_from_string(name);
    std::vector<Buffer> memory;
    std::vector<PackedMatrix> matrices;
    for (int g = 0; g < 2; ++g) {
      memory.push_back(cpu({.threads = 1}).allocate(packed_bytes(format, 40, 96)));
      matrices.push_back(pack(format, source.tensor[g], memory.back()));
    }
    const Buffer prepared =
        context.allocate(prepared_bytes(context, DType::bf16, format, 2, 40, 96));
    const PreparedWeights given = prepare_packed(context, DType::bf16, matrices, prepared);
    context.synchronize();
    save_prepared(context, given, path);
    Buffer again;
    const PreparedWeights read = load_prepared(context, path, again);
    EXPECT_EQ(read.format, given.format);
    EXPECT_EQ(read.n, 40);
    EXPECT_EQ(bytes_of(context, read), bytes_of(context, given));
    // A file that says another format has another number of bytes, or another layout.
    auto metadata = SafetensorsFile::open(path).metadata();
    std::string& words = metadata.at("weights");
    words.replace(words.find(name), std::strlen(name), "mxfp9");
    const std::string other = folder / "other.safetensors";
    write_safetensors(other, {{"prepared", SafetensorsFile::open(path).get("prepared")}}, metadata);
    Status status{};
    EXPECT_NE(error_of([&] { load_prepared(context, other, again); }, &status).find("mxfp9"),
              std::string::npos);
    EXPECT_EQ(status, Status::bad_file);
  }
}

// An order of columns is followed when rows are read: one from a file must not lead elsewhere.
TEST(SavedWeights, DamagedOrdersAreRefused) {
  SHUNT_ON_CPU_ONLY();
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "weights.safetensors";
  const FormatSpec format = format_from_string("int4:32");
  const Array source = random_array(DType::f32, {1, 40, 96}, 33);
  const Buffer packed = context.allocate(packed_bytes(format, 40, 96));
  PackedMatrix matrix = pack(format, source.tensor[0], packed);
  std::vector<std::int32_t> group_of(96);
  for (std::size_t k = 0; k < group_of.size(); ++k) group_of[k] = static_cast<std::int32_t>(k % 3);
  matrix.group_of = view(group_of.data(), {96});
  std::vector<std::uint8_t> zeros(std::size_t{40} * 3, 8);
  zeros[7] = 3;
  matrix.zeros = view(static_cast<const void*>(zeros.data()), DType::u8, {40, 3});
  const FormatSpec wanted = prepared_format({matrix});
  const Buffer memory = context.allocate(prepared_bytes(context, DType::f32, wanted, 1, 40, 96));
  const PreparedWeights given = prepare_packed(context, DType::f32, {matrix}, memory);
  EXPECT_TRUE(given.format.ordered && given.format.zeros);
  save_prepared(context, given, path);
  Buffer again;
  const PreparedWeights read = load_prepared(context, path, again);
  EXPECT_EQ(read.format, given.format);
  EXPECT_EQ(bytes_of(context, read), bytes_of(context, given));

  const auto metadata = SafetensorsFile::open(path).metadata();
  for (const std::int32_t wrong : {-1, 96, 1 << 30}) {
    std::vector<char> bytes = bytes_of(context, given);
    std::memcpy(bytes.data() + 64 + 4 * 17, &wrong, sizeof wrong);
    const std::string other = folder / "other.safetensors";
    write_safetensors(other,
                      {{"prepared", view(static_cast<const void*>(bytes.data()), DType::u8,
                                         {static_cast<std::int64_t>(bytes.size())})}},
                      metadata);
    Status status{};
    EXPECT_NE(error_of([&] { load_prepared(context, other, again); }, &status).find("group 0"),
              std::string::npos);
    EXPECT_EQ(status, Status::bad_file);
  }
}

// Every refusal names the file and what is wrong; memory that was there stays.
TEST(SavedWeights, OtherFilesAreRefusedByName) {
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "weights.safetensors";
  const Prepared given(context, DType::bf16, 2, 64, 64, false);
  save_prepared(context, given.weights, path);
  const SafetensorsFile good = SafetensorsFile::open(path);
  const Tensor bytes = good.get("prepared");
  Buffer memory = context.allocate(64);
  void* const before = memory.data();
  const auto refusal = [&](std::map<std::string, std::string> metadata, const Tensor& tensor,
                           Status& status) {
    const std::string other = folder / "other.safetensors";
    write_safetensors(other, {{"prepared", tensor}}, metadata);
    const std::string message = error_of([&] { load_prepared(context, other, memory); }, &status);
    EXPECT_EQ(message.rfind(other, 0), 0U) << message;
    EXPECT_EQ(memory.data(), before);
    return message;
  };
  const auto with = [&](const std::string& key, const std::string& from, const std::string& to) {
    std::map<std::string, std::string> metadata = good.metadata();
    std::string& value = metadata.at(key);
    const std::size_t at = value.find(from);
    EXPECT_NE(at, std::string::npos) << value;
    if (at != std::string::npos) value.replace(at, from.size(), to);
    return metadata;
  };
  const auto has = [](const std::string& message, const char* what) {
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  Status status{};
  has(refusal({}, bytes, status), "holds no prepared weights");
  EXPECT_EQ(status, Status::bad_file);
  has(refusal(with("shunt.prepared_weights", "1", "2"), bytes, status), "reads version 1");
  EXPECT_EQ(status, Status::unsupported);
  const std::string layout = layout_name(context.device().type, DType::bf16);
  has(refusal(with("weights", layout, "other.layout"), bytes, status),
      ("the layout is other.layout: this engine reads " + layout).c_str());
  EXPECT_EQ(status, Status::unsupported);
  for (const auto& [from, to] :
       {std::pair<const char*, const char*>{"\"groups\":2", "\"groups\":3"},
        {"\"n\":64", "\"n\":-64"},
        {"\"n\":64", "\"m\":64"},
        {"\"k\":64", "\"k\":1099511627776"},
        {"\"bf16\"", "\"bf17\""},
        {"false", "1"},
        {"}", ""}}) {
    refusal(with("weights", from, to), bytes, status);
    EXPECT_EQ(status, Status::bad_file) << to;
  }
  Tensor cut = bytes;
  cut.shape[0] -= 1;
  has(refusal(good.metadata(), cut, status), "must be u8");
  EXPECT_EQ(status, Status::bad_file);
  std::vector<char> changed(bytes.as<char>(), bytes.as<char>() + bytes.bytes());
  changed[5000] = static_cast<char>(changed[5000] ^ 1);
  Tensor damaged = bytes;
  damaged.data = changed.data();
  has(refusal(good.metadata(), damaged, status), "the bytes of prepared are damaged");
  EXPECT_EQ(status, Status::bad_file);
  EXPECT_NE(error_of([&] { load_prepared(context, folder / "none", memory); }, &status), "");
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(error_of([&] { save_prepared(context, {.bytes = 8}, path); }, &status), "");
  EXPECT_EQ(status, Status::invalid_argument);
}

TEST(InPlace, GivesThePreparedBytesAndTheMatricesAgain) {
  const Context context = test::engine();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool paired : {false, true}) {
      const Array source = random_array(dtype, {3, 256, 128}, 32);
      std::vector<Tensor> first, second;
      for (int g = 0; g < 3; ++g) {
        first.push_back(source.tensor[g].rows(0, paired ? 128 : 256));
        second.push_back(source.tensor[g].rows(128, 256));
      }
      const Buffer memory = context.allocate(prepared_bytes(context, dtype, 3, 256, 128, paired));
      const PreparedWeights want = paired ? prepare_paired(context, dtype, first, second, memory)
                                          : prepare(context, dtype, first, memory);
      const auto bytes = static_cast<std::size_t>(source.tensor.bytes());
      ASSERT_EQ(want.bytes, bytes);
      const Buffer own = context.allocate(bytes), scratch = context.allocate(bytes / 3);
      context.copy(own.data(), source.tensor.data, bytes);
      const PreparedWeights got = prepare_in_place(
          context, view(own.data(), dtype, {3, 256, 128}, context.device()), paired, scratch);
      EXPECT_EQ(got.data, own.data());
      EXPECT_EQ(bytes_of(context, got), bytes_of(context, want));
      unprepare_in_place(context, got, scratch);
      std::vector<char> back(bytes);
      context.copy(back.data(), own.data(), bytes);
      EXPECT_EQ(std::memcmp(back.data(), source.tensor.data, bytes), 0);
    }
  }
}

TEST(InPlace, RefusesWhatTheLayoutFillsUp) {
  const Context context = test::engine();
  const Buffer own = context.allocate(3 * 50 * 21 * 2), scratch = context.allocate(50 * 21 * 2);
  const Tensor odd = view(own.data(), DType::bf16, {3, 50, 21}, context.device());
  Status status{};
  const std::string message =
      error_of([&] { prepare_in_place(context, odd, false, scratch); }, &status);
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(message.find("matrices are bf16 [3, 50, 21]"), std::string::npos) << message;
  const Tensor even = view(own.data(), DType::bf16, {1, 128, 64}, context.device());
  EXPECT_NE(error_of([&] { prepare_in_place(context, even, false, {}); }, &status), "");
  EXPECT_EQ(status, Status::invalid_argument);
  EXPECT_NE(error_of([&] { unprepare_in_place(context, {}, scratch); }, &status), "");
  EXPECT_EQ(status, Status::invalid_argument);
}

}  // namespace
}  // namespace shunt
