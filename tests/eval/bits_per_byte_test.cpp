// Bits per byte: which bytes are scored, and against what transformers computes.
#include "eval/bits_per_byte.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "models.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

std::vector<std::uint8_t> text_of(std::size_t bytes) {
  const std::string text = read_file(tiny_moe + "/heldout.txt").substr(0, bytes);
  return {text.begin(), text.end()};
}

LanguageModel open(int threads = 0) {
  return LanguageModel(Checkpoint::open(tiny_moe), cpu({.threads = threads}), engine(threads),
                       {.dtype = f32, .batch_invariant = true});
}

TEST(BitsPerByte, IsThatOfTransformers) {
  const SafetensorsFile file =
      SafetensorsFile::open(SHUNT_SOURCE_DIR "/tests/data/logits/tiny_moe.safetensors");
  const double* recorded = file.get("bits_per_byte").as<const double>();
  LanguageModel model = open();
  const BitsPerByte result = bits_per_byte(model, text_of(4096),
                                           {.context = static_cast<std::int64_t>(recorded[0]),
                                            .stride = static_cast<std::int64_t>(recorded[1])});
  EXPECT_EQ(result.bytes, 4095);
  // A logit is off by about 1e-5; over thousands of bytes that averages out.
  EXPECT_NEAR(result.per_byte(), recorded[2], 2e-5);
}

TEST(BitsPerByte, EveryByteButTheFirstIsScoredOnce) {
  LanguageModel model = open();
  for (const std::size_t size : {2u, 63u, 64u, 65u, 96u, 97u, 200u}) {
    for (const Windows windows : {Windows{64, 32}, Windows{64, 63}, Windows{64, 1}}) {
      std::int64_t last = 0;
      const BitsPerByte result =
          bits_per_byte(model, text_of(size), windows, [&](std::int64_t scored) { last = scored; });
      EXPECT_EQ(result.bytes, static_cast<std::int64_t>(size) - 1);
      EXPECT_EQ(last, static_cast<std::int64_t>(size));
    }
  }
}

TEST(BitsPerByte, IsTheSameForAnyBatchAndThreads) {
  LanguageModel one = open(1), three = open(3);
  const auto text = text_of(700);
  const Windows windows{.context = 128, .stride = 48};
  const BitsPerByte whole = bits_per_byte(one, text, windows);
  for (const std::int64_t batch : {1, 300, 4096}) {
    EXPECT_EQ(bits_per_byte(three, text, windows, nullptr, nullptr, batch).bits, whole.bits)
        << batch;
  }
}

TEST(BitsPerByte, RefusesWhatItCannotScore) {
  LanguageModel model = open(1);
  const auto message = [&](std::size_t size, Windows windows) {
    return error_of([&] { bits_per_byte(model, text_of(size), windows); });
  };
  EXPECT_NE(message(1, {}).find("1 bytes"), std::string::npos);
  EXPECT_NE(message(9, {.context = 1, .stride = 1}).find("context is 1"), std::string::npos);
  EXPECT_NE(message(9, {.context = 1025, .stride = 1}).find("1024"), std::string::npos);
  EXPECT_NE(message(9, {.context = 8, .stride = 8}).find("stride is 8"), std::string::npos);
  EXPECT_NE(message(9, {.context = 8, .stride = 0}).find("stride is 0"), std::string::npos);

  const Context host = cpu({.threads = 1});
  LanguageModel words(Checkpoint::open(golden("mixtral")), host, host, {.dtype = f32});
  EXPECT_NE(error_of([&] {
              bits_per_byte(words, text_of(9), {.context = 8, .stride = 4});
            }).find("64 tokens"),
            std::string::npos);
}

}  // namespace
}  // namespace shunt::test
